"""Driver of one elastic round at one replica: offers its part, gathers the others, votes, and applies the decision.

The blob of a part is a header of 16 bytes (hash of the global value it refers to, zeros, round) and the part. Each
replica that holds a blob offers it too, so that it survives its sender. `RoundStateMachine` decides the next action.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from thinwire.elastic.coordinator_session import CoordinatorSession
from thinwire.elastic.protocol import PartFault
from thinwire.elastic.rounds import Decision
from thinwire.elastic.routing import probed_sources, relays, site_of, slow_sources
from thinwire.errors import Expelled, PayloadError, TransportError
from thinwire.events import FIRST_LAST_ROUND
from thinwire.transport.base import Received
from thinwire.transport.blob_store import BlobFetch, BlobStore

# Seconds until a replica that could not deliver a part is asked again.
_AGAIN_S = 0.2
# Seconds without any part after which a replica gives up a decided round, at least.
_LEAST_FETCH_S = 60.0
# Factor on the time limit while this replica's own link is busy: a second copy of a part would share that link.
_BUSY_TIMES = 8.0
# Parts of later rounds are requested once earlier ones miss fewer than this. A thin link then carries first what is
# applied first, and is never idle between two rounds.
_PARTS_AHEAD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPart:
    """Action: request a part from a replica; earlier requests for it continue."""

    source: int
    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CastVote:
    """Action: report the parts that are here."""

    has: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Action: leave, because no replica delivers a part of the mean."""

    member: int
    sources: tuple[int, ...]


Action = RequestPart | CastVote | GiveUp


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundInputs:
    """Inputs of one transition: the coordinator's messages, members, and measured limits."""

    called: tuple[int, ...] | None  # replicas called to gather the round's parts, None before the call
    decision: Decision | None  # the coordinator's decision, None before
    active: Collection[int]  # replicas that take part in rounds
    neighbours: Collection[int]  # all connected replicas
    limit_s: float  # time limit of a part, seconds
    silent: Collection[int] = ()  # replicas from which no byte has arrived for a while
    # replica to ask first for a part of another one, where the link to its origin is slow
    relays: Mapping[int, int] = field(default_factory=dict)
    relay_limit_s: float = 0.0  # seconds from the call until the origin is asked instead of the relay
    near: Collection[int] = ()  # replicas of the same site; asked first for parts that many hold
    slow: Collection[int] = ()  # replicas with a slow link to this one; asked last
    slack_s: float = 0.0  # seconds after the call before any replica needs the result
    is_busy: bool = False  # whether this replica's link is busy, so that a late part is not its source's fault
    ahead: int = 0  # missing parts of earlier decided rounds, which come first


