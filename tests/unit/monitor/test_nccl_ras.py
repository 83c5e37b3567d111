"""Answers of NCCL's RAS: who is gone, who has not come, what has failed, and what only seems so."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from nccl_answers import Comm, Rank, answer, text, world
from nccl_files import HASH, Fleet

from thinwire.errors import DataError
from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.findings import Finding
from thinwire.runlog.reader import Records
from thinwire.runlog.run_folder import read_files

FORMS = ("json", "verbose", "plain")


def write(folder: Path, form: str, *moments: Sequence[Comm], apart_s: float = 60.0) -> list[Path]:
    """Write one answer a moment, a file each."""
    paths = []
    for number, comms in enumerate(moments):
        at_s = 1_790_000_000.0 + number * apart_s
        told = answer(comms, at_s=at_s) if form == "json" else text(comms, verbose=form == "verbose")
        path = folder / f"ras-{number}.txt"
        path.write_text(told)
        os.utime(path, (at_s, at_s))
        paths.append(path)
    return paths


def found(paths: list[Path]) -> list[Finding]:
    records = read_files(paths)
    assert records.num_refused == 0, records.refusals
    return diagnose(records)


@pytest.mark.parametrize("form", FORMS)
def test_a_job_that_is_well_is_no_finding(tmp_path: Path, form: str) -> None:
    assert found(write(tmp_path, form, [world(8)], [world(8, usual={"AllReduce": 700})])) == []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("state", ["dead", "unresponsive"])
def test_a_process_that_is_gone_is_named_with_its_rank(tmp_path: Path, form: str, state: str) -> None:
    job = [world(8, lost={5: state}, counts={2: {"AllReduce": 639}})]
    (finding,) = found(write(tmp_path, form, job))
    assert finding.kind == "non-communication hang" and finding.where == "rank 5"
    assert "505" in finding.text and "10.0.0.2" in finding.text
    assert finding.confidence == (0.9 if state == "dead" else 0.7) and finding.evidence["state"] == state


def test_a_host_of_which_no_process_answers_is_named_as_one(tmp_path: Path) -> None:
    (finding,) = found(write(tmp_path, "json", [world(8, lost={2: "dead", 3: "dead"})]))
    assert finding.where == "host 10.0.0.1" and finding.evidence["ranks"] == [2, 3]


@pytest.mark.parametrize("form", FORMS)
def test_who_is_behind_in_two_answers_has_not_come(tmp_path: Path, form: str) -> None:
    job = [world(8, counts={3: {"AllReduce": 639}})]
    (finding,) = found(write(tmp_path, form, job, job))
    assert finding.kind == "non-communication hang" and finding.where == "rank 3"
    assert finding.confidence == 0.9 and finding.since_round == 640 and "in 60 s" in finding.text
    assert "process 503" in finding.evidence["locations"][0]


@pytest.mark.parametrize("form", FORMS)
def test_one_answer_is_no_proof_and_asks_for_a_second_one(tmp_path: Path, form: str) -> None:
    (finding,) = found(write(tmp_path, form, [world(8, counts={3: {"AllReduce": 639}})]))
    assert finding.where == "rank 3" and finding.confidence == 0.35 and "ask RAS again" in finding.remedy


@pytest.mark.parametrize("form", FORMS)
def test_ranks_that_move_on_are_well_though_they_count_differently(tmp_path: Path, form: str) -> None:
    first, second = (
        world(8, counts={3: {"AllReduce": 639}}),
        world(8, counts={3: {"AllReduce": 645}, 4: {"AllReduce": 645}}),
    )
    assert found(write(tmp_path, form, [first], [second])) == []


@pytest.mark.parametrize("form", FORMS)
def test_the_many_that_are_behind_are_named_and_not_the_few_that_ras_prints(tmp_path: Path, form: str) -> None:
    """Two of 32 are ahead, and RAS prints these two (NVIDIA/nccl issue 1911)."""
    ahead = {rank: {"AllGather": 641} for rank in (12, 13)}
    job = [world(32, per_host=8, counts=ahead, usual={"AllGather": 640})]
    (finding,) = found(write(tmp_path, form, job, job))
    assert finding.places[0].ranks == tuple(rank for rank in range(32) if rank not in ahead)
    assert finding.confidence == 0.6 and "once too often" in finding.text


def test_a_group_that_nobody_named_is_told_by_its_number(tmp_path: Path) -> None:
    half = [world(8, counts={rank: {"AllReduce": 639} for rank in range(4)})]
    (finding,) = found(write(tmp_path, "verbose", half, half))
    assert finding.places[0].kind == "communicator" and "4 ranks" in finding.text and "ncclras -f json" in finding.probe
    (finding,) = found(write(tmp_path, "json", half, half))
    assert finding.evidence["ranks"] == [0, 1, 2, 3]


def test_a_host_whose_ranks_are_all_behind_is_named_as_one(tmp_path: Path) -> None:
    job = [world(8, counts={rank: {"AllReduce": 639} for rank in (2, 3)})]
    (finding,) = found(write(tmp_path, "json", job, job))
    assert finding.where == "host 10.0.0.1"


@pytest.mark.parametrize("form", FORMS)
def test_a_rank_that_calls_something_else_is_out_of_step_at_once(tmp_path: Path, form: str) -> None:
    job = [world(8, usual={"AllReduce": 640, "AllGather": 10}, counts={6: {"AllReduce": 639, "AllGather": 11}})]
    (finding,) = found(write(tmp_path, form, job))
    assert finding.kind == "desync" and finding.where == "rank 6" and finding.confidence == 0.8
    assert "more AllGather" in finding.text and "fewer AllReduce" in finding.text


def test_a_rank_that_has_launched_nothing_is_behind(tmp_path: Path) -> None:
    job = [world(8, counts={3: {"AllReduce": 0}}, usual={"AllReduce": 1})]
    for form in FORMS:
        (finding,) = found(write(tmp_path, form, job, job))
        assert finding.where == "rank 3" and finding.since_round == 1


def test_who_waits_in_another_communicator_is_not_blamed(tmp_path: Path) -> None:
    """Rank 0 hangs. Rank 1 waits for it in their group, and so has not come to the one that it has with rank 3."""
    seats = [Rank(f"10.0.0.{rank // 2}", 500 + rank, rank % 2) for rank in range(4)]

    def group(ranks: Sequence[int], counts: Sequence[int], comm_hash: int) -> Comm:
        made = [Rank(seats[rank].host, seats[rank].pid, seats[rank].gpu, {"AllReduce": count})
                for rank, count in zip(ranks, counts, strict=True)]  # fmt: skip
        return Comm(made, comm_hash)

    job = [
        group(range(4), (7, 7, 7, 7), HASH), group((0, 1), (90, 91), 0x11), group((1, 3), (40, 41), 0x22),
        group((0, 2), (40, 41), 0x33),
    ]  # fmt: skip
    findings = found(write(tmp_path, "json", job, job))
    assert {finding.where for finding in findings} == {"rank 0"} and len(findings) == 2


def test_a_job_of_which_nothing_moves_and_all_count_alike_is_told_with_doubt(tmp_path: Path) -> None:
    job = [world(8)]
    (finding,) = found(write(tmp_path, "json", job, job))
    assert finding.kind == "communication hang" and finding.where == "job" and finding.confidence == 0.4
    assert found(write(tmp_path, "json", job, job, apart_s=5.0)) == []
    idle = Comm(world(8).ranks, 0x77)
    moving = world(8, usual={"AllReduce": 641})
    assert found(write(tmp_path, "json", [world(8), idle], [moving, idle])) == []


@pytest.mark.parametrize("form", FORMS)
def test_the_same_answer_twice_is_one_moment(tmp_path: Path, form: str) -> None:
    (finding,) = found(write(tmp_path, form, *[[world(8, counts={3: {"AllReduce": 639}})]] * 2, apart_s=0.0))
    assert finding.confidence == 0.35


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("status", "where", "said"),
    [
        ({3: "ABORT"}, "rank 3", "has aborted"),
        ({3: "INIT"}, "rank 3", "is still initialising"),
        ({rank: "FINALIZE" for rank in range(8) if rank != 3}, "rank 3", "has not ended"),
        ({rank: "NOCOMM" for rank in range(8) if rank != 3}, "rank 3", "has not ended"),
        ({3: "FINALIZE"}, "rank 3", "has ended or left"),
    ],
)
def test_a_rank_in_another_state_is_named(
    tmp_path: Path, form: str, status: Mapping[int, str], where: str, said: str
) -> None:
    job = [world(8, status=status)]
    (finding,) = found(write(tmp_path, form, job))
    assert finding.where == where and said in finding.text and finding.confidence == 0.3
    (finding,) = found(write(tmp_path, form, job, job))
    assert finding.where == where and finding.confidence == 0.75


@pytest.mark.parametrize("form", FORMS)
def test_an_error_of_a_rank_is_named_before_those_who_lost_it(tmp_path: Path, form: str) -> None:
    errors = dict.fromkeys(range(8), 6) | {2: 1}
    (finding,) = found(write(tmp_path, form, [world(8, async_error=errors)]))
    assert finding.kind == "non-communication hang" and finding.where == "rank 2"
    assert "Unhandled CUDA error" in finding.text and finding.confidence == 0.85


@pytest.mark.parametrize("form", FORMS)
def test_an_error_by_the_loss_of_others_alone_is_one_of_communication(tmp_path: Path, form: str) -> None:
    (finding,) = found(write(tmp_path, form, [world(8, async_error={2: 6})]))
    assert finding.kind == "communication hang" and finding.confidence == 0.5 and "diagnose test" in finding.probe
    (gone,) = found(write(tmp_path, form, [world(8, async_error={2: 6}, lost={5: "dead"})]))
    assert gone.where == "rank 5"


@pytest.mark.parametrize("form", FORMS)
def test_an_error_while_initialising_is_named(tmp_path: Path, form: str) -> None:
    findings = found(write(tmp_path, form, [world(8, init_error={4: 2}, status={4: "INIT"})]))
    assert [one.where for one in findings] == ["rank 4"] and "System error" in findings[0].text


def test_several_answers_in_one_file_are_taken_in_turn(tmp_path: Path) -> None:
    job = [world(8, counts={3: {"AllReduce": 639}})]
    path = tmp_path / "all.txt"
    path.write_text("OK\n" + "Mon Nov 23 16:00:00\n".join([text(job), text(job, took=0.02)]))
    (finding,) = found([path])
    assert finding.where == "rank 3" and finding.confidence == 0.75 and "between them" in finding.text
    path.write_text("OK\n" + "OK\n".join([answer(job), answer(job, at_s=1_790_000_090.0)]))
    (finding,) = found([path])
    assert finding.confidence == 0.9 and "in 90 s" in finding.text


def test_an_answer_as_the_oldest_ras_wrote_it_is_read(tmp_path: Path) -> None:
    head, _, _ = text([world(8)]).partition("\nErrors\n")
    head = head.replace("RUNNING      OK", "RUNNING  INCOMPLETE,MISMATCH")
    path = tmp_path / "old.txt"
    path.write_text(
        head + "\nErrors\n======\n\nDEAD\n  1 job process is considered dead (unreachable via the RAS network)\n"
        "  Process 505 on node 10.0.0.2 managing GPU 1\n\n#0-0 (00000000000000aa) INCOMPLETE\n"
        "  Missing communicator data from 1 rank\n  The missing rank: 5\n\nWarnings\n========\n\n"
        "#0-0 (00000000000000aa) MISMATCH\n  Communicator ranks have different collective operation counts\n"
        "  6 ranks have launched up to operation 12\n"
        "  Rank 1 has launched up to operation 11 -- GPU 1 (NVML 3) managed by process 501 on node 10.0.0.0\n"
    )
    (finding,) = found([path])
    assert finding.where == "rank 5" and "process 505" in finding.text and finding.evidence["state"] == "dead"


def test_what_ras_calls_unwell_and_does_not_explain_is_told(tmp_path: Path) -> None:
    told = text([world(8, counts={3: {"AllReduce": 639}})]).partition("\nWarnings\n")[0]
    (tmp_path / "a.txt").write_text(told)
    (finding,) = found([tmp_path / "a.txt"])
    assert finding.evidence["ras_says"] == "MISMATCH" and finding.confidence == 0.3


def test_files_of_the_inspector_and_of_ras_are_read_together(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, ("node-a", "node-a", "node-b", "node-b"))
    for number in range(60):
        fleet.collective(number, dict.fromkeys((0, 1, 2, 3), 0.004))
    fleet.lines[2] = fleet.lines[2][:20]
    fleet.write()
    job = [world(4, lost={2: "dead"})]
    write(tmp_path, "verbose", job)
    (finding,) = found([tmp_path])
    assert finding.where == "rank 2" and finding.kind == "non-communication hang"
    assert finding.evidence["hosts"] == ["10.0.0.1 is node-b"]


def _read(tmp_path: Path, content: bytes) -> Records:
    path = tmp_path / "x.txt"
    path.write_bytes(content)
    return read_files([path])


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("timestamp",), "yesterday", "timestamp is no date and time"),
        (("communicators",), {}, "communicators is no list of JSON objects"),
        (("communicators", 0, "size"), 1 << 40, "size is no whole number"),
        (("communicators", 0, "hash"), "0xg", "hash is none of a communicator"),
        (("communicators", 0, "ranks", 1, "rank"), 0, "rank is twice there"),
        (("communicators", 0, "ranks", 1, "rank"), 8, "rank is twice there or not below"),
        (("communicators", 0, "ranks", 1, "pid"), "1", "pid is no whole number"),
        (("communicators", 0, "ranks", 1, "host"), None, "host is no text"),
        (("communicators", 0, "ranks", 1, "status"), 3, "status or collective_counts is no JSON object"),
        (("communicators", 0, "ranks", 1, "collective_counts", "AllReduce"), -5, "count is no whole number"),
        (("communicators", 0, "missing_ranks"), [3], "missing is no list of JSON objects"),
        (("nccl_version",), 2, "nccl_version is no text"),
    ],
)
def test_a_forged_answer_is_refused_and_named(
    tmp_path: Path, path: tuple[str | int, ...], value: object, said: str
) -> None:
    told = json.loads(answer([world(8)]))
    place = told
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    records = _read(tmp_path, (json.dumps(told, indent=1) + "\n" + answer([world(8)])).encode())
    assert records.num_refused == 1 and said in records.refusals[0].reason and len(records.nccl) == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("  Rank 9 has launched up to operation 5 -- [process information not found]", "rank is not below"),
        ("  All ranks are splendid", "nothing that RAS is known to say"),
        ("  " + "9" * 5000 + " ranks have launched up to operation 5", "nothing that RAS is known to say"),
        ("  Rank 1 -- [process information not found]\n" * 2, ""),
    ],
)
def test_a_line_that_cannot_be_is_refused_and_the_rest_is_read(tmp_path: Path, line: str, said: str) -> None:
    told = text([world(8, counts={3: {"AllReduce": 639}})]) + line + "\n"
    records = _read(tmp_path, told.encode())
    assert records.num_refused == (1 if said else 0) and all(said in one.reason for one in records.refusals)
    assert [one.where for one in diagnose(records)][:1] in (["rank 3"], ["ranks 1, 3"])


def _cuts(content: str) -> list[int]:
    """Return lengths to cut a text to: the ends of all lines, and in the first line of each form around every word.

    A word is cut after its first letter as well. Lines that differ in their numbers alone have one form.
    """
    cuts, forms, start = set[int](), set[str](), 0
    for line in content.splitlines(keepends=True):
        cuts |= {start, start + 1, start + len(line) - 1}
        form = re.sub(r"[0-9a-f]*\d[0-9a-f]*", "0", line)
        if form not in forms:
            forms.add(form)
            for word in re.finditer(r"\w+|\s+|[^\w\s]", line):
                cuts |= {start + word.start(), start + word.start() + 1}
        start += len(line)
    return sorted(cut for cut in cuts if cut >= 60)


def test_a_file_cut_off_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    job = [
        world(8, counts={3: {"AllReduce": 639}}, async_error={1: 2}),
        world(4, lost={1: "dead"}, status={2: "ABORT"}),
    ]
    for content in (text(job), answer(job)):
        assert content.isascii()
        for length in _cuts(content):
            diagnose(_read(tmp_path, content[:length].encode()))


def test_random_bytes_end_no_reading(tmp_path: Path) -> None:
    draw = random.Random(3)
    job = [
        world(8, counts={3: {"AllReduce": 639}}, async_error={1: 2}),
        world(4, lost={1: "dead"}, status={2: "ABORT"}),
    ]
    for content in (text(job).encode(), answer(job).encode()):
        for _ in range(300):
            forged = bytearray(content)
            for _ in range(draw.randrange(1, 40)):
                forged[draw.randrange(50, len(forged))] = draw.randrange(256)
            diagnose(_read(tmp_path, bytes(forged)))


def test_a_forged_size_fills_no_memory(tmp_path: Path) -> None:
    told = text([world(8, counts={3: {"AllReduce": 639}})]).replace(
        "       8         8   RUNNING", " 1000000  8   RUNNING"
    )
    more = "".join(
        f"#0-{number} ({number:016x}) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n"
        "  999999 ranks have launched up to operation 640\n"
        "  Rank 3 has launched up to operation 639 -- [process information not found]\n"
        for number in range(1, 200)
    )
    records = _read(tmp_path, (told + more).encode())
    communicators = records.nccl.snapshots[0].communicators
    assert len(communicators) == 200 and {one.size for one in communicators} == {1_000_000}
    assert sum(len(one.members) for one in communicators) < 1000


def test_answers_in_json_that_never_end_are_given_up(tmp_path: Path) -> None:
    records = _read(tmp_path, b'{"nccl_version": "2"\n' + b'{"a":\n' * 200_000)
    assert len(records.nccl) == 0 and 0 < records.num_refused <= 16


def test_a_file_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.runlog.nccl_ras.MOST_BYTES", 100)
    with pytest.raises(DataError, match="more than 100 bytes"):
        _read(tmp_path, answer([world(8)]).encode())


def test_many_answers_that_are_none_are_refused_by_their_lines_in_time(tmp_path: Path) -> None:
    path, count = tmp_path / "ras.json", 200_000
    path.write_text('{"nccl_version": 1}\n' * count)
    records = read_files([path])  # lines are counted once: from the begin each time, a file of 64 MB would take hours
    assert records.num_refused == count and [one.line for one in records.refusals[:3]] == [1, 2, 3]
