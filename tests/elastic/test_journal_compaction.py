"""The coordinator's journal is compacted: replayed alike, bounded, and whole wherever its writer is killed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from live_processes import DEADLINE_S
from test_coordinator import Desk

from tests.full_disk import file_size_limit
from thinwire.elastic.journal import Journal
from thinwire.errors import PayloadError

Lines = list[dict[str, Any]]


def replayed(lines: Lines) -> dict[str, Any]:
    """Return all that a coordinator has in mind which has read these lines and nothing else."""
    found = Desk([json.loads(json.dumps(line)) for line in lines]).coordinator.state
    members = [
        {**member.describe(), "token": member.token, "held": member.held_step, "begin": member.begin_step,
         "disk": member.disk_step, "counted": member.has_counted, "awaited": member.is_awaited}
        for member in found.roster
    ]  # fmt: skip
    return {
        "members": members, "next": found.roster.next_replica, "step": found.rounds.step,
        "decisions": [asdict(one) for one in found.rounds.decisions.values()], "ledger": found.leases.state_dict(),
        "undo": found.leases.undo_state(), "findings": found.findings, "notes": found.notes, "corpus": found.corpus,
        "era": found.era, "disk": found.is_from_disk, "started": found.has_started, "finished": found.has_finished,
        "failure": found.failure,
        "vacancies": [[one.replica, one.host, one.is_called] for one in found.standby_hosts.vacancies],
        "waiting": found.snapshots.waiting, "accounts": [[*when, trained(data)] for *when, data in found.accounts],
    }  # fmt: skip


def trained(account: dict[str, Any]) -> dict[str, Any]:
    """Return what an account says is trained; how far shards were used beyond that, the live process alone knows."""
    leases = {
        one: [[lease["shard"], lease["start"], lease["counted"]] for lease in held]
        for one, held in account["leases"].items()
    }
    return {"next": account["next"], "counted": account["counted"], "returned": account["returned"], "leases": leases}


class Life(Desk):
    """A run in which replicas come and go, train, are bad and are lost, as a seed says."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.number = 0

    def move(self) -> None:
        members = list(self.coordinator.state.roster)
        member = self.random.choice(members) if members else None
        what = self.random.choice(
            ["come", "come", "round", "round", "round", "round", "lease", "leave", "lost", "note"]
        )
        if (what == "come" and len(members) < 5) or member is None:
            token = b"t%d" % self.random.randrange(1 << 30)
            self.come(token)
            self.hear(token, "active", step=self.coordinator.state.rounds.step)
        elif what == "lease":
            self.hear(member.token, "lease", number=self.random.randrange(3))
        elif what == "leave":
            self.hear(member.token, "leave", why="w")
        elif what == "lost":
            self.coordinator.expel(member.replica, "was silent")
        elif what == "note":
            self.hear(member.token, "note", level="warning", text=str(self.random.random()))
        elif what == "round":
            self._round()
        self.now_s += 1.0
        for one in list(self.coordinator.state.roster):
            self.hear(one.token, "beat", step=one.step, step_s=0.1, roster=0)
        self.coordinator.tick(self.now_s)

    def _round(self) -> None:
        step = self.coordinator.state.rounds.step + 10
        self.number += 1
        active = [one for one in self.coordinator.state.roster if str(one.state) == "active"]
        bad = {one.replica for one in active[1:] if self.random.random() < 0.15}
        good = [one for one in active if one.replica not in bad]
        for one in active:
            leases = self.coordinator.state.leases._leases.get(one.replica, {})
            used = {str(shard): min(8, lease.used + self.random.randrange(5)) for shard, lease in leases.items()}
            if one.replica in bad:
                parts = self.random.randrange(1, 3)
                self.hear(one.token, "withhold", round=self.number, step=step, used=used, parts=parts)
            else:
                self.hear(one.token, "launch", round=self.number, step=step, used=used)
        for one in good:
            has = [other.replica for other in good]
            self.hear(one.token, "vote", round=self.number, step=step, has=has, hash=0)
        if active and self.random.random() < 0.1:
            who = self.random.choice(active).replica
            for one in active:
                self.hear(
                    one.token,
                    "reject",
                    round=self.number,
                    member=who,
                    parts=2,
                    since=self.number - 1,
                    fault="non_finite",
                    why="",
                )


@pytest.mark.parametrize("seed", range(20))
def test_replay_after_compaction_equals_replay_of_the_whole(seed: int) -> None:
    life = Life(seed)
    compacted: Lines = []
    begin = 0
    for move in range(120):
        try:
            life.move()
        except PayloadError as error:  # such as more shards than one may be lent
            assert "at most" in str(error)
        if move % 17 == seed % 17:
            # how far shards were used since the last line about the ledger is known to the live process only
            life.coordinator._record("leases", life.coordinator.state.leases.state_dict())
            before = [*compacted, *life.journal[begin:]]
            compacted, begin = life.coordinator.state.journal_lines(), len(life.journal)
            assert replayed(compacted) == replayed(before) == replayed(life.journal)
    assert replayed([*compacted, *life.journal[begin:]]) == replayed(life.journal)
    assert len([line for line in life.journal if line["what"] == "decision"]) > 10, "much has happened"