class RoundStateMachine:
    """One replica's state in one round.

    Args:
        replica: Number of this replica.
        has_part: Whether it offers a part of its own; otherwise it only waits for the decision.

    Attributes:
        called_s: Time at which the call was seen, None before.
        has_voted: Whether this replica has voted and only waits for the decision.

    Example:
        >>> machine = RoundStateMachine(replica=0, has_part=True)
        >>> words = dict(decision=None, active=(0, 1), neighbours=(0, 1), limit_s=2.0)
        >>> machine.advance(RoundInputs(called=None, **words), now_s=0.0)
        [RequestPart(source=1, member=1)]
        >>> machine.on_part(1)
        >>> machine.advance(RoundInputs(called=(0, 1), **words), now_s=0.1)
        [CastVote(has=(0, 1))]
    """

    def __init__(self, *, replica: int, has_part: bool) -> None:
        self._replica = replica
        self._has = {replica} if has_part else set[int]()
        self._asked: dict[int, dict[int, float]] = {}  # by whose part it is: who was asked, and when
        self._failed: dict[int, float] = {}
        self.called_s: float | None = None
        self.has_voted = not has_part
        self._until_s, self._num_parts = 0.0, -1
        self._turns: dict[int, int] = {}
        self._direct: set[int] = set()  # whose parts a relay did not give
        self._direct_s = 0.0
        self._refused: set[int] = set()  # whose own copy of their part cannot be used

    @property
    def has(self) -> tuple[int, ...]:
        """Members whose parts are here, in ascending order."""
        return tuple(sorted(self._has))

    def on_part(self, member: int) -> None:
        """Record a part that arrived."""
        self._asked.pop(member, None)
        self._has.add(member)

    def on_refusal(self, member: int) -> None:
        """Record that the part that a member itself delivers cannot be used: it is not awaited any more."""
        self._asked.pop(member, None)
        self._refused.add(member)

    def on_failure(self, member: int, *, now_s: float, source: int | None = None) -> None:
        """Record that a source cannot deliver a part; None means every source asked so far."""
        asked = self._asked.get(member, {})
        asked.pop(source, None) if source is not None else asked.clear()
        if source not in (None, member):
            self._direct.add(member)
        if not asked:
            self._asked.pop(member, None)
            self._failed[member] = now_s

    def num_lacking(self, decision: Decision) -> int:
        """Return the number of parts of the mean that are missing."""
        return len(set(decision.members) - self._has)

    def advance(self, inputs: RoundInputs, *, now_s: float) -> list[Action]:
        """Return the actions due now; they count as done."""
        if inputs.decision is not None:
            return self._complete(inputs.decision, inputs, now_s)
        if self.has_voted:
            return []
        todo: list[Action] = []
        responsive = set(inputs.active) - set(inputs.silent)
        for peer in inputs.active:
            if peer not in self._has | self._refused and self._is_wanted(peer, inputs, now_s):
                relay = inputs.relays.get(peer, peer)
                source = relay if peer not in self._direct and relay in responsive else peer
                todo.append(self._ask(source, peer, now_s))
        if inputs.called is not None:
            self.called_s = now_s if self.called_s is None else self.called_s
            # parts of dead or sleeping replicas, and those refused, would only delay the vote
            awaited = (set(inputs.called) & {*inputs.active, self._replica}) - set(inputs.silent) - self._refused
            # an origin asked in place of its relay gets the full time limit
            limit_s = max(inputs.limit_s, inputs.slack_s)
            if self._has.issuperset(awaited) or now_s > max(self.called_s, self._direct_s) + limit_s:
                self.has_voted = True
                todo.append(CastVote(has=self.has))
        return todo

    def _is_wanted(self, peer: int, inputs: RoundInputs, now_s: float) -> bool:
        """Return whether to request a part of an undecided round: not requested yet, or without success."""
        asked = self._asked.get(peer)
        if not asked:
            return self._is_due(peer, inputs, now_s)
        if peer in asked or self.called_s is None:
            return False
        # a called, responsive relay will fetch the part; the link to the origin is spared until its limit
        is_called = inputs.called is not None and set(asked) <= set(inputs.called) - set(inputs.silent)
        if is_called and now_s < max(self.called_s, *asked.values()) + inputs.relay_limit_s:
            return False
        # from here on the origin itself is asked, with a time limit that starts now
        self._direct.add(peer)
        self._direct_s = now_s
        return True

    def _complete(self, decision: Decision, inputs: RoundInputs, now_s: float) -> list[Action]:
        # something comes, however slowly, or is yet to be asked for
        if len(self._has) > self._num_parts or inputs.ahead:
            self._num_parts, self._until_s = len(self._has), now_s + max(_LEAST_FETCH_S, 3 * inputs.limit_s)
        todo: list[Action] = []
        for member in sorted(set(decision.members) - self._has):
            holders = (set(inputs.neighbours) & ({*decision.holders} | {member} - self._refused)) - {self._replica}
            # if all holders at decision time have gone, another active replica may have fetched the part since
            sources = sorted(holders or set(inputs.active) - {self._replica})
            if not sources or now_s > self._until_s:
                return [GiveUp(member=member, sources=tuple(sources))]
            # sources without a request for this part; on the first request slow links last, own site first
            free = [source for source in sources if source not in self._asked.get(member, {})]
            if member not in self._turns:
                free = [source for source in free if source not in inputs.slow] or free
                free = [source for source in free if source in inputs.near] or free
            # an unrequested part waits for the parts of earlier rounds, see `_PARTS_AHEAD`
            has_turn = member in self._asked or not inputs.ahead or inputs.ahead + len(self._asked) < _PARTS_AHEAD
            if free and has_turn and self._is_due(member, inputs, now_s):
                # rotate by member, so that the parts of one round start at different sources
                turn = self._turns.get(member, member)
                self._turns[member] = turn + 1
                todo.append(self._ask(free[turn % len(free)], member, now_s))
        return todo

    def _is_due(self, member: int, inputs: RoundInputs, now_s: float) -> bool:
        """Return whether a part is not under way, or is late enough to request it from another source too.

        Earlier requests continue: on a link that became slow, a part requested again would never arrive.
        """
        if asked := self._asked.get(member):
            # the limit doubles with each source asked: exponential back-off against duplicate transfers
            limit_s = inputs.limit_s * (_BUSY_TIMES if inputs.is_busy else 1.0) * 2.0 ** (len(asked) - 1)
            return now_s >= max(asked.values()) + limit_s
        return member not in self._failed or now_s > self._failed[member] + _AGAIN_S

    def _ask(self, source: int, member: int, now_s: float) -> RequestPart:
        self._failed.pop(member, None)
        self._asked.setdefault(member, {})[source] = now_s
        return RequestPart(source=source, member=member)


