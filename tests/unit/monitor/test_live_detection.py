"""The judge of a running job: what is new, what is over, and that nothing which is fed to it makes it fall."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.synthetic_jobs import InjectedFault, Scene, synthesize
from thinwire.errors import DataError
from thinwire.monitor.detect.live import LiveDetector, News, RecordWindow, is_one_cause
from thinwire.monitor.findings import Finding, Kind, Place
from thinwire.runlog.records import (
    Beat,
    Communicator,
    Operation,
    Record,
    Span,
    TransferEnd,
    header_line,
    to_line,
)
from thinwire.runlog.run_folder import read_files
from thinwire.runlog.tailer import RecordTailer

HOSTS = ("a", "b", "c")


def at(record: Record) -> float:
    """Return when a record was written."""
    if isinstance(record, Communicator):
        return float("-inf")
    if isinstance(record, Beat):
        return record.at_s
    return record.done_s if record.done_s is not None else record.posted_s  # type: ignore[union-attr]


def in_parts(records: list[Record], count: int) -> Iterator[list[Record]]:
    # the rehearsal's clocks are seconds apart: a rank's own records stay in order, and ranks go on together
    of_rank: dict[int, list[Record]] = {}
    for record in sorted(records, key=at):
        of_rank.setdefault(getattr(record, "rank", -1), []).append(record)
    for part in range(count):
        yield [
            one for own in of_rank.values() for one in own[part * len(own) // count : (part + 1) * len(own) // count]
        ]


def play(scene: Scene, *, looks: int = 60, **options: int) -> tuple[list[tuple[int, News]], LiveDetector]:
    judge, told = LiveDetector(**options), []
    for number, part in enumerate(in_parts(synthesize(scene), looks)):
        judge.add(part)
        told += [(number, news) for news in judge.update()]
    return told, judge


@pytest.mark.slow
def test_a_lasting_fault_is_told_once_also_when_it_lasts_much_longer_than_what_is_kept() -> None:
    slow = InjectedFault(kind="slow link", place=Place(kind="link", ranks=(0, 1)), begin=60, severity=6.0)
    told, judge = play(Scene(hosts=HOSTS, rounds=300, faults=(slow,)), looks=40, most_records=1200)
    assert [(news.state, news.finding.where, news.case) for _, news in told] == [("new", "link 0 -> 1", 0)]
    assert 60 / 300 * 40 - 1 <= told[0][0] <= 80 / 300 * 40 + 2
    assert judge.num_failed == 0


def test_a_fault_that_ends_is_over_and_the_same_place_may_break_again() -> None:
    judge = LiveDetector(updates_until_new=2, updates_until_over=3)
    good = synthesize(Scene(hosts=HOSTS, rounds=30))
    stuck = synthesize(Scene(hosts=HOSTS, rounds=30, faults=(InjectedFault(kind="paused", begin=20, place=_rank(1)),)))
    states = []
    for records in (stuck, good, stuck):
        judge._window = RecordWindow()  # the fault is gone with its records
        judge.add(records)
        states += [(news.state, news.case, news.finding.kind) for _ in range(4) for news in judge.update()]
    kind = "non-communication hang"
    assert states == [("new", 0, kind), ("over", 0, kind), ("new", 1, kind)]


def test_a_clean_run_is_told_nothing_of() -> None:
    told, judge = play(Scene(hosts=HOSTS, rounds=150), looks=40)
    assert told == [] and judge.num_failed == 0


def test_what_is_seen_at_one_look_only_is_not_told() -> None:
    judge = LiveDetector(updates_until_new=3)
    judge.add(
        synthesize(Scene(hosts=HOSTS, rounds=30, faults=(InjectedFault(kind="killed", begin=20, place=_rank(2)),)))
    )
    assert [len(judge.update()) for _ in range(5)] == [0, 0, 1, 0, 0]


def test_ranks_that_take_part_no_more_are_blamed_for_nothing() -> None:
    judge = LiveDetector(updates_until_new=1)
    judge.add(
        synthesize(Scene(hosts=HOSTS, rounds=30, faults=(InjectedFault(kind="killed", begin=20, place=_rank(2)),)))
    )
    assert not any("2" in news.finding.where for news in judge.update(without={2}))
    assert "rank 2" in [news.finding.where for news in judge.update()]


def _rank(rank: int) -> Place:
    return Place(kind="rank", ranks=(rank,))


def _finding(*places: Place, kind: Kind = "communication slow") -> Finding:
    return Finding(kind=kind, places=places, since_s=0.0, text="", confidence=0.5, remedy="")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((("link", (0, 1)), ("sender", (0,))), (("link", (0, 1)),), True),
        ((("link", (0, 1)),), (("sender", (0,)),), True),
        ((("link", (0, 1)),), (("link", (0, 2)),), False),
        ((("link", (0, 1)),), (("link", (2, 3)),), False),
        ((("rank", (1,)),), (("rank", (1, 2)),), True),
        ((("communicator", ()),), (("link", (2, 3)),), False),
    ],
)
def test_what_was_ambiguous_and_becomes_exact_is_one_cause(one: object, other: object, expected: bool) -> None:
    first, second = (
        _finding(*(Place(kind=kind, ranks=ranks) for kind, ranks in places))
        for places in (one, other)  # type: ignore[attr-defined]
    )
    assert is_one_cause(first, second, hosts={}) is expected
    other_kind = _finding(*second.places, kind="desync")
    assert not is_one_cause(first, other_kind, hosts={})


def test_a_host_and_its_rank_are_one_cause() -> None:
    host, rank = _finding(Place(kind="host", hosts=("a",))), _finding(_rank(0))
    assert is_one_cause(host, rank, hosts={0: "a", 1: "a", 2: "b"})
    assert not is_one_cause(host, _finding(_rank(2)), hosts={0: "a", 1: "a", 2: "b"})


def test_an_operation_that_its_rank_has_left_behind_does_not_hang() -> None:
    window = RecordWindow()
    for sequence in range(6):
        done_s = None if sequence in (1, 5) else sequence + 0.5
        window.add(Operation(communicator="w", rank=0, sequence=sequence, kind="r", posted_s=sequence, done_s=done_s))
    assert [op.sequence for op in window.records().operations] == [0, 2, 3, 4, 5]


def beats(silent_from: float, *, end: float, every_s: float = 1.0) -> list[Record]:
    world = Communicator(communicator="w", ranks=(0, 1), hosts=("a", "a"))
    times = [every_s * number for number in range(int(end / every_s))]
    return [world, *(Beat(rank=rank, at_s=at_s) for at_s in times for rank in (0, 1) if not rank or at_s < silent_from)]


def test_a_rank_that_stops_is_found_also_where_nobody_waits_for_it() -> None:
    judge = LiveDetector(updates_until_new=1)
    judge.add(beats(10.0, end=13.0))
    assert judge.update() == []
    judge.add([Beat(rank=0, at_s=13.0)])
    (news,) = judge.update()
    assert (news.finding.kind, news.finding.where) == ("non-communication hang", "rank 1")
    assert news.finding.since_s == 9.0 and news.age_s == 4.0


def test_signs_of_life_that_come_seldom_are_missed_later() -> None:
    judge = LiveDetector(updates_until_new=1)
    judge.add(beats(30.0, end=40.0, every_s=3.0))
    assert judge.update() == []
    judge.add([Beat(rank=0, at_s=42.0)])
    assert [news.finding.where for news in judge.update()] == ["rank 1"]


# -- files that grow


def write(path: Path, records: list[Record]) -> None:
    with path.open("a") as file:
        file.writelines(to_line(record) + "\n" for record in records)


def test_a_growing_file_is_read_once_and_a_half_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "records-rank-0.jsonl"
    tail = RecordTailer(path)
    assert tail.new_records() == []
    path.write_text(header_line() + "\n")
    write(path, [Beat(rank=0, at_s=1.0)])
    line = to_line(Beat(rank=0, at_s=2.0))
    with path.open("a") as file:
        file.write(line[:10])
    assert [record.at_s for record in tail.new_records()] == [1.0]  # type: ignore[union-attr]
    with path.open("a") as file:
        file.write(line[10:] + "\n")
    assert [record.at_s for record in tail.new_records()] == [2.0]  # type: ignore[union-attr]
    path.write_text(header_line() + "\n" + line + "\n")  # begun anew, and shorter
    assert len(tail.new_records()) == 1 and tail.num_refused == 0


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "records-rank-0.jsonl"
    os.mkfifo(path)
    assert RecordTailer(path).new_records() == []
    with pytest.raises(DataError, match="holds no records"):
        read_files([tmp_path])


def test_of_a_long_file_the_communicators_and_the_end_are_read(tmp_path: Path) -> None:
    path = tmp_path / "records-rank-0.jsonl"
    path.write_text(header_line() + "\n")
    write(path, [Communicator(communicator="w", ranks=(0, 1), hosts=("a", "b"))])
    write(path, [Beat(rank=0, at_s=float(second)) for second in range(10_000)])
    tail = RecordTailer(path, most_bytes=5_000)
    found = [record for _ in range(4) for record in tail.new_records()]
    assert isinstance(found[0], Communicator) and found[-1] == Beat(rank=0, at_s=9999.0)
    assert len(found) < 200 and tail.num_skipped_bytes > 100_000 and tail.num_refused == 0


def test_nothing_that_is_written_makes_it_fall(tmp_path: Path) -> None:
    draw, path = random.Random(3), tmp_path / "records-rank-0.jsonl"
    tail, judge = RecordTailer(path, most_bytes=300_000), LiveDetector(updates_until_new=1, most_records=400)
    lines = [to_line(record).encode() for record in synthesize(Scene(hosts=HOSTS, rounds=10))]
    with path.open("wb") as file:
        for _ in range(12):
            for line in draw.sample(lines, 60):
                told = json.loads(line)
                key = draw.choice([*told])
                told[key] = draw.choice([None, -1, 1e300, [], {}, "x" * 600, 2**70, told[key], told[key]])
                text = json.dumps(told).encode()
                file.write(draw.choice([text, text[: draw.randrange(len(text))], b"\xff\x00", b"[" * 5000]) + b"\n")
            file.write(b"x" * draw.choice([10, 400_000]))
            file.write(b"\n")
            file.flush()
            judge.add(tail.new_records())
            judge.update()
            judge.update(without={0, 7})
    assert tail.num_refused > 50 and judge.num_failed == 0, judge.problem


def test_a_rule_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*job: object) -> list[Finding]:
        raise ZeroDivisionError("of a rule")

    monkeypatch.setattr("thinwire.monitor.detect.live.findings_of", fail)
    judge = LiveDetector()
    assert judge.update() == [] and judge.num_failed == 1 and judge.problem == "ZeroDivisionError: of a rule"


def test_what_is_kept_is_bounded() -> None:
    window = RecordWindow(most_records=40)
    for number in range(1000):
        window.add(Operation(communicator="w", rank=0, sequence=number, kind="r", posted_s=number, done_s=number))
        window.add(TransferEnd(communicator="w", rank=0, peer=1, direction="sent", operation=number, num_bytes=1,
                               posted_s=number))  # fmt: skip
        window.add(Span(rank=0, kind="compute", step=number, started_s=number, done_s=number))
        window.add(Beat(rank=0, at_s=number))
        window.add(Communicator(communicator=str(number), ranks=(0,), hosts=("a",)))
    records = window.records()
    assert (len(records.operations), len(records.transfers), len(records.spans), len(records.beats)) == (40, 80, 40, 16)
    assert len(records.communicators) == 256


def test_limits_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="updates_until_new must be at least 1, got 0"):
        LiveDetector(updates_until_new=0)
    with pytest.raises(ValueError, match="most_records must be at least 4, got 3"):
        RecordWindow(most_records=3)


def heard(rank: int, times: Iterable[float]) -> list[Record]:
    """Return what rank 0 wrote of messages from a rank that writes nothing itself."""
    return [
        TransferEnd(communicator="world", rank=0, peer=rank, direction="received", operation=number, num_bytes=1000,
                    posted_s=at_s - 0.1, done_s=at_s)
        for number, at_s in enumerate(times)
    ]  # fmt: skip


def test_a_rank_that_writes_nothing_any_more_and_is_still_heard_of_is_not_called_stopped() -> None:
    judge = LiveDetector(updates_until_new=1)
    judge.add([*beats(10.0, end=20.0), *heard(1, (9.5, 12.0, 15.0, 18.5))])
    (news,) = judge.update()
    assert (news.finding.kind, news.finding.where) == ("no records", "rank 1")
    assert "received from it 0.5 s ago" in news.finding.text and "disk" in news.finding.remedy


def test_a_rank_whose_last_message_was_on_its_way_when_it_stopped_has_stopped() -> None:
    judge = LiveDetector(updates_until_new=1)
    judge.add([*beats(10.0, end=20.0), *heard(1, (9.5, 10.5))])
    (news,) = judge.update()
    assert (news.finding.kind, news.finding.where) == ("non-communication hang", "rank 1")
