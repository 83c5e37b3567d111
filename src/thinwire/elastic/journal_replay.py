"""Replay of the coordinator's journal after a restart, and the lines that a compacted journal keeps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from thinwire.elastic.coordinator_state import MOST_FINDINGS, Desk
from thinwire.elastic.roster import MemberState, RosterMember
from thinwire.elastic.rounds import Decision

# Replicas that went, in a compacted journal: the latest ones.
_MOST_GONE = 1000


class Memory(Desk):
    """A desk that remembers; see `Desk`."""

    def resume_from(self, lines: list[dict[str, Any]], *, now_s: float) -> None:
        """Take back what an earlier process of the coordinator wrote down."""
        for line in lines:
            self._replay(dict(line), now_s=now_s)
        for member in self.roster.in_state(MemberState.LOADING):
            self._first_s = now_s
            if not member.held_step:
                self.cuts.wait(member.replica)
        for replica in self.ledger.borrowers():  # killed after it wrote that one is gone, and before what that one had
            if self.roster.get(replica) is None:
                self.ledger.release(replica)

    def snapshot(self) -> list[dict[str, Any]]:
        """Return journal lines whose replay gives the same as that of all lines written so far.

        Call it between two messages: within one, lines may have been written whose effect is yet to come.
        """
        lines: list[dict[str, Any]] = [{"what": "numbers", "next_replica": self.roster.next_replica}]
        # post-mortem diagnosis reads from the journal which replicas have gone
        numbers = range(max(0, self.roster.next_replica - _MOST_GONE), self.roster.next_replica)
        lines += [{"what": "gone", "replica": one} for one in numbers if self.roster.get(one) is None]
        if self._revived is not None:  # before the decisions, since it forgets all of them
            lines.append({"what": "revived", **self._revived})
        if self._corpus is not None:
            lines.append({"what": "corpus", "corpus": self._corpus[0], "windows": self._corpus[1]})
        lines += [{"what": "started"}] if self.has_started else []
        for member in self.roster:
            if member.replica in self._written:
                own = self._written[member.replica]
                lines.append({"what": "member", **own, "has_counted": member.has_counted})
            if member.replica in self._notes:
                lines.append({"what": "note", "replica": member.replica, "note": self._notes[member.replica]})
        lines.append({"what": "gaps", "gaps": self.spares.told()})
        # what the decisions counted is in the ledger already
        lines.append({"what": "ledger", **self.ledger.state_dict()})
        lines.append({"what": "undo", "rounds": self.ledger.undo_state()})
        lines += [{"what": "decision", **asdict(decision)} for decision in self.book.decisions.values()]
        # after the decisions, each of which adds one: the account of the data before it was counted
        lines.append({"what": "accounts", "accounts": [list(account) for account in self._accounts]})
        lines += [{"what": "finding", "text": text} for text in self.findings]
        lines += [{"what": "failed", "why": self.failure}] if self.failure else []
        lines += [{"what": "finished"}] if self.has_finished else []
        return lines

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
                self._written.pop(line["replica"], None)
                self._notes.pop(line["replica"], None)
                self.ledger.forget_undo(line["replica"])  # what it was lent, the next line about the ledger says
            case "gaps":
                self.spares.load(line["gaps"], now_s=now_s)
            case "ledger":
                self.ledger.load_state_dict(line)
            case "accounts":
                self._accounts = deque((applied, round_id, data) for applied, round_id, data in line["accounts"])
            case "undo":
                self.ledger.load_undo_state(line["rounds"])
            case _:
                self._replay_word(what, line)

    def _replay_member(self, line: dict[str, Any], *, now_s: float) -> None:
        before = self.roster.get(line["replica"])
        has_counted = line.pop("has_counted", False) or (before is not None and before.has_counted)
        self._written[line["replica"]] = line
        self.roster.put(RosterMember(
            replica=line["replica"], token=bytes.fromhex(line["token"]), host=line["host"], heard_s=now_s,
            address=line["address"], port=line["port"], state=MemberState(line["standing"]), step=line["step"],
            is_awaited=True, held_step=line.get("held_step", 0),
            begin_step=line.get("begin_step", 0), disk_step=line.get("disk_step", 0), has_counted=has_counted,
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
                # the lines of earlier processes do not say which era they begin
                self._era = line.get("era", self._era + (not line["is_begun"]))
                self._revived = {"step": line["step"], "is_begun": line["is_begun"], "era": self._era}
            case "corpus":
                self._corpus = line["corpus"], line["windows"]
            case "note":
                self._notes[line["replica"]] = line["note"]
            case "finding":
                self.findings.append(line["text"])
                del self.findings[:-MOST_FINDINGS]

    def _count(self, used: Mapping[str, Mapping[Any, int]], *, round_id: int) -> None:
        for replica, windows in used.items():
            shards = {int(shard): window for shard, window in windows.items()}
            self.ledger.count(int(replica), shards, round_id=round_id)
            if (member := self.roster.get(int(replica))) is not None:
                member.has_counted = True