# A part is not requested again once its own sender has delivered a bad one so often: one may be damaged on its way.
_MOST_BAD_COPIES = 2
# Characters of an error's text that a report holds.
_MOST_WHY = 200
# Rounds whose verdicts are kept for the coordinator; and the limit on a blob that is here already.
_MOST_VERDICTS, _ANY_BYTES = 64, 1 << 62
_HEAD = struct.Struct("<IxxxxQ")
HEAD_BYTES = _HEAD.size
# Seconds between two polls for blobs; coordinator messages wake a waiting round at once.
_POLL_S, _WAIT_S = 0.02, 0.5


class _ForeignPart(PayloadError):
    """A part of another round, or that refers to another global value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """Result of a round, the same at every replica."""

    parts: Mapping[int, torch.Tensor]  # parts of the mean, by replica in ascending order
    step: int  # the furthest step that was known when it was decided
    closed_step: int  # a step up to which all rounds are decided
    # by replica, what is wrong with the part that it delivered to this one, and the error's text
    refused: Mapping[int, tuple[PartFault, str]] = field(default_factory=dict)


def blob_name(round_id: int, member: int) -> bytes:
    """Return the name of a part."""
    return b"r" + struct.pack("<QI", round_id, member)


def part_of_name(name: bytes) -> tuple[int, int] | None:
    """Return the round and the member of a part's name, None for another blob."""
    if len(name) != 13 or name[:1] != b"r":
        return None
    round_id, member = struct.unpack("<QI", name[1:])
    return round_id, member


def round_of_name(name: bytes) -> int | None:
    """Return the round of a part's name, None for another blob."""
    found = part_of_name(name)
    return None if found is None else found[0]


