"""What records of one side of a cut tell: the place where all are there, and little confidence where they are not."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from tests.rehearsed_run import write_records
from tests.synthetic_jobs import InjectedFault
from thinwire.cli.main import main
from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.detect.live import LiveDetector
from thinwire.monitor.findings import Finding, Place
from thinwire.runlog.reader import from_records
from thinwire.runlog.records import (
    Arrival,
    Beat,
    Communicator,
    Operation,
    Record,
    TransferEnd,
    header_line,
    to_line,
)
from thinwire.runlog.run_folder import MEMBERS_FILE, read_files, removed_replicas

RECORDED = Path(__file__).parents[2] / "recorded"
KILLED = InjectedFault(kind="killed", place=Place(kind="rank", ranks=(1,)), begin=20)


def _told(name: str, *hosts: int) -> Finding:
    (finding,) = diagnose(read_files([RECORDED / name / f"h{host}" for host in hosts]))
    return finding


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("cut_gloo", "link 1 <-> 2"),  # rank 0 still had all messages of that round
        ("cut_wire", "host host1 (10.9.0.2)"),
        ("link_wire", "link 1 <-> 2"),
        ("kill_gloo", "rank 1"),
    ],
)
def test_the_records_of_all_hosts_name_the_place_after_all_have_ended(name: str, where: str) -> None:
    finding = _told(name, 0, 1, 2)
    assert finding.where == where and finding.confidence >= 0.9
    assert main(["diagnose", *(str(RECORDED / name / f"h{host}") for host in range(3))]) == 3


def test_a_host_that_was_cut_off_names_itself_with_little_confidence() -> None:
    finding = _told("cut_wire", 1)
    assert finding.where == "host host1 (10.9.0.2)" and finding.confidence <= 0.3
    assert "cut off" in finding.text and "Judged from one side only: the records of rank 1." in finding.text
    assert finding.evidence["judged_from"] == [1] and finding.evidence["not_heard"] == [0, 2]


@pytest.mark.parametrize(
    ("name", "host", "where"),
    [
        ("cut_wire", 0, "ambiguous: link 0 <-> 1 or rank 1"),
        ("cut_wire", 2, "ambiguous: link 1 <-> 2 or rank 1"),
        ("link_wire", 2, "ambiguous: link 1 <-> 2 or rank 1"),
        ("link_wire", 0, "communicator"),  # its peers live, and wait for each other
        ("kill_gloo", 0, "ambiguous: link 0 <-> 1 or rank 1"),
        ("cut_gloo", 0, "ambiguous: host host0 (10.9.0.1) or communicator"),  # gloo has no signs of life
    ],
)
def test_one_host_of_a_cut_job_accuses_nobody_surely(name: str, host: int, where: str) -> None:
    finding = _told(name, host)
    assert finding.where == where and finding.confidence <= 0.5 and "Judged from one side only" in finding.text


def test_a_first_host_that_was_cut_off_does_not_accuse_those_whose_records_come_no_more() -> None:
    findings = diagnose(read_files([RECORDED / "first_cut" / "h0"]))
    assert findings and all(one.confidence <= 0.3 for one in findings)
    assert all(one.places[0] == Place(kind="host", hosts=("host-0 (10.77.0.1)",)) for one in findings)


# -- made by hand


def _host(rank: int) -> Communicator:
    return Communicator(communicator="rounds", ranks=(rank,), hosts=(f"host-{rank // 2}",), clocks=(f"c{rank // 2}",))


def _round(rank: int, number: int, *, peers: tuple[int, ...], is_done: bool) -> list[Record]:
    at_s = float(number)
    done_s = at_s + 0.2 if is_done else None
    records: list[Record] = [
        Operation(communicator="rounds", rank=rank, sequence=number, kind="round", posted_s=at_s, done_s=done_s,
                  round=number)
    ]  # fmt: skip
    for peer in peers:
        for direction in ("sent", "received"):
            records.append(TransferEnd(
                communicator="rounds", rank=rank, peer=peer, direction=direction, operation=number, num_bytes=9,  # type: ignore[arg-type]
                posted_s=at_s, done_s=done_s,
            ))  # fmt: skip
    return records


def test_replicas_of_a_cut_off_host_do_not_accuse_each_other() -> None:
    peers = (0, 1, 4, 5)  # on two other hosts
    records: list[Record] = [_host(2), _host(3)]
    for number in range(20):
        records += [one for rank in (2, 3) for one in _round(rank, number, peers=peers, is_done=True)]
    # rank 2 waits in a round that rank 3, which waits in the one before, has not come to
    records += _round(2, 20, peers=peers, is_done=True) + _round(2, 21, peers=peers, is_done=False)
    records += _round(3, 20, peers=peers, is_done=False)
    records += [Beat(rank=rank, at_s=half / 2) for rank in (2, 3) for half in range(60)]
    findings = diagnose(from_records(records))
    assert [one.places[0] for one in findings] == [Place(kind="host", hosts=("host-1",))], findings
    assert all(one.confidence <= 0.3 and "cut off" in one.text for one in findings)


@pytest.mark.parametrize(
    ("error", "where"), [("was silent for 2.1 s", "ambiguous: link 0 <-> 1 or rank 0"), ("", "communicator")]
)
def test_the_only_peer_is_named_where_its_connection_was_given_up_soon_after_its_last_byte(
    error: str, where: str
) -> None:
    records: list[Record] = [Communicator(communicator="rounds", ranks=(1,), hosts=("b",), clocks=("one",))]
    for number in range(20):
        records += _round(1, number, peers=(0,), is_done=True)
    records += [
        dataclasses.replace(one, error=error) if isinstance(one, TransferEnd) else one
        for one in _round(1, 20, peers=(0,), is_done=False)
    ]
    records += [Arrival(rank=1, peer=0, at_s=half / 2, num_bytes=half) for half in range(60)]
    records += [Beat(rank=1, at_s=half / 2) for half in range(63)]
    (finding,) = diagnose(from_records(records))
    assert (finding.kind, finding.where) == ("communication hang", where) and finding.confidence <= 0.5


def test_the_only_peer_is_named_where_only_what_was_sent_to_it_failed() -> None:
    records: list[Record] = [Communicator(communicator="rounds", ranks=(1,), hosts=("b",), clocks=("one",))]
    for number in range(20):
        records += _round(1, number, peers=(0,), is_done=True)
    for one in _round(1, 20, peers=(0,), is_done=False):
        is_sent = isinstance(one, TransferEnd) and one.direction == "sent"
        is_received = isinstance(one, TransferEnd) and not is_sent  # the last bytes before the cut
        records.append(
            dataclasses.replace(one, error="was silent for 2.1 s") if is_sent
            else dataclasses.replace(one, done_s=20.2) if is_received
            else one
        )  # fmt: skip
    records += [Beat(rank=1, at_s=half / 2) for half in range(63)]
    (finding,) = diagnose(from_records(records))
    assert finding.where == "ambiguous: link 0 <-> 1 or rank 0" and finding.confidence <= 0.5


@pytest.mark.parametrize(("silent", "confidence"), [((1, 2), 0.3), ((1,), 0.9)])
def test_a_host_that_hears_of_no_other_is_unsure_and_one_that_hears_of_some_is_sure(
    silent: tuple[int, ...], confidence: float
) -> None:
    where = Communicator(communicator="rounds", ranks=(0, 1, 2), hosts=("a", "b", "c"), clocks=("one",) * 3)
    beats = [Beat(rank=rank, at_s=half / 2) for rank in range(3) for half in range(20 if rank in silent else 60)]
    judge = LiveDetector(updates_until_new=1)
    judge.add([where, *beats])
    news = judge.update()
    assert news and all(one.finding.confidence == pytest.approx(confidence) for one in news)
    assert all((Place(kind="host", hosts=("a",)) in one.finding.places) == (len(silent) == 2) for one in news)


def test_hosts_that_stopped_one_after_the_other_are_told_surely() -> None:
    where = Communicator(communicator="rounds", ranks=(0, 1, 2), hosts=("a", "b", "c"), clocks=("one",) * 3)
    beats = [Beat(rank=rank, at_s=half / 2) for rank in range(3) for half in range((60, 10, 30)[rank])]
    found = diagnose(from_records([where, *beats]))
    assert [(one.where, one.confidence) for one in found] == [("rank 1", 0.9), ("rank 2", 0.9)]


# -- who was a member


def _elastic(folder: Path) -> None:
    """Write a run of ranks 0, 1 and 2, of which rank 1 was removed, and rank 3 came in its place."""
    folder.mkdir()
    for rank in range(4):
        numbers = {1: range(20), 3: range(25, 60)}.get(rank, range(60))
        where = Communicator(communicator="rounds", ranks=(rank,), hosts=("a",), clocks=("one",))
        own = [one for number in numbers for one in _round(rank, number, peers=(), is_done=True)]
        if rank == 1:
            own += _round(1, 20, peers=(), is_done=False)
        beats = [Beat(rank=rank, at_s=half / 2) for half in range(2 * numbers[0], 2 * numbers[-1] + 2)]
        lines = [header_line(), *map(to_line, [where, *own, *beats])]
        (folder / f"records-rank-{rank}.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("source", ["members", "journal"])
def test_a_replica_that_was_removed_is_not_blamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    run = tmp_path / "run"
    _elastic(run)
    assert [one.where for one in diagnose(read_files([run]))] == ["rank 1"]
    if source == "members":
        lines = [{"at": 1.0, "present": [0, 1, 2], "removed": []}, {"at": 2.0, "present": [0, 2, 3], "removed": [1]}]
        (run / MEMBERS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        (run / "coordinator.jsonl").write_text('{"what":"started"}\n{"what":"gone","replica":1}\n')
    assert removed_replicas(run) == {1}
    assert main(["diagnose", str(run)]) == 0
    said = capsys.readouterr()
    assert "No fault found" in said.out and "not diagnosed, since the run removed them: replicas 1;" in said.err
    assert main(["watch", "--json", str(run)]) == 0
    assert json.loads(capsys.readouterr().out)["findings"]["findings"] == []


def test_a_run_that_lost_all_but_one_is_judged_with_those_that_it_lost(tmp_path: Path) -> None:
    _elastic(tmp_path / "run")
    (tmp_path / "run" / MEMBERS_FILE).write_text('{"at":2.0,"present":[0],"removed":[1]}\n')
    assert [one.where for one in diagnose(read_files([tmp_path / "run"]))] == ["rank 1"]


@pytest.mark.parametrize("line", ['{"removed":[1]}', '{"removed":[1,-1,"2",true,1e9]}', '{"what":"gone","replica":1}'])
@pytest.mark.parametrize("other", ["", "[", '{"removed":7}', '{"what":"gone","replica":[]}', '{"removed":{"1":2}}'])
def test_lines_about_members_are_read_as_a_stranger_s(tmp_path: Path, line: str, other: str) -> None:
    (tmp_path / MEMBERS_FILE).write_text(f"{other}\n{line}\n")
    assert removed_replicas(tmp_path) == {1}


# -- one judgement


@pytest.mark.parametrize("name", ["cut_wire/h1", "link_wire/h2", "kill_gloo/h0", "first_cut/h1", "killed", "slow"])
@pytest.mark.parametrize("has_findings", [False, True])
def test_watch_and_diagnose_say_the_same_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, has_findings: bool
) -> None:
    slow = InjectedFault(kind="slow link", place=Place(kind="link", ranks=(0, 2)), begin=30, severity=5.0)
    if "/" in name:
        run = tmp_path / "run"
        shutil.copytree(RECORDED / name, run)
    else:
        run = write_records(tmp_path, {"killed": KILLED, "slow": slow}[name])
    if has_findings:  # what the run itself found while it went on, and what did not last
        rank = Place(kind="rank", ranks=(7,))
        finding = Finding(kind="desync", places=(rank,), since_s=0.0, text="", confidence=1.0, remedy="").to_json()
        line = {"at": 1.0, "state": "new", "case": 0, "age_s": 0.0, "finding": finding}
        (run / "findings.jsonl").write_text(json.dumps(line) + "\n")
    code = main(["diagnose", "--json", str(run)])
    diagnosed = [(one["kind"], one["where"]) for one in json.loads(capsys.readouterr().out)["findings"]]
    assert main(["watch", "--json", str(run)]) == code == 3
    watched = json.loads(capsys.readouterr().out)["findings"]["findings"]
    assert [(one["kind"], one["where"]) for one in watched] == diagnosed
