"""Coordinator of an elastic run: decides membership, rounds and data leases.

It holds no parameters and sees no part of a mean; it sends a few short messages a round. It is a pure state machine:
messages and times go in, messages come out, and what must survive a crash is written to a journal first. So every
order of messages can be tested without a network.

What happens when a replica

- joins: `_join` gives it a number; `_on_ready` finds it a state, its own or a snapshot; `_on_active` lets it take part.
- is silent or dies: `tick` removes it after a limit; its data leases return, and rounds go on without it.
- does no step, though it beats: `tick` removes it once it is too far behind to follow, and it joins again.
- sends bad parts, as with NaN: `_drop_bad_replica` removes it, and it joins again with the state of the others.
- was the last one: `_restart_from_checkpoint` lets a joining replica load its checkpoint.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar

from thinwire.elastic.admin_commands import AdminCommands, Send
from thinwire.elastic.coordinator_state import CoordinatorConfig, CoordinatorState
from thinwire.elastic.one_time_invitations import NO_INVITATION, check_verb
from thinwire.elastic.part_disputes import PartReport
from thinwire.elastic.protocol import (
    PART_FAULTS,
    RELATIVE_FAULTS,
    RUN_OVER,
    VERSION,
    Message,
    PartFault,
    printable,
)
from thinwire.elastic.roster import SUSPECT_SILENCE_S, MemberState, RosterMember
from thinwire.elastic.rounds import Decision, Vote
from thinwire.elastic.snapshots import StateSnapshot
from thinwire.errors import PayloadError
from thinwire.events import FIRST_LAST_ROUND
from thinwire.roles import ROLES, unknown_role
from thinwire.transport.secret import Secret

PROGRESS_S = 1.0
# Findings written down of one replica, and leases to it that no round has counted yet.
_MAX_NOTICES, _MAX_LEASED = 100, 256
_MAX_OPEN_ROUNDS, _MAX_OPEN_ALONE, _MAX_MEMBERS = 256, 128, 1024
# Replicas from one IP address, behind which may be a whole site.
_MAX_PER_ADDRESS = 64
# Sites and detours follow measured rates, which may go up and down for days.
_MAX_SITE_FINDINGS, _MAX_DETOUR_FINDINGS = 20, 100
# Decided rounds without a report of a replica's bad parts after which the next one is a new finding.
_EPISODE_ROUNDS = 32
# A replica is dropped with so many bad parts in a row. One may be an accident on the way of one message or in one
# tensor. A second one means parameters or code that are not right, and no later step makes those right.
MOST_BAD_PARTS = 2
# Members of which no majority tells which one is wrong.
_LEAST_MEMBERS = 2

Record = Callable[[str, dict[str, Any]], None]
_Caller = tuple[bytes, RosterMember | None, str, int]  # token, IP address, and number of the proven invitation
_Handler = Callable[["Coordinator", RosterMember, Message, float], None]


def _discard(replica: int, text: str) -> None:
    """Discard records: a coordinator without a folder, which can be copied."""


class Coordinator:
    """The state machine.

    Args:
        config: Constants of the run.
        send: Sends a message to a connection.
        record: Writes a line to the journal, before anything that depends on it is sent.
        generation: Names this process of the coordinator.
        keep_records: Takes lines that a replica recorded.
        clock: Returns the time of day, which others compare with theirs.
        secret: The job's, which who joins by an invitation is sent.

    Attributes:
        state: All that it knows.
        admin: Commands of users and launchers.
    """

    def __init__(
        self, config: CoordinatorConfig, *, send: Send, record: Record, generation: str,
        keep_records: Callable[[int, str], None] = _discard, clock: Callable[[], float] = time.time,
        secret: Secret | None = None,
    ) -> None:  # fmt: skip
        self.state = CoordinatorState(config=config)
        self.admin = AdminCommands(self.state, send=send, expel=self.expel, report=self.report, clock=clock)
        self._config = config
        self._send = send
        self._record = record
        self._generation = generation
        self._keep_records = keep_records
        self._secret = secret
        self._next_progress_s = 0.0

    def handle(
        self, token: bytes, message: Message, *, now_s: float, origin: str = "", invitation: int = NO_INVITATION,
        is_own_host: bool = True,
    ) -> None:  # fmt: skip
        """Act on a validated message of a connection.

        Args:
            token: The connection.
            message: The message.
            now_s: The time.
            origin: IP address from which the connection comes; empty where it is not known.
            invitation: Number of the invitation that it has proven, 0 for the job's secret.
            is_own_host: Whether it comes from the coordinator's own host.

        Raises:
            PayloadError: It contradicts the state, or exceeds a limit.
        """
        kind = message["kind"]
        if kind == "command":
            check_verb(invitation, message["verb"])
            self.admin.handle(token, verb=message["verb"], target=message["target"], now_s=now_s)
            return
        member = self.state.roster.by_token(token)
        if kind == "join":
            caller = token, member, origin, invitation
            why_not = "" if member else self._invitation_refusal(caller, now_s=now_s, is_own_host=is_own_host)
            if why_not is not None:  # else it asks again in a second
                self._join(caller, message, now_s=now_s, why_not=why_not)
            return
        if member is None:
            self._send(token, "unknown", {"generation": self._generation})
            return
        member.origin = origin
        self.state.roster.hear(member, now_s=now_s, is_beat=kind == "beat")
        self._HANDLERS[kind](self, member, message, now_s)
        self._advance(now_s)

    def tick(self, now_s: float) -> None:
        """Do what is due by time alone."""
        state = self.state
        for member in state.roster.silent(now_s=now_s):
            self._remove(member, why=f"was silent for {now_s - member.heard_s:.1f} s", is_lost=True)
        for member in state.stalled(now_s=now_s):
            behind = state.steps_behind(member)
            why = (
                f"did no step for {now_s - member.moved_s:.1f} s and is {behind} steps behind, where the others keep "
                f"{state.most_steps_behind}; it joins again with their state"
            )
            self._remove(member, why=why, is_lost=True)
        self.admin.call_due_standby_hosts(now_s=now_s)
        if (vacancies := state.standby_hosts.take_change()) is not None:
            self._record("vacancies", {"vacancies": vacancies})
        self._advance(now_s)
        if now_s >= self._next_progress_s:
            self._next_progress_s = now_s + PROGRESS_S
            # any of these may have been lost on its way, so each is repeated until it is answered
            if state.failure:
                self._send_all("failed", {"why": state.failure})
            self._send_progress()
            self.send_pace()
            self._repeat_snapshots()

    def replay(self, lines: list[dict[str, Any]], *, now_s: float) -> None:
        """Rebuild the state from the journal of an earlier process of the coordinator."""
        self.state.replay(lines, now_s=now_s)

    def report(self, text: str) -> None:
        """Add a finding."""
        self.state.findings.append(text)
        self._record("finding", {"text": text})

    def expel(self, replica: int, why: str) -> None:
        """Remove a replica, if it is there."""
        if (member := self.state.roster.get(replica)) is not None:
            self._remove(member, why=why, is_lost=why != RUN_OVER)

    # -- joining

    def _invitation_refusal(self, caller: _Caller, *, now_s: float, is_own_host: bool) -> str | None:
        """Return why a caller is not admitted, None to wait; a silent replica of its invitation makes room."""
        state, (token, _, origin, invitation) = self.state, caller
        if not self._config.is_invite_only:
            return ""
        held = [member for member in state.roster if invitation != NO_INVITATION and member.invitation == invitation]
        silent = [member for member in held if now_s - member.heard_s > SUSPECT_SILENCE_S and member.origin == origin]
        heard_s = max((member.heard_s for member in held if member not in silent), default=None)
        refusal = state.used_invitations.refusal(
            token, invitation, origin, is_own_host=is_own_host, heard_s=heard_s, now_s=now_s
        )
        for member in silent if refusal == "" else ():
            self._remove(member, why="has fallen silent, and its invitation's holder joins again")
        return refusal

    def _join(self, caller: _Caller, message: Message, *, now_s: float, why_not: str) -> None:
        token, member, origin, invitation = caller
        state, job, role = self.state, self._config.job, message.get("role", ROLES[0])
        refusal, why_not = "", why_not or unknown_role(role)
        if message["version"] != VERSION or message["thinwire"] != job.get("thinwire"):
            refusal = (
                f"the job runs thinwire {job.get('thinwire')} with protocol version {VERSION}, and this host "
                f"thinwire {printable(message['thinwire'], most=40)} with protocol version {message['version']}; "
                f"install the same thinwire on all hosts"
            )
        elif state.failure or state.has_finished:
            refusal = state.failure or RUN_OVER
        elif why_not:
            refusal = why_not
        elif member is None and len(state.roster) >= _MAX_MEMBERS:
            refusal = f"the job has {_MAX_MEMBERS} replicas, which is the most"
        elif member is None and origin and sum(one.origin == origin for one in state.roster) >= _MAX_PER_ADDRESS:
            refusal = (
                f"{_MAX_PER_ADDRESS} replicas take part from the address {origin}, which is the most; join from "
                f"another address"
            )
        if refusal:
            self._send(token, "refused", {"why": refusal})
            host = printable(message["host"], most=200)
            # repeated until it is answered, and every replica of the host asks
            if refusal != RUN_OVER and (host, refusal) not in state.refused and len(state.refused) < _MAX_NOTICES:
                state.refused.add((host, refusal))
                self.report(f"a replica of {host} was refused: {refusal}")
            return
        state.has_been_left = False
        if member is None:
            member = state.roster.add(token, host=printable(message["host"], most=200), now_s=now_s, role=role)
            member.origin, member.invitation = origin, invitation
            if state.used_invitations.take(invitation, origin):
                self._record("invitation", {"invitation": invitation, "origin": origin})
            # in the journal before the welcome: a number must never be given twice
            self._record("member", state.member_line(member))
            state.standby_hosts.joined(member.host)
            self.report(f"replica {member.replica} on {member.host} joins")
        # a repeated join gets the same number again: the first welcome was lost
        secret = self._secret.key.hex() if invitation != NO_INVITATION and self._secret is not None else ""
        welcome = {"replica": member.replica, "generation": self._generation, "job": dict(job), "secret": secret}
        self._send(token, "welcome", welcome)

    def _on_ready(self, member: RosterMember, message: Message, now_s: float) -> None:
        state = self.state
        if member.state is not MemberState.ARRIVING:
            self._repeat_answer(member)
            return
        corpus = message["corpus"], message["windows"]
        if state.corpus is None:
            state.corpus = corpus
            self._record("corpus", {"corpus": corpus[0], "windows": corpus[1]})
        if corpus != state.corpus:
            self._send(member.token, "refused", {
                "why": "this host reads another corpus than the others; give it the same files (stdlib is another one "
                "for another version of Python)"
            })  # fmt: skip
            # a standby host that cannot take the place leaves it to another one
            was_called = any(one["host"] == member.host for one in state.replaced)
            self._remove(member, why="reads another corpus", is_told=False, is_lost=was_called)
            return
        member.address, member.port = message["address"], message["port"]
        member.disk_step, member.first_values = message["disk"], message["first_values"]
        member.own_step, member.own_era = message["held"], message["era"]
        member.state = MemberState.LOADING
        if state.can_resume(member.own_step, era=member.own_era):
            # its step bounds the floor: the rounds after it are kept until it has caught up
            member.step = member.held_step = member.own_step
        else:
            state.snapshots.waiting.add(member.replica)
        self._record("member", state.member_line(member))
        if state.first_s is None:
            state.first_s = now_s
        self._send_roster()
        for decision in state.rounds.decisions.values():
            self._send_decision(decision, to=member)
        if member.held_step:
            self._offer_unshown(member.replica, "own", step=member.held_step)

    def _repeat_answer(self, member: RosterMember) -> None:
        """Repeat what a replica still waits for that is ready: the first answer was lost on its way."""
        state = self.state
        self._send_roster(to=member)
        if member.state is not MemberState.LOADING:
            return
        snapshot = state.snapshots.of(member.replica)
        if snapshot is not None:
            self._offer(snapshot, to=(member.replica,))
        elif state.reviver == member.replica:
            self._offer_unshown(member.replica, "disk", step=state.resumed_step)
        elif member.held_step:
            self._offer_unshown(member.replica, "own", step=member.held_step)
        else:
            state.snapshots.waiting.add(member.replica)

    def _on_active(self, member: RosterMember, message: Message, now_s: float) -> None:
        state = self.state
        is_reviver = state.reviver == member.replica
        if member.state is MemberState.LOADING:
            most = max(state.furthest_step(now_s=now_s), state.most_step(member, now_s=now_s))
            if not is_reviver and message["step"] > most:
                raise PayloadError(f"a state of step {message['step']}, where the run has reached {most:.0f} at most")
            member.step, member.moved_s = message["step"], now_s
        state.snapshots.loaded(member.replica)
        if is_reviver:
            self._begin_from_checkpoint(member.step)
        if member.state is MemberState.ACTIVE:
            self._send_roster(to=member)
        if member.state is MemberState.LOADING:
            member.state, member.begin_step = MemberState.ACTIVE, member.step
            state.rounds.late.discard(member.replica)
            self._record("member", state.member_line(member))
            self.report(f"replica {member.replica} on {member.host} takes part from step {member.step}")
            self._send_roster()
        if is_reviver:
            # others may hold a state of their own of the checkpoint's era: they need no snapshot
            for replica in sorted(state.snapshots.waiting):
                other = state.roster.get(replica)
                if other is not None and state.can_resume(other.own_step, era=other.own_era):
                    state.snapshots.loaded(replica)
                    other.step = other.held_step = other.own_step
                    self._record("member", state.member_line(other))
                    self._offer_unshown(replica, "own", step=other.held_step)

    def _begin_from_checkpoint(self, step: int) -> None:
        """Begin again at the step of the checkpoint that a replica has loaded."""
        state = self.state
        state.reviver = None
        if not state.resumed_step:  # else the data account was read with the checkpoint
            state.leases.go_back_to(state.note_for_state(step)["data"] if step else None)
            state.leased.clear()
            self._record("leases", state.leases.state_dict())
        state.is_from_disk, state.resumed_step = False, 0
        state.accounts.clear()
        self._restart_rounds(step, is_begun=True)

    def _restart_rounds(self, step: int, *, is_begun: bool) -> None:
        state = self.state
        state.rounds.restart(step)
        state.restart = {"step": step, "is_begun": is_begun, "era": state.era}
        self._record("revived", state.restart)

    # -- reports of replicas

    def _on_heartbeat(self, member: RosterMember, message: Message, now_s: float) -> None:
        self.state.roster.reach(member, message["step"], now_s=now_s)
        member.step_s, member.relayed = message["step_s"], message["relayed"]
        if message["roster"] != self.state.roster_number and member.state is not MemberState.ARRIVING:
            self._send_roster(to=member)  # the last one was lost on its way

    def _on_work(self, member: RosterMember, message: Message, now_s: float) -> None:
        # the run's loss is weighted by them
        member.tokens_s = min(message["tokens_s"], self.state.most_tokens_s(member, now_s=now_s))
        member.steps_per_interval, member.loss = message["steps_per_interval"], message["loss"]

    def _on_rates(self, member: RosterMember, message: Message, now_s: float) -> None:
        self.state.sites.add_rates(member.replica, message["rates"])
        self.state.detours.add_rates(member.replica, message["latest"], probes=message["probes"])

    def _on_connection_lost(self, member: RosterMember, message: Message, now_s: float) -> None:
        self.state.roster.suspect(message["replica"], by=member.replica, now_s=now_s)

    def _on_stuck(self, member: RosterMember, message: Message, now_s: float) -> None:
        why = printable(message["why"], most=300)
        self.expel(member.replica, f"could not get round {message['round']}: {why}")

    def _on_note(self, member: RosterMember, message: Message, now_s: float) -> None:
        num_notices = self.state.num_notices.get(member.replica, 0) + 1
        self.state.num_notices[member.replica] = num_notices
        about = message["about"]
        if num_notices <= _MAX_NOTICES and (not about or about not in self.state.noted):
            self.state.noted += [about] if about else []
            self.report(f"replica {member.replica} on {member.host}: {printable(message['text'], most=400)}")

    def _on_records(self, member: RosterMember, message: Message, now_s: float) -> None:
        recorded = self.state.recorded
        if message["number"] > recorded.get(member.replica, -1):  # else the answer was lost on its way
            recorded[member.replica] = message["number"]
            self._keep_records(member.replica, message["text"])
        self._send(member.token, "recorded", {"number": recorded[member.replica]})

    def _on_leave(self, member: RosterMember, message: Message, now_s: float) -> None:
        why = printable(message["why"], most=300) or "left"
        self._remove(member, why=why, is_told=False)
        is_well = why in ("left", "has come to the end") or "was told to leave" in why
        self.state.has_been_left = is_well and not len(self.state.roster)

    # -- rounds

    def _on_launch(self, member: RosterMember, message: Message, now_s: float) -> None:
        state, round_id = self.state, message["round"]
        if round_id not in state.rounds.open_rounds and len(state.rounds.open_rounds) >= _MAX_OPEN_ROUNDS:
            raise PayloadError(f"a launch of round {round_id}: at most {_MAX_OPEN_ROUNDS} are open at a time")
        if round_id not in state.rounds.open_rounds and state.rounds.num_alone(member.replica) >= _MAX_OPEN_ALONE:
            raise PayloadError(f"a launch of round {round_id}: at most {_MAX_OPEN_ALONE} are open of one replica alone")
        self._reach(member, message, now_s=now_s)
        before = state.rounds.step
        lead_s = state.roster.lead_s(member, message["step"], now_s=now_s, grace_steps=state.rounds.grace_steps)
        decision = state.rounds.launch(
            member.replica, round_id=round_id, launch_step=message["step"], now_s=now_s,
            ahead_s=state.roster.ahead_s(member), lead_s=lead_s,
        )  # fmt: skip
        if decision is not None:
            self._send_decision(decision, to=member)
            return
        # counted with the decision, and only if this part is in the mean
        state.used.setdefault(round_id, {})[member.replica] = message["used"]
        if state.rounds.step > before:  # replicas that are behind learn at once that they are
            self._send_progress()
        called = state.rounds.open_rounds[round_id].called
        if called is not None:  # late, or the call was lost on its way
            self._send(member.token, "call", {"round": round_id, "members": list(called)})

    def _reach(self, member: RosterMember, message: Message, *, now_s: float) -> None:
        """Note the step and the used data of a round, and refuse a step that a replica cannot have reached.

        One that can launches the round again soon.
        """
        state, step = self.state, message["step"]
        if step > (most := state.most_step(member, now_s=now_s)):
            raise PayloadError(
                f"round {message['round']} of replica {member.replica} at step {step}, where it can have reached "
                f"{most:.0f} at most"
            )
        state.leases.use(member.replica, message["used"])
        state.roster.reach(member, step, now_s=now_s)

    def _on_withhold(self, member: RosterMember, message: Message, now_s: float) -> None:
        state, round_id = self.state, message["round"]
        if round_id not in state.rounds.withheld and len(state.rounds.withheld) >= _MAX_OPEN_ROUNDS:
            raise PayloadError(
                f"a part of round {round_id} withheld: at most {_MAX_OPEN_ROUNDS} rounds are open at a time"
            )
        self._reach(member, message, now_s=now_s)
        decision = state.rounds.withhold(member.replica, round_id=round_id, parts=message["parts"])
        if decision is not None:
            self._send_decision(decision, to=member)
            self._drop_bad_replica(member.replica, message["parts"])

    def _on_reject(self, member: RosterMember, message: Message, now_s: float) -> None:
        """Drop a replica that found its own parts bad; let the others check what it says of another one's."""
        state, bad = self.state, self.state.roster.get(message["member"])
        if bad is None or member.state is not MemberState.ACTIVE:
            return
        report = PartReport(
            verdict="bad", sha256=message["sha256"], since=message["since"], num_parts=message["parts"],
            fault=message["fault"], why=printable(message["why"], most=200),
        )  # fmt: skip
        are_two = len(state.roster.active) == _LEAST_MEMBERS
        if report.fault != "non_finite" or (are_two and member is not bad):
            # one finding an episode: observers differ in its first round, and good parts may lie between
            before, bad.named_at = bad.named_at, state.rounds.num_decided
            if before is None or bad.named_at - before > _EPISODE_ROUNDS:
                of = f"replica {bad.replica} on {bad.host}"
                text = report.left_out_text(message["round"], of=of, are_two=are_two)
                self._on_note(member, {"text": text, "about": ""}, now_s)
        if report.num_parts < MOST_BAD_PARTS:
            return
        if member is bad:
            if report.fault not in RELATIVE_FAULTS:
                self._drop_for_parts(bad, report, since=report.since)
            return
        decision = state.rounds.decisions.get(message["round"])
        is_new = state.disputes.accuse(
            member.replica, report, round_id=message["round"], member=bad.replica, now_s=now_s,
            is_counted=decision is not None and bad.replica in decision.members,
        )  # fmt: skip
        for replica in set(state.roster.active) - {member.replica} if is_new else ():
            self._send_to(replica, "verify", {"round": message["round"], "member": bad.replica})

    def _on_verdict(self, member: RosterMember, message: Message, now_s: float) -> None:
        report = PartReport(verdict=message["verdict"], sha256=message["sha256"])
        self.state.disputes.answer(member.replica, report, round_id=message["round"], member=message["member"])

    def _settle_disputes(self, now_s: float) -> None:
        state = self.state
        for one in state.disputes.settle(state.roster.active, now_s=now_s):
            bad = state.roster.get(one.dispute.member)
            if one.is_bad and bad is not None:
                since = statistics.median_low(report.since for report in one.dispute.accusers.values())
                self._drop_for_parts(bad, next(iter(one.dispute.accusers.values())), since=since)
            for replica in one.liars:
                if (liar := state.roster.get(replica)) is not None:
                    fault = PART_FAULTS[one.dispute.accusers[replica].fault]
                    self._remove(liar, why=(
                        f"was dropped: it reported that parts of replica {one.dispute.member} {fault}, and most others "
                        f"hold the same bytes of round {one.dispute.round_id} and find them sound; it joins again with "
                        f"the state of the others"
                    ))  # fmt: skip

    def _drop_for_parts(self, bad: RosterMember, report: PartReport, *, since: int) -> None:
        if self.state.uncount(bad.replica, since=since):
            self._record("accounts", {"accounts": [list(account) for account in self.state.accounts]})
        self._drop_bad_replica(bad.replica, report.num_parts, fault=report.fault, why=report.why)

    def _on_vote(self, member: RosterMember, message: Message, now_s: float) -> None:
        state = self.state
        if any(one >= state.roster.next_replica for one in message["has"]):
            raise PayloadError(f"a vote of replica {member.replica} for parts of unknown replicas")
        vote = Vote(has=frozenset(message["has"]), reference_hash=message["hash"])
        most = min(state.most_step(member, now_s=now_s), message["step"])
        # a slow replica launches ahead of the others: its step does not say where they are
        step = 0 if state.roster.ahead_s(member) else int(most)
        state.rounds.vote(member.replica, vote, round_id=message["round"], step=step, now_s=now_s)
        decision = state.rounds.decisions.get(message["round"])
        if decision is not None:
            self._send_decision(decision, to=member)

    def _announce(self, decision: Decision) -> None:
        state = self.state
        found = state.used.pop(decision.round_id, {})
        used = {str(replica): found[replica] for replica in decision.members if replica in found}
        self._record("decision", {**asdict(decision), "used": used})
        state.count(used, decision)
        for gone in [one for one in decision.members if one not in found and state.roster.get(one) is None]:
            # its launch was received by an earlier process of the coordinator
            self.report(
                f"round {decision.round_id} counts a part of replica {gone}, which went before it was heard that "
                f"it had launched; what it trained on is trained again, and not counted as repeated"
            )
        for member in state.roster:
            if member.state is not MemberState.ARRIVING:
                self._send_decision(decision, to=member)

    # -- data, snapshots, end

    def _on_lease(self, member: RosterMember, message: Message, now_s: float) -> None:
        state, number = self.state, message["number"]
        if number != state.leased.get(member.replica, (-1, None))[0]:  # else the answer was lost on its way
            if state.leases.num_lent(member.replica) >= _MAX_LEASED:
                raise PayloadError(f"replica {member.replica} asks for more shards than the {_MAX_LEASED} at most")
            state.leased[member.replica] = number, state.leases.lend(member.replica)
            # before the answer: a shard must never be leased to two replicas
            self._record("leases", state.leases.state_dict())
        lease = state.leased[member.replica][1]
        self._send(member.token, "leased", {"number": number, "shard": lease.shard, "start": lease.start})

    def _on_captured(self, member: RosterMember, message: Message, now_s: float) -> None:
        snapshot = self.state.snapshots.hold(
            message["step"], member.replica, root=message["root"], num_bytes=message["bytes"]
        )
        # the hash of the state proves that replicas agree bit for bit
        if snapshot.is_sure(num_active=len(self.state.roster.active)) and len(snapshot.holders) > 1:
            for replica in snapshot.odd():
                self.expel(replica, f"holds other global parameters than the others at step {snapshot.step}")
        self._offer(snapshot, to=(member.replica, *snapshot.joiners))

    def _on_missed(self, member: RosterMember, message: Message, now_s: float) -> None:
        self.state.snapshots.miss(message["step"], member.replica)

    def _on_account(self, member: RosterMember, message: Message, now_s: float) -> None:
        note = self.state.note_for_state(message["step"])
        self._send(member.token, "account", {"step": message["step"], "note": note})

    def _on_done(self, member: RosterMember, message: Message, now_s: float) -> None:
        state = self.state
        if member.state is not MemberState.DONE:
            state.notes[member.replica] = message["note"]
            self._record("note", {"replica": member.replica, "note": message["note"]})
            member.state = MemberState.DONE
            self._record("member", state.member_line(member))
        if state.finish is not None:  # it was lost on its way
            self._send(member.token, "finish", state.finish)

    _HANDLERS: ClassVar[Mapping[str, _Handler]] = {
        "here": _on_ready, "active": _on_active, "beat": _on_heartbeat, "work": _on_work, "rates": _on_rates,
        "launch": _on_launch, "withhold": _on_withhold, "reject": _on_reject, "verdict": _on_verdict, "vote": _on_vote,
        "lease": _on_lease, "captured": _on_captured, "account": _on_account, "missed": _on_missed,
        "lost": _on_connection_lost, "stuck": _on_stuck, "note": _on_note, "records": _on_records, "done": _on_done,
        "leave": _on_leave,
    }  # fmt: skip

    # -- consequences

    def _advance(self, now_s: float) -> None:
        """Do all that has become possible."""
        state = self.state
        if state.failure:
            return
        self._start_when_ready(now_s)
        present, step_s = state.roster.present(now_s=now_s), state.roster.step_s()
        for round_id, called in state.rounds.calls(present, step_s=step_s, now_s=now_s).items():
            self._send_all("call", {"round": round_id, "members": list(called)})
        # a replica in the middle of a longer step would not come while the others wait
        near = state.roster.fresh_steps(now_s=now_s, within_s=state.rounds.grace_s(step_s=step_s))
        for decision in state.rounds.decided(present, steps=near, now_s=now_s, step_s=step_s):
            self._announce(decision)
            for replica, parts in state.rounds.take_withheld(decision.round_id).items():
                self._drop_bad_replica(replica, parts)
        self._settle_disputes(now_s)
        self._fail_if_diverged()
        self._schedule_snapshots(state.roster.active)
        self._finish_when_done(present)

    def _start_when_ready(self, now_s: float) -> None:
        state, config = self.state, self._config
        if state.has_started or state.first_s is None:
            return
        ready = state.roster.in_state(MemberState.LOADING)
        if ready and (len(ready) >= config.initial_replicas or now_s > state.first_s + config.start_timeout_s):
            state.has_started = True
            self._record("started", {})
            self._send_roster()

    def _drop_bad_replica(self, replica: int, parts: int, *, fault: PartFault = "non_finite", why: str = "") -> None:
        """Remove a replica whose parts are bad while others have good ones; it comes back with their state."""
        state, member = self.state, self.state.roster.get(replica)
        if member is None or parts < MOST_BAD_PARTS:
            return
        # bad again before any part of it has counted: the same episode, which is reported once
        is_again = not member.has_counted and member.host in state.hosts_with_bad_parts
        state.hosts_with_bad_parts.add(member.host)
        why = (
            f"was dropped: {parts} of its parts in a row {PART_FAULTS[fault]}{f' ({why})' if why else ''}; what it "
            f"trained on since its last good part is trained again, and it joins again with the state of the others"
        )
        self._remove(member, why=why, has_bad_parts=True, is_reported=not is_again)

    def _fail_if_diverged(self) -> None:
        """End the run where no active replica has a finite part for a round: no model is left to go on with."""
        state, active = self.state, self.state.roster.active
        round_id = next((one for one in state.rounds.withheld if state.rounds.is_hopeless(one, active)), None)
        if round_id is None or state.failure or state.roster.in_state(MemberState.DONE):
            return
        many = f"parts of all {len(active)} active replicas hold"
        state.failure = (
            f"round {round_id}: the {many if len(active) > 1 else 'part of the one active replica holds'} NaN or "
            f"infinity; the model has diverged: look at its loss, lower its learning rate or clip its gradients, and "
            f"resume from a checkpoint before that"
        )
        self._record("failed", {"why": state.failure})
        self.report(state.failure)
        self._send_all("failed", {"why": state.failure})

    def _schedule_snapshots(self, active: tuple[int, ...]) -> None:
        """Have active replicas keep their state of a step ahead for those that join."""
        state = self.state
        if not state.has_started or state.has_finished or not state.snapshots.waiting:
            return
        if not active:
            self._restart_from_checkpoint()
            return
        snapshot = state.snapshots.schedule(active=active, step=state.furthest_step(), step_s=state.roster.step_s())
        if snapshot is not None and snapshot.step > 0:
            for replica in active:
                self._send_to(replica, "capture", {"step": snapshot.step})

    def _repeat_snapshots(self) -> None:
        """Repeat to those that have not answered which state is to be kept, and what there is to fetch."""
        for snapshot in self.state.snapshots.wanted():
            snapshot.num_repeats += bool(snapshot.holders)
            for replica in set(snapshot.asked) - set(snapshot.holders) - snapshot.missed:
                self._send_to(replica, "capture", {"step": snapshot.step})
            self._offer(snapshot, to=tuple(snapshot.joiners))

    def _restart_from_checkpoint(self) -> None:
        """Begin with no active replica: from the seed before any training, else from the newest checkpoint on disk."""
        state = self.state
        if not state.is_from_disk and not state.rounds.decisions and state.rounds.step == 0:
            self._begin_from_first_values()
            return
        is_loading = state.reviver is not None and state.roster.get(state.reviver) is not None
        if is_loading or state.roster.in_state(MemberState.DONE):
            return
        waiting = [member for member in state.roster if member.replica in state.snapshots.waiting]
        if state.resumed_step:  # the data account is that of this step: no other state goes with it
            waiting = [member for member in waiting if member.disk_step == state.resumed_step]
        if not waiting:
            return
        reviver = state.reviver = min(waiting, key=lambda one: (-one.disk_step, one.replica)).replica
        self.report(f"no replica holds the state any more; replica {reviver} goes on from its last checkpoint")
        # rounds decided after its checkpoint are void; a new era refuses states that hold them
        state.is_from_disk = True
        state.era += 1
        state.kept_step = 0
        self._restart_rounds(0, is_begun=False)
        self._send_all("anew", {})
        self._offer_unshown(reviver, "disk", step=state.resumed_step)

    def _begin_from_first_values(self) -> None:
        """Let those begin whose models hold the same first values; the others wait for a state of these."""
        state = self.state
        if all(member.first_values != state.first_values for member in state.roster):  # none holds them any more
            first = state.roster.get(min(state.snapshots.waiting))
            state.first_values = "" if first is None else first.first_values
            if state.first_values:
                self._record("first_values", {"first_values": state.first_values})
        for joiner in sorted(state.snapshots.waiting):
            member = state.roster.get(joiner)
            if member is not None and member.first_values == state.first_values:
                self._offer_unshown(joiner, "seed")
                state.snapshots.loaded(joiner)

    def _finish_when_done(self, present: tuple[int, ...]) -> None:
        state = self.state
        done = state.roster.in_state(MemberState.DONE)
        # notes to an earlier process of the coordinator are sent again
        has_notes = done and all(member.replica in state.notes for member in done)
        # after the last round is decided, a replica without a part in it, or that is not present, adds nothing
        rounds = state.rounds.decisions
        last = {one for round_id in rounds if round_id >= FIRST_LAST_ROUND for one in rounds[round_id].members}
        if state.finish is None and has_notes and not (last or {*state.roster.active}) & set(present):
            notes = [state.notes[member.replica] for member in done]
            state.finish = {"writer": done[0].replica, "notes": notes, "note": state.note_for_state()}
            self._record("finished", {})
            state.has_finished = True
            self._send_all("finish", state.finish)
        if state.has_finished:
            for late in state.roster.in_state(MemberState.ARRIVING, MemberState.LOADING, MemberState.ACTIVE):
                self.expel(late.replica, RUN_OVER)

    def _remove(
        self, member: RosterMember, *, why: str, is_told: bool = True, is_lost: bool = False,
        has_bad_parts: bool = False, is_reported: bool = True,
    ) -> None:  # fmt: skip
        """Remove a replica; where it is lost, a standby host may take its place."""
        state = self.state
        if is_told:
            self._send(member.token, "expelled", {"why": why, "has_bad_parts": has_bad_parts})
        if is_lost and member.state is not MemberState.DONE:
            state.standby_hosts.lost(member.replica, member.host, now_s=member.heard_s)
        state.forget(member)
        self._record("gone", {"replica": member.replica})
        self._record("leases", state.leases.state_dict())
        if is_reported:
            what = "came too late to take part" if why == RUN_OVER else why
            goes_on = "" if state.has_finished else "; the others go on without it"
            self.report(f"replica {member.replica} on {member.host} {what}{goes_on}")
        self._send_roster()

    # -- messages to replicas

    def _send_to(self, replica: int, kind: str, fields: dict[str, Any]) -> None:
        if (member := self.state.roster.get(replica)) is not None:
            self._send(member.token, kind, fields)

    def _send_all(self, kind: str, fields: dict[str, Any]) -> None:
        for member in self.state.roster:
            self._send(member.token, kind, fields)

    def _send_roster(self, *, to: RosterMember | None = None) -> None:
        state = self.state
        members = [member.describe() for member in state.roster if member.state is not MemberState.ARRIVING]
        fields = {"members": members, "started": state.has_started, "number": state.roster_number}
        for member in state.roster if to is None else (to,):
            self._send(member.token, "roster", fields)

    def _send_decision(self, decision: Decision, *, to: RosterMember) -> None:
        self._send(to.token, "decision", {
            "round": decision.round_id, "launch_step": decision.launch_step, "members": list(decision.members),
            "holders": list(decision.holders), "step": decision.step, "closed": self.state.rounds.closed_step,
        })  # fmt: skip

    def _send_progress(self) -> None:
        state = self.state
        self._send_all("progress", {
            "step": state.rounds.step, "closed": state.rounds.closed_step, "floor": state.floor_step(),
            "kept": state.keep_from(), "generation": self._generation,
        })  # fmt: skip

    def send_pace(self) -> None:
        """Send step time, sites and detours to all, and report those that have changed."""
        state = self.state
        active = state.roster.active
        for text in state.detours.update(active, num_rounds=state.rounds.num_decided):
            if state.detours.num_changes <= _MAX_DETOUR_FINDINGS:
                self.report(text)
        is_new = state.sites.update(active, ways=state.detours.ways())
        sites, detours = state.sites.sites, [one.to_list() for one in state.detours.detours]
        if is_new and state.sites.num_changes <= _MAX_SITE_FINDINGS:
            named = "; ".join(", ".join(map(str, site)) for site in sites)
            self.report(f"sites by measured rates: {f'replicas {named}' if sites else 'none any more'}")
        fields = {"step_s": state.roster.step_s(), "sites": [list(site) for site in sites], "detours": detours}
        self._send_all("pace", fields)

    def _offer(self, snapshot: StateSnapshot, *, to: tuple[int, ...]) -> None:
        if snapshot.agreed is None:
            return
        # whoever holds it waits for the note alone
        is_sure = snapshot.is_sure(num_active=len(self.state.roster.active))
        root, num_bytes = snapshot.agreed
        fields = {
            "step": snapshot.step, "root": root, "bytes": num_bytes, "holders": list(snapshot.agreeing()),
            "note": self.state.note_for_state(snapshot.step), "era": self.state.era,
        }  # fmt: skip
        for replica in to if is_sure else set(to) & set(snapshot.holders):
            self._send_to(replica, "state", fields)

    def _offer_unshown(self, replica: int, root: str, *, step: int = 0) -> None:
        """Offer a state that no replica shows: the seed's, that on the replica's disk, or that which it holds."""
        fields = {"step": step, "root": root, "bytes": 0, "holders": [], "note": {}, "era": self.state.era}
        self._send_to(replica, "state", fields)