class RoundDriver:
    """Executes the actions of a `RoundStateMachine` on real blobs and messages.

    `wait` drives it, from any one thread; every wait in it ends by a measured time or by `Expelled`.

    Args:
        session: Session with the coordinator.
        store: Blobs of this replica and of the others.
        round_id: The round.
        launch_step: The step that it is launched at.
        part: uint8, one-dimensional, CPU; None where this replica has none to offer.
        reference_hash: Of the global value that it refers to.
        most_bytes: Size of a part, at most.
        bad_parts: Where its part is not offered because it holds NaN or infinity: how many of these there were in a
            row, this one among them; else 0.
    """

    def __init__(
        self, *, session: CoordinatorSession, store: BlobStore, round_id: int, launch_step: int,
        part: torch.Tensor | None, reference_hash: int, most_bytes: int, bad_parts: int = 0,
    ) -> None:  # fmt: skip
        self._session = session
        self._store = store
        self._round_id, self._launch_step = round_id, launch_step
        self._hash = reference_hash
        self._most_bytes = most_bytes + HEAD_BYTES
        self._parts: dict[int, torch.Tensor] = {}
        self._asked: dict[tuple[int, int], tuple[float, BlobFetch]] = {}  # by whose part it is, and who was asked
        self._probes: dict[int, BlobFetch | None] = {}  # by whose part it is, over a slow wire; None once it has come
        self._refusals: dict[int, tuple[PartFault, str]] = {}  # by whose bad part it is
        self._bad_copies: Counter[int] = Counter()  # by whose part it is: how often it itself delivered a bad one
        self.agreed: RoundResult | None = None
        self._decision: Decision | None = None
        offered = part if self._inputs().decision is None else None
        self._machine = RoundStateMachine(replica=session.replica, has_part=offered is not None)
        if offered is not None:
            # published before it is announced, so that whoever asks finds it
            head = torch.frombuffer(bytearray(_HEAD.pack(self._hash, round_id)), dtype=torch.uint8)
            self._parts[session.replica] = torch.cat([head, offered])
            store.publish(blob_name(round_id, session.replica), self._parts[session.replica])
            session.launch(round_id, launch_step=launch_step)
            # request the others' parts at once: the transfer overlaps with the next inner steps
            self._advance()
        elif bad_parts and self._decision is None:
            session.withhold(round_id, launch_step=launch_step, parts=bad_parts)

    def done(self) -> bool:
        """Return whether the round has ended; it ends only in `wait`."""
        return self.agreed is not None

    def wait(self, *, deadline_s: float) -> Received:
        """Drive the round to its end.

        Args:
            deadline_s: Ignored: the session's own time limits apply.

        Raises:
            Expelled: The run goes on without this replica.
        """
        while (decision := self._advance()) is None or self._machine.num_lacking(decision):
            self._session.check()
            self._pause()
        # apply: the decision is complete here
        self._session.settle(self._round_id)
        with self._session.changed:
            closed_step = self._session.view.closed_step
        parts = {member: self._parts[member][HEAD_BYTES:] for member in decision.members}
        refused = {member: found for member, found in self._refusals.items() if member not in parts}
        self.agreed = RoundResult(parts=parts, step=decision.step, closed_step=closed_step, refused=refused)
        for member in {member for member, _ in self._asked}:
            self._cancel(member)
        return Received(payload=torch.empty(0, dtype=torch.uint8))

    def _advance(self) -> Decision | None:
        """Execute all actions due; return the decision, None before."""
        self._collect()
        inputs = self._inputs()
        if inputs.decision is not None:
            self._session.settle(self._round_id)
        for action in self._machine.advance(inputs, now_s=time.monotonic()):
            match action:
                case RequestPart(source=source, member=member):
                    self._ask(source, member)
                case CastVote(has=has):
                    self._session.vote(self._round_id, has=has, reference_hash=self._hash)
                case GiveUp(member=member, sources=sources):
                    self._give_up(member, sources)
        with self._session.changed:
            lacking = 0 if inputs.decision is None else self._machine.num_lacking(inputs.decision)
            self._session.missing_parts.pop(self._round_id, None)
            if lacking:
                self._session.missing_parts[self._round_id] = lacking
        return inputs.decision

    def _inputs(self) -> RoundInputs:
        with self._session.changed:
            view, active, me = self._session.view, self._session.active(), self._session.replica
            # the session forgets old decisions once all others are far ahead
            self._decision = self._decision or view.decisions.get(self._round_id)
            return RoundInputs(
                called=view.calls.get(self._round_id), decision=self._decision, active=active,
                neighbours=tuple(view.neighbours), limit_s=self._session.transfer_timeout.limit_s,
                silent=self._session.activity.silent_peers(),
                relays=relays(view.sites, replica=me, round_id=self._round_id, active=active, detours=view.detours),
                # a relay given up too early makes the part cross the thin link twice
                relay_limit_s=min(
                    self._session.relay_timeout.limit_s + self._session.relay_timeout.median_s,
                    # after that the vote is cast without the part
                    max(self._session.transfer_timeout.limit_s, self._slack_s()),
                ),
                near=site_of(me, view.sites), slow=slow_sources(view.detours, replica=me),
                is_busy=self._session.activity.is_link_busy(), slack_s=self._slack_s(),
                ahead=sum(count for number, count in self._session.missing_parts.items() if number < self._round_id),
            )  # fmt: skip

    def _slack_s(self) -> float:
        """Return the seconds after the call for which no replica waits for the result."""
        steps = self._session.limits.overdue_steps
        is_at_end = self._round_id >= FIRST_LAST_ROUND or self._launch_step + steps > self._session.limits.last_step
        return 0.0 if is_at_end else steps * self._session.pace.step_s

    def _ask(self, source: int, member: int) -> None:
        name = blob_name(self._round_id, member)
        with self._session.changed:
            detours = self._session.view.detours
        probed = probed_sources(detours, replica=self._session.replica, round_id=self._round_id)
        fetch = None
        # a probe under way to the origin becomes the request; else the probe is a second, measured transfer
        if source == member:
            fetch, self._probes[member] = self._probes.get(member), None
        elif member not in self._probes and member in probed:
            self._probes[member] = self._store.get(member, name, most_bytes=self._most_bytes)
        fetch = fetch or self._store.get(source, name, most_bytes=self._most_bytes)
        self._asked[member, source] = time.monotonic(), fetch

    def _collect_probes(self) -> None:
        """Use parts that arrived over probed links first; later probes only measure the rate and are not cancelled."""
        for member, fetch in list(self._probes.items()):
            if fetch is not None and fetch.done():
                self._probes[member] = None
                with contextlib.suppress(TransportError):
                    self._take(member, fetch.wait(deadline_s=0.0))
                    self._cancel(member)

    def _collect(self) -> None:
        """Process the requests that have finished."""
        self._collect_probes()
        for (member, source), (asked_s, fetch) in list(self._asked.items()):
            if (member, source) not in self._asked or not fetch.done():
                continue
            del self._asked[member, source]
            now_s = time.monotonic()
            try:
                self._take(member, fetch.wait(deadline_s=0.0))
            except PayloadError as error:
                self._refuse(member, source, error, now_s=now_s)
                continue
            except TransportError:
                self._machine.on_failure(member, now_s=now_s, source=source)
                continue
            self._cancel(member)
            # before the call a part may not exist yet, so its time counts from the call
            called_s = self._machine.called_s
            since_s = now_s if called_s is None else max(asked_s, called_s)
            self._session.transfer_timeout.observe(max(0.0, now_s - since_s))
            if source != member:
                self._session.relay_timeout.observe(max(0.0, now_s - since_s))

    def _cancel(self, member: int) -> None:
        """Cancel all requests for a part."""
        for key in [key for key in self._asked if key[0] == member]:
            self._asked.pop(key)[1].cancel()

    def _take(self, member: int, blob: torch.Tensor) -> None:
        """Verify a blob, and offer it to others.

        Raises:
            PayloadError: It is not a part of this round, or refers to another global value.
        """
        if not HEAD_BYTES <= blob.numel() <= self._most_bytes:
            raise PayloadError(f"{blob.numel()} bytes, where {HEAD_BYTES} to {self._most_bytes} are allowed")
        found_hash, round_id = _HEAD.unpack(bytes(blob[:HEAD_BYTES].numpy()))
        if round_id != self._round_id or found_hash != self._hash:
            raise _ForeignPart(
                f"round {round_id} and hash {found_hash:08x}, where this is round {self._round_id} and hash "
                f"{self._hash:08x}"
            )
        self._machine.on_part(member)
        # offered in turn, so that it outlives its sender
        if member not in self._parts:
            self._parts[member] = blob
            self._store.publish(blob_name(self._round_id, member), blob)

    def _refuse(self, member: int, source: int, error: PayloadError, *, now_s: float) -> None:
        """Take note of a part that cannot be used; one damaged on its way, or at a relay, is requested again."""
        is_foreign = isinstance(error, _ForeignPart)  # whole, so its sender means it
        self._bad_copies[member] += (_MOST_BAD_COPIES if is_foreign else 1) if source == member else 0
        if self._bad_copies[member] < _MOST_BAD_COPIES:
            self._machine.on_failure(member, now_s=now_s, source=source)
            return
        self._refusals[member] = "foreign" if is_foreign else "malformed", str(error)
        self._cancel(member)
        self._machine.on_refusal(member)

    def _give_up(self, member: int, sources: tuple[int, ...]) -> None:
        who = f"none of the replicas {list(sources)} delivered" if sources else "no remaining replica holds"
        why = f"{who} the part of replica {member}"
        self._session.send("stuck", round=self._round_id, why=why)
        self._session.settle(self._round_id)
        raise Expelled(f"replica {self._session.replica} could not get round {self._round_id}: {why}; it joins again")

    def _pause(self) -> None:
        """Wait until a coordinator message arrives or the next poll is due."""
        with self._session.changed:
            is_idle = self._machine.has_voted and self._round_id not in self._session.view.decisions
            self._session.changed.wait(_WAIT_S if is_idle else _POLL_S)


