"""While training: whether steps take as long as the plan said, and what to tell where they take longer for long."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from thinwire.events import Transfer, TransferLog
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.sync.schedule import Schedule
from thinwire.training.config import TrainConfig
from thinwire.units import format_rate, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a replica did in some steps one after another.

    Attributes:
        steps: How many inner steps.
        seconds: That they took, with what was waited for in them.
        stalled_s: Of these, seconds in which the training thread waited for the wire.
        sent_bytes: Of all messages that left meanwhile, thinwire's headers included.
        sending_s: Seconds in which at least one of these was being sent.
    """

    steps: int
    seconds: float
    stalled_s: float = 0.0
    sent_bytes: int = 0
    sending_s: float = 0.0

    def plus(self, other: Window) -> Window:
        """Return both as one."""
        return Window(
            steps=self.steps + other.steps, seconds=self.seconds + other.seconds,
            stalled_s=self.stalled_s + other.stalled_s, sent_bytes=self.sent_bytes + other.sent_bytes,
            sending_s=self.sending_s + other.sending_s,
        )  # fmt: skip


class Drift:
    """Tells once when steps take longer than expected for several windows, and again only after they had been in time.

    Steps that take less are no reason for a word: nobody waits for them.

    Args:
        expected_step_s: Seconds that a step should take, with its share of what is waited for.
        sync_interval: H of the run; 1 where it exchanges at every step.
        tolerance: By what share of that a step may take longer.
        windows: So many windows one after another are late before there is a word, or in time before there may be
            another. The very first is not judged: start-up and compilation fall into it.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> drift = Drift(expected_step_s=0.4, sync_interval=30, windows=2)
        >>> late = Window(steps=30, seconds=18.0, stalled_s=6.0, sent_bytes=4_000_000, sending_s=8.0)
        >>> [bool(drift.observe(late)) for _ in range(5)]
        [False, False, True, False, False]
    """

    def __init__(
        self, *, expected_step_s: float, sync_interval: int, tolerance: float = 0.25, windows: int = 3
    ) -> None:
        if not 0 < expected_step_s < math.inf:
            raise ValueError(f"expected_step_s must be positive, got {expected_step_s}")
        if not 0 <= tolerance < math.inf:
            raise ValueError(f"tolerance must be at least 0, got {tolerance}")
        if windows < 1:
            raise ValueError(f"windows must be at least 1, got {windows}")
        self._expected_step_s = expected_step_s
        self._sync_interval = sync_interval
        self._most_step_s = (1 + tolerance) * expected_step_s
        self._windows = windows
        self._has_begun = False
        self._has_complained = False
        # windows one after another that speak for a change
        self._others: list[Window] = []

    def observe(self, window: Window, *, is_typical: bool = True) -> str:
        """Take in the next window; return what to tell the user, mostly an empty text.

        Args:
            window: What was done in it.
            is_typical: Whether it can be held against what is expected; nothing is said of one that cannot.
        """
        is_first, self._has_begun = not self._has_begun, True
        if is_first or not is_typical:
            return ""
        is_late = window.seconds > self._most_step_s * window.steps
        if is_late == self._has_complained:
            self._others.clear()
            return ""
        self._others.append(window)
        if len(self._others) < self._windows:
            return ""
        first, *rest = self._others
        self._others = []
        self._has_complained = is_late
        for other in rest:
            first = first.plus(other)
        return self._complaint(first) if is_late else ""

    def _complaint(self, window: Window) -> str:
        step_s, stalled_s = window.seconds / window.steps, window.stalled_s / window.steps
        computing_s = max(0.0, step_s - stalled_s)
        ratio = step_s / self._expected_step_s
        more = f"{ratio:,.{1 if ratio < 10 else 0}f} times" if ratio >= 2 else f"{100 * (ratio - 1):.0f} % longer than"
        rate = f", {format_rate(8 * window.sent_bytes / window.sending_s)} while sending" if window.sending_s else ""
        return (
            f"steps take {format_seconds(step_s)}, {more} the plan's {format_seconds(self._expected_step_s)}: "
            f"computing {format_seconds(computing_s)}, waiting for the wire {format_seconds(stalled_s)}{rate}; "
            f"{self._remedy(computing_s)}"
        )

    def _remedy(self, computing_s: float) -> str:
        again = "measure again with thinwire probe and plan anew"
        if computing_s > self._most_step_s:  # no wire would make it fast enough
            return f"look what else runs on this machine, or {again}"
        if self._sync_interval == 1:
            return again
        return f"{again}, or go on with a --sync-interval above {self._sync_interval} in a new run"


