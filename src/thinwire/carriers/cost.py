"""Requests and bytes of stores: an hourly budget, list prices, and what the rounds of a run cost."""

from __future__ import annotations

import math
import threading

from thinwire.errors import refusal

_HOUR_S = 3600.0
# Requests beyond the even pace that may go at once, as a share of the hour's.
BURST = 0.05


class RequestBudget:
    """An hourly budget of requests, spent at an even pace; pure, time comes in as a number. Thread-safe.

    Polls wait until the pace has caught up. Other requests wait only when they are `BURST` of the hour ahead of it, so
    that no hour has more than the budget and `BURST` of it.

    Raises:
        ValueError: The budget is not positive.

    Example:
        >>> budget = RequestBudget(3600)  # 180 may go at once
        >>> [budget.take(now_s=0.0) for _ in range(181)][-1], budget.poll_wait_s(now_s=0.0)
        (1.0, 181.0)
    """

    def __init__(self, per_hour: float) -> None:
        if not per_hour > 0:
            raise refusal("the budget of requests is too small", got=per_hour, allowed="above 0 an hour",
                          remedy="3600")  # fmt: skip
        self._interval_s = _HOUR_S / per_hour
        self._ahead_s = max(BURST * _HOUR_S, self._interval_s)
        self._lock = threading.Lock()
        self._due_s = -math.inf  # when the pace has caught up with the requests so far

    def take(self, *, now_s: float) -> float:
        """Count a request, and return the seconds that it must wait."""
        with self._lock:
            self._due_s = max(self._due_s, now_s) + self._interval_s
            return max(0.0, self._due_s - now_s - self._ahead_s)

    def poll_wait_s(self, *, now_s: float) -> float:
        """Return the seconds until the next poll is within the pace."""
        with self._lock:
            return max(0.0, self._due_s - now_s)
