"""From findings to actions, and what lost time and checkpoints are counted by."""

from __future__ import annotations

import math

import pytest

from thinwire.monitor.detect.live import News
from thinwire.monitor.findings import Evidence, Finding, Kind, Place
from thinwire.monitor.remediation import HELPS, ActionKind, Policy, Steering, target_of
from thinwire.runlog.attempts import daly_s, interval_steps, mtbf_s, young_s
from thinwire.runlog.downtime import Incident, account

PRESENT = (0, 1, 2)


def news(
    kind: Kind = "non-communication hang", *places: Place, case: int = 0, confidence: float = 0.95, state: str = "new",
    times: float | None = 5.0,
) -> News:  # fmt: skip
    found = places or (Place(kind="rank", ranks=(1,)),)
    finding = Finding(kind=kind, places=found, since_s=0.0, text="It broke.", confidence=confidence, remedy="",
                      evidence=Evidence("slow_link", times_longer=times))  # fmt: skip
    return News(case=case, state=state, finding=finding, age_s=1.0)  # type: ignore[arg-type]


def rank(number: int) -> Place:
    return Place(kind="rank", ranks=(number,))


def steer(on_finding: ActionKind, **limits: float) -> Steering:
    return Steering(Policy(on_finding=on_finding, **limits))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", HELPS)
@pytest.mark.parametrize("on_finding", ["warn", "exclude", "restart", "replace", "abort"])
def test_what_is_done_is_what_was_asked_for_where_it_helps_and_a_warning_else(
    kind: Kind, on_finding: ActionKind
) -> None:
    action = steer(on_finding).decide(news(kind), now_s=0.0, present=PRESENT, num_spares=1)
    assert action is not None
    expected = on_finding if on_finding in HELPS[kind] else "warn"
    assert action.kind == expected
    assert action.target == (1 if expected in ("exclude", "restart", "replace") else None)
    assert on_finding != "warn" or action.why == "reported only: --on-finding warn"


def test_the_table_knows_every_kind_of_finding() -> None:
    assert set(HELPS) == set(Kind.__args__)  # type: ignore[attr-defined]


def test_one_cause_is_acted_on_once_and_its_end_is_no_reason() -> None:
    steering = steer("exclude")
    assert steering.decide(news(state="over"), now_s=0.0, present=PRESENT) is None
    assert steering.decide(news(), now_s=0.0, present=PRESENT) is not None
    assert steering.decide(news(), now_s=500.0, present=PRESENT) is None


def test_a_second_cause_at_the_same_place_waits_for_the_cool_down() -> None:
    steering = steer("restart", cooldown_s=60.0)
    first, second, third = (
        steering.decide(news(case=number), now_s=now_s, present=PRESENT)
        for number, now_s in enumerate((0.0, 59.0, 61.0))
    )
    assert first is not None and second is not None and third is not None
    assert [first.kind, second.kind, third.kind] == ["restart", "warn", "restart"]
    assert second.why == "something was done to replica 1 59 s ago, and nothing else is before 60 s"


@pytest.mark.parametrize(("count", "left"), [(2, 1), (3, 2), (4, 2), (5, 3)])
def test_no_more_are_excluded_than_half_of_them(count: int, left: int) -> None:
    steering, present = steer("exclude"), range(count)
    # all who were told to leave are still there for a while
    actions = [
        steering.decide(news("desync", rank(number), case=number), now_s=0.0, present=present) for number in present
    ]
    assert [action.kind for action in actions if action] == ["exclude"] * (count - left) + ["warn"] * left
    assert actions[-1] is not None and f"{left} are the least" in actions[-1].why


def test_restarts_are_so_many_an_hour() -> None:
    steering = steer("restart", most_restarts=2, cooldown_s=0.0)
    kinds = []
    for case, now_s in enumerate((0.0, 10.0, 20.0, 3601.0)):
        action = steering.decide(news(case=case), now_s=now_s, present=PRESENT)
        assert action is not None
        kinds.append(action.kind)
    assert kinds == ["restart", "restart", "warn", "restart"]