def test_the_file_stays_bounded_and_keeps_what_is_needed(tmp_path: Path) -> None:
    path, bound = tmp_path / "journal", 20_000
    journal = Journal(path, compact_bytes=bound)
    desk = Desk()
    desk.coordinator._record = journal.write
    desk.begun()
    largest = num_compacted = 0
    for number in range(300):
        desk.hear(b"a", "lease", number=number)
        for token in (b"a", b"b"):
            desk.hear(token, "launch", round=number, step=10 * (number + 1), used={str(number): 8})
        for token in (b"a", b"b"):
            desk.hear(token, "vote", round=number, step=10 * (number + 1), has=[0, 1], hash=0)
        while len(desk.coordinator.state.rounds.decisions) > 20:  # as it forgets old ones, later
            del desk.coordinator.state.rounds.decisions[next(iter(desk.coordinator.state.rounds.decisions))]
        desk.said.clear()
        num_compacted += journal.compact(desk.coordinator.state.journal_lines)
        largest = max(largest, path.stat().st_size)
    assert num_compacted > 3 and largest < 2 * bound
    journal.close()
    found = Desk(Journal(path).lines).coordinator.state
    assert found.leases.counted == desk.coordinator.state.leases.counted == 300 * 8
    assert max(found.rounds.decisions) == 299
    assert not list(tmp_path.glob(".journal*"))


# dies in the n-th call of the system that it makes while it compacts, after half of what is to be written
KILLED = """
# begins with torch loaded
import os, sys, pathlib
from thinwire.elastic.journal import Journal
path, stage = pathlib.Path(sys.argv[1]), int(sys.argv[2])
journal = Journal(path, compact_bytes=100)
calls = 0
def dying(name, owner, half=False):
    inner = getattr(owner, name)
    def call(*arguments, **more):
        global calls
        calls += 1
        if calls == stage:
            if half:
                inner(arguments[0], arguments[1][: len(arguments[1]) // 2])
            os._exit(9)
        if half and len(arguments[1]) > 40:
            return inner(arguments[0], arguments[1][:40])
        return inner(*arguments, **more)
    setattr(owner, name, call)
for name in ("open", "fsync", "close", "fstat", "unlink", "rename", "replace"):
    dying(name, os)
dying("write", os, half=True)
new = [{"what": "line", "new": number} for number in range(5)]
assert journal.compact(lambda: new)
journal.write("line", {"new": 5})
journal.close()
os._exit(0)
"""


def test_a_writer_that_is_killed_at_any_stage_leaves_the_old_lines_or_the_new_ones_whole(tmp_path: Path) -> None:
    old = [{"what": "line", "old": number} for number in range(20)]
    new = [{"what": "line", "new": number} for number in range(6)]
    found, stage = [], 0
    while True:
        stage += 1
        path = tmp_path / str(stage) / "journal"
        journal = Journal(path)
        for line in old:
            journal.write("line", {"old": line["old"]})
        journal.close()
        code = subprocess.run(
            [sys.executable, "-c", KILLED, str(path), str(stage)], timeout=DEADLINE_S, check=False
        ).returncode
        after = Journal(path)
        assert after.lines in (old, new[:5], new), stage
        found.append(after.lines)
        after.write("line", {"later": 1})
        after.close()
        assert Journal(path).lines == [*found[-1], {"what": "line", "later": 1}]
        assert [entry.name for entry in path.parent.iterdir()] == ["journal"]
        if code == 0:
            break
        assert code == 9 and stage < 60
    assert found[0] == old and found[-1] == new and stage > 8
    assert sorted(map(json.dumps, found), reverse=True) == list(map(json.dumps, found)), "never the old ones again"


def test_where_there_is_no_room_the_old_lines_are_added_to_and_it_is_tried_again_later(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, compact_bytes=2000)
    for number in range(100):
        journal.write("line", {"number": number})
    lines = [{"what": "line", "text": "x" * 40}] * 40
    with file_size_limit(500):
        assert not journal.compact(lambda: lines)
    assert not list(tmp_path.glob(".journal*"))
    journal.write("line", {"number": 100})
    assert not journal.compact(lambda: lines), "not at once again"
    assert [line["number"] for line in Journal(path).lines] == list(range(101))
    for number in range(101, 200):
        journal.write("line", {"number": number})
    assert journal.compact(lambda: lines) and Journal(path).lines == lines
    journal.close()
