"""Adaptive local steps (DyLU, arXiv 2401.09135): a slow replica takes fewer inner steps an interval.

The coordinator reports when the fastest replicas launch, and how long their steps take. A slower replica predicts their
step after its own next one, and skips the steps that it cannot take in time, before its step instead of after it. Its
steps spread evenly over the interval, its part is there at each launch, and no replica waits. Its work counts by its
tokens. In DyLU a server assigns H; here each replica finds its own, step by step.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

# Ratio of step times from which a replica counts as slower; below it lies measurement noise.
SLOWER = 1.05
# Number of launches from which the others' speed is measured.
_SEEN = 8
# Number of own steps needed, or as many as fit in an interval; one disturbed step changes nothing.
_OWN_SEEN = 5
# A step rarely exceeds the median by more than this many median absolute deviations.
_DEVIATIONS = 3.0
# Steps; a step that just fits must not fail through rounding.
_EPSILON = 1e-6
# Bound on the look-ahead, whatever was measured.
_MOST_STEPS = 1 << 20


def is_slower(step_s: float, *, fastest_s: float) -> bool:
    """Return whether a replica is slower than the fastest by more than noise; False where a time is unknown (0).

    Example:
        >>> is_slower(0.2, fastest_s=0.1), is_slower(0.102, fastest_s=0.1), is_slower(0.2, fastest_s=0.0)
        (True, False, False)
    """
    return fastest_s > 0 and step_s > SLOWER * fastest_s


class PeerPace:
    """Pace of the fastest replicas: the time at which they reached each step, and the time of their steps.

    Attributes:
        step_s: Seconds of an inner step at the fastest replica, 0 while unknown.
    """

    def __init__(self) -> None:
        self.step_s = 0.0
        self._reached: deque[tuple[int, float]] = deque(maxlen=4 * _SEEN)

    def observe(self, step: int, *, now_s: float) -> None:
        """Record that one of the fastest has reached a step."""
        if step > (self._reached[-1][0] if self._reached else 0):
            self._reached.append((step, now_s))

    def start(self, *, now_s: float) -> None:
        """Record that all begin now at step 0; ignored once later steps are known."""
        if not self._reached:
            self._reached.append((0, now_s))

    def reset(self) -> None:
        """Forget all steps, because the run continues from an earlier state."""
        self._reached.clear()

    def launches(self, is_launch: Callable[[int], bool]) -> list[tuple[int, float]]:
        """Return step and time of the latest launches, and of the start of the run."""
        return [found for found in list(self._reached) if found[0] == 0 or is_launch(found[0])][-_SEEN - 1 :]


class AdaptiveLocalSteps:
    """Chooses the steps that a slow replica skips; the engine asks between two inner steps.

    Args:
        peers: Pace of the fastest replicas.
        own_s: Returns the times of this replica's own latest steps, in seconds, without its waits.
        launched: Returns the fragments of the rounds that are launched at a step.
        has_work: Returns whether this replica has trained a fragment since its last counted round.
        interval_steps: H: within so many steps there is a launch.
        slack_steps: Steps of the others by which a launch may follow theirs, because no replica needs it yet.
        now: Clock of the recorded times, seconds.

    Example:
        >>> peers = PeerPace()
        >>> peers.step_s = 0.1
        >>> for step in (10, 20):
        ...     peers.observe(step, now_s=0.1 * step)
        >>> pace = AdaptiveLocalSteps(
        ...     peers=peers, own_s=lambda: [0.5, 0.5], launched=lambda step: [0] if step % 10 == 0 else [],
        ...     has_work=lambda fragment: True, interval_steps=10, now=lambda: 2.0,
        ... )
        >>> pace.target_step(20)  # after its next step the others are at 25: it goes to 24, and does that one
        24
        >>> pace.target_step(12)  # it is late: it goes to where they launched
        20
    """

    def __init__(
        self, *, peers: PeerPace, own_s: Callable[[], Sequence[float]], launched: Callable[[int], Iterable[int]],
        has_work: Callable[[int], bool], interval_steps: int, slack_steps: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._peers = peers
        self._own_s = own_s
        self._launched = launched
        self._has_work = has_work
        self._interval_steps = interval_steps
        self._slack_steps = slack_steps
        self._now = now

    def target_step(self, reached: int) -> int:
        """Return the step to skip to before the next inner step; at most `reached` where none is skipped.

        Args:
            reached: The step that this replica is at.
        """
        own_s = self._own_s()
        if not own_s or not is_slower(statistics.median(own_s), fastest_s=self._peers.step_s):
            return 0
        in_an_interval = self._interval_steps * self._peers.step_s / statistics.median(own_s)
        if len(own_s) < min(_OWN_SEEN, math.floor(in_an_interval)):
            return 0
        seen = self._peers.launches(self._is_launch)
        if not seen:
            return 0
        (known, at_s), now_s, each_s = seen[-1], self._now(), self._each_s(seen)
        if reached < known:
            return known
        if now_s > at_s + (self._next_launch(known) - known + self._interval_steps / 2) * each_s:
            return 0  # they have stopped
        end_s = now_s + statistics.median(own_s) + _DEVIATIONS * _deviation(own_s)
        return self._ahead(reached, min(known + (end_s - at_s) / each_s, float(reached + _MOST_STEPS)))

    def _ahead(self, reached: int, after: float) -> int:
        """Return where to go if the others will be at `after` when the next step has been done."""
        last = math.floor(after + _EPSILON)
        target = last - 1
        for step in filter(self._is_launch, range(reached + 1, last + 1)):
            if after <= step + self._slack_steps + _EPSILON:
                return min(target, step - 1)  # it will be there in time
            if not any(map(self._has_work, self._launched(step))):
                return min(target, step - 1)  # an empty part counts nothing: better late
            target = max(target, step)  # its next step would be too late: it launches before it
        return target

    def _each_s(self, seen: list[tuple[int, float]]) -> float:
        """Return the seconds that a step takes the fastest, its waits for the rounds among them."""
        measured = [(later_s - s) / (later - step) for (step, s), (later, later_s) in pairwise(seen)]
        return max(statistics.median(measured) if measured else 0.0, self._peers.step_s)

    def _is_launch(self, step: int) -> bool:
        return any(True for _ in self._launched(step))

    def _next_launch(self, step: int) -> int:
        ahead = range(step + 1, step + self._interval_steps + 1)
        return next(filter(self._is_launch, ahead), step + self._interval_steps)


def _deviation(times_s: Sequence[float]) -> float:
    median = statistics.median(times_s)
    return statistics.median(abs(took_s - median) for took_s in times_s)
