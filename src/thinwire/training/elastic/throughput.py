"""Throughput of a replica: time of its steps, steps an interval, tokens a second."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from thinwire.elastic.coordinator_session import CoordinatorSession

_SEEN = 32
# A step cannot take no time at all, whatever a clock says.
_LEAST_S = 1e-6


class StepThroughput:
    """A replica's latest steps; each is told to the session, and so to the others and to people.

    Args:
        session: This replica's seat.
        interval_steps: H, inner steps.
        now: Gives seconds that only grow.

    Attributes:
        steps_s: Times of the latest steps without waits, in seconds.
    """

    def __init__(
        self, session: CoordinatorSession, *, interval_steps: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.steps_s: deque[float] = deque(maxlen=_SEEN)
        self._session = session
        self._interval_steps = interval_steps
        self._now = now
        self._seen: deque[tuple[int, int, float]] = deque(maxlen=_SEEN + 1)
        self._tokens = 0

    def add_step(self, *, took_s: float, step: int, tokens: int) -> None:
        """Take in a step.

        Args:
            took_s: Seconds without waits.
            step: Where the replica is after it, and after what it passed over.
            tokens: What it trained on.
        """
        if len(self._seen) == 1:
            self.steps_s.clear()  # the first step warms up: it says little of the others, once there is one
        self.steps_s.append(max(_LEAST_S, took_s))
        self._tokens += tokens
        self._seen.append((step, self._tokens, self._now()))
        session, (first_step, first_tokens, first_s) = self._session, self._seen[0]
        session.step, session.step_s = max(session.step, step), statistics.median(self.steps_s)
        if step > first_step:
            session.steps_per_interval = self._interval_steps * (len(self._seen) - 1) / (step - first_step)
            session.tokens_s = (self._tokens - first_tokens) / max(_LEAST_S, self._seen[-1][2] - first_s)
