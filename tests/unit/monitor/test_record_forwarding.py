"""Records on their way to the coordinator's host: in order, once, bounded, and untrusted where they arrive."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.full_disk import file_size_limit
from thinwire.runlog.forwarding import (
    BYTES_A_SECOND,
    MOST_BATCH_BYTES,
    MOST_WAITING_BYTES,
    RecordForward,
    TakenRecords,
    pressed,
    unpressed,
)
from thinwire.runlog.reader import parse_line
from thinwire.runlog.records import Beat, Communicator, Record, Span, header_line, to_line
from thinwire.runlog.writer import record_writer

PLACE = Communicator(communicator="rounds", ranks=(3,), hosts=("far",), clocks=("c",))


class Line:
    """A way to the coordinator that answers when a test says so."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self.is_open = False

    def send_reliably(self, kind: str, **fields: Any) -> None:
        assert kind == "records" and not self.is_open, "one batch at a time"
        self.said.append(fields)
        self.is_open = True

    def is_acknowledged(self, kind: str) -> bool:
        return not self.is_open

    def lines(self) -> list[str]:
        return [line for one in self.said for line in unpressed(one["text"])]


def beat(second: float, rank: int = 3) -> str:
    return to_line(Beat(rank=rank, at_s=second))


def test_a_batch_goes_when_the_one_before_was_answered_and_nothing_goes_twice() -> None:
    line, time_s = Line(), [0.0]
    forward = RecordForward(line, now=lambda: time_s[0])
    for second in range(5):
        forward.add([beat(second)])
        forward.turn()
    assert line.lines() == [beat(0)]
    line.is_open = False
    forward.turn()
    assert line.lines() == [beat(second) for second in range(5)] and [one["number"] for one in line.said] == [0, 1]


def test_no_more_is_sent_than_the_allowance() -> None:
    line, time_s, values = Line(), [0.0], random.Random(2)
    forward = RecordForward(line, now=lambda: time_s[0])
    for turn in range(400):  # a hundred seconds of far too much
        time_s[0] = turn / 4
        forward.add([beat(values.random()) for _ in range(200)])
        line.is_open = False
        forward.turn()
    assert forward.num_bytes <= 100 * BYTES_A_SECOND + 32768 + MOST_BATCH_BYTES
    assert forward.num_bytes >= 90 * BYTES_A_SECOND and forward.num_left_out > 0
    assert all(len("\n".join(unpressed(one["text"]))) <= MOST_BATCH_BYTES for one in line.said)


def test_while_nobody_answers_steps_are_left_out_first() -> None:
    line = Line()
    line.is_open = True
    forward = RecordForward(line)
    step = to_line(Span(rank=3, kind="compute", step=1, started_s=0.0, done_s=1.0))
    count = MOST_WAITING_BYTES // len(step)
    for number in range(count):
        forward.add([step, beat(number)] if number % 10 == 0 else [step])
    assert forward.num_left_out >= count * 0.9 and not line.said
    line.is_open = False
    while not line.is_open or forward._lines:
        line.is_open = False
        forward._left_bytes = 1.0
        forward.turn()
    sent = line.lines()
    assert [one for one in sent if "beat" in one] == [beat(number) for number in range(0, count, 10)]


@pytest.fixture
def taken(tmp_path: Path) -> TakenRecords:
    return TakenRecords(tmp_path, say=lambda text: None)


def records(folder: Path, rank: int = 3) -> list[Record]:
    header, *lines = (folder / f"records-rank-{rank}.jsonl").read_bytes().splitlines()
    assert header.decode() == header_line()
    return [parse_line(line) for line in lines]


def test_what_arrives_stands_in_a_file_as_if_written_here_and_outlives_the_coordinator(
    taken: TakenRecords, tmp_path: Path
) -> None:
    taken.take(3, pressed([to_line(PLACE), beat(1)]))
    taken.take(3, pressed([beat(2)]))
    TakenRecords(tmp_path, say=print).take(3, pressed([beat(3)]))
    assert records(tmp_path) == [PLACE, *(Beat(rank=3, at_s=float(second)) for second in (1, 2, 3))]


@pytest.mark.parametrize("num_bytes_lost", [0, 1, 9, 60])
def test_a_batch_that_a_dead_coordinator_did_not_answer_stands_there_once(tmp_path: Path, num_bytes_lost: int) -> None:
    batch = pressed([beat(second) for second in (2, 3, 4)])
    before = TakenRecords(tmp_path, say=print)
    before.take(3, pressed([to_line(PLACE), beat(1)]))
    before.take(3, batch)
    path = tmp_path / "records-rank-3.jsonl"
    path.write_bytes(path.read_bytes()[: path.stat().st_size - num_bytes_lost])
    after = TakenRecords(tmp_path, say=print)
    after.take(3, batch)
    after.take(3, pressed([beat(5)]))
    assert records(tmp_path) == [PLACE, *(Beat(rank=3, at_s=float(second)) for second in range(1, 6))]


def test_lines_of_other_ranks_and_lines_that_are_none_are_left_out(taken: TakenRecords, tmp_path: Path) -> None:
    other = Communicator(communicator="rounds", ranks=(3, 4), hosts=("a", "b"))
    wrong = [beat(1, rank=4), to_line(other), "{", "", '{"record":"beat","rank":3}', "x" * 9000]
    taken.take(3, pressed([*wrong, beat(2)]))
    assert records(tmp_path) == [Beat(rank=3, at_s=2.0)] and taken.num_refused == 6
    taken.take(4, pressed(["\0"]))
    assert not (tmp_path / "records-rank-4.jsonl").exists()


