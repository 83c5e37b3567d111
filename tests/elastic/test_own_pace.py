"""A slow replica does fewer steps an interval, is in every mean, and makes no fast one wait: in virtual time."""

from dataclasses import replace
from functools import cache

import pytest
from paced_town import Ended, PacedTown, Setting

import thinwire
from thinwire.elastic.adaptive_local_steps import AdaptiveLocalSteps, PeerPace, is_slower
from thinwire.elastic.rounds import ElasticRounds
from thinwire.runlog.run_identity import RunIdentity
from thinwire.training.elastic.job import LoopJob

INTERVALS, STEP_S, JITTER = 15, 1.0, 0.1
# How many times the fastest one's step time each replica needs.
SPEEDS = [(1.0, 1.3), (1.0, 2.0), (1.0, 10.0), (1.0, 1.0, 4.0), (1.0, 1.0, 1.5, 7.0)]


def setting_of(name: str, interval: int, speeds: tuple[float, ...], **more: bool) -> Setting:
    fragments, overlap = (1, 0) if name == "plain" else (3, interval // 6)
    streaming = thinwire.methods.streaming_diloco
    if name == "plain":
        method = thinwire.methods.diloco(sync_interval=interval)
    else:
        method = streaming(sync_interval=interval, overlap_steps=overlap, num_fragments=fragments)
    return Setting(
        schedule=method.schedule, num_fragments=fragments, overlap_steps=overlap,
        step_s=tuple(STEP_S * speed for speed in speeds), num_steps=INTERVALS * interval, jitter=JITTER, **more,
    )  # fmt: skip


@cache
def run(name: str, interval: int, speeds: tuple[float, ...], **more: bool) -> Ended:
    return PacedTown(setting_of(name, interval, speeds, **more)).run()


# every speed with either method, and the most uneven ones at longer intervals
CASES = [
    *((*method, speeds) for method in (("plain", 10), ("streaming", 30)) for speeds in SPEEDS),
    ("plain", 30, SPEEDS[-1]),
]


@pytest.mark.parametrize(("name", "interval", "speeds"), CASES, ids=str)
def test_a_slow_replica_is_in_every_mean_and_a_fast_one_hardly_waits(
    name: str, interval: int, speeds: tuple[float, ...]
) -> None:
    alike = run(name, interval, (1.0,) * len(speeds))
    found = run(name, interval, speeds)
    assert found.own_share == [1.0] * len(speeds), "all are in every mean after the first interval"
    assert found.seconds[0] <= 1.035 * alike.seconds[0]
    for trained, speed in zip(found.trained, speeds, strict=True):
        # at most one step an interval is lost to waiting, and a share to what steps' times scatter
        assert trained >= INTERVALS * (0.9 * interval / speed - 1) - 1
        assert trained >= INTERVALS * 0.95


@pytest.mark.parametrize("name", ["iso_loco", "streaming_diloco"])
def test_a_cut_between_the_coordinator_and_most_replicas_makes_none_wait(name: str) -> None:
    method = getattr(thinwire.methods, name)(sync_interval=60, overlap_steps=5, num_fragments=3)
    identity = RunIdentity(run="0" * 16, config_digest="0" * 32, incarnations=("0" * 16,))
    job = LoopJob.of(method, setup={}, num_replicas=4, last_step=240, identity=identity)
    setting = Setting(
        schedule=method.schedule, num_fragments=3, overlap_steps=job.overlap_steps, step_s=(0.55,) * 4, num_steps=240,
        jitter=JITTER, allows_overdue=job.allows_overdue, cut=((1, 2, 3), 31.0, 42.5),
    )  # fmt: skip
    found = PacedTown(setting).run()
    assert sum(found.waited) < 0.01 * sum(found.seconds) and min(found.trained) >= 0.97 * 240
    assert sum(PacedTown(replace(setting, allows_overdue=False)).run().waited) > 15


def test_without_an_own_pace_a_slow_replica_is_late_and_others_wait_for_it() -> None:
    old, new = (run("plain", 10, (1.0, 10.0), has_own_pace=has) for has in (False, True))
    assert old.own_share[1] < 0.9 < new.own_share[1]
    old, new = (run("plain", 10, (1.0, 2.0), has_own_pace=has) for has in (False, True))
    assert new.seconds[0] < 0.95 * old.seconds[0]


def test_launches_that_are_less_than_a_step_apart_are_made_ahead_where_results_may_come_late() -> None:
    alike, found = (run("streaming", 10, speeds) for speeds in ((1.0, 1.0), (1.0, 10.0)))
    assert found.own_share[1] > 0.9 and found.seconds[0] <= 1.035 * alike.seconds[0]


def test_one_whose_step_is_longer_than_an_interval_counts_less_often_and_is_hardly_waited_for() -> None:
    alike, found = (run("plain", 10, speeds) for speeds in ((1.0, 1.0), (1.0, 15.0)))
    assert 0.2 < found.own_share[1] < 1
    assert found.seconds[0] <= 1.08 * alike.seconds[0]


def test_a_slow_replica_does_not_drive_fast_ones_on() -> None:
    assert run("streaming", 30, (1.0, 10.0)).trained[0] == INTERVALS * 30


def test_replicas_alike_pass_over_hardly_anything() -> None:
    found = run("streaming", 30, (1.0, 1.0, 1.02))
    assert min(found.trained) >= 0.97 * INTERVALS * 30 and found.own_share == [1.0] * 3


def pace_of(others: PeerPace, now_s: float, *, own_s: float = 0.5, has_work: bool = True) -> AdaptiveLocalSteps:
    return AdaptiveLocalSteps(
        peers=others, own_s=lambda: [own_s] * 5, launched=lambda step: [0] if step % 10 == 0 else [],
        has_work=lambda fragment: has_work, interval_steps=10, now=lambda: now_s,
    )  # fmt: skip


def heard(*steps: int) -> PeerPace:
    others = PeerPace()
    others.step_s = 0.1
    for step in steps:
        others.observe(step, now_s=0.1 * step)
    return others


def test_it_launches_ahead_what_it_would_be_late_for_but_no_empty_part() -> None:
    assert pace_of(heard(10, 20), 2.4).target_step(24) == 28, "after its next step the others are at 29"
    assert pace_of(heard(10, 20), 2.5).target_step(24) == 29, "it comes to 30 together with them"
    assert pace_of(heard(10, 20), 2.7).target_step(24) == 31, "its step ends at 32: it launches 30 before it"
    assert pace_of(heard(10, 20), 2.7, has_work=False).target_step(24) == 29, "nothing to launch: rather late"


def test_it_follows_at_once_when_the_others_have_launched_and_drives_nobody_who_has_stopped() -> None:
    assert pace_of(heard(10, 20), 2.1).target_step(15) == 20
    assert pace_of(heard(10, 20), 4.0).target_step(30) == 0, "nothing was heard of a launch at 30, due at 3.0"
    assert pace_of(heard(), 4.0).target_step(3) == 0


def test_it_keeps_up_where_it_is_as_fast_as_the_others_or_nobody_knows() -> None:
    assert pace_of(heard(10, 20), 2.5, own_s=0.104).target_step(22) == 0
    assert is_slower(0.106, fastest_s=0.1) and not is_slower(9.0, fastest_s=0.0)


def test_a_slow_replica_that_launches_ahead_makes_nobody_late_and_nobody_hurry() -> None:
    book = ElasticRounds(sync_interval=10, overlap_steps=0)
    book.launch(1, round_id=0, launch_step=10, now_s=0.0, ahead_s=3.0)
    assert book.step == 0 and book.calls((0, 1), step_s=0.1, now_s=2.9) == {}
    book.launch(0, round_id=0, launch_step=10, now_s=2.9)
    assert book.step == 10 and book.calls((0, 1), step_s=0.1, now_s=2.9) == {0: (0, 1)} and not book.late


def test_who_was_disturbed_in_its_first_steps_passes_over_none() -> None:
    others = PeerPace()
    others.step_s = 0.5
    others.start(now_s=0.0)
    own_s = [3.0]
    pace = AdaptiveLocalSteps(
        peers=others, own_s=lambda: own_s, launched=lambda step: [0] if step % 20 == 0 else [],
        has_work=lambda fragment: True, interval_steps=60, now=lambda: 3.0,
    )  # fmt: skip
    assert pace.target_step(1) == 0
    own_s += [2.0, 0.5, 0.5, 0.5]
    assert pace.target_step(5) == 0, "the middle one is as fast as the others"
    own_s[2:] = [2.0, 2.0, 2.0]
    assert pace.target_step(5) > 5, "it is slow indeed"
    own_s[:] = [31.0]
    assert pace.target_step(1) > 1, "it does not even do one in an interval"
