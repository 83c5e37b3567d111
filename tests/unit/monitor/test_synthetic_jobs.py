"""Rehearsed jobs with and without faults: what is found is what was done, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.fault_matrix import (
    HANGS,
    FaultResult,
    clean_scenes,
    compare,
    pairs_of_faults,
    scenes,
)
from tests.synthetic_jobs import NOISES, InjectedFault, Scene, synthesize
from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.findings import Place
from thinwire.runlog.reader import from_records

# Two hundred scenes are played for all tests together: minutes of a core, more where others use it too.
pytestmark = pytest.mark.timeout(1800)
pytestmark = pytest.mark.slow
SEED = 7
PLACED = ("right", "ambiguous")


def _judged(played: Iterable[Scene]) -> tuple[list[FaultResult], int]:
    judgements, extras = [], 0
    for scene in played:
        made, left = compare(scene, diagnose(from_records(synthesize(scene))))
        judgements += made
        extras += len(left)
    return judgements, extras


@pytest.fixture(scope="module")
def judged() -> tuple[list[FaultResult], int]:
    played = [*scenes(seed=SEED, per_cell=4), *pairs_of_faults(seed=SEED, count=28)]
    assert len(played) >= 200
    return _judged(played)


def _share(judgements: list[FaultResult]) -> float:
    assert len(judgements) >= 20
    return sum(one.verdict in PLACED for one in judgements) / len(judgements)


def test_hangs_are_of_the_right_kind_and_in_the_right_place(judged: tuple[list[FaultResult], int]) -> None:
    assert _share([one for one in judged[0] if one.fault.kind in HANGS]) >= 0.97


def test_slowdowns_of_three_times_and_more_are_in_the_right_place(judged: tuple[list[FaultResult], int]) -> None:
    assert _share([one for one in judged[0] if one.fault.kind not in HANGS and one.fault.severity >= 3.0]) >= 0.97


def test_slowdowns_of_one_and_a_half_are_found_in_four_of_five(judged: tuple[list[FaultResult], int]) -> None:
    assert _share([one for one in judged[0] if one.fault.severity == 1.5]) >= 0.80


def test_a_place_is_called_ambiguous_in_few_scenes(judged: tuple[list[FaultResult], int]) -> None:
    verdicts = Counter(one.verdict for one in judged[0])
    assert verdicts["ambiguous"] <= 0.1 * verdicts["right"]


def test_a_lasting_slowdown_of_three_times_is_sure_within_five_rounds_in_the_middle(
    judged: tuple[list[FaultResult], int],
) -> None:
    rounds = sorted(
        one.rounds
        for one in judged[0]
        if one.fault.kind in ("slow link", "slow work") and one.fault.severity >= 3.0 and one.rounds >= 0
    )
    assert rounds[len(rounds) // 2] <= 5


def test_beside_the_faults_little_else_is_found(judged: tuple[list[FaultResult], int]) -> None:
    assert judged[1] <= 0.02 * len(judged[0])


def test_no_alarm_in_a_thousand_clean_rounds_with_every_noise() -> None:
    played = list(clean_scenes(seed=SEED, rounds=250))
    assert sum(scene.rounds for scene in played) >= 1000 and len(played) == len(NOISES)
    for scene in played:
        assert diagnose(from_records(synthesize(scene))) == [], scene


def test_a_scene_is_the_same_every_time_it_is_played() -> None:
    scene = Scene(hosts=("a", "b", "b"), rounds=5, seed=1, noise=NOISES["heavy"])
    assert synthesize(scene) == synthesize(scene)


def test_where_a_ring_never_changes_link_and_ends_are_not_told_apart_and_the_probe_is_named() -> None:
    hosts = ("a", "b", "c", "d")
    ring = Scene(hosts=hosts, pattern="ring", rounds=60, seed=2)
    order = ring.orders()[0]
    fault = InjectedFault(
        kind="slow link", place=Place(kind="link", ranks=(order[0], order[1])), begin=35, severity=6.0
    )
    scene = Scene(hosts=hosts, pattern="ring", rounds=60, seed=2, faults=(fault,))
    (finding,) = diagnose(from_records(synthesize(scene)))
    assert finding.where.startswith("ambiguous: ") and finding.confidence <= 0.5
    kinds = {place.kind for place in finding.places}
    assert {"link", "sender", "receiver"} <= kinds and fault.place in finding.places
    assert "another peer" in finding.probe


def test_a_slow_wire_under_a_plain_collective_is_said_to_have_no_known_place() -> None:
    hosts = ("a", "b", "c")
    fault = InjectedFault(kind="slow link", place=Place(kind="host", hosts=("b",)), begin=35, severity=6.0)
    scene = Scene(hosts=hosts, pattern="torch", rounds=60, seed=2, faults=(fault,))
    (finding,) = diagnose(from_records(synthesize(scene)))
    assert finding.kind == "communication slow" and finding.where == "communicator" and finding.probe