def test_a_flood_is_cut_off(tmp_path: Path) -> None:
    # time stands still: on a busy machine the allowance would grow during the flood
    taken, values = TakenRecords(tmp_path, say=lambda text: None, now=lambda: 0.0), random.Random(3)
    for _ in range(400):
        taken.take(3, pressed([beat(values.random()) for _ in range(300)]))
    assert (tmp_path / "records-rank-3.jsonl").stat().st_size < 5 * MOST_WAITING_BYTES and taken.num_refused > 100


def test_a_small_text_does_not_become_a_large_one(taken: TakenRecords, tmp_path: Path) -> None:
    for bomb in (pressed(["0" * 50_000_000]), pressed([beat(1)] * 2000), pressed([beat(1)])[:-8]):
        with pytest.raises(ValueError, match=r"a batch of records"):
            unpressed(bomb)
        taken.take(3, bomb)
    assert taken.num_refused == 3 and not list(tmp_path.iterdir())


def test_a_replica_of_this_host_writes_itself(taken: TakenRecords, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "replica-3.pid").write_text(f"{os.getpid()}\n")
    taken.take(3, pressed([beat(1)]))
    assert not (tmp_path / "records-rank-3.jsonl").exists() and taken.num_refused == 1


def test_a_file_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    said: list[str] = []
    taken = TakenRecords(tmp_path / "gone" / "away", say=said.append)
    taken.take(3, pressed([beat(1)]))
    taken.take(3, pressed([beat(2)]))
    assert len(said) == 1 and "records of replica 3 are lost: No such file" in said[0]


def test_what_there_is_no_room_for_waits_in_memory_and_is_written_whole_later(tmp_path: Path) -> None:
    said: list[str] = []
    taken, path = TakenRecords(tmp_path, say=said.append), tmp_path / "records-rank-3.jsonl"
    with file_size_limit(20):
        taken.take(3, pressed([beat(0.0)]))
    assert not path.exists()
    taken.take(3, pressed([beat(1)]))
    whole = path.read_text()
    assert [record.at_s for record in records(tmp_path) if isinstance(record, Beat)] == [0.0, 1.0]
    with file_size_limit(len(whole) + 20):
        for second in (2.0, 3.0):
            taken.take(3, pressed([beat(second)]))
    assert path.read_text() == whole and taken.num_refused == 0
    taken.close()
    assert path.read_text() == whole + beat(2.0) + "\n" + beat(3.0) + "\n"
    assert len(said) == 2 and all("records of replica 3 wait in memory until there is room" in text for text in said)


def test_what_waits_in_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.runlog.forwarding.MAX_WAITING_HERE_BYTES", 10 * len(beat(0.0)))
    taken = TakenRecords(tmp_path, say=lambda text: None)
    with file_size_limit(20):
        for second in range(30):
            taken.take(3, pressed([beat(float(second))]))
        taken.take(4, pressed([beat(0.0).replace('"rank":3', '"rank":4')]))
    taken.close()
    beats = [record for record in records(tmp_path) if isinstance(record, Beat)]
    assert taken.num_refused > 15 and beats[-1].at_s == 29.0, "the oldest of the one with the most are lost"
    assert "records-rank-4.jsonl" in {path.name for path in tmp_path.iterdir()}


def test_a_long_file_begins_anew_with_the_rank_s_place(taken: TakenRecords, tmp_path: Path, monkeypatch: Any) -> None:
    made = lambda *args, **more: record_writer(*args, **more, most_bytes=2000)  # noqa: E731
    monkeypatch.setattr("thinwire.runlog.forwarding.record_writer", made)
    taken.take(3, pressed([to_line(PLACE)]))
    for second in range(100):
        taken.take(3, pressed([beat(second)]))
    found = records(tmp_path)
    assert PLACE in found and found[-1] == Beat(rank=3, at_s=99.0) and len(found) < 100


def test_who_has_been_silent_for_longest_makes_room_for_those_who_come(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "replica-0.pid").write_text("1")
    own = tmp_path / "records-rank-0.jsonl"  # this host's own, which are bounded by themselves
    own.write_text("x" * 9000)

    def kept() -> set[int]:
        found = tmp_path.glob("records-rank-*.jsonl")
        return {int(path.stem.removesuffix(".old").rpartition("-")[2]) for path in found}

    taken = TakenRecords(tmp_path, say=print, most_bytes=6000)
    words = pressed([beat(second, rank=3) for second in range(40)])  # 1.5 KB as they are written
    taken.take(3, words)
    for replica in (4, 5):
        taken.take(replica, pressed([beat(second, rank=replica) for second in range(40)]))
    taken.take(3, pressed([beat(41)]))
    assert kept() == {0, 3, 4, 5}
    # another coordinator counts what is there
    os.utime(tmp_path / "records-rank-4.jsonl", (1, 1))
    older = tmp_path / "records-rank-5.old.jsonl"  # what a replica put aside long ago does not make it silent
    older.write_text("")
    os.utime(older, (0, 0))
    later = TakenRecords(tmp_path, say=print, most_bytes=6000)
    later.take(6, pressed([beat(second, rank=6) for second in range(40)]))
    assert kept() == {0, 3, 5, 6} and own.stat().st_size == 9000
    later.take(4, pressed([beat(42, rank=4)]))
    assert records(tmp_path, rank=4) == [Beat(rank=4, at_s=42.0)], "who comes back begins anew"


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: raw.decode("latin1")))
def test_nothing_that_is_said_breaks_it(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    TakenRecords(folder, say=lambda text: None).take(3, text)
    TakenRecords(folder, say=lambda text: None).take(3, pressed([text]))
    assert not list(folder.iterdir())
