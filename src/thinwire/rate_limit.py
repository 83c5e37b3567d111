"""Token bucket: so much a second, and so much at once."""

from __future__ import annotations


class RateLimit:
    """A token bucket of so many a second and so many at once; pure, time comes in as a number.

    Example:
        >>> limit = RateLimit(a_second=1.0, at_once=2.0)
        >>> [limit.take(now_s=0.0) for _ in range(3)], limit.take(now_s=1.0)
        ([True, True, False], True)
    """

    def __init__(self, *, a_second: float, at_once: float) -> None:
        self._a_second = a_second
        self._at_once = at_once
        self._left = at_once
        self._taken_s: float | None = None

    def take(self, *, now_s: float, amount: float = 1.0) -> bool:
        """Take tokens; return whether there were enough."""
        since_s = 0.0 if self._taken_s is None else now_s - self._taken_s
        self._taken_s = now_s
        self._left = min(self._at_once, self._left + since_s * self._a_second)
        if self._left < amount:
            return False
        self._left -= amount
        return True
