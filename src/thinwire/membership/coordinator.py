"""The coordinator of an elastic run: who takes part, what each round's mean is made of, who trains on what.

It holds no parameters and sees no part of a mean; what it says is a few hundred bytes a round. It is a pure machine:
messages and times go in, messages come out, and what must survive it goes through a journal first. So every order of
messages can be tried without a network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from thinwire.errors import PayloadError
from thinwire.membership.cuts import Cut, Cuts
from thinwire.membership.decide import Vote
from thinwire.membership.protocol import RUN_OVER, VERSION, Message, numbers, windows_of
from thinwire.membership.roster import Member, Roster, Standing
from thinwire.membership.rounds import Decision, RoundBook
from thinwire.membership.shards import Lease, Ledger

PROGRESS_S = 1.0
Send = Callable[[bytes, str, dict[str, Any]], None]
Record = Callable[[str, dict[str, Any]], None]


class Coordinator:
    """See the module.

    Args:
        job: What a replica must know to take part: `config` and numbers, as JSON values.
        planned: So many replicas begin together.
        sync_interval: H, inner steps.
        overlap_steps: tau, inner steps.
        shard_windows: Windows of the data that a replica is lent at a time.
        send: Sends a message to a connection.
        record: Writes what must survive to the journal, before anything is sent.
        generation: Names this process of the coordinator.
        founding_s: For how long those that are late are waited for at the beginning.
        from_disk: Whether the run goes on from a checkpoint.
    """

    def __init__(
        self, *, job: Mapping[str, Any], planned: int, sync_interval: int, overlap_steps: int, shard_windows: int,
        send: Send, record: Record, generation: str, founding_s: float = 60.0, from_disk: bool = False,
    ) -> None:  # fmt: skip
        self.roster = Roster()
        self.book = RoundBook(sync_interval=sync_interval, overlap_steps=overlap_steps)
        self.ledger = Ledger(shard_windows=shard_windows)
        self.cuts = Cuts()
        self.has_started = False
        self.has_finished = False
        self.is_paused = False
        self.findings: list[str] = []
        self._job = dict(job)
        self._planned = planned
        self._send = send
        self._record = record
        self._generation = generation
        self._founding_s = founding_s
        self._first_s: float | None = None
        self._from_disk = from_disk
        self._reviver: int | None = None
        self._corpus: tuple[str, int] | None = None
        self._used: dict[int, dict[int, dict[int, int]]] = {}
        self._notes: dict[int, dict[str, Any]] = {}
        self._finish: dict[str, Any] | None = None
        self._next_progress_s = 0.0
        self._lent: dict[int, tuple[int, Lease]] = {}

    def handle(self, token: bytes, message: Message, *, now_s: float) -> None:
        """Act on a checked message of a connection.

        Raises:
            PayloadError: What it says cannot be.
        """
        kind = message["kind"]
        if kind == "command":
            self._obey(token, verb=message["verb"], target=message["target"])
            return
        member = self.roster.by_token(token)
        if kind == "join":
            self._join(token, member, message, now_s=now_s)
            return
        if member is None:
            self._send(token, "unknown", {"generation": self._generation})
            return
        self.roster.hear(member, now_s=now_s, is_beat=kind == "beat")
        getattr(self, f"_on_{kind}")(member, message, now_s)
        self._settle(now_s)

    def tick(self, now_s: float) -> None:
        """Do what time alone makes due."""
        for member in self.roster.silent(now_s=now_s):
            silence_s = now_s - member.heard_s
            self._remove(member, why=f"was silent for {silence_s:.1f} s")
        self._settle(now_s)
        if now_s >= self._next_progress_s:
            self._next_progress_s = now_s + PROGRESS_S
            self._tell_progress()
            self._ask_again()

    def resume_from(self, lines: list[dict[str, Any]], *, now_s: float) -> None:
        """Take back what an earlier process of the coordinator wrote down."""
        for line in lines:
            self._replay(dict(line), now_s=now_s)
        for member in self.roster.with_standing(Standing.LOADING):
            self._first_s = now_s
            self.cuts.wait(member.replica)

    def status(self) -> dict[str, Any]:
        """Return what people are shown."""
        return {
            "step": self.book.step, "started": self.has_started, "paused": self.is_paused,
            "rounds": len(self.book.decisions), "members": [member.describe() for member in self.roster],
            "data": {key: value for key, value in self.ledger.state_dict().items() if isinstance(value, int)},
            "findings": self.findings[-20:], "grace_s": round(self.book.grace_s(step_s=self.roster.step_s()), 3),
            "vote_s": round(self.book.vote_s, 3), "silence_s": round(self.roster.silence_s, 3),
        }  # fmt: skip

    # -- what replicas say

    def _join(self, token: bytes, member: Member | None, message: Message, *, now_s: float) -> None:
        if message["version"] != VERSION or message["thinwire"] != self._job.get("thinwire"):
            why = (
                f"the job runs thinwire {self._job.get('thinwire')} and this host {message['thinwire'][:40]}; "
                f"install the same version"
            )
            self._send(token, "refused", {"why": why})
            return
        if self.has_finished:
            self._send(token, "refused", {"why": RUN_OVER})
            return
        if member is None:
            member = self.roster.add(token, host=message["host"][:200], now_s=now_s)
            self._write_member(member)
            self._find(f"replica {member.replica} on {member.host} joins")
        welcome = {"replica": member.replica, "generation": self._generation, "job": self._job}
        self._send(token, "welcome", welcome)

    def _on_here(self, member: Member, message: Message, now_s: float) -> None:
        corpus = message["corpus"], message["windows"]
        if self._corpus is None:
            self._corpus = corpus
        if corpus != self._corpus:
            self._send(member.token, "refused", {
                "why": "this host reads another corpus than the others; give it the same files (stdlib is another one "
                "for another version of Python)"
            })  # fmt: skip
            self._remove(member, why="reads another corpus", is_told=False)
            return
        member.address, member.port = message["address"], message["port"]
        if member.standing is Standing.ARRIVING:
            member.standing = Standing.LOADING
            self.cuts.wait(member.replica)
        self._write_member(member)
        if self._first_s is None:
            self._first_s = now_s
        self._tell_roster()
        for decision in self.book.decisions.values():
            self._tell_decision(decision, to=member)

    def _on_active(self, member: Member, message: Message, now_s: float) -> None:
        member.step = message["step"]
        self.cuts.loaded(member.replica)
        if self._reviver == member.replica:
            self._reviver = None
            self._from_disk = False
            self.book.decisions.clear()
            self.book.step = member.step
            self._record("revived", {"step": member.step})
        if member.standing is Standing.LOADING:
            member.standing = Standing.ACTIVE
            self.book.late.discard(member.replica)
            self._write_member(member)
            self._find(f"replica {member.replica} on {member.host} takes part from step {member.step}")
            self._tell_roster()

    def _on_beat(self, member: Member, message: Message, now_s: float) -> None:
        member.step = max(member.step, message["step"])
        member.step_s = float(message["step_s"])
        if message["roster"] != self._roster_number() and member.standing is not Standing.ARRIVING:
            self._tell_roster(to=member)  # the last one was lost on its way

    def _on_launch(self, member: Member, message: Message, now_s: float) -> None:
        used = windows_of(message["used"])
        self.ledger.use(member.replica, used)
        member.step = max(member.step, message["step"])
        round_id, before = message["round"], self.book.step
        decision = self.book.launch(member.replica, round_id=round_id, launch_step=message["step"], now_s=now_s)
        if decision is None:
            self._used.setdefault(round_id, {})[member.replica] = used
            called = self.book.open_rounds[round_id].called
            if called is not None:  # the call was lost on its way, or it comes late
                self._send(member.token, "call", {"round": round_id, "members": list(called)})
            if self.book.step > before:  # those that are behind learn at once that they are
                self._tell_progress()
        else:
            self._tell_decision(decision, to=member)

    def _on_vote(self, member: Member, message: Message, now_s: float) -> None:
        has = numbers(message["has"], what="the parts that a replica holds")
        vote = Vote(has=frozenset(has), reference_hash=message["hash"])
        self.book.vote(member.replica, vote, round_id=message["round"], step=message["step"], now_s=now_s)
        decision = self.book.decisions.get(message["round"])
        if decision is not None:
            self._tell_decision(decision, to=member)

    def _on_lease(self, member: Member, message: Message, now_s: float) -> None:
        number = message["number"]
        if number != self._lent.get(member.replica, (-1, None))[0]:  # else the answer was lost on its way
            self._lent[member.replica] = number, self.ledger.lend(member.replica)
            self._record("ledger", self.ledger.state_dict())
        lease = self._lent[member.replica][1]
        self._send(member.token, "leased", {"number": number, "shard": lease.shard, "start": lease.start})

    def _on_captured(self, member: Member, message: Message, now_s: float) -> None:
        cut = self.cuts.hold(message["step"], member.replica, root=message["root"], num_bytes=message["bytes"])
        if cut.agreed is not None and len(cut.holders) > 1:
            for replica in cut.odd():
                self._expel(replica, why=f"holds other global parameters than the others at step {cut.step}")
        self._show(cut, to=(member.replica, *cut.joiners))

    def _on_missed(self, member: Member, message: Message, now_s: float) -> None:
        self.cuts.miss(message["step"], member.replica)

    def _on_lost(self, member: Member, message: Message, now_s: float) -> None:
        self.roster.suspect(message["replica"], now_s=now_s)

    def _on_stuck(self, member: Member, message: Message, now_s: float) -> None:
        self._expel(member.replica, why=f"could not get round {message['round']}: {message['why'][:300]}")

    def _on_note(self, member: Member, message: Message, now_s: float) -> None:
        self._find(f"replica {member.replica} on {member.host}: {message['text'][:400]}")

    def _on_done(self, member: Member, message: Message, now_s: float) -> None:
        self._notes[member.replica] = message["note"]
        if self._finish is not None:
            self._send(member.token, "finish", self._finish)
        member.standing = Standing.DONE
        self._write_member(member)

    def _on_leave(self, member: Member, message: Message, now_s: float) -> None:
        self._remove(member, why=message["why"][:300] or "left", is_told=False)

    # -- what follows

    def _settle(self, now_s: float) -> None:
        """Do all that has become possible."""
        self._start_when_all_are_there(now_s)
        active = self.roster.active
        for round_id, called in self.book.calls(active, step_s=self.roster.step_s(), now_s=now_s).items():
            self._tell_all("call", {"round": round_id, "members": list(called)})
        for decision in self.book.decided(active, steps=self.roster.fresh_steps(now_s=now_s), now_s=now_s):
            self._announce(decision)
        self._help_joiners(active)
        self._finish_when_all_are_done()

    def _start_when_all_are_there(self, now_s: float) -> None:
        if self.has_started or self._first_s is None:
            return
        here = self.roster.with_standing(Standing.LOADING)
        if here and (len(here) >= self._planned or now_s > self._first_s + self._founding_s):
            self.has_started = True
            self._record("started", {})
            self._tell_roster()

    def _help_joiners(self, active: tuple[int, ...]) -> None:
        if not self.has_started or self.has_finished or not self.cuts.waiting:
            return
        if not active:
            self._begin_anew()
            return
        cut = self.cuts.schedule(active=active, step=self._furthest_step(), step_s=self.roster.step_s())
        if cut is not None and cut.step > 0:
            for replica in active:
                self._tell(replica, "capture", {"step": cut.step})

    def _ask_again(self) -> None:
        """Say again to those that have not answered which state is to be kept, and what there is to fetch."""
        for cut in self.cuts.wanted():
            for replica in set(cut.asked) - set(cut.holders) - cut.missed:
                self._tell(replica, "capture", {"step": cut.step})
            self._show(cut, to=tuple(cut.joiners))

    def _begin_anew(self) -> None:
        """Let those begin that wait: from the seed where nothing has been trained yet, else one from its disk."""
        if not self._from_disk and not self.book.decisions and self.book.step == 0:
            for joiner in self.cuts.waiting:
                self._tell(joiner, "state", {"step": 0, "root": "seed", "bytes": 0, "holders": [], "note": {}})
                self.cuts.loaded(joiner)
            return
        is_waited_for = self._reviver is not None and self.roster.get(self._reviver) is not None
        if is_waited_for or self.roster.with_standing(Standing.DONE):
            return
        self._reviver = min(self.cuts.waiting)
        self._find(f"no replica holds the state any more; replica {self._reviver} goes on from its last checkpoint")
        self._tell(self._reviver, "state", {"step": 0, "root": "disk", "bytes": 0, "holders": [], "note": {}})

    def _announce(self, decision: Decision) -> None:
        used = self._used.pop(decision.round_id, {})
        for replica in decision.members:
            if replica in used:
                self.ledger.count(replica, used[replica])
        self._record("decision", asdict(decision))
        for member in self.roster:
            if member.standing is not Standing.ARRIVING:
                self._tell_decision(decision, to=member)

    def _furthest_step(self) -> int:
        return max([self.book.step, *(member.step for member in self.roster)])

    def _floor(self) -> int:
        """Return a step up to which nobody needs rounds any more, nor states from before it."""
        steps = [member.step for member in self.roster.with_standing(Standing.ACTIVE)]
        # what they fetch is of this step, also where another process of the coordinator told them of it
        steps += [member.step for member in self.roster.with_standing(Standing.LOADING) if member.step]
        needed = self.cuts.needed_step()
        return max(0, min([*steps, *([] if needed is None else [needed])], default=0) - 1)

    def _finish_when_all_are_done(self) -> None:
        done = self.roster.with_standing(Standing.DONE)
        # after another process of the coordinator heard them, they say it again
        has_notes = done and all(member.replica in self._notes for member in done)
        if self._finish is None and has_notes and not self.roster.with_standing(Standing.ACTIVE):
            notes = [self._notes[member.replica] for member in done]
            self._finish = {"writer": done[0].replica, "notes": notes, "note": self._run_note()}
            self._record("finished", {})
            self.has_finished = True
            self._tell_all("finish", self._finish)
        if self.has_finished:
            for late in self.roster.with_standing(Standing.ARRIVING, Standing.LOADING):
                self._expel(late.replica, why=RUN_OVER)

    def _run_note(self) -> dict[str, Any]:
        return {"data": self.ledger.state_dict(), "next_replica": self.roster.next_replica}

    def _show(self, cut: Cut, *, to: tuple[int, ...]) -> None:
        agreed = cut.agreed
        if agreed is None:
            return
        state = {
            "step": cut.step, "root": agreed[0], "bytes": agreed[1], "holders": list(cut.agreeing()),
            "note": self._run_note(),
        }  # fmt: skip
        for replica in to:
            self._tell(replica, "state", state)

    def _expel(self, replica: int, *, why: str) -> None:
        member = self.roster.get(replica)
        if member is not None:
            self._remove(member, why=why)

    def _remove(self, member: Member, *, why: str, is_told: bool = True) -> None:
        if is_told:
            self._send(member.token, "expelled", {"why": why})
        self.roster.remove(member.replica)
        self.book.forget(member.replica)
        self.book.drop_empty()
        self.cuts.forget(member.replica)
        self.ledger.release(member.replica)
        self._lent.pop(member.replica, None)
        self._record("gone", {"replica": member.replica})
        self._record("ledger", self.ledger.state_dict())
        goes_on = "" if self.has_finished else "; the others go on without it"
        what = "came too late to take part" if why == RUN_OVER else why
        self._find(f"replica {member.replica} on {member.host} {what}{goes_on}")
        self._tell_roster()

    def _find(self, text: str) -> None:
        self.findings.append(text)
        del self.findings[:-1000]
        self._record("finding", {"text": text})

    # -- what people say

    def _obey(self, token: bytes, *, verb: str, target: str) -> None:
        verbs = {"status": self._do_status, "pause": self._do_pause, "resume": self._do_resume, "leave": self._do_leave}
        if verb not in verbs:
            raise PayloadError(f"there is no command {verb[:40]!r}")
        is_done, text = verbs[verb](target)
        self._send(token, "answer", {"ok": is_done, "text": text, "status": self.status()})

    def _do_status(self, target: str) -> tuple[bool, str]:
        return True, ""

    def _do_pause(self, target: str) -> tuple[bool, str]:
        return self._set_paused(target, is_paused=True)

    def _do_resume(self, target: str) -> tuple[bool, str]:
        return self._set_paused(target, is_paused=False)

    def _set_paused(self, target: str, *, is_paused: bool) -> tuple[bool, str]:
        found = self._named(target)
        if not found:
            return False, self._nobody(target)
        for member in found:
            member.is_paused = is_paused
            self._send(member.token, "pause", {"paused": is_paused})
        self.is_paused = all(member.is_paused for member in self.roster)
        return True, self._told("paused" if is_paused else "goes on", found)

    def _do_leave(self, target: str) -> tuple[bool, str]:
        found = self._named(target) if target else []
        if not found:
            return False, self._nobody(target)
        for member in found:
            self._send(member.token, "leave", {"why": "was told to leave"})
        return True, self._told("was told to leave", found)

    def _named(self, target: str) -> list[Member]:
        """Return the replicas of a number or a host; all where nothing is named."""
        return [member for member in self.roster if target in ("", str(member.replica), member.host)]

    def _nobody(self, target: str) -> str:
        there = ", ".join(f"{member.replica} ({member.host})" for member in self.roster) or "none"
        return f"there is no replica or host {target[:80]!r}; there are: {there}"

    def _told(self, what: str, found: list[Member]) -> str:
        return "; ".join(f"replica {member.replica} on {member.host} {what}" for member in found)

    # -- words to replicas

    def _tell(self, replica: int, kind: str, fields: dict[str, Any]) -> None:
        member = self.roster.get(replica)
        if member is not None:
            self._send(member.token, kind, fields)

    def _tell_all(self, kind: str, fields: dict[str, Any]) -> None:
        for member in self.roster:
            self._send(member.token, kind, fields)

    def _tell_roster(self, *, to: Member | None = None) -> None:
        there = [member.describe() for member in self.roster if member.standing is not Standing.ARRIVING]
        fields = {"members": there, "started": self.has_started, "number": self._roster_number()}
        for member in self.roster if to is None else (to,):
            self._send(member.token, "roster", fields)

    def _roster_number(self) -> int:
        return 2 * self.roster.number + self.has_started

    def _tell_decision(self, decision: Decision, *, to: Member) -> None:
        fields = {
            "round": decision.round_id, "launch_step": decision.launch_step, "members": list(decision.members),
            "holders": list(decision.holders), "step": decision.step, "closed": self.book.closed_step,
        }  # fmt: skip
        self._send(to.token, "decision", fields)

    def _tell_progress(self) -> None:
        fields = {
            "step": self.book.step, "closed": self.book.closed_step, "floor": self._floor(),
            "generation": self._generation,
        }  # fmt: skip
        self._tell_all("progress", fields)

    # -- the journal

    def _write_member(self, member: Member) -> None:
        self._record("member", {**member.describe(), "token": member.token.hex()})

    def _replay(self, line: dict[str, Any], *, now_s: float) -> None:
        kind = line.pop("what")
        if kind == "decision":
            members, holders = tuple(line.pop("members")), tuple(line.pop("holders"))
            self.book.adopt(Decision(members=members, holders=holders, **line))
        elif kind == "member":
            self.roster.put(Member(
                replica=line["replica"], token=bytes.fromhex(line["token"]), host=line["host"], heard_s=now_s,
                address=line["address"], port=line["port"], standing=Standing(line["standing"]), step=line["step"],
                is_awaited=True,
            ))  # fmt: skip
        elif kind == "gone":
            self.roster.remove(line["replica"])
        elif kind == "ledger":
            self.ledger.load_state_dict(line)
        elif kind == "started":
            self.has_started = True
        elif kind == "finished":
            self.has_finished = True
        elif kind == "revived":
            self.book.decisions.clear()
            self.book.step = line["step"]
        elif kind == "finding":
            self.findings.append(line["text"])
