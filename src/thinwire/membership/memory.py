"""What a coordinator takes back that an earlier process of it wrote down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.membership.desk import Desk
from thinwire.membership.roster import Member, Standing
from thinwire.membership.rounds import Decision


class Memory(Desk):
    """A desk that remembers; see `Desk`."""

    def resume_from(self, lines: list[dict[str, Any]], *, now_s: float) -> None:
        """Take back what an earlier process of the coordinator wrote down."""
        for line in lines:
            self._replay(dict(line), now_s=now_s)
        for member in self.roster.with_standing(Standing.LOADING):
            self._first_s = now_s
            if not member.held_step:
                self.cuts.wait(member.replica)
        for replica in self.ledger.borrowers():  # killed after it wrote that one is gone, and before what that one had
            if self.roster.get(replica) is None:
                self.ledger.release(replica)

    def _replay(self, line: dict[str, Any], *, now_s: float) -> None:
        what = line.pop("what")
        match what:
            case "decision":
                members, holders = tuple(line.pop("members")), tuple(line.pop("holders"))
                used = line.pop("used", {})
                decision = Decision(members=members, holders=holders, **line)
                self._remember(decision)
                self.book.adopt(decision)
                self._count(used, round_id=decision.round_id)
            case "member":
                self._replay_member(line, now_s=now_s)
            case "gone":
                self.roster.remove(line["replica"])
            case "gaps":
                self.spares.load(line["gaps"], now_s=now_s)
            case "ledger":
                self.ledger.load_state_dict(line)
            case _:
                self._replay_word(what, line)

    def _replay_member(self, line: dict[str, Any], *, now_s: float) -> None:
        self.roster.put(Member(
            replica=line["replica"], token=bytes.fromhex(line["token"]), host=line["host"], heard_s=now_s,
            address=line["address"], port=line["port"], standing=Standing(line["standing"]), step=line["step"],
            is_awaited=True, held_step=line.get("held_step", 0),
            begin_step=line.get("begin_step", 0), disk_step=line.get("disk_step", 0),
        ))  # fmt: skip

    def _replay_word(self, what: str, line: Mapping[str, Any]) -> None:
        match what:
            case "numbers":
                self.roster.next_replica = line["next_replica"]
            case "started":
                self.has_started = True
            case "finished":
                self.has_finished = True
            case "failed":
                self.failure = line["why"]
            case "revived":
                self.book.begin_anew(line["step"])
                self._forget_accounts()
                self._from_disk = not line["is_begun"]
                self._resumed_step = 0 if line["is_begun"] else self._resumed_step
                self._era += not line["is_begun"]
            case "corpus":
                self._corpus = line["corpus"], line["windows"]
            case "note":
                self._notes[line["replica"]] = line["note"]
            case "finding":
                self.findings.append(line["text"])

    def _count(self, used: Mapping[str, Mapping[Any, int]], *, round_id: int) -> None:
        for replica, windows in used.items():
            shards = {int(shard): window for shard, window in windows.items()}
            self.ledger.count(int(replica), shards, round_id=round_id)
            if (member := self.roster.get(int(replica))) is not None:
                member.has_counted = True
