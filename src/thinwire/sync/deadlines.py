"""Adaptive deadlines for peers, derived from measured step and round times."""

from __future__ import annotations

import statistics
from collections import deque


class Deadlines:
    """Turns measured step and round times into a deadline.

    A peer does the same work as we do, on hardware that may be slower and over a wire that may be busier. So it counts
    as hung when it has kept us waiting `slack` times as long as the slowest interval and the slowest exchange seen
    lately took, and at least `minimum_s`, which leaves room for what has not been measured yet: the first compilation,
    or a pause to evaluate.

    Bytes that no round has shown the wire's speed for yet are allowed the time that they take at `slowest_bits_per_s`.

    Args:
        minimum_s: Floor in seconds.
        slack: Factor on the measured times.
        window: How many of the latest measurements count.
        slowest_bits_per_s: A wire slower than this counts as broken until it has shown otherwise.

    Example:
        >>> deadlines = Deadlines(minimum_s=60, slack=10)
        >>> deadlines.observe_step(0.5)
        >>> deadlines.deadline_s(steps=30)
        210.0
    """

    def __init__(
        self, *, minimum_s: float = 60.0, slack: float = 10.0, window: int = 200, slowest_bits_per_s: float = 1e5
    ) -> None:
        if minimum_s <= 0 or slack < 1:
            raise ValueError(f"minimum_s must be positive and slack at least 1, got {minimum_s} and {slack}")
        self._slowest_bits_per_s = slowest_bits_per_s
        self._largest_seen_bytes = 0
        self._minimum_s = minimum_s
        self._slack = slack
        self._steps: deque[float] = deque(maxlen=window)
        self._rounds: deque[float] = deque(maxlen=window)

    def observe_step(self, seconds: float) -> None:
        """Take in the time between two steps."""
        self._steps.append(seconds)

    def median_step_s(self) -> float:
        """Return the median of the latest steps' times, 0 where none has been seen."""
        return statistics.median(self._steps) if self._steps else 0.0

    def observe_round(self, seconds: float, *, num_bytes: int = 0) -> None:
        """Take in the time from a round's launch to its arrival, and the bytes that this replica sent for it."""
        self._rounds.append(seconds)
        self._largest_seen_bytes = max(self._largest_seen_bytes, num_bytes)

    def deadline_s(self, *, steps: int, num_bytes: int = 0) -> float:
        """Return how many seconds a round may take from now on.

        Args:
            steps: Inner steps that may pass meanwhile, here and at the peers.
            num_bytes: What this replica sends.
        """
        interval_s = steps * max(self._steps, default=0.0)
        unseen_bytes = max(0, num_bytes - self._largest_seen_bytes)
        wire_s = 8 * unseen_bytes / self._slowest_bits_per_s
        return self._minimum_s + wire_s + self._slack * (interval_s + max(self._rounds, default=0.0))
