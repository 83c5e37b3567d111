"""The coordinator of an elastic run: who takes part, what each round's mean is made of, who trains on what.

It holds no parameters and sees no part of a mean; what it says are a few short messages a round. It is a pure machine:
messages and times go in, messages come out, and what must survive it goes through a journal first. So every order of
messages can be tried without a network.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict

from thinwire.elastic.admin_commands import Counter
from thinwire.elastic.protocol import RUN_OVER, VERSION, Message, numbers, printable, rates_of, windows_of
from thinwire.elastic.roster import Member, Standing
from thinwire.elastic.round_decision import Vote
from thinwire.elastic.rounds import Decision
from thinwire.errors import PayloadError
from thinwire.events import FIRST_LAST_ROUND

PROGRESS_S = 1.0
# Of one replica, so many findings are written down, and so many shards are lent to it that no round has counted yet.
_MOST_NOTICES, _MOST_LENT = 100, 256
_MOST_OPEN, _MOST_MEMBERS = 256, 1024
# A replica is dropped with so many bad parts (NaN or infinity) in a row. One may be an accident on the way of one
# message or in one tensor. A second one means parameters that are not finite, and no later step makes those finite.
MOST_BAD_PARTS = 2


class Coordinator(Counter):
    """See the module; what it is made of is told by `Desk`."""

    def handle(self, token: bytes, message: Message, *, now_s: float) -> None:
        """Act on a checked message of a connection.

        Raises:
            PayloadError: What it says cannot be.
        """
        kind = message["kind"]
        if kind == "command":
            self._obey(token, verb=message["verb"], target=message["target"], now_s=now_s)
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
            self._remove(member, why=f"was silent for {silence_s:.1f} s", is_lost=True)
        self._call_spares(now_s)
        self._settle(now_s)
        if now_s >= self._next_progress_s:
            self._next_progress_s = now_s + PROGRESS_S
            if self.failure:
                self._tell_all("failed", {"why": self.failure})
            self._tell_progress()
            self._tell_pace()
            self._ask_again()

    # -- what replicas say

    def _join(self, token: bytes, member: Member | None, message: Message, *, now_s: float) -> None:
        if message["version"] != VERSION or message["thinwire"] != self._job.get("thinwire"):
            why = (
                f"the job runs thinwire {self._job.get('thinwire')} with protocol version {VERSION}, and this host "
                f"thinwire {printable(message['thinwire'], most=40)} with protocol version {message['version']}; "
                f"install the same thinwire on all hosts"
            )
            self._send(token, "refused", {"why": why})
            return
        if self.failure:
            self._send(token, "refused", {"why": self.failure})
            return
        if self.has_finished:
            self._send(token, "refused", {"why": RUN_OVER})
            return
        if member is None and len(self.roster) >= _MOST_MEMBERS:
            self._send(token, "refused", {"why": f"the job has {_MOST_MEMBERS} replicas, which is the most"})
            return
        if member is None:
            member = self.roster.add(token, host=printable(message["host"], most=200), now_s=now_s)
            self._write_member(member)
            self.spares.come(member.host)
            self._find(f"replica {member.replica} on {member.host} joins")
        welcome = {"replica": member.replica, "generation": self._generation, "job": self._job}
        self._send(token, "welcome", welcome)

    def _on_here(self, member: Member, message: Message, now_s: float) -> None:
        if member.standing is not Standing.ARRIVING:
            self._answer_again(member)
            return
        corpus = message["corpus"], message["windows"]
        if self._corpus is None:
            self._corpus = corpus
            self._record("corpus", {"corpus": corpus[0], "windows": corpus[1]})
        if corpus != self._corpus:
            self._send(member.token, "refused", {
                "why": "this host reads another corpus than the others; give it the same files (stdlib is another one "
                "for another version of Python)"
            })  # fmt: skip
            # a spare that cannot take the place leaves it to another one
            self._remove(member, why="reads another corpus", is_told=False, is_lost=self._was_called(member))
            return
        member.address, member.port = message["address"], message["port"]
        member.disk_step = message["disk"]
        member.own_step, member.own_era = message["held"], message["era"]
        member.standing = Standing.LOADING
        if self._may_go_on(message["held"], era=message["era"]):
            member.step = member.held_step = message["held"]  # from there on rounds are kept for it
        else:
            self.cuts.wait(member.replica)
        self._write_member(member)
        if self._first_s is None:
            self._first_s = now_s
        self._tell_roster()
        for decision in self.book.decisions.values():
            self._tell_decision(decision, to=member)
        if member.held_step:
            self._offer_from_nobody(member.replica, "own", step=member.held_step)

    def _answer_again(self, member: Member) -> None:
        """Say again what a replica still waits for that has said where it is: the first answer was lost on its way."""
        self._tell_roster(to=member)
        if member.standing is not Standing.LOADING:
            return
        cut = self.cuts.of(member.replica)
        if cut is not None:
            self._show(cut, to=(member.replica,))
        elif self._reviver == member.replica:
            self._offer_from_nobody(member.replica, "disk", step=self._resumed_step)
        elif member.held_step:
            self._offer_from_nobody(member.replica, "own", step=member.held_step)
        else:
            self.cuts.wait(member.replica)

    def _on_active(self, member: Member, message: Message, now_s: float) -> None:
        member.step = message["step"]
        self.cuts.loaded(member.replica)
        is_reviver = self._reviver == member.replica
        if is_reviver:
            self._reviver = None
            if not self._resumed_step:  # whose account was read with the checkpoint
                self.ledger.go_back_to(self._run_note(member.step)["data"] if member.step else None)
                self._lent.clear()
                self._record("ledger", self.ledger.state_dict())
            self._from_disk, self._resumed_step = False, 0
            self._forget_accounts()
            self.book.begin_anew(member.step)
            self._write_revived(member.step, is_begun=True)
        if member.standing is Standing.ACTIVE:
            self._tell_roster(to=member)
        if member.standing is Standing.LOADING:
            member.standing, member.begin_step = Standing.ACTIVE, message["step"]
            self.book.late.discard(member.replica)
            self._write_member(member)
            self._find(f"replica {member.replica} on {member.host} takes part from step {member.step}")
            self._tell_roster()
        if is_reviver:
            self._let_own_states_go_on()

    def _let_own_states_go_on(self) -> None:
        """Let those that wait go on from a state of their own: it is that from which the run has just begun again."""
        for replica in sorted(self.cuts.waiting):
            member = self.roster.get(replica)
            if member is not None and self._may_go_on(member.own_step, era=member.own_era):
                self.cuts.loaded(replica)
                member.step = member.held_step = member.own_step
                self._write_member(member)
                self._offer_from_nobody(replica, "own", step=member.held_step)

    def _on_beat(self, member: Member, message: Message, now_s: float) -> None:
        member.step = max(member.step, message["step"])
        member.step_s = float(message["step_s"])
        if message["roster"] != self._roster_number() and member.standing is not Standing.ARRIVING:
            self._tell_roster(to=member)  # the last one was lost on its way

    def _on_work(self, member: Member, message: Message, now_s: float) -> None:
        member.steps_per_interval, member.tokens_s = float(message["steps_per_interval"]), float(message["tokens_s"])
        member.loss = float(message["loss"])

    def _on_rates(self, member: Member, message: Message, now_s: float) -> None:
        rates, latest = rates_of(message["rates"]), rates_of(message["latest"])
        self.places.add_rates(member.replica, rates)
        self.detours.add_rates(member.replica, latest)

    def _on_launch(self, member: Member, message: Message, now_s: float) -> None:
        used = windows_of(message["used"])
        is_open = message["round"] in self.book.open_rounds
        if not is_open and len(self.book.open_rounds) >= _MOST_OPEN:
            raise PayloadError(f"a launch of round {message['round']}: at most {_MOST_OPEN} are open at a time")
        self.ledger.use(member.replica, used)
        member.step = max(member.step, message["step"])
        round_id, before = message["round"], self.book.step
        decision = self.book.launch(
            member.replica, round_id=round_id, launch_step=message["step"], now_s=now_s,
            ahead_s=self.roster.ahead_s(member),
        )  # fmt: skip
        if decision is None:
            self._used.setdefault(round_id, {})[member.replica] = used
            if self.book.step > before:  # those that are behind learn at once that they are
                self._tell_progress()
            called = self.book.open_rounds[round_id].called
            if called is not None:  # late, or the call was lost on its way
                self._send(member.token, "call", {"round": round_id, "members": list(called)})
        else:
            self._tell_decision(decision, to=member)

    def _on_withhold(self, member: Member, message: Message, now_s: float) -> None:
        round_id, used = message["round"], windows_of(message["used"])
        if round_id not in self.book.withheld and len(self.book.withheld) >= _MOST_OPEN:
            raise PayloadError(f"a part of round {round_id} withheld: at most {_MOST_OPEN} rounds are open at a time")
        self.ledger.use(member.replica, used)
        member.step = max(member.step, message["step"])
        decision = self.book.withhold(member.replica, round_id=round_id, parts=message["parts"])
        if decision is not None:
            self._tell_decision(decision, to=member)
            self._drop_where_bad(member.replica, message["parts"])

    def _on_reject(self, member: Member, message: Message, now_s: float) -> None:
        """Note that a replica found another one's parts bad; drop that one where most others say so, or itself."""
        bad = self.roster.get(message["member"])
        if bad is None or message["parts"] < MOST_BAD_PARTS or member.standing is not Standing.ACTIVE:
            return
        bad.rejected_by[member.replica] = message["since"]
        others = set(self.roster.active) - {bad.replica}
        reporters = others & set(bad.rejected_by)
        if member is bad or 2 * len(reporters) > len(others):
            since = statistics.median_low(bad.rejected_by[one] for one in reporters or {bad.replica})
            self._uncount(bad.replica, since=since)
            self._drop_where_bad(bad.replica, message["parts"])

    def _on_vote(self, member: Member, message: Message, now_s: float) -> None:
        has = numbers(message["has"], what="the parts that a replica holds")
        if any(one >= self.roster.next_replica for one in has):
            raise PayloadError(f"a vote of replica {member.replica} for parts of replicas that nobody has heard of")
        vote = Vote(has=frozenset(has), reference_hash=message["hash"])
        # where a slow one has gone ahead to, nobody has come yet
        step = 0 if self.roster.ahead_s(member) else message["step"]
        self.book.vote(member.replica, vote, round_id=message["round"], step=step, now_s=now_s)
        decision = self.book.decisions.get(message["round"])
        if decision is not None:
            self._tell_decision(decision, to=member)

    def _on_lease(self, member: Member, message: Message, now_s: float) -> None:
        number = message["number"]
        if number != self._lent.get(member.replica, (-1, None))[0]:  # else the answer was lost on its way
            if self.ledger.num_lent(member.replica) >= _MOST_LENT:
                raise PayloadError(f"replica {member.replica} asks for more shards than the {_MOST_LENT} at most")
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

    def _on_account(self, member: Member, message: Message, now_s: float) -> None:
        self._send(member.token, "account", {"step": message["step"], "note": self._run_note(message["step"])})

    def _on_missed(self, member: Member, message: Message, now_s: float) -> None:
        self.cuts.miss(message["step"], member.replica)

    def _on_lost(self, member: Member, message: Message, now_s: float) -> None:
        self.roster.suspect(message["replica"], now_s=now_s)

    def _on_stuck(self, member: Member, message: Message, now_s: float) -> None:
        why = printable(message["why"], most=300)
        self._expel(member.replica, why=f"could not get round {message['round']}: {why}")

    def _on_note(self, member: Member, message: Message, now_s: float) -> None:
        self._notices[member.replica] = self._notices.get(member.replica, 0) + 1
        if self._notices[member.replica] <= _MOST_NOTICES:
            self._find(f"replica {member.replica} on {member.host}: {printable(message['text'], most=400)}")

    def _on_records(self, member: Member, message: Message, now_s: float) -> None:
        if message["number"] > self._recorded.get(member.replica, -1):  # else the answer was lost on its way
            self._recorded[member.replica] = message["number"]
            self.keep_records(member.replica, message["text"])
        self._send(member.token, "recorded", {"number": self._recorded[member.replica]})

    def _on_done(self, member: Member, message: Message, now_s: float) -> None:
        if member.standing is not Standing.DONE:
            self._notes[member.replica] = message["note"]
            self._record("note", {"replica": member.replica, "note": message["note"]})
            member.standing = Standing.DONE
            self._write_member(member)
        if self._finish is not None:  # the word was lost on its way
            self._send(member.token, "finish", self._finish)

    def _on_leave(self, member: Member, message: Message, now_s: float) -> None:
        self._remove(member, why=printable(message["why"], most=300) or "left", is_told=False)

    # -- what follows

    def _settle(self, now_s: float) -> None:
        """Do all that has become possible."""
        if self.failure:
            return
        self._start_when_all_are_there(now_s)
        present = self.roster.present(now_s=now_s)
        for round_id, called in self.book.calls(present, step_s=self.roster.step_s(), now_s=now_s).items():
            self._tell_all("call", {"round": round_id, "members": list(called)})
        # who is in the middle of a longer step would not come while the others wait
        step_s = self.roster.step_s()
        near = self.roster.fresh_steps(now_s=now_s, within_s=self.book.grace_s(step_s=step_s))
        for decision in self.book.decided(present, steps=near, now_s=now_s, step_s=step_s):
            self._announce(decision)
            for replica, parts in self.book.take_withheld(decision.round_id).items():
                self._drop_where_bad(replica, parts)
        self._fail_where_none_is_finite()
        self._help_joiners(self.roster.active)
        self._finish_when_all_are_done(present)

    def _start_when_all_are_there(self, now_s: float) -> None:
        if self.has_started or self._first_s is None:
            return
        here = self.roster.with_standing(Standing.LOADING)
        if here and (len(here) >= self._planned or now_s > self._first_s + self._founding_s):
            self.has_started = True
            self._record("started", {})
            self._tell_roster()

    def _drop_where_bad(self, replica: int, parts: int) -> None:
        """Drop a replica whose parts are bad while others have finite ones; it comes back with their state.

        One that comes back and is bad again before any part of it has counted is the same episode: nothing new is
        found then.
        """
        member = self.roster.get(replica)
        if member is None or parts < MOST_BAD_PARTS:
            return
        is_again = not member.has_counted and member.host in self._bad_hosts
        self._bad_hosts.add(member.host)
        why = (
            f"was dropped: {parts} of its parts in a row hold NaN or infinity; what it trained on since its last "
            f"finite part is trained again, and it joins again with the state of the others"
        )
        self._remove(member, why=why, is_non_finite=True, is_found=not is_again)

    def _fail_where_none_is_finite(self) -> None:
        """End the run where no active replica has a finite part for a round: no replica holds a model to go on with."""
        active = self.roster.active
        round_id = next((one for one in self.book.withheld if self.book.is_hopeless(one, active)), None)
        if round_id is None or self.failure or self.roster.with_standing(Standing.DONE):
            return
        many = f"parts of all {len(active)} active replicas hold"
        self.failure = (
            f"round {round_id}: the {many if len(active) > 1 else 'part of the one active replica holds'} NaN or "
            f"infinity; the model has diverged: look at its loss, lower its learning rate or clip its gradients, and "
            f"resume from a checkpoint before that"
        )
        self._record("failed", {"why": self.failure})
        self._find(self.failure)
        self._tell_all("failed", {"why": self.failure})

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
                self._offer_from_nobody(joiner, "seed")
                self.cuts.loaded(joiner)
            return
        is_waited_for = self._reviver is not None and self.roster.get(self._reviver) is not None
        if is_waited_for or self.roster.with_standing(Standing.DONE):
            return
        disk_steps = {
            one: member.disk_step for one in self.cuts.waiting if (member := self.roster.get(one)) is not None
        }
        if self._resumed_step:  # the account of the data is that of this step: no other state goes with it
            disk_steps = {one: step for one, step in disk_steps.items() if step == self._resumed_step}
        if not disk_steps:
            return
        self._reviver = min(disk_steps, key=lambda one: (-disk_steps[one], one))
        self._find(f"no replica holds the state any more; replica {self._reviver} goes on from its last checkpoint")
        # what was decided after its checkpoint is not the past any more, for those that wait either
        self._from_disk = True
        self._era += 1
        self._kept_step = 0
        self.book.begin_anew(0)
        self._write_revived(0, is_begun=False)
        self._tell_all("anew", {})
        self._offer_from_nobody(self._reviver, "disk", step=self._resumed_step)

    def _announce(self, decision: Decision) -> None:
        found = self._used.pop(decision.round_id, {})
        used = {str(replica): found[replica] for replica in decision.members if replica in found}
        self._record("decision", {**asdict(decision), "used": used})
        self._remember(decision)
        self._count(used, round_id=decision.round_id)
        for gone in [one for one in decision.members if one not in found and self.roster.get(one) is None]:
            # its word was lost with an earlier process of the coordinator
            self._find(
                f"round {decision.round_id} counts a part of replica {gone}, which went before it was heard that "
                f"it had launched; what it trained on is trained again, and not counted as repeated"
            )
        for member in self.roster:
            if member.standing is not Standing.ARRIVING:
                self._tell_decision(decision, to=member)

    def _finish_when_all_are_done(self, present: tuple[int, ...]) -> None:
        done = self.roster.with_standing(Standing.DONE)
        # after another process of the coordinator heard them, they say it again
        has_notes = done and all(member.replica in self._notes for member in done)
        # the last word is spoken: who had no part in it, or is not there, would add nothing to it
        last = {one for number in self.book.decisions if number >= FIRST_LAST_ROUND for one in self._members(number)}
        if self._finish is None and has_notes and not (last or {*self.roster.active}) & set(present):
            notes = [self._notes[member.replica] for member in done]
            self._finish = {"writer": done[0].replica, "notes": notes, "note": self._run_note()}
            self._record("finished", {})
            self.has_finished = True
            self._tell_all("finish", self._finish)
        if self.has_finished:
            for late in self.roster.with_standing(Standing.ARRIVING, Standing.LOADING, Standing.ACTIVE):
                self._expel(late.replica, why=RUN_OVER)

    def _members(self, round_id: int) -> tuple[int, ...]:
        return self.book.decisions[round_id].members

    def _expel(self, replica: int, *, why: str) -> None:
        member = self.roster.get(replica)
        if member is not None:
            self._remove(member, why=why, is_lost=why != RUN_OVER)

    def _remove(
        self, member: Member, *, why: str, is_told: bool = True, is_lost: bool = False, is_non_finite: bool = False,
        is_found: bool = True,
    ) -> None:  # fmt: skip
        if is_told:
            self._send(member.token, "expelled", {"why": why, "is_non_finite": is_non_finite})
        if is_lost and member.standing is not Standing.DONE:
            self.spares.lose(member.replica, member.host, now_s=member.heard_s)
        self.roster.remove(member.replica)
        self.book.forget(member.replica)
        self.book.drop_empty()
        self.cuts.forget(member.replica)
        self.ledger.release(member.replica)
        self._lent.pop(member.replica, None)
        self._notes.pop(member.replica, None)
        self._notices.pop(member.replica, None)
        self._written.pop(member.replica, None)
        self.places.forget(member.replica)
        self.detours.forget(member.replica)
        self._used = {number: used for number, used in self._used.items() if number in self.book.open_rounds}
        self._record("gone", {"replica": member.replica})
        self._record("ledger", self.ledger.state_dict())
        goes_on = "" if self.has_finished else "; the others go on without it"
        what = "came too late to take part" if why == RUN_OVER else why
        if is_found:
            self._find(f"replica {member.replica} on {member.host} {what}{goes_on}")
        self._tell_roster()
