"""Adaptive time-outs: limits for silence, votes and rounds that follow from measured times."""

from __future__ import annotations

import math
import statistics
from collections import deque

_DEVIATIONS = 6.0


class AdaptiveTimeout:
    """A limit over the latest measured times: median + 6 median absolute deviations, within bounds.

    Args:
        least_s: Lower bound of the limit; tolerates a pause of the scheduler.
        most_s: Upper bound, and the limit until a time has been measured.
        window: Number of latest times that count.

    Raises:
        ValueError: The bounds are not in order.

    Example:
        >>> timeout = AdaptiveTimeout(least_s=0.5, most_s=30)
        >>> timeout.limit_s
        30
        >>> for seconds in (1.0, 1.2, 1.4):
        ...     timeout.observe(seconds)
        >>> round(timeout.limit_s, 3), timeout.median_s, timeout.largest_s
        (2.4, 1.2, 1.4)
    """

    def __init__(self, *, least_s: float = 0.0, most_s: float = math.inf, window: int = 64) -> None:
        if not (0 <= least_s <= most_s and most_s > 0):
            raise ValueError(f"least_s must be at least 0 and at most most_s, got {least_s} and {most_s}")
        self.least_s = least_s
        self.most_s = most_s
        self._seen: deque[float] = deque(maxlen=window)
        self._known_s: float | None = most_s

    def observe(self, seconds: float) -> None:
        self._seen.append(seconds)
        self._known_s = None

    @property
    def median_s(self) -> float:
        """The median of the latest times, 0 before the first."""
        return statistics.median(self._seen) if self._seen else 0.0

    @property
    def largest_s(self) -> float:
        """The largest of the latest times, 0 before the first."""
        return max(self._seen, default=0.0)

    @property
    def limit_s(self) -> float:
        if self._known_s is None:  # read far more often than a time is measured
            median = statistics.median(self._seen)
            deviation = statistics.median(abs(seconds - median) for seconds in self._seen)
            self._known_s = min(max(self.least_s, median + _DEVIATIONS * deviation), self.most_s)
        return self._known_s


class Deadlines:
    """Deadlines of rounds, for which a peer computes and transfers as well as this replica does.

    A peer does the same work on hardware that may be slower, over a link that may be busier. It counts as hung after
    `slack` times the slowest recent interval and exchange, plus `minimum_s`. The minimum covers what has not been
    measured yet: the first compilation, or a pause to evaluate. Bytes beyond the largest round so far are allowed the
    time that they take at `slowest_bits_per_s`.

    Args:
        minimum_s: Floor in seconds.
        slack: Factor on the measured times.
        window: Number of latest times that count.
        slowest_bits_per_s: Rate assumed of a link that has not been measured.

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
        self._steps, self._rounds = AdaptiveTimeout(window=window), AdaptiveTimeout(window=window)

    def observe_step(self, seconds: float) -> None:
        """Add the time between two steps."""
        self._steps.observe(seconds)

    def median_step_s(self) -> float:
        """Return the median time of the latest steps, 0 before the first."""
        return self._steps.median_s

    def observe_round(self, seconds: float, *, num_bytes: int = 0) -> None:
        """Add the time from a round's launch to its arrival, and the bytes that this replica sent for it."""
        self._rounds.observe(seconds)
        self._largest_seen_bytes = max(self._largest_seen_bytes, num_bytes)

    def deadline_s(self, *, steps: int, num_bytes: int = 0) -> float:
        """Return how many seconds a round may take from now on.

        Args:
            steps: Inner steps that may pass meanwhile, here and at the peers.
            num_bytes: Bytes that this replica sends.
        """
        unseen_bytes = max(0, num_bytes - self._largest_seen_bytes)
        wire_s = 8 * unseen_bytes / self._slowest_bits_per_s
        # the maximum, not the spread: an evaluation or a checkpoint makes single steps ten times longer
        return self._minimum_s + wire_s + self._slack * (steps * self._steps.largest_s + self._rounds.largest_s)
