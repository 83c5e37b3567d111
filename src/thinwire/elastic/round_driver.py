"""Driver of one elastic round at one replica: offers its part, gathers the others, votes, and applies the decision.

The blob of a part is a header of 16 bytes (hash of the global value it refers to, zeros, round) and the part. Each
replica that holds a blob offers it too, so that it survives its sender. `RoundStateMachine` decides the next action.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from thinwire.elastic.coordinator_session import CoordinatorSession
from thinwire.elastic.round_state_machine import Action, CastVote, GiveUp, RequestPart, RoundInputs, RoundStateMachine
from thinwire.elastic.rounds import Decision
from thinwire.elastic.routing import probed_sources, relays, site_of, slow_sources
from thinwire.errors import Expelled, PayloadError, TransportError
from thinwire.events import FIRST_LAST_ROUND
from thinwire.transport.base import Received

_HEAD = struct.Struct("<IxxxxQ")
HEAD_BYTES = _HEAD.size
# Seconds between two polls for blobs; coordinator messages wake a waiting round at once.
_POLL_S, _WAIT_S = 0.02, 0.5


class PendingPart(Protocol):
    """A requested blob."""

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        ...

    def wait(self, *, deadline_s: float) -> torch.Tensor:
        """Return the blob: uint8, one-dimensional, CPU."""
        ...

    def cancel(self) -> None:
        """Cancel the request."""
        ...


class PartStore(Protocol):
    """Store that offers blobs and fetches those of other replicas by name."""

    def publish(self, name: bytes, payload: torch.Tensor) -> None:
        """Offer a blob."""
        ...

    def get(self, source: int, name: bytes, *, most_bytes: int) -> PendingPart:
        """Start to fetch a blob from a replica."""
        ...

    def forget_past(self) -> None:
        """Release blobs that no replica needs any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """Result of a round, the same at every replica.

    Attributes:
        parts: Parts of the mean, by replica in ascending order.
        step: The furthest step that was known when it was decided.
        closed_step: A step up to which all rounds are decided.
    """

    parts: Mapping[int, torch.Tensor]
    step: int
    closed_step: int


def blob_name(round_id: int, member: int) -> bytes:
    """Return the name of a part."""
    return b"r" + struct.pack("<QI", round_id, member)


def round_of_name(name: bytes) -> int | None:
    """Return the round of a part's name, None for another blob."""
    return struct.unpack("<QI", name[1:])[0] if len(name) == 13 and name[:1] == b"r" else None


