"""Adaptive timeout: the median of measured waits plus a multiple of their spread."""

from __future__ import annotations

import statistics
from collections import deque

_DEVIATIONS = 6.0


class Patience:
    """A limit that follows from measured times: median + 6 median absolute deviations, within bounds.

    Args:
        least_s: The limit is never below, so that a glitch of the scheduler is borne.
        most_s: Nor above; it is also the limit as long as nothing has been measured.
        window: How many of the latest times count.

    Raises:
        ValueError: The bounds are not in order.

    Example:
        >>> patience = Patience(least_s=0.5, most_s=30)
        >>> patience.limit_s
        30
        >>> for seconds in (1.0, 1.2, 1.4):
        ...     patience.observe(seconds)
        >>> round(patience.limit_s, 3)
        2.4
    """

    def __init__(self, *, least_s: float, most_s: float, window: int = 64) -> None:
        if not 0 < least_s <= most_s:
            raise ValueError(f"least_s must be positive and at most most_s, got {least_s} and {most_s}")
        self.least_s = least_s
        self.most_s = most_s
        self._seen: deque[float] = deque(maxlen=window)
        self._known_s: float | None = most_s

    def observe(self, seconds: float) -> None:
        """Take in a time."""
        self._seen.append(seconds)
        self._known_s = None

    @property
    def median_s(self) -> float:
        """The median of the latest times, 0 where there is none."""
        return statistics.median(self._seen) if self._seen else 0.0

    @property
    def limit_s(self) -> float:
        """How long to wait now."""
        if self._known_s is None:  # it is asked for far more often than a time is measured
            median = statistics.median(self._seen)
            deviation = statistics.median(abs(seconds - median) for seconds in self._seen)
            self._known_s = min(max(self.least_s, median + _DEVIATIONS * deviation), self.most_s)
        return self._known_s