class ReplicaRounds:
    """Elastic rounds as the engine uses them: who takes part, and which parts each round decides on."""

    def __init__(self, session: CoordinatorSession, store: BlobStore) -> None:
        self._session = session
        self._store = store
        self._kept: dict[int, int] = {}
        self._bad: dict[int, set[int]] = {}  # by applied round: whose parts were bad
        self._sound: dict[int, frozenset[int]] = {}  # and whose were not
        self._unanswered: set[tuple[int, int]] = set()  # parts that the coordinator asks about
        session.verifiers.append(self._verify)

    def active(self) -> tuple[int, ...]:
        """Return the replicas that take part, this one among them."""
        return self._session.active()

    def known_step(self) -> int:
        """Return the furthest step at which any replica has launched a round."""
        with self._session.changed:
            return self._session.view.step

    def is_decided(self, round_id: int) -> bool:
        """Return whether a round was decided without this replica."""
        with self._session.changed:
            return round_id in self._session.view.decisions

    def propose(
        self, part: torch.Tensor | None, *, round_id: int, launch_step: int, reference_hash: int, most_bytes: int,
        bad_parts: int = 0,
    ) -> RoundDriver:  # fmt: skip
        """Offer a part, None for none, and take part in what is agreed on; see `RoundDriver` for the arguments."""
        self._forget_old()
        self._kept[round_id] = launch_step
        return RoundDriver(
            session=self._session, store=self._store, round_id=round_id, launch_step=launch_step, part=part,
            reference_hash=reference_hash, most_bytes=most_bytes, bad_parts=bad_parts,
        )  # fmt: skip

    def reject(
        self, member: int, *, round_id: int, bad_parts: int, since: int, fault: PartFault, why: str = ""
    ) -> None:
        """Report that a part could not be used, and was left out of the mean.

        Args:
            member: Whose part.
            round_id: The round.
            bad_parts: How many of its parts in a row were bad, this one among them.
            since: The round of the first of them.
            fault: What is wrong with this one.
            why: The error's text.
        """
        with self._session.changed:
            self._bad.setdefault(round_id, set()).add(member)
        self._session.send(
            "reject", round=round_id, member=member, parts=bad_parts, since=since, fault=fault, why=why[:_MOST_WHY],
            sha256=self._own_copy_sha256(round_id, member) if bad_parts > 1 else "",
        )  # fmt: skip

    def confirm(self, round_id: int, sound: Collection[int]) -> None:
        """Record whose parts of a round could be used, after its last `reject`; the coordinator may ask."""
        with self._session.changed:
            self._sound[round_id] = frozenset(sound)
            for verdicts in (self._sound, self._bad):
                while len(verdicts) > _MOST_VERDICTS:
                    del verdicts[next(iter(verdicts))]
            asked = {part for part in self._unanswered if part[0] == round_id}
            self._unanswered -= asked
        for _, member in asked:
            self._verify(round_id, member)

    def _verify(self, round_id: int, member: int) -> None:
        """Tell the coordinator what this replica makes of a part; once the round is applied, where it is not yet."""
        with self._session.changed:
            if round_id not in self._sound:
                if len(self._unanswered) < _MOST_VERDICTS:
                    self._unanswered.add((round_id, member))
                return
            is_bad = member in self._bad.get(round_id, ())
            is_sound = member in self._sound[round_id] and not is_bad
        sha256 = self._own_copy_sha256(round_id, member)
        verdict = "bad" if is_bad else "sound" if is_sound and sha256 else "unknown"
        self._session.send("verdict", round=round_id, member=member, verdict=verdict, sha256=sha256)

    def _own_copy_sha256(self, round_id: int, member: int) -> str:
        """Return the hash of this replica's copy of a part; empty where it holds none any more."""
        fetch = self._store.get(self._session.replica, blob_name(round_id, member), most_bytes=_ANY_BYTES)
        if not fetch.done():
            fetch.cancel()
            return ""
        with contextlib.suppress(TransportError, PayloadError):
            return hashlib.sha256(fetch.wait(deadline_s=0.0).numpy().data).hexdigest()
        return ""

    def is_past(self, name: bytes) -> bool:
        """Return whether a name is that of a part of a round that no replica needs any more."""
        round_id = round_of_name(name)
        oldest = min(list(self._kept), default=0)
        return round_id is not None and round_id < oldest

    def _forget_old(self) -> None:
        """Release rounds that all have applied, and that no joining or returning replica needs."""
        view = self._session.view
        floor = min(view.floor_step, view.kept_step) - self._session.interval_steps
        old = [round_id for round_id, launch_step in self._kept.items() if launch_step < floor]
        for round_id in old:
            del self._kept[round_id]
        if old:
            self._store.forget_past()
