"""Detection of steps that take longer than the plan predicts, while a run trains."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields

from thinwire.events import Transfer, TransferLog
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.sync.schedule import Schedule
from thinwire.training.config import TrainConfig
from thinwire.units import format_rate, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWindow:
    """Totals of a replica's consecutive steps.

    Attributes:
        steps: Number of inner steps.
        seconds: Their time, waiting included.
        stalled_s: Part of it in which the training thread waited for the network.
        sent_bytes: Bytes of all messages sent meanwhile, thinwire's headers included.
        sending_s: Seconds in which at least one of these was being sent.
    """

    steps: int
    seconds: float
    stalled_s: float = 0.0
    sent_bytes: int = 0
    sending_s: float = 0.0


class Drift:
    """Reports once when steps take longer than expected for several windows, and again only after a recovery.

    Args:
        expected_step_s: Seconds that a step should take, waiting included.
        sync_interval: H of the run; 1 if it exchanges at every step.
        tolerance: Share of the expected time by which a step may take longer.
        windows: Consecutive late windows before a report, and consecutive windows in time before another one. The very
            first window is ignored: start-up and compilation fall into it.

    Example:
        >>> drift = Drift(expected_step_s=0.4, sync_interval=30, windows=2)
        >>> late = StepWindow(steps=30, seconds=18.0, stalled_s=6.0, sent_bytes=4_000_000, sending_s=8.0)
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
        self._has_reported = False
        # consecutive windows that speak for a change
        self._others: list[StepWindow] = []

    def observe(self, window: StepWindow, *, is_typical: bool = True) -> str:
        """Return the report after the next window, mostly an empty text; a window that is not typical is ignored."""
        is_first, self._has_begun = not self._has_begun, True
        if is_first or not is_typical:
            return ""
        is_late = window.seconds > self._most_step_s * window.steps
        if is_late == self._has_reported:
            self._others.clear()
            return ""
        self._others.append(window)
        if len(self._others) < self._windows:
            return ""
        others, self._others, self._has_reported = self._others, [], is_late
        total = {field.name: sum(getattr(one, field.name) for one in others) for field in fields(StepWindow)}
        return self._report(StepWindow(**total)) if is_late else ""

    def _report(self, window: StepWindow) -> str:
        step_s, stalled_s = window.seconds / window.steps, window.stalled_s / window.steps
        computing_s = max(0.0, step_s - stalled_s)
        ratio = step_s / self._expected_step_s
        more = f"{ratio:,.{1 if ratio < 10 else 0}f} times" if ratio >= 2 else f"{100 * (ratio - 1):.0f} % longer than"
        rate = f", {format_rate(8 * window.sent_bytes / window.sending_s)} while sending" if window.sending_s else ""
        remedy = "measure again with thinwire probe and plan again"
        if computing_s > self._most_step_s:  # no link would make it fast enough
            remedy = f"check what else runs on this machine, or {remedy}"
        elif self._sync_interval > 1:
            remedy += f", or use a --sync-interval above {self._sync_interval} in a new run"
        return (
            f"steps take {format_seconds(step_s)}, {more} the plan's {format_seconds(self._expected_step_s)}: "
            f"computing {format_seconds(computing_s)}, waiting for the network {format_seconds(stalled_s)}{rate}; "
            f"{remedy}"
        )


class StepMonitor:
    """Groups a replica's steps into windows of whole sync intervals and passes them to the drift detector.

    Only steps with the rounds of the run's end are typical, since a plan predicts their time: not a warm-up that sends
    more, nor the steps before the first round.
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

    def observe_step(self, step: int) -> str:
        """Return the report after a step that has ended, mostly an empty text."""
        first = self._first_step
        # a replica that catches up may pass over the last step of a window
        if first is not None and step - first + 1 < self._window_steps:
            return ""
        now_s, now_stalled_s = self._clock(), self._stalled_s()
        report = ""
        if first is not None:
            sent_bytes, sending_s = sending([self._sent.popleft() for _ in range(len(self._sent))])
            window = StepWindow(
                steps=step - first + 1, seconds=now_s - self._began_s, stalled_s=now_stalled_s - self._began_stalled_s,
                sent_bytes=sent_bytes, sending_s=sending_s,
            )  # fmt: skip
            interval = self._schedule.sync_interval
            left = (self._num_steps - step) // interval * interval
            is_typical = all(self._launched(one) == self._launched(one + left) for one in range(first, step + 1))
            report = self._drift.observe(window, is_typical=is_typical)
        self._first_step, self._began_s, self._began_stalled_s = step + 1, now_s, now_stalled_s
        return report

    def _launched(self, step: int) -> list[tuple[int, int]]:
        rounds = self._schedule.launches(step, num_fragments=self._num_fragments)
        return [(round.fragment, round.channel) for round in rounds]

    def _note(self, transfer: Transfer) -> None:
        if transfer.direction == "sent" and transfer.kind == "round" and not transfer.error:
            self._sent.append(transfer)


def step_monitor_of(config: TrainConfig, optimizer: DistributedOptimizer, *, log: TransferLog) -> StepMonitor | None:
    """Return the monitor of a run, None without `--expected-step-s` or a plan."""
    if config.run.expected_step_s is None:
        return None
    schedule = optimizer.method.schedule
    return StepMonitor(
        Drift(expected_step_s=config.run.expected_step_s, sync_interval=schedule.sync_interval),
        window_steps=whole_intervals(at_least=config.output.log_every, sync_interval=schedule.sync_interval),
        schedule=schedule, num_fragments=optimizer.num_fragments, num_steps=config.run.steps, log=log,
        stalled_s=lambda: optimizer.statistics.stalled_s,
    )  # fmt: skip


def whole_intervals(*, at_least: int, sync_interval: int) -> int:
    """Return the least number of steps from `at_least` on that is a multiple of the sync interval.

    Example:
        >>> whole_intervals(at_least=10, sync_interval=4), whole_intervals(at_least=10, sync_interval=100)
        (12, 100)
    """
    return max(1, -(-at_least // sync_interval)) * sync_interval


def sending(transfers: Iterable[Transfer]) -> tuple[int, float]:
    """Return the bytes of messages, and the seconds in which at least one of them was being sent.

    A message counts from its request to its completion, time for a peer that was not ready included.
    """
    sent_bytes, seconds, until_s = 0, 0.0, -math.inf
    for transfer in sorted(transfers, key=lambda transfer: transfer.started_s):
        sent_bytes += transfer.wire_bytes
        seconds += max(0.0, transfer.finished_s - max(transfer.started_s, until_s))
        until_s = max(until_s, transfer.finished_s)
    return sent_bytes, seconds
