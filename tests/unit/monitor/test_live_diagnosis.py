"""What judges a run in the process that started it: files in, findings and actions out, and time that was lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire.cli.run_watchdog import diagnosis_of, report_end
from thinwire.elastic.coordinator import Coordinator
from thinwire.elastic.coordinator_state import CoordinatorConfig
from thinwire.monitor import live_diagnosis
from thinwire.monitor.detect.live import News
from thinwire.monitor.findings import Finding, Place
from thinwire.monitor.live_diagnosis import LiveDiagnosis, Members, end_report
from thinwire.monitor.remediation import Action, Policy, Steering
from thinwire.runlog.downtime import Downtime
from thinwire.runlog.records import Beat, Communicator, Record, header_line, to_line
from thinwire.training.elastic.remediation import DowntimeTracker, ElasticRemediation, ProcessOrder, read_pid, write_pid


class FakeHands:
    def __init__(self, members: Members | None, *, fails: bool = False) -> None:
        self.found = members
        self.fails = fails
        self.done: list[Action] = []

    def members(self) -> Members | None:
        return self.found

    def act(self, action: Action) -> str:
        if self.fails:
            raise OSError("no way")
        self.done.append(action)
        return "done"


def members(*present: int, resting: tuple[int, ...] = ()) -> Members:
    return Members(present=frozenset(present), resting=frozenset(resting))


def write_beats(run_dir: Path, rank: int, *, until_s: int) -> None:
    lines: list[Record] = [Communicator(communicator="rounds", ranks=(rank,), hosts=("h",), clocks=("c",))]
    lines += [Beat(rank=rank, at_s=float(second)) for second in range(until_s)]
    text = "".join(line + "\n" for line in [header_line(), *map(to_line, lines)])
    (run_dir / f"records-rank-{rank}.jsonl").write_text(text)


def judge(run_dir: Path, hands: FakeHands, said: list[str], *, on_finding: str, dry: bool = False) -> LiveDiagnosis:
    found = diagnosis_of(run_dir, on_finding=on_finding, is_dry_run=dry, hands=hands, say=said.append)
    assert found is not None
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_link_that_is_slow_by_turns_is_one_finding_an_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, now_s = list[str](), [1000.0]
    diagnosis = judge(tmp_path, FakeHands(members(0, 1)), said, on_finding="warn")
    monkeypatch.setattr(live_diagnosis, "time", SimpleNamespace(time=lambda: now_s[0]))

    def report(state: str, case: int, *, ranks: tuple[int, ...] = (0, 1)) -> None:
        finding = Finding(
            kind="communication slow", places=(Place(kind="link both ways", ranks=ranks),), since_s=0.0, confidence=0.9,
            text="", remedy="",
        )  # fmt: skip
        diagnosis._report(News(case=case, state=state, finding=finding, age_s=1.0))  # type: ignore[arg-type]
        now_s[0] += 20.0

    for case in range(3):
        report("new", case)
        report("over", case)
    report("new", 3, ranks=(0, 2))
    now_s[0] += 500.0
    report("new", 4)
    assert [text.split(" (")[0] for text in said] == [
        "finding: communication slow: link 0 <-> 1", "over: communication slow: link 0 <-> 1",
        "finding: communication slow: link 0 <-> 2", "finding: communication slow: link 0 <-> 1",
    ]  # fmt: skip
    assert len(lines(tmp_path / "findings.jsonl")) == 8, "the file holds all of them"


@pytest.mark.parametrize("dry", [False, True])
def test_a_finding_is_written_told_and_acted_on_once(tmp_path: Path, dry: bool) -> None:
    hands, said = FakeHands(members(0, 1, 2)), list[str]()
    diagnosis = judge(tmp_path, hands, said, on_finding="exclude", dry=dry)
    for rank in range(3):
        write_beats(tmp_path, rank, until_s=8 if rank == 1 else 20)
    for _ in range(4):
        diagnosis.poll()
    (told,) = lines(tmp_path / "findings.jsonl")
    assert (told["state"], told["finding"]["where"], told["age_s"]) == ("new", "rank 1", 12.0)
    (action,) = lines(tmp_path / "actions.jsonl")
    assert (action["action"], action["target"], action["dry_run"]) == ("exclude", "1", dry)
    assert [one.target for one in hands.done] == ([] if dry else [1])
    assert action["result"] == ("nothing, since this is a dry run" if dry else "done")
    assert len(said) == 2 and said[0].startswith("finding: non-communication hang: rank 1 (confidence 0.90).")
    assert "exclude 1: " in end_report(diagnosis)[0]
    assert datetime.strptime(end_report(diagnosis)[0][:23], "%Y-%m-%d %H:%M:%S %Z").year > 2000


def test_a_warning_is_told_and_nothing_is_done(tmp_path: Path) -> None:
    hands, said = FakeHands(None), list[str]()
    diagnosis = judge(tmp_path, hands, said, on_finding="warn")
    for rank in (0, 1):
        write_beats(tmp_path, rank, until_s=20 - 12 * rank)
    for _ in range(3):
        diagnosis.poll()
    assert [(one["action"], one["result"]) for one in lines(tmp_path / "actions.jsonl")] == [("warn", "reported")]
    assert hands.done == [] and len(said) == 1


def test_an_error_that_the_launcher_tells_is_written_and_not_said_twice(tmp_path: Path) -> None:
    said: list[str] = []
    diagnosis = diagnosis_of(
        tmp_path, on_finding="warn", is_dry_run=False, hands=FakeHands(None), say=said.append,
        is_said=lambda finding: not finding.is_own_error,
    )  # fmt: skip
    assert diagnosis is not None
    for rank in (0, 1):
        write_beats(tmp_path, rank, until_s=20)
    with (tmp_path / "records-rank-1.jsonl").open("a") as file:
        file.write(to_line(Beat(rank=1, at_s=20.0, error="no room on the disk", is_last=True)) + "\n")
    for _ in range(3):
        diagnosis.poll()
    (told,) = lines(tmp_path / "findings.jsonl")
    assert "no room on the disk" in told["finding"]["text"]
    assert said == [] and end_report(diagnosis) == []


class BecomesSure:
    """A judge that tells a hang of rank 1 and grows surer of it, look by look."""

    problem, is_unsure = "", False

    def __init__(self, *confidences: float) -> None:
        self.confidences, self.num_looks = confidences, 0

    def add(self, records: object) -> None:
        """Take anything."""

    def ranks(self) -> frozenset[int]:
        return frozenset((0, 1))

    def update(self, *, without: object = None) -> list[News]:
        self.num_looks += 1
        return self.open_findings() if self.num_looks == 1 else []

    def open_findings(self) -> list[News]:
        (_, told) = hang(0.0, age_s=1.0)
        sure = self.confidences[min(self.num_looks, len(self.confidences)) - 1]
        return [replace(told, finding=replace(told.finding, confidence=sure))]


def test_what_was_told_before_it_was_sure_is_acted_on_once_it_is(tmp_path: Path) -> None:
    write_beats(tmp_path, 0, until_s=3)
    said: list[str] = []
    hands = FakeHands(members(0, 1))
    diagnosis = LiveDiagnosis(
        tmp_path, say=said.append, steering=Steering(Policy(on_finding="restart")), hands=hands,
        judge=BecomesSure(0.6, 0.7, 0.9, 0.95),  # type: ignore[arg-type]
    )  # fmt: skip
    write_beats(tmp_path, 0, until_s=4)
    for _ in range(5):
        diagnosis.poll()
    assert [line["action"] for line in diagnosis.actions] == ["warn", "restart"]
    assert [one.kind for one in hands.done] == ["restart"]
    assert len([line for line in said if line.startswith("finding: ")]) == 1


def test_who_has_left_or_rests_is_not_judged(tmp_path: Path) -> None:
    hands, said = FakeHands(members(0, 2, resting=(2,))), list[str]()
    diagnosis = judge(tmp_path, hands, said, on_finding="exclude")
    for rank in range(3):
        write_beats(tmp_path, rank, until_s=20 if rank == 0 else 8)
    for _ in range(4):
        diagnosis.poll()
    assert said == [] and diagnosis.num_looks == 4 and not (tmp_path / "findings.jsonl").exists()


@pytest.mark.parametrize("how", ["begun anew", "gone on"])
def test_a_file_of_an_earlier_part_of_the_run_is_not_judged_before_somebody_writes_to_it(
    tmp_path: Path, how: str
) -> None:
    # the part before ended a moment ago, and its rank 1 fell silent in it
    for rank in (0, 1):
        write_beats(tmp_path, rank, until_s=20 if rank == 0 else 8)
    said: list[str] = []
    diagnosis = judge(tmp_path, FakeHands(None), said, on_finding="warn")
    for _ in range(4):
        diagnosis.poll()
    assert diagnosis.num_looks == 0
    write_beats(tmp_path, 0, until_s=30)  # the first of the next part
    for _ in range(4):
        diagnosis.poll()
    assert said == [] and diagnosis.num_looks == 4
    if how == "begun anew":
        write_beats(tmp_path, 1, until_s=9)
    else:
        with (tmp_path / "records-rank-1.jsonl").open("a") as file:
            file.write(to_line(Beat(rank=1, at_s=8.5)) + "\n")
    for _ in range(4):
        diagnosis.poll()
    assert len(said) == 1 and "rank 1" in said[0]


def test_where_there_are_no_records_nothing_is_done(tmp_path: Path) -> None:
    diagnosis = judge(tmp_path, FakeHands(None), [], on_finding="warn")
    with diagnosis:
        diagnosis.poll()
    assert diagnosis.num_looks == 0 and list(tmp_path.iterdir()) == []
    assert diagnosis_of(tmp_path, on_finding="off", is_dry_run=False, hands=FakeHands(None), say=print) is None


def test_an_action_or_a_disk_that_fails_is_told_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "findings.jsonl").mkdir()
    said: list[str] = []
    diagnosis = judge(tmp_path, FakeHands(members(0, 1, 2), fails=True), said, on_finding="restart")
    for rank in range(3):
        write_beats(tmp_path, rank, until_s=8 if rank == 1 else 20)
    for _ in range(4):
        diagnosis.poll()
    assert [text for text in said if "restart replica 1" in text and text.endswith("failed: no way")]
    assert sum("cannot write" in text for text in said) == 1
    report_end(tmp_path, diagnosis, Downtime(run_s=5.0), say=said.append)
    assert json.loads((tmp_path / "downtime.json").read_text())["total_s"] == 0.0
    assert said[-1] == "downtime: 0 s of 5 s (only restarts count)"


def test_a_disk_without_room_is_told_once_and_so_is_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    diagnosis = judge(tmp_path, FakeHands(None), said, on_finding="warn")
    for free_bytes in (10**9, 0, 0, 2**21, 2**20, 0, 2**20, 10**9, 10**9):
        usage = SimpleNamespace(free=free_bytes)
        monkeypatch.setattr("thinwire.monitor.live_diagnosis.shutil.disk_usage", lambda path, usage=usage: usage)
        diagnosis.poll()
    assert len(said) == 4, said
    assert all(f"the disk of {tmp_path} is full (0 B free)" in text for text in said[::2])
    assert all(f"there is room on the disk of {tmp_path} again" in text for text in said[1::2])


# -- an elastic run


def member(replica: int, *, step: int, state: str = "active", host: str = "a", paused: bool = False) -> Any:
    return {
        "replica": replica, "host": host, "state": state, "step": step, "step_s": 0.5, "paused": paused
    }  # fmt: skip


def status(*there: Any, findings: tuple[str, ...] = (), repeated: int = 0) -> dict[str, Any]:
    return {"members": list(there), "findings": list(findings), "data": {"repeated": repeated}}


def action(kind: str, *, is_hang: bool = True) -> Action:
    return Action(kind=kind, target=1, case=0, why="It broke.", is_hang=is_hang)  # type: ignore[arg-type]


def test_the_hands_know_whose_process_has_ended_also_before_anybody_has_looked_after_it(tmp_path: Path) -> None:
    hands = ElasticRemediation(
        tmp_path, status=lambda: status(member(0, step=5), member(1, step=5)), send_command=lambda *_: ""
    )
    write_pid(tmp_path, 0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (tmp_path / "logs" / "replica-1.pid").write_text(f"{process.pid}\n")
        found = hands.members()
        assert found is not None and (found.present, found.gone) == ({0, 1}, frozenset())
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and its parent has not asked
        dead = hands.members()
        assert dead is not None and dead.gone == {1}
    gone = hands.members()
    assert gone is not None and (gone.present, gone.gone) == ({0, 1}, {1})


def test_the_hands_of_an_elastic_run_ask_the_coordinator_and_order_the_launcher(tmp_path: Path) -> None:
    said: list[tuple[str, str]] = []

    def tell(verb: str, target: str) -> str:
        said.append((verb, target))
        return "it was told"

    now = status(member(0, step=5, paused=True), member(1, step=5), member(2, step=0, state="loading"))
    hands = ElasticRemediation(tmp_path, status=lambda: now, send_command=tell)
    assert [hands.act(action(what)) for what in ("restart", "exclude")] == ["it was told"] * 2  # of another host
    assert said == [("restart", "1"), ("end", "1")] and hands.take_orders() == []
    write_pid(tmp_path, 1)
    listed = Members(present=frozenset({0, 1}), resting=frozenset({0}), ended=frozenset({2}))
    assert hands.members() == listed
    assert hands.act(action("exclude", is_hang=False)) == "it was told" and hands.take_orders() == []
    assert hands.act(action("exclude")) == "it was told"
    assert hands.take_orders() == [ProcessOrder(what="end", pid=os.getpid(), why="It broke.")]
    assert hands.act(action("restart")) == "its process was killed, and another one takes its place"
    assert hands.act(action("abort")) == "the run ends"
    assert [order.what for order in hands.take_orders()] == ["kill", "abort"] and hands.take_orders() == []
    assert said[2:] == [("leave", "1"), ("expel", "1"), ("expel", "1")]
    assert ElasticRemediation(tmp_path, status=lambda: None, send_command=tell).members() is None
    assert read_pid(tmp_path, 9) is None


def hang(at_s: float, *, age_s: float, replica: int = 1, case: int = 0, state: str = "new") -> tuple[float, News]:
    place = Place(kind="rank", ranks=(replica,))
    found = Finding(kind="non-communication hang", places=(place,), since_s=0.0, text="", confidence=0.9, remedy="")
    return at_s, News(case=case, state=state, finding=found, age_s=age_s)  # type: ignore[arg-type]


def lost_after(*seen: tuple[float, dict[str, Any]]) -> DowntimeTracker:
    lost = DowntimeTracker()
    for at_s, what in seen:
        lost.observe(what, at_s=at_s)
    return lost


def test_a_replica_that_was_lost_costs_from_its_last_step_to_the_one_that_comes_for_it() -> None:
    silent = ("replica 1 on a was silent for 20.0 s; the others go on without it",)
    lost = lost_after(
        (100.0, status(member(0, step=10), member(1, step=10))),
        (101.0, status(member(0, step=12), member(1, step=12))),
        (110.0, status(member(0, step=30), member(1, step=12))),
        (121.0, status(member(0, step=50), findings=silent)),
        (131.0, status(member(0, step=70), member(2, step=70), findings=silent, repeated=16)),
    )
    found = lost.downtime([], [], run_s=100.0, end_s=200.0, batch_size=8)
    # one of two replicas: since 101, let go at 121, another one from 131 on; 2 steps of half a second again by both
    assert (found.detection_s, found.diagnosis_s, found.reinitialisation_s) == (10.0, 0.0, 5.0)
    assert found.post_checkpoint_s == 0.5 and found.num_incidents == 1
    acted = [{"at": 106.0, "target": "1", "dry_run": False}]
    found = lost.downtime([hang(105.0, age_s=4.0)], acted, run_s=100.0, end_s=200.0, batch_size=8)
    assert (found.detection_s, found.diagnosis_s, found.reinitialisation_s) == (2.0, 0.5, 12.5)


def test_who_came_before_the_lost_one_was_let_go_came_for_it_and_who_was_told_to_leave_is_not_lost() -> None:
    lost = lost_after(
        (0.0, status(member(0, step=1), member(1, step=1))),
        (5.0, status(member(0, step=9), member(1, step=1), member(2, step=9))),
        (8.0, status(member(0, step=12), member(2, step=12), findings=("replica 1 on a was silent for 8 s",))),
        (9.0, status(member(2, step=12), findings=("replica 0 on a was told to leave; the others go on without it",))),
    )
    found = lost.downtime([], [], run_s=10.0, end_s=10.0, batch_size=1)
    assert found.num_incidents == 1 and found.reinitialisation_s == 0.0
    assert found.detection_s == pytest.approx(8.0 / 3)


def test_a_replica_that_stood_still_and_went_on_cost_its_time() -> None:
    lost = lost_after((0.0, status(member(0, step=1), member(1, step=1))))
    news = [hang(20.0, age_s=4.0), hang(30.0, age_s=4.0, state="over")]
    found = lost.downtime(news, [], run_s=50.0, end_s=50.0, batch_size=1)
    assert (found.detection_s, found.reinitialisation_s) == (2.0, 5.0)


def test_the_coordinator_lets_a_replica_go_that_does_not_answer() -> None:
    sent: list[tuple[bytes, str, dict[str, Any]]] = []
    coordinator = Coordinator(
        CoordinatorConfig(job={}, initial_replicas=2, sync_interval=4, overlap_steps=1, shard_windows=8),
        send=lambda token, kind, fields: sent.append((token, kind, dict(fields))), record=lambda what, fields: None,
        generation="g",
    )  # fmt: skip
    for token in (b"a", b"b"):
        coordinator.state.roster.add(token, host="h", now_s=0.0)
    for target, is_done in (("1", True), ("7", False), ("", False)):
        coordinator.handle(b"person", {"kind": "command", "verb": "expel", "target": target}, now_s=1.0)
        assert sent[-1][:2] == (b"person", "answer") and sent[-1][2]["ok"] is is_done
    assert [one.replica for one in coordinator.state.roster] == [0]
    assert (b"b", "expelled", {"why": "was let go, since it hangs", "has_bad_parts": False}) in sent