class Watch:
    """Puts a replica's steps together to windows of whole sync intervals, and has them judged.

    Only steps whose rounds are those of the run's end are judged, as it is these that a plan tells the time of: not a
    warm-up that sends more, nor the steps before the first round.

    Args:
        drift: The judge.
        window_steps: The least steps of a window.
        schedule: Of the run's rounds.
        num_fragments: That it launches.
        num_steps: Inner steps of the run.
        log: Where messages are recorded, on the same clock.
        stalled_s: Tells the seconds in which the training thread has waited for the wire so far.
        clock: Seconds that only grow.
    """

    def __init__(
        self, drift: Drift, *, window_steps: int, schedule: Schedule, num_fragments: int, num_steps: int,
        log: TransferLog, stalled_s: Callable[[], float], clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._drift = drift
        self._window_steps = window_steps
        self._schedule = schedule
        self._num_fragments = num_fragments
        self._num_steps = num_steps
        self._stalled_s = stalled_s
        self._clock = clock
        self._first_step: int | None = None
        self._began_s = self._began_stalled_s = 0.0
        # filled by the threads that end messages, emptied by the one that trains
        self._sent: deque[Transfer] = deque()
        log.add_sink(self._note)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Leave out the time of a `with` block that is no training: an evaluation, a checkpoint."""
        began_s, began_stalled_s = self._clock(), self._stalled_s()
        yield
        self._began_s += self._clock() - began_s
        self._began_stalled_s += self._stalled_s() - began_stalled_s

    def look(self, step: int) -> str:
        """Look at the steps up to this one, which has ended; return what to tell the user, mostly an empty text."""
        if self._first_step is None:
            self._begin(step + 1)
            return ""
        # a replica that catches up may pass over the very step
        if step - self._first_step + 1 < self._window_steps:
            return ""
        sent = [self._sent.popleft() for _ in range(len(self._sent))]
        sent_bytes, sending_s = sending(sent)
        window = Window(
            steps=step - self._first_step + 1, seconds=self._clock() - self._began_s,
            stalled_s=self._stalled_s() - self._began_stalled_s, sent_bytes=sent_bytes, sending_s=sending_s,
        )  # fmt: skip
        is_typical = self._is_typical(self._first_step, step)
        self._begin(step + 1)
        return self._drift.observe(window, is_typical=is_typical)

    def _begin(self, step: int) -> None:
        self._first_step = step
        self._began_s, self._began_stalled_s = self._clock(), self._stalled_s()

    def _is_typical(self, first: int, last: int) -> bool:
        interval = self._schedule.sync_interval
        to_the_end = (self._num_steps - last) // interval * interval
        return all(self._launched(step) == self._launched(step + to_the_end) for step in range(first, last + 1))

    def _launched(self, step: int) -> list[tuple[int, int]]:
        rounds = self._schedule.launches(step, num_fragments=self._num_fragments)
        return [(round.fragment, round.channel) for round in rounds]

    def _note(self, transfer: Transfer) -> None:
        if transfer.direction == "sent" and transfer.kind == "round" and not transfer.error:
            self._sent.append(transfer)


def watch_for(config: TrainConfig, optimizer: DistributedOptimizer, *, log: TransferLog) -> Watch | None:
    """Return a run's watch, None where nobody said how long a step should take.

    Args:
        config: Resolved options.
        optimizer: What runs.
        log: Of the transport.
    """
    if config.run.expected_step_s is None:
        return None
    schedule = optimizer.method.schedule
    return Watch(
        Drift(expected_step_s=config.run.expected_step_s, sync_interval=schedule.sync_interval),
        window_steps=whole_intervals(at_least=config.output.log_every, sync_interval=schedule.sync_interval),
        schedule=schedule,
        num_fragments=optimizer.num_fragments,
        num_steps=config.run.steps,
        log=log,
        stalled_s=lambda: optimizer.statistics.stalled_s,
    )


def whole_intervals(*, at_least: int, sync_interval: int) -> int:
    """Return the least number of steps that is `at_least` so many and holds whole sync intervals.

    Example:
        >>> whole_intervals(at_least=10, sync_interval=4), whole_intervals(at_least=10, sync_interval=100)
        (12, 100)
    """
    return max(1, -(-at_least // sync_interval)) * sync_interval


def sending(transfers: Iterable[Transfer]) -> tuple[int, float]:
    """Return how many bytes messages had, and the seconds in which at least one of them was being sent.

    A message counts from when it was asked for to when it was seen to be done, so that bytes by seconds are the rate
    that a replica reached to all its peers together; what it waited for a peer that was not ready is in it.

    Example:
        >>> sending([])
        (0, 0.0)
    """
    sent_bytes, seconds, until_s = 0, 0.0, -math.inf
    for transfer in sorted(transfers, key=lambda transfer: transfer.started_s):
        sent_bytes += transfer.wire_bytes
        seconds += max(0.0, transfer.finished_s - max(transfer.started_s, until_s))
        until_s = max(until_s, transfer.finished_s)
    return sent_bytes, seconds
