"""What a rank's recorder has on disk while the rank waits, when it ends, and when there is too much of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.full_disk import file_size_limit
from thinwire.elastic.round_driver import blob_name
from thinwire.events import Posted, RoundMark, Transfer, TransferLog
from thinwire.monitor.detect.timeline import build
from thinwire.recording.recorder import BEAT_S, TURN_S, Recorder
from thinwire.runlog.reader import Records, from_records, read_records
from thinwire.runlog.records import Communicator, TransferEnd
from thinwire.runlog.run_folder import read_files
from thinwire.runlog.writer import JsonlWriter, record_paths, record_writer

POSTED = Posted(
    direction="received", peer=1, kind="round", round_id=7, fragment=2, phase=1, num_bytes=100, posted_s=10.0
)  # fmt: skip


def ended(*, error: str = "") -> Transfer:
    return Transfer(
        direction="received", peer=1, kind="round", round_id=7, fragment=2, phase=1, payload_bytes=90, wire_bytes=150,
        started_s=10.0, finished_s=11.5, error=error,
    )  # fmt: skip


def mark(*, is_done: bool) -> RoundMark:
    return RoundMark(round_id=7, num_elements=5, dtype="float32", is_done=is_done, at_s=10.0 + 2.0 * is_done)


def soon(folder: Path, is_there: Callable[[Records], object]) -> Records:
    """Return what is in a folder as soon as it holds what is waited for."""
    until_s = time.monotonic() + 40 * TURN_S
    while True:
        records = read_files([folder])
        if is_there(records):
            return records
        assert time.monotonic() < until_s, records
        time.sleep(TURN_S / 5)


def test_what_is_posted_and_never_ends_is_on_disk_while_the_rank_waits(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0)
    recorder.add(mark(is_done=False))
    recorder.add(POSTED)
    records = soon(tmp_path, lambda found: found.transfers and found.operations and found.beats)
    (end,), (operation,) = records.transfers, records.operations
    assert (end.peer, end.operation, end.num_bytes, end.posted_s, end.done_s) == (1, 7, 100, 10.0, None)
    assert (operation.sequence, operation.dtype, operation.count, operation.done_s) == (7, "float32", 5, None)
    assert records.num_refused == 0 and not records.beats[-1].is_last
    recorder.close()


def test_what_ends_later_takes_the_place_of_what_was_posted(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0)
    for event in (mark(is_done=False), POSTED):
        recorder.add(event)
    soon(tmp_path, lambda found: found.transfers)
    recorder.add(ended(error="too late"))
    soon(tmp_path, lambda found: any(end.error for end in found.transfers))
    for event in (ended(), mark(is_done=True)):
        recorder.add(event)
    recorder.close()
    records = read_files([tmp_path])
    assert len(records.transfers) == 3 and len(records.operations) == 2
    job = build(records)
    (message,) = job.messages
    assert (message.received_posted_s, message.received_done_s, message.num_bytes) == (10.0, 11.5, 90)
    assert job.operations["rounds", 7][0].done_s == 12.0


def test_parts_that_replicas_ask_each_other_for_are_known_by_round_and_owner(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=3)
    for direction, name in (("received", blob_name(5, 2)), ("sent", b"state/0")):
        recorder.add(Posted(
            direction=direction, peer=1, kind="blob", round_id=99, fragment=0, phase=0, num_bytes=10, posted_s=1.0,
            name=name,
        ))  # fmt: skip
    recorder.close()
    (end,) = read_files([tmp_path]).transfers
    assert (end.direction, end.operation, end.part) == ("received", 5, 2)


@pytest.mark.parametrize("error", ["", "DataError: no more data"])
def test_a_rank_that_ends_says_goodbye_once(tmp_path: Path, error: str) -> None:
    recorder = Recorder(tmp_path, rank=0)
    recorder.close(error=error)
    recorder.close(error="again")
    assert [(beat.is_last, beat.error) for beat in read_files([tmp_path]).beats if beat.is_last] == [(True, error)]


def test_the_files_stay_small_and_hold_the_latest_and_all_that_is_open(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0, most_bytes=8000)
    recorder.add(POSTED)
    for turn in range(4):
        for step in range(40):
            recorder.add_step(40 * turn + step, started_s=1.0, done_s=2.0, loss=0.5)
        last = 40 * turn + 39
        soon(tmp_path, lambda found, last=last: found.spans and found.spans[-1].step == last)
    recorder.close()
    assert sum(path.stat().st_size for path in record_paths(tmp_path, rank=0)) < 9000
    records = read_files([tmp_path])
    assert records.spans[-1].step == 159 and 0 < records.spans[0].step < 150
    records = read_records([record_paths(tmp_path, rank=0)[0]])
    assert [end.operation for end in records.transfers] == [7] and records.communicators["rounds"].ranks == (0,)


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_is_begun_anew_again_and_again_is_there_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    def refuse(*unused: object) -> None:
        raise OSError("no links here")

    if not has_links:
        monkeypatch.setattr(Path, "hardlink_to", refuse)
    file, (path, old) = record_writer(tmp_path, rank=0, most_bytes=300), record_paths(tmp_path, rank=0)
    is_over, missed, lost = threading.Event(), [], []

    def look() -> None:
        was_there = False
        while not is_over.is_set():
            missed.append(not path.exists())
            is_there = old.exists()
            lost.append(was_there and not is_there)
            was_there = was_there or is_there

    looking = threading.Thread(target=look)
    looking.start()
    for number in range(300):
        assert file.write_all([f"{number:050d}"] * 3) == (number > 0)
    is_over.set()
    looking.join()
    file.close()
    assert missed and (not any(missed) or not has_links)
    assert not any(lost)
    assert f"{299:050d}" in path.read_text() and f"{298:050d}" in old.read_text()
    assert sorted(found.name for found in tmp_path.iterdir()) == [path.name, old.name]


def test_records_of_a_full_disk_are_kept_and_written_whole_once_there_is_room(tmp_path: Path) -> None:
    file, (path, _) = record_writer(tmp_path, rank=0), record_paths(tmp_path, rank=0)
    file.write_all(["first"])
    whole = path.read_text()
    with file_size_limit(len(whole) + 3):
        for number in range(100):
            assert not file.write_all([f"{number:05d}"])
        assert path.read_text() == whole and file.has_waiting
    file.write_all(["last"])
    file.close()
    assert path.read_text() == whole + "".join(f"{number:05d}\n" for number in range(100)) + "last\n"
    assert file.num_lost == 0


def test_a_file_is_not_begun_anew_on_a_full_disk_and_what_is_kept_is_bounded(tmp_path: Path) -> None:
    file = record_writer(tmp_path, rank=0, most_bytes=300, max_kept_bytes=300)
    path, old = record_paths(tmp_path, rank=0)
    file.write_all(["x" * 120])
    with file_size_limit(1):
        for number in range(100):
            assert not file.write_all([f"{number:049d}"])
    assert not old.exists() and file.num_lost == 94
    assert file.write_all(["last"]) and old.exists()
    file.close()
    assert path.read_text().splitlines()[1:] == [*(f"{number:049d}" for number in range(94, 100)), "last"]


def test_a_recorder_goes_on_after_a_full_disk_and_warns(tmp_path: Path) -> None:
    told: list[str] = []
    with file_size_limit(10):
        recorder = Recorder(tmp_path, rank=0, warn=told.append)
        recorder.add_step(1, started_s=1.0, done_s=2.0)
        until_s = time.monotonic() + 60
        while not told:
            assert time.monotonic() < until_s, "it never warned"
            time.sleep(TURN_S / 5)
    recorder.add_step(2, started_s=2.0, done_s=3.0)
    recorder.close()
    assert len(told) == 1 and "lines are kept in memory until there is room" in told[0]
    records = read_files([tmp_path])
    assert [span.step for span in records.spans] == [1, 2] and records.num_refused == 0


def test_a_folder_that_takes_no_file_is_told_and_ends_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    recorder = Recorder(tmp_path / "not-there", rank=4, warn=told.append)
    recorder.add(POSTED)
    recorder.close()
    assert len(told) == 1 and told[0].startswith("rank 4 records nothing any more: ")


def test_ranks_that_each_know_themselves_only_make_one_communicator() -> None:
    def own(rank: int, host: str) -> Communicator:
        return Communicator(communicator="rounds", ranks=(rank,), hosts=(host,), clocks=("c",))

    records = from_records([own(1, "b"), own(0, "a"), own(1, "b")])
    assert records.communicators["rounds"] == Communicator(
        communicator="rounds", ranks=(0, 1), hosts=("a", "b"), clocks=("c", "c")
    )
    with pytest.raises(ValueError, match="other members: rank 1 is somewhere else"):
        records.add(own(1, "a"))


def test_records_come_before_the_transfers_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "transfers-replica-0.jsonl").write_text("broken\n")
    Recorder(tmp_path, rank=0).close()
    records = read_files([tmp_path])
    assert records.num_refused == 0 and isinstance(records.transfers, list) and records.beats


def test_rounds_of_two_owners_on_one_transport_are_two_operations_of_a_runs_files(tmp_path: Path) -> None:
    def line(owner: object, number: int, finished_s: float) -> str:
        values = {
            "kind": "round", "direction": "sent", "peer": 1, "round_id": number, "fragment": 0, "phase": 0,
            "payload_bytes": 1, "wire_bytes": 57, "started_s": 0.0, "finished_s": finished_s, "error": "",
        }  # fmt: skip
        return json.dumps(values if owner is None else values | {"owner": owner}) + "\n"

    lines = [line(None, 0, 1.0), line(0, 0, 2.0), line(1, 0, 3.0), line(-1, 0, 4.0), line("1", 0, 4.0)]
    (tmp_path / "transfers-replica-0.jsonl").write_text("".join(lines))
    found = read_files([tmp_path])
    assert [(one.posted_s, one.done_s) for one in found.operations] == [(0.0, 2.0), (0.0, 3.0)]
    assert [one.part for one in found.transfers] == [0, 1, 0] and found.num_refused == 2
    assert {one.operation for one in found.transfers} == {one.round for one in found.operations}


def test_an_end_that_was_done_is_not_open_again() -> None:
    def end(done_s: float | None) -> TransferEnd:
        return TransferEnd(
            communicator="rounds", rank=0, peer=1, direction="sent", operation=1, num_bytes=1, posted_s=0.0,
            done_s=done_s,
        )  # fmt: skip

    (message,) = build(from_records([end(2.0), end(None)])).messages
    assert message.sent_done_s == 2.0


def test_a_disk_that_does_not_answer_keeps_nobody_from_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answers, said = threading.Event(), threading.Event(), []

    def write(self: JsonlWriter, lines: Iterable[str]) -> bool:
        asked.set()
        return not answers.wait(60)

    recorder = Recorder(tmp_path, rank=0, warn=said.append)
    monkeypatch.setattr(JsonlWriter, "write_all", write)
    monkeypatch.setattr("thinwire.recording.recorder._CLOSE_S", 0.01)
    assert asked.wait(60)
    recorder.close()
    assert said == ["rank 0 ends without its last records: the disk has not answered for 0.01 s"]
    answers.set()


class Wire:
    """A transport whose connections the kernel tells of."""

    def __init__(self) -> None:
        self.log = TransferLog()
        self.asked: list[int] = []

    def reading(self, peer: int) -> SimpleNamespace | None:
        self.asked.append(peer)
        count = 1000 * len(self.asked)
        return SimpleNamespace(
            received_bytes=count, has_signs=True, sent_bytes=2 * count, busy_s=0.001 * count, held_s=0.5
        ) if peer in (2, 5) else None  # fmt: skip

    def paths(self, peer: int) -> tuple[()]:
        return ()

    def limit_path(self, peer: int, path: int, weight: float) -> None:
        raise AssertionError("no limit is set")


def test_what_comes_while_a_message_is_open_is_recorded_and_nothing_where_none_is(tmp_path: Path) -> None:
    wire, engine = Wire(), SimpleNamespace(observers=[])
    recorder = Recorder(tmp_path, rank=1)
    recorder.follow(wire, engine)  # type: ignore[arg-type]
    try:
        time.sleep(3 * BEAT_S)
        assert not wire.asked
        now_s = time.monotonic()
        for peer, direction in ((2, "received"), (3, "received"), (4, "sent")):
            recorder.add(replace(POSTED, peer=peer, direction=direction, posted_s=now_s))  # type: ignore[arg-type]
        records = soon(tmp_path, lambda records: len(records.arrivals) >= 3)
    finally:
        recorder.close()
    assert set(wire.asked) == {2, 3, 4}, "whom something is waited for from, or is sent to"
    assert not records.flows, "nobody can tell of rank 4"
    assert {(one.rank, one.peer) for one in records.arrivals} == {(1, 2)}
    counts = [one.num_bytes for one in records.arrivals]
    assert counts == sorted(set(counts)) and records.arrivals[0].at_s >= now_s + BEAT_S


def test_what_kernels_tell_of_connections_that_something_is_sent_over_is_recorded(tmp_path: Path) -> None:
    wire, engine = Wire(), SimpleNamespace(observers=[])
    recorder = Recorder(tmp_path, rank=1)
    recorder.follow(wire, engine)  # type: ignore[arg-type]
    try:
        recorder.add(replace(POSTED, peer=5, direction="sent", posted_s=time.monotonic()))
        records = soon(tmp_path, lambda records: len(records.flows) >= 3)
    finally:
        recorder.close()
    assert {(one.rank, one.peer, one.held_s, one.silence_s) for one in records.flows} == {(1, 5, 0.5, None)}
    assert [one.num_bytes for one in records.flows] == [2000 * round(one.busy_s) for one in records.flows]
    gaps = [later.at_s - early.at_s for early, later in pairwise(records.flows)]
    assert min(gaps) > BEAT_S / 4, "with the beats"