def part_of_name(name: bytes) -> tuple[int, int] | None:
    """Return the round and the member of a part's name, None for another blob."""
    found = struct.unpack("<QI", name[1:]) if round_of_name(name) is not None else None
    return None if found is None else (int(found[0]), int(found[1]))


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
        self, *, session: CoordinatorSession, store: PartStore, round_id: int, launch_step: int,
        part: torch.Tensor | None, reference_hash: int, most_bytes: int, bad_parts: int = 0,
    ) -> None:  # fmt: skip
        self._session = session
        self._store = store
        self._round_id, self._launch_step = round_id, launch_step
        self._hash = reference_hash
        self._most_bytes = most_bytes + HEAD_BYTES
        self._parts: dict[int, torch.Tensor] = {}
        self._asked: dict[tuple[int, int], tuple[float, PendingPart]] = {}  # by whose part it is, and who was asked
        self._probes: dict[int, PendingPart | None] = {}  # by whose part it is, over a slow wire; None once it has come
        self.agreed: RoundResult | None = None
        self._decision: Decision | None = None
        is_offered = self._inputs().decision is None and part is not None
        self._machine = RoundStateMachine(replica=session.replica, has_part=is_offered)
        # launch: publish the part before announcing it, so that whoever asks finds it
        if is_offered:
            assert part is not None
            self._offer(session.replica, part)
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
        while (decision := self._advance()) is None or not self._machine.is_complete(decision):
            self._session.check()
            self._pause()
        # apply: the decision is complete here
        self._session.settle(self._round_id)
        with self._session.changed:
            closed_step = self._session.view.closed_step
        parts = {member: self._parts[member][HEAD_BYTES:] for member in decision.members}
        self.agreed = RoundResult(parts=parts, step=decision.step, closed_step=closed_step)
        for member in {member for member, _ in self._asked}:
            self._cancel(member)
        return Received(payload=torch.empty(0, dtype=torch.uint8), reference_hash=self._hash)

    def _advance(self) -> Decision | None:
        """Execute all actions due; return the decision, None before."""
        self._collect()
        inputs = self._inputs()
        if inputs.decision is not None:
            self._session.settle(self._round_id)
        for action in self._machine.advance(inputs, now_s=time.monotonic()):
            self._do(action)
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

    def _do(self, action: Action) -> None:
        match action:
            case RequestPart(source=source, member=member):
                self._ask(source, member)
            case CastVote(has=has):
                self._session.vote(self._round_id, has=has, reference_hash=self._hash)
            case GiveUp(member=member, sources=sources):
                self._give_up(member, sources)

    def _ask(self, source: int, member: int) -> None:
        name = blob_name(self._round_id, member)
        fetch = None
        # a probe under way to the origin becomes the request; else the probe is a second, measured transfer
        if source == member:
            fetch, self._probes[member] = self._probes.get(member), None
        elif member not in self._probes and member in self._probed_now():
            self._probes[member] = self._store.get(member, name, most_bytes=self._most_bytes)
        fetch = fetch or self._store.get(source, name, most_bytes=self._most_bytes)
        self._asked[member, source] = time.monotonic(), fetch

    def _probed_now(self) -> frozenset[int]:
        """Return the members whose slow links are probed in this round."""
        with self._session.changed:
            detours = self._session.view.detours
        return probed_sources(detours, replica=self._session.replica, round_id=self._round_id)

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
        if blob.numel() < HEAD_BYTES:
            raise PayloadError(f"round {self._round_id}: a part of replica {member} without a head")
        found_hash, round_id = _HEAD.unpack(bytes(blob[:HEAD_BYTES].numpy()))
        if round_id != self._round_id or found_hash != self._hash:
            raise PayloadError(f"round {self._round_id}: the part of replica {member} refers to another global value")
        self._machine.on_part(member)
        # offered in turn, so that it outlives its sender
        if member not in self._parts:
            self._parts[member] = blob
            self._store.publish(blob_name(self._round_id, member), blob)

    def _offer(self, member: int, part: torch.Tensor) -> None:
        head = torch.frombuffer(bytearray(_HEAD.pack(self._hash, self._round_id)), dtype=torch.uint8)
        self._parts[member] = torch.cat([head, part])
        self._store.publish(blob_name(self._round_id, member), self._parts[member])

    def _give_up(self, member: int, sources: tuple[int, ...]) -> None:
        who = f"none of the replicas {list(sources)} delivered" if sources else "no remaining replica holds"
        why = f"{who} the part of replica {member}"
        self._session.send("stuck", round=self._round_id, why=why)
        self._session.settle(self._round_id)
        raise Expelled(f"replica {self._session.replica} could not get round {self._round_id}: {why}; it joins again")

    def _pause(self) -> None:
        """Wait until a coordinator message arrives or the next poll is due."""
        with self._session.changed:
            if self._machine.has_voted and self._round_id not in self._session.view.decisions:
                self._session.changed.wait(_WAIT_S)
            else:
                self._session.changed.wait(_POLL_S)


class ReplicaRounds:
    """Elastic rounds as the engine uses them; implements `ElasticSession`.

    Args:
        session: Session with the coordinator.
        store: Offers and fetches parts.
    """

    def __init__(self, session: CoordinatorSession, store: PartStore) -> None:
        self._session = session
        self._store = store
        self._kept: dict[int, int] = {}

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
        """Start a round; see `RoundDriver`."""
        self._forget_old()
        self._kept[round_id] = launch_step
        return RoundDriver(
            session=self._session, store=self._store, round_id=round_id, launch_step=launch_step, part=part,
            reference_hash=reference_hash, most_bytes=most_bytes, bad_parts=bad_parts,
        )  # fmt: skip

    def reject(self, member: int, *, round_id: int, bad_parts: int, since: int) -> None:
        """Report that a part held NaN or infinity and was left out; see `ElasticSession.reject`."""
        self._session.send("reject", round=round_id, member=member, parts=bad_parts, since=since)

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