def test_who_was_killed_is_told_and_is_none_of_the_restarts_of_the_hour() -> None:
    steering = steer("restart", most_restarts=1, cooldown_s=0.0)
    killed = steering.decide(news(), now_s=0.0, present=PRESENT, gone={1})
    assert killed is not None and killed.kind == "warn" and "its launcher starts another one" in killed.why
    stopped = steering.decide(news(case=1), now_s=1.0, present=PRESENT)
    assert stopped is not None and stopped.kind == "restart"


def test_who_was_killed_is_not_replaced_since_its_launcher_starts_another_one() -> None:
    for num_spares in (0, 1):
        action = steer("replace").decide(news(), now_s=0.0, present=PRESENT, gone={1}, num_spares=num_spares)
        assert action is not None and action.kind == "warn" and "its launcher starts another one" in action.why


def test_where_no_spare_waits_a_replica_is_excluded_within_the_limits_of_that() -> None:
    steering = steer("replace", cooldown_s=0.0)
    actions = [
        steering.decide(news("desync", rank(number), case=number), now_s=0.0, present=range(4), num_spares=num_spares)
        for number, num_spares in enumerate((1, 0, 0, 1))
    ]
    assert [action.kind for action in actions if action] == ["replace", "exclude", "warn", "replace"]
    assert actions[1] is not None and actions[1].why == "It broke. No spare host waits."
    assert actions[2] is not None and "2 are the least" in actions[2].why


@pytest.mark.parametrize(
    ("places", "target"),
    [
        ((Place(kind="sender", ranks=(2,)),), 2),
        ((Place(kind="rank", ranks=(1, 2)),), None),
        ((Place(kind="link", ranks=(0, 1)),), None),
        ((Place(kind="host", hosts=("a",)),), None),
        ((Place(kind="sender", ranks=(2,)), Place(kind="link", ranks=(2, 1))), None),
        ((), None),
    ],
)
def test_only_a_finding_that_blames_one_rank_alone_has_a_target(places: tuple[Place, ...], target: int | None) -> None:
    finding = Finding(kind="desync", places=places, since_s=0.0, text="", confidence=1.0, remedy="")
    assert target_of(finding) == target
    if target is None:
        action = steer("exclude").decide(
            News(case=0, state="new", finding=finding, age_s=0.0), now_s=0.0, present=PRESENT
        )
        assert action is not None and (action.kind, action.why) == ("warn", "the finding names no single replica")


def test_what_is_unsure_or_about_one_who_has_gone_is_told_only() -> None:
    unsure = steer("restart").decide(news(confidence=0.7), now_s=0.0, present=PRESENT)
    gone = steer("exclude").decide(news(), now_s=0.0, present=(0, 2))
    assert unsure is not None and unsure.kind == "warn" and unsure.why == "not sure enough: 0.70 of 0.80"
    assert gone is not None and gone.kind == "warn" and gone.why == "replica 1 takes part no more"


def test_what_becomes_sure_is_acted_on_then_and_once() -> None:
    steering = steer("restart")
    told = [steering.decide(news(confidence=sure), now_s=at_s, present=PRESENT)
            for at_s, sure in enumerate((0.7, 0.7, 0.9, 0.9))]  # fmt: skip
    assert [None if one is None else one.kind for one in told] == ["warn", None, "restart", None]
    assert not steering.unsure


def test_a_policy_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="one of warn, exclude, restart, replace, abort, got 'pray'"):
        Policy(on_finding="pray")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="least_confidence and least_share"):
        Policy(least_share=0.0)
    with pytest.raises(ValueError, match="cooldown_s, settle_s and most_restarts"):
        Policy(most_restarts=-1)


def test_who_is_a_little_slow_or_slow_just_after_an_action_is_told_of_only() -> None:
    slow: Kind = "non-communication slow"
    for times in (2.9, math.nan, None):
        action = steer("exclude").decide(news(slow, times=times), now_s=0.0, present=PRESENT)
        assert action is not None and (action.kind, action.why) == ("warn", "slower by less than 3 times")
    steering = steer("exclude", settle_s=60.0)
    present = range(9)
    told = [
        steering.decide(news(kind, rank(number), case=number), now_s=now_s, present=present)
        for number, (kind, now_s) in enumerate([("desync", 0.0), (slow, 59.0), ("desync", 60.0), (slow, 120.0)])
    ]
    assert [action.kind for action in told if action] == ["exclude", "warn", "exclude", "exclude"]


