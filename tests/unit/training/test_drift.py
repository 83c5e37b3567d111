"""Steps that take longer than the plan said: told once and with numbers, and not told where nothing is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.events import Transfer, TransferLog
from thinwire.sync.schedule import EveryStep, Schedule, Staggered, WarmUp
from thinwire.training.drift import Drift, StepMonitor, StepWindow, sending, whole_intervals

EXPECTED_S = 0.4


def window(step_s: float, *, steps: int = 30, **more: Any) -> StepWindow:
    return StepWindow(steps=steps, seconds=steps * step_s, **more)


def drift_of(*, sync_interval: int = 30, **options: Any) -> Drift:
    return Drift(expected_step_s=EXPECTED_S, sync_interval=sync_interval, **options)


def told(drift: Drift, step_times: list[float]) -> list[int]:
    """Return the windows, counted from 0, after which there was a word."""
    return [number for number, step_s in enumerate(step_times) if drift.observe(window(step_s))]


@pytest.mark.parametrize("step_s", [0.01, 0.4, 0.499])
def test_steps_within_the_tolerance_or_faster_are_not_told(step_s: float) -> None:
    assert told(drift_of(), [step_s] * 20) == []


@pytest.mark.parametrize("windows", [1, 2, 3, 5])
def test_late_steps_are_told_once_after_exactly_so_many_windows(windows: int) -> None:
    # the first window does not count
    assert told(drift_of(windows=windows), [0.51] * 20) == [windows]


def test_the_first_window_does_not_count_however_late_it_is() -> None:
    assert told(drift_of(), [100.0, *[0.51] * 2, *[0.4] * 9]) == []


def test_late_windows_with_one_in_time_between_them_are_not_told() -> None:
    assert told(drift_of(), [0.4, *[9.0, 9.0, 0.4] * 5]) == []


def test_steps_are_told_again_only_when_they_had_been_in_time_for_as_many_windows() -> None:
    late, well = [0.6] * 3, [0.4] * 3
    assert told(drift_of(), [0.4, *late, *well[:2], *late, *late]) == [3]
    assert told(drift_of(), [0.4, *late, *well, *late, *late]) == [3, 9]


def test_windows_that_are_not_typical_are_not_judged() -> None:
    drift = drift_of()
    assert not any(drift.observe(window(9.0), is_typical=False) for _ in range(9))
    # the first of all is over by then
    assert told(drift, [0.6] * 3) == [2]


def test_the_word_has_the_mean_of_the_late_windows_and_what_to_do() -> None:
    drift = drift_of()
    drift.observe(window(77.0))
    late = [window(step_s, stalled_s=30 * stalled_s, sent_bytes=3_000_000, sending_s=6.0)
            for step_s, stalled_s in ((0.5001, 0.1), (0.6, 0.2), (0.7, 0.3))]  # fmt: skip
    found = [drift.observe(one) for one in late]
    assert found[:2] == ["", ""]
    assert found[2] == (
        "steps take 600.0 ms, 50 % longer than the plan's 400.0 ms: computing 400.0 ms, waiting for the network "
        "200.0 ms, 4.00 Mbit/s while sending; measure again with thinwire probe and plan again, or use a "
        "--sync-interval above 30 in a new run"
    )


@pytest.mark.parametrize(
    "sync_interval, late, has, lacks",
    [
        (1, {"step_s": 1.0, "stalled_s": 24.0}, "2.5 times the plan's 400.0 ms", "--sync-interval"),
        (30, {"step_s": 0.7}, "75 % longer than the plan's", "while sending"),
        (30, {"step_s": 0.7}, "check what else runs on this machine", "--sync-interval"),
        (30, {"step_s": 0.7, "stalled_s": 7.5}, "--sync-interval above 30", "what else runs"),
    ],
)
def test_the_word_advises_what_helps_where_the_time_goes(
    sync_interval: int, late: dict[str, Any], has: str, lacks: str
) -> None:
    drift = drift_of(sync_interval=sync_interval, windows=1)
    drift.observe(window(0.4))
    found = drift.observe(window(**late))
    assert has in found and "measure again with thinwire probe and plan again" in found
    assert lacks not in found


@pytest.mark.parametrize(
    "options",
    [{"expected_step_s": 0.0}, {"expected_step_s": float("nan")}, {"expected_step_s": 1.0, "tolerance": -0.1},
     {"expected_step_s": 1.0, "windows": 0}],
)  # fmt: skip
def test_numbers_out_of_their_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{list(options)[-1]} must be"):
        Drift(sync_interval=1, **options)


@pytest.mark.parametrize(
    "at_least, sync_interval, steps",
    [(1, 1, 1), (10, 1, 10), (10, 4, 12), (10, 10, 10), (10, 11, 11), (10, 100, 100), (250, 100, 300)],
)
def test_a_window_holds_whole_sync_intervals(at_least: int, sync_interval: int, steps: int) -> None:
    assert whole_intervals(at_least=at_least, sync_interval=sync_interval) == steps


def sent(started_s: float, finished_s: float, num_bytes: int, **more: Any) -> Transfer:
    return Transfer(
        **{"direction": "sent", "peer": 1, "kind": "round", "round_id": 0, "fragment": 0, "phase": 0,
           "payload_bytes": num_bytes - 40, "wire_bytes": num_bytes, "started_s": started_s, "finished_s": finished_s,
           **more}
    )  # fmt: skip


def test_time_in_which_several_messages_are_sent_counts_once() -> None:
    assert sending([sent(1.0, 3.0, 100)]) == (100, 2.0)
    # ended in another order than begun: one within another, one that goes on after it, one apart, one in no time
    some = [sent(2.0, 3.0, 10), sent(1.0, 4.0, 100), sent(3.5, 5.0, 1000), sent(8.0, 9.0, 10_000), sent(9.0, 9.0, 1)]
    assert sending(some) == (11_111, 5.0)
    assert sending(reversed(some)) == (11_111, 5.0)


class Run:
    """A watched run on a clock of its own, that takes down what is judged."""

    def __init__(self, schedule: Schedule, *, window_steps: int, num_steps: int = 1000) -> None:
        self.now_s = self.stalled_s = 0.0
        self.log = TransferLog()
        self.judged: list[tuple[StepWindow, bool]] = []
        self.step = 0
        self.watch = StepMonitor(
            self,  # type: ignore[arg-type]
            window_steps=window_steps, schedule=schedule, num_fragments=2, num_steps=num_steps, log=self.log,
            stalled_s=lambda: self.stalled_s, clock=lambda: self.now_s,
        )  # fmt: skip

    def observe(self, window: StepWindow, *, is_typical: bool) -> str:
        self.judged.append((window, is_typical))
        return "late"

    def steps(self, count: int, *, step_s: float = 1.0, stalled_s: float = 0.0, stride: int = 1) -> list[int]:
        """Take so many steps, and return those after which there was a word."""
        found = []
        for _ in range(count):
            self.step += stride
            self.now_s += step_s
            self.stalled_s += stalled_s
            if self.watch.observe_step(self.step):
                found.append(self.step)
        return found


def test_windows_follow_each_other_without_a_gap_and_hold_what_was_done_in_them() -> None:
    run = Run(EveryStep(), window_steps=4)
    # counting begins where the first step has ended
    assert run.steps(1, step_s=500.0) == []
    assert run.steps(4, step_s=2.0, stalled_s=0.5) == [5]
    assert run.steps(5, step_s=3.0, stalled_s=0.25) == [9]
    assert [one.seconds for one, _ in run.judged] == [8.0, 12.0]
    assert [one.stalled_s for one, _ in run.judged] == [2.0, 1.0]
    assert [one.steps for one, _ in run.judged] == [4, 4]


def test_evaluations_and_checkpoints_are_left_out_with_what_they_wait_for() -> None:
    run = Run(EveryStep(), window_steps=4)
    run.steps(3, stalled_s=0.5)
    with run.watch.apart():
        run.now_s += 100.0
        run.stalled_s += 50.0
    run.steps(2, stalled_s=0.5)
    assert run.judged == [(StepWindow(steps=4, seconds=4.0, stalled_s=2.0), True)]


def test_a_window_has_the_messages_of_rounds_that_left_in_it() -> None:
    run = Run(EveryStep(), window_steps=2)
    run.steps(1)
    run.log.add(sent(1.0, 1.5, 100))
    run.log.add(sent(1.2, 1.6, 100))
    run.log.add(sent(1.0, 9.0, 7, kind="control"))
    run.log.add(sent(1.0, 9.0, 7, direction="received"))
    run.log.add(sent(1.0, 9.0, 7, error="the deadline ran out"))
    run.steps(2)
    run.log.add(sent(3.0, 3.25, 1000))
    run.steps(2)
    assert [(one.sent_bytes, one.sending_s) for one, _ in run.judged] == [(200, pytest.approx(0.6)), (1000, 0.25)]


def test_a_replica_that_passes_over_steps_counts_them() -> None:
    run = Run(EveryStep(), window_steps=4)
    assert run.steps(5, stride=3) == [9, 15]
    assert [(one.steps, one.seconds) for one, _ in run.judged] == [(6, 2.0)] * 2


def test_only_windows_that_send_what_the_end_of_the_run_sends_are_typical() -> None:
    run = Run(WarmUp(warmup_steps=10), window_steps=4, num_steps=30)
    run.steps(30)
    # steps 2 to 5, 6 to 9, 10 to 13, and so on: the warm-up ends with step 10
    assert [is_typical for _, is_typical in run.judged] == [False, False, False, True, True, True, True]
    run = Run(Staggered(sync_interval=4, overlap_steps=3), window_steps=4, num_steps=31)
    run.steps(31)
    # before step 4 nobody has anything to exchange
    assert [is_typical for _, is_typical in run.judged] == [False, *[True] * 6]
