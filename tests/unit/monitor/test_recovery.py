"""What was slow and is as before again, slow ends that only all of their wires show, and wires that flap after that."""

from __future__ import annotations

import math
import random

import pytest

from tests.synthetic_jobs import InjectedFault, Place, Scene, synthesize
from thinwire.monitor.detect.change_points import ChangePointDetector, median
from thinwire.monitor.detect.delay_matrix import DelayMatrix
from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.detect.intermittent import flapping_of
from thinwire.monitor.detect.link_history import ENDPOINT_CUSUM, EndpointHistory
from thinwire.monitor.detect.live import LiveDetector
from thinwire.monitor.detect.slow_compute import regular_stalls
from thinwire.monitor.findings import report
from thinwire.runlog.reader import from_records
from thinwire.runlog.records import Record

HOSTS = {0: "a", 1: "b", 2: "c", 3: "d"}
CELLS = [(source, destination) for source in HOSTS for destination in HOSTS if source != destination]


def _noisy(
    seed: int, count: int, *, slow: range = range(0), ratio: float = 3.0, noise: float = 0.2
) -> ChangePointDetector:
    draw, watch = random.Random(seed), ChangePointDetector()
    for number in range(count):
        watch.add(number, float(number), math.exp(draw.gauss(0, noise)) * (ratio if number in slow else 1.0))
    return watch


def test_a_change_is_over_soon_after_times_are_as_before() -> None:
    for seed in range(20):
        change = _noisy(seed, 120, slow=range(40, 70)).change
        assert change is not None and change.is_over, seed
        assert 38 <= change.since_round <= 44 and 66 <= change.until_round <= 76, seed


def test_a_change_that_lasts_is_not_over_and_a_second_one_is_seen() -> None:
    lasting = [_noisy(seed, 120, slow=range(40, 120)).change for seed in range(20)]
    assert all(change is not None and not change.is_over for change in lasting)
    watch = ChangePointDetector()
    for number in range(150):
        watch.add(number, float(number), 3.0 if 40 <= number < 60 or number >= 110 else 1.0)
    assert watch.change is not None and watch.change.since_round == 110 and not watch.change.is_over


def _healed(rounds: int) -> list[Record]:
    """Return a job whose link 0 -> 1 was slow in rounds 20 to 39 and is not any more."""
    place = Place(kind="link", ranks=(0, 1))
    slow = Scene(
        hosts=("a", "b", "c"),
        rounds=rounds,
        faults=(InjectedFault(kind="slow link", place=place, begin=20, severity=6),),
    )
    well = Scene(hosts=("a", "b", "c"), rounds=rounds)
    before = [record for record in synthesize(slow) if _round_of(record) < 40]
    gap_s = 30.0  # of all clocks alike: what they drift by meanwhile is left out, and must be little
    after = [record for record in synthesize(well) if _round_of(record) >= 40]
    return [*before, *(_later(record, gap_s) for record in after)]


def _round_of(record: Record) -> int:
    return int(getattr(record, "round", getattr(record, "operation", getattr(record, "step", 0))))


def _later(record: Record, by_s: float) -> Record:
    from dataclasses import replace

    names = [name for name in ("posted_s", "started_s", "done_s", "at_s") if getattr(record, name, None) is not None]
    return replace(record, **{name: getattr(record, name) + by_s for name in names})


def test_a_slow_link_that_is_as_before_is_over_for_the_judge_and_open_findings_afterwards() -> None:
    records = _healed(90)
    (finding,) = [one for one in diagnose(from_records(records)) if one.kind == "communication slow"]
    assert finding.where == "link 0 -> 1" and finding.until_s is not None
    assert "as before again from" in report([finding])
    judge = LiveDetector(updates_until_new=1, updates_until_over=1)
    judge.add(_healed(45))
    assert [news.state for news in judge.update() if news.finding.kind == "communication slow"] == ["new"]
    assert [news.finding.where for news in judge.open_findings()] == ["link 0 -> 1"]
    judge.add(records)
    assert [news.state for news in judge.update() if news.finding.kind == "communication slow"] == ["over"]
    assert judge.open_findings() == []


def test_an_end_is_slow_by_all_its_wires_where_none_of_them_alone_shows_it() -> None:
    draw = random.Random(2)
    watches = {cell: ChangePointDetector() for cell in CELLS}
    for number in range(70):
        for cell, watch in watches.items():
            watch.add(
                number, float(number), math.exp(draw.gauss(0, 0.5)) * (1.8 if cell[0] == 2 and number >= 50 else 1)
            )
    assert not any(watch.change for watch in watches.values())
    seen = {(end.rank, end.cells) for end in EndpointHistory().take(watches, {}) if end.watch.change is not None}
    assert (2, frozenset(cell for cell in CELLS if cell[0] == 2)) in seen
    assert {rank for rank, _ in seen} == {2}


def test_what_slows_all_wires_is_no_fault_of_an_end() -> None:
    draw = random.Random(5)
    watches = {cell: ChangePointDetector() for cell in CELLS}
    for number in range(80):
        for watch in watches.values():
            watch.add(number, float(number), math.exp(draw.gauss(0, 0.2)) * (3.0 if number >= 50 else 1.0))
    assert not any(end.watch.change for end in EndpointHistory().take(watches, {}))