# -- lost time


def test_lost_time_is_told_in_four_rows_weighted_by_who_stood_still() -> None:
    whole = Incident(since_s=0.0, found_s=5.0, acted_s=6.0, back_s=16.0, lost_work_s=30.0)
    third = Incident(since_s=100.0, found_s=109.0, acted_s=None, back_s=130.0, share=1 / 3)
    found = account([whole, third], run_s=1000.0)
    assert found.post_checkpoint_s == 30.0 and found.detection_s == pytest.approx(8.0)
    assert found.diagnosis_s == 1.0 and found.reinitialisation_s == pytest.approx(17.0)
    assert found.total_s == pytest.approx(56.0) and found.num_incidents == 2
    assert found.to_json()["total_s"] == 56.0


def test_times_that_contradict_each_other_are_no_gain_and_none_is_after_the_end() -> None:
    backwards = Incident(since_s=50.0, found_s=40.0, acted_s=30.0, back_s=60.0)
    found = account([backwards], run_s=100.0, end_s=55.0)
    assert (found.detection_s, found.diagnosis_s, found.reinitialisation_s) == (0.0, 0.0, 5.0)
    assert account([Incident(since_s=90.0, found_s=95.0)], run_s=1.0, end_s=80.0).total_s == 0.0


def test_who_did_not_come_back_cost_no_time_after_it_was_let_go() -> None:
    found = account([Incident(since_s=0.0, found_s=2.0, acted_s=2.5, back_s=None)], run_s=10.0)
    assert found.total_s == 2.5 and found.reinitialisation_s == 0.0
    said = "downtime: 0 s of 61 s (only restarts count)"
    assert str(account([], run_s=61.0)) == said


# -- how often to write a checkpoint


def overhead(interval_s: float, cost_s: float, mean_s: float) -> float:
    """Return the time a run takes over the time it would without failures, by Daly's model of exponential failures."""
    return mean_s / interval_s * math.expm1((interval_s + cost_s) / mean_s)


@pytest.mark.parametrize("cost_s", [0.5, 5.0, 60.0, 600.0])
def test_daly_is_the_minimum_of_the_expected_time_and_no_worse_than_young(cost_s: float) -> None:
    mean_s = 3600.0
    best = min((overhead(60.0 * 1.001**n, cost_s, mean_s) for n in range(6000)), default=math.inf)
    best = min(best, min(overhead(1.0 * 1.001**n, cost_s, mean_s) for n in range(9000)))
    assert overhead(daly_s(cost_s, mean_s), cost_s, mean_s) <= best * 1.001
    assert overhead(daly_s(cost_s, mean_s), cost_s, mean_s) <= overhead(young_s(cost_s, mean_s), cost_s, mean_s) + 1e-9


def test_a_checkpoint_that_costs_more_than_two_failures_apart_is_written_once_a_failure() -> None:
    assert daly_s(200.0, 100.0) == 100.0 and daly_s(199.9, 100.0) < 100.0


def test_the_prior_is_forgotten_with_failures_and_grows_without_them() -> None:
    assert mtbf_s(run_s=0.0, num_failures=0, prior_s=100.0) == 100.0
    assert mtbf_s(run_s=900.0, num_failures=0, prior_s=100.0) == 1000.0
    assert mtbf_s(run_s=10_000.0, num_failures=100, prior_s=100.0) == pytest.approx(100.0)
    with pytest.raises(ValueError, match="prior_s positive"):
        mtbf_s(run_s=0.0, num_failures=0, prior_s=0.0)


def test_checkpoints_are_never_closer_than_writing_two_takes() -> None:
    fast = interval_steps(cost_s=0.01, write_s=0.0, step_s=1.0, mtbf_s=3600.0)
    slow = interval_steps(cost_s=0.01, write_s=50.0, step_s=1.0, mtbf_s=3600.0)
    assert (fast, slow) == (8, 100)
    assert interval_steps(cost_s=0.0, write_s=0.0, step_s=100.0, mtbf_s=10.0) == 1
    with pytest.raises(ValueError, match="must be positive, got 0 and 1"):
        young_s(0, 1)
