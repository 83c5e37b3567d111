"""How long to wait for a peer: derived from what was measured, never a guess of the user's."""

from __future__ import annotations

from collections import deque


class Deadlines:
    """Turns measured step and round times into a deadline.

    A peer does the same work as we do, on hardware that may be slower and over a wire that may be busier. So it counts
    as hung when it has kept us waiting `slack` times as long as the slowest interval and the slowest exchange seen
    lately took, and at least `minimum_s`, which leaves room for what has not been measured yet: the first compilation,
    or a pause to evaluate.

    Args:
        minimum_s: Floor in seconds.
        slack: Factor on the measured times.
        window: How many of the latest measurements count.

    Example:
        >>> deadlines = Deadlines(minimum_s=60, slack=10)
        >>> deadlines.observe_step(0.5)
        >>> deadlines.deadline_s(steps=30)
        210.0
    """

    def __init__(self, *, minimum_s: float = 60.0, slack: float = 10.0, window: int = 200) -> None:
        if minimum_s <= 0 or slack < 1:
            raise ValueError(f"minimum_s must be positive and slack at least 1, got {minimum_s} and {slack}")
        self._minimum_s = minimum_s
        self._slack = slack
        self._steps: deque[float] = deque(maxlen=window)
        self._rounds: deque[float] = deque(maxlen=window)

    def observe_step(self, seconds: float) -> None:
        """Take in the time between two steps."""
        self._steps.append(seconds)

    def observe_round(self, seconds: float) -> None:
        """Take in the time from a round's launch to its arrival."""
        self._rounds.append(seconds)

    def deadline_s(self, *, steps: int) -> float:
        """Return how many seconds a round may take while `steps` inner steps pass, from now on."""
        interval_s = steps * max(self._steps, default=0.0)
        return self._minimum_s + self._slack * (interval_s + max(self._rounds, default=0.0))