@pytest.mark.parametrize(("back", "said"), [(1.1, "sender rank 1"), (1.8, "host b"), (2.9, "host b")])
def test_acknowledgements_that_wait_are_no_fault_of_the_way_back(back: float, said: str) -> None:
    cells = {cell: 3.0 if cell[0] == 1 else back if cell[1] == 1 else 0.0 for cell in CELLS}
    explained = DelayMatrix(cells, HOSTS).explain()
    assert explained is not None and [str(place) for place in explained.places] == [said]


@pytest.mark.parametrize(("out", "said"), [(0.5, "receiver rank 1"), (0.9, "receiver rank 1"), (1.2, "host b")])
def test_a_slow_way_in_holds_up_what_goes_out_and_a_slow_host_is_not_slower_in_than_out(out: float, said: str) -> None:
    cells = {cell: 1.2 if cell[1] == 1 else out if cell[0] == 1 else 0.0 for cell in CELLS}
    explained = DelayMatrix(cells, HOSTS).explain()
    assert explained is not None and [str(place) for place in explained.places] == [said]


def _with_bad(count: int, bad: set[int]) -> ChangePointDetector:
    draw, watch = random.Random(6), ChangePointDetector()
    for number in range(count):
        watch.add(number, float(number), math.exp(draw.gauss(0, 0.05)) * (6.0 if number in bad else 1.0))
    return watch


def test_a_link_flaps_also_after_a_long_good_time_and_a_slow_one_and_no_longer_when_it_has_stopped() -> None:
    slow, flaps = set(range(40, 60)), {160, 163, 164, 167, 170, 171, 174, 177}
    found = flapping_of(_with_bad(180, slow | flaps), least=math.log(2.2), usual=0.01)
    assert found is not None and found.episodes[0][0] == 160 and found.seen_round <= 177
    assert flapping_of(_with_bad(220, slow | flaps), least=math.log(2.2), usual=0.01) is None
    assert flapping_of(_with_bad(100, slow), least=math.log(2.2), usual=0.01) is None


def test_stalls_stand_out_from_the_steps_around_them() -> None:
    watch = ChangePointDetector()
    draw = random.Random(7)
    for step in range(200):
        busy = 2.2 if step >= 80 else 1.0  # something else runs beside it
        watch.add(step, float(step), 0.1 * busy * math.exp(draw.gauss(0, 0.1)))
    assert regular_stalls(watch) is None
    stalling = ChangePointDetector()
    for step in range(200):
        busy = (2.2 if step >= 80 else 1.0) * (3.0 if step >= 100 and step % 8 == 0 else 1.0)
        stalling.add(step, float(step), 0.1 * busy * math.exp(draw.gauss(0, 0.1)))
    found = regular_stalls(stalling)
    assert found is not None and found[1] == 8


@pytest.mark.parametrize(
    ("severity", "rounds", "is_told"), [(1.6, 52, False), (1.6, 60, True), (4.0, 52, True)]
)  # fmt: skip
def test_work_that_is_slower_by_little_is_told_once_it_has_lasted_for_seconds(
    severity: float, rounds: int, is_told: bool
) -> None:
    """What else runs on a machine makes a rank of it half as slow again, for three seconds."""
    work = InjectedFault(kind="slow work", place=Place(kind="rank", ranks=(1,)), begin=40, severity=severity)
    found = diagnose(from_records(synthesize(Scene(hosts=tuple("abc"), rounds=rounds, faults=(work,)))))
    assert [(one.kind, one.where) for one in found] == [("non-communication slow", "rank 1")] * is_told


def test_work_that_was_slow_and_is_not_any_more_hides_no_slow_wire_of_that_rank() -> None:
    work = InjectedFault(kind="slow work", place=Place(kind="rank", ranks=(1,)), begin=30, end=60, severity=8.0)
    slow = InjectedFault(kind="slow link", place=Place(kind="receiver", ranks=(1,)), begin=100, severity=5.0)
    found = diagnose(from_records(synthesize(Scene(hosts=tuple("abcd"), rounds=140, faults=(work, slow), seed=3))))
    assert [(one.kind, one.where, one.until_s is None) for one in found] == [
        ("communication slow", "receiver rank 1", True), ("non-communication slow", "rank 1", False),
    ]  # fmt: skip


def test_what_other_wires_show_is_taken_off_exactly() -> None:
    draw = random.Random(9)
    for num_cells in (3, 4, 6, 12):
        cells = CELLS[:num_cells]
        watches = {cell: ChangePointDetector() for cell in cells}
        for number in range(40):
            for watch in watches.values():
                watch.add(number, float(number), draw.choice((1.0, 1.0, 2.0, math.exp(draw.gauss(0, 0.3)))))
        histories = {cell: {number: x for number, _, x in watch.history()} for cell, watch in watches.items()}
        for end in EndpointHistory().take(watches, {}):
            own, expected = watches[min(end.cells)], ChangePointDetector(ENDPOINT_CUSUM)
            for number, _, _ in own.history():
                values = {cell: seen[number] for cell, seen in histories.items()}
                others = [value for cell, value in values.items() if cell not in end.cells]
                mean = math.fsum(values[cell] for cell in end.cells) / len(end.cells)
                expected.add(number, float(number), math.exp(mean - max(0.0, median(others) if others else 0.0)))
            assert list(end.watch.excess) == list(expected.excess)
