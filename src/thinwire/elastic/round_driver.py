"""One round of an elastic run at one replica: offer the own part, gather the others', vote, and get what was decided.

A part's blob is 16 bytes, the hash of the global value that it refers to, zeros and the round, and the part itself.
Whoever holds a blob offers it in turn, so that it can be had after its sender has gone.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from thinwire.elastic.coordinator_session import Council
from thinwire.elastic.round_state_machine import Action, Ask, Bid, CastVote, GiveUp, Seen
from thinwire.elastic.rounds import Decision
from thinwire.elastic.site_topology import site_of
from thinwire.elastic.source_selection import relays, slow_to, tried
from thinwire.errors import Expelled, PayloadError, TransportError
from thinwire.events import FIRST_LAST_ROUND
from thinwire.transport.base import Received

_HEAD = struct.Struct("<IxxxxQ")
HEAD_BYTES = _HEAD.size
# Blobs that come are looked for so often; words of the coordinator wake whoever waits for them.
_LOOK_S, _WAIT_S = 0.02, 0.5


class Fetch(Protocol):
    """A blob on its way."""

    def done(self) -> bool:
        """Tell whether `wait` would return or raise at once."""
        ...

    def wait(self, *, deadline_s: float) -> torch.Tensor:
        """Return the blob: uint8, one-dimensional, CPU."""
        ...

    def cancel(self) -> None:
        """Wait for it no longer."""
        ...


class Shelf(Protocol):
    """Where blobs are offered and fetched by name."""

    def publish(self, name: bytes, payload: torch.Tensor) -> None:
        """Offer a blob."""
        ...

    def get(self, source: int, name: bytes, *, most_bytes: int) -> Fetch:
        """Begin to fetch a blob from a replica."""
        ...

    def forget_past(self) -> None:
        """Let go of blobs that nobody needs any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What a round came to, the same at every replica.

    Attributes:
        parts: By replica in ascending order, what makes the mean.
        step: The furthest step that was known when it was decided.
        closed_step: A step up to which all rounds are decided.
    """

    parts: Mapping[int, torch.Tensor]
    step: int
    closed_step: int


def blob_name(round_id: int, member: int) -> bytes:
    """Return the name of a part."""
    return b"r" + struct.pack("<QI", round_id, member)


def round_of(name: bytes) -> int | None:
    """Return the round of a part's name, None for another blob."""
    return struct.unpack("<QI", name[1:])[0] if len(name) == 13 and name[:1] == b"r" else None


def named_part(name: bytes) -> tuple[int, int] | None:
    """Return the round and the member of a part's name, None for another blob."""
    found = struct.unpack("<QI", name[1:]) if round_of(name) is not None else None
    return None if found is None else (int(found[0]), int(found[1]))


class Proposal:
    """See the module; what to do next is `Bid`'s business, and this does it.

    `wait` drives it, from any one thread; every wait in it ends by a measured time or by `Expelled`.

    Args:
        council: This replica's seat.
        shelf: Its blobs and the others'.
        round_id: The round.
        launch_step: The step that it is launched at.
        part: uint8, one-dimensional, CPU; None where this replica has none to offer.
        reference_hash: Of the global value that it refers to.
        most_bytes: Size of a part, at most.
        bad_parts: Where its part is not offered because it holds NaN or infinity: how many of these there were in a
            row, this one among them; else 0.
    """

    def __init__(
        self, *, council: Council, shelf: Shelf, round_id: int, launch_step: int, part: torch.Tensor | None,
        reference_hash: int, most_bytes: int, bad_parts: int = 0,
    ) -> None:  # fmt: skip
        self._council = council
        self._shelf = shelf
        self._round_id, self._launch_step = round_id, launch_step
        self._hash = reference_hash
        self._most_bytes = most_bytes + HEAD_BYTES
        self._parts: dict[int, torch.Tensor] = {}
        self._asked: dict[tuple[int, int], tuple[float, Fetch]] = {}  # by whose part it is, and who was asked
        self._tries: dict[int, Fetch | None] = {}  # by whose part it is, over a slow wire; None once it has come
        self.agreed: Agreed | None = None
        self._decision: Decision | None = None
        is_offered = self._seen().decision is None and part is not None
        self._bid = Bid(replica=council.replica, has_part=is_offered)
        if is_offered:
            assert part is not None
            self._offer(council.replica, part)
            council.launch(round_id, launch_step=launch_step)
            self._move()
        elif bad_parts and self._decision is None:
            council.withhold(round_id, launch_step=launch_step, parts=bad_parts)

    def done(self) -> bool:
        """Tell whether it has come to its end; it does so in `wait` only."""
        return self.agreed is not None

    def wait(self, *, deadline_s: float) -> Received:
        """Drive the round to its end.

        Args:
            deadline_s: Has no meaning here: the council's own deadlines hold.

        Raises:
            Expelled: The run goes on without this replica.
        """
        while (decision := self._move()) is None or not self._bid.is_complete(decision):
            self._council.check()
            self._pause()
        self._council.settle(self._round_id)
        with self._council.changed:
            closed_step = self._council.view.closed_step
        parts = {member: self._parts[member][HEAD_BYTES:] for member in decision.members}
        self.agreed = Agreed(parts=parts, step=decision.step, closed_step=closed_step)
        for member in {member for member, _ in self._asked}:
            self._cancel(member)
        return Received(payload=torch.empty(0, dtype=torch.uint8), reference_hash=self._hash)

    def _move(self) -> Decision | None:
        """Do what can be done; return the decision, None before."""
        self._collect()
        seen = self._seen()
        if seen.decision is not None:
            self._council.settle(self._round_id)
        for action in self._bid.turn(seen, now_s=time.monotonic()):
            self._do(action)
        with self._council.changed:
            lacking = 0 if seen.decision is None else self._bid.num_lacking(seen.decision)
            self._council.lacking.pop(self._round_id, None)
            if lacking:
                self._council.lacking[self._round_id] = lacking
        return seen.decision

    def _seen(self) -> Seen:
        with self._council.changed:
            view, active, me = self._council.view, self._council.active(), self._council.replica
            # the council forgets it once all others are far ahead
            self._decision = self._decision or view.decisions.get(self._round_id)
            return Seen(
                called=view.calls.get(self._round_id), decision=self._decision, active=active,
                neighbours=tuple(view.neighbours), limit_s=self._council.transfers.limit_s, quiet=self._council.quiet(),
                relays=relays(view.sites, replica=me, round_id=self._round_id, active=active, detours=view.detours),
                # a relay that is given up too early costs the thin wire the part a second time
                relay_limit_s=min(
                    self._council.relayed.limit_s + self._council.relayed.median_s,
                    max(self._council.transfers.limit_s, self._borne_s()),  # then a vote would be cast without the part
                ),
                near=site_of(me, view.sites), slow=slow_to(view.detours, replica=me),
                is_busy=self._council.is_busy(), borne_s=self._borne_s(),
                ahead=sum(count for number, count in self._council.lacking.items() if number < self._round_id),
            )  # fmt: skip

    def _borne_s(self) -> float:
        """Return for how long after the call parts may come without anybody waiting for the result."""
        steps = self._council.max_overdue_steps
        is_at_end = self._round_id >= FIRST_LAST_ROUND or self._launch_step + steps > self._council.last_step
        return 0.0 if is_at_end else steps * self._council.others.step_s

    def _do(self, action: Action) -> None:
        match action:
            case Ask(source=source, member=member):
                self._ask(source, member)
            case CastVote(has=has):
                self._council.vote(self._round_id, has=has, reference_hash=self._hash)
            case GiveUp(member=member, sources=sources):
                self._give_up(member, sources)

    def _ask(self, source: int, member: int) -> None:
        name = blob_name(self._round_id, member)
        fetch = None
        if source == member:
            fetch, self._tries[member] = self._tries.get(member), None
        elif member not in self._tries and member in self._slow_now():
            self._tries[member] = self._shelf.get(member, name, most_bytes=self._most_bytes)
        fetch = fetch or self._shelf.get(source, name, most_bytes=self._most_bytes)
        self._asked[member, source] = time.monotonic(), fetch

    def _slow_now(self) -> frozenset[int]:
        """Return whose slow wires are tried in this round."""
        with self._council.changed:
            detours = self._council.view.detours
        return tried(detours, replica=self._council.replica, round_id=self._round_id)

    def _collect_tries(self) -> None:
        """Take in what has come over slow wires; what comes later is for the rate only, and nobody ends it."""
        for member, fetch in list(self._tries.items()):
            if fetch is not None and fetch.done():
                self._tries[member] = None
                with contextlib.suppress(TransportError):
                    self._take(member, fetch.wait(deadline_s=0.0))
                    self._cancel(member)

    def _collect(self) -> None:
        """Take in what has come."""
        self._collect_tries()
        for (member, source), (asked_s, fetch) in list(self._asked.items()):
            if (member, source) not in self._asked or not fetch.done():
                continue
            del self._asked[member, source]
            now_s = time.monotonic()
            try:
                self._take(member, fetch.wait(deadline_s=0.0))
            except TransportError:
                self._bid.fail(member, now_s=now_s, source=source)
                continue
            self._cancel(member)
            called_s = self._bid.called_s
            since_s = now_s if called_s is None else max(asked_s, called_s)
            self._council.transfers.observe(max(0.0, now_s - since_s))
            if source != member:
                self._council.relayed.observe(max(0.0, now_s - since_s))

    def _cancel(self, member: int) -> None:
        """Ask for a part no longer."""
        for key in [key for key in self._asked if key[0] == member]:
            self._asked.pop(key)[1].cancel()

    def _take(self, member: int, blob: torch.Tensor) -> None:
        """Check a blob and offer it in turn.

        Raises:
            PayloadError: It is no part of this round, or of another global value.
        """
        if blob.numel() < HEAD_BYTES:
            raise PayloadError(f"round {self._round_id}: a part of replica {member} without a head")
        found_hash, round_id = _HEAD.unpack(bytes(blob[:HEAD_BYTES].numpy()))
        if round_id != self._round_id or found_hash != self._hash:
            raise PayloadError(f"round {self._round_id}: the part of replica {member} refers to another global value")
        self._bid.take(member)
        if member not in self._parts:
            self._parts[member] = blob
            self._shelf.publish(blob_name(self._round_id, member), blob)

    def _offer(self, member: int, part: torch.Tensor) -> None:
        head = torch.frombuffer(bytearray(_HEAD.pack(self._hash, self._round_id)), dtype=torch.uint8)
        self._parts[member] = torch.cat([head, part])
        self._shelf.publish(blob_name(self._round_id, member), self._parts[member])

    def _give_up(self, member: int, sources: tuple[int, ...]) -> None:
        who = f"none of the replicas {list(sources)} gave" if sources else "nobody that is left holds"
        why = f"{who} the part of replica {member}"
        self._council.tell("stuck", round=self._round_id, why=why)
        self._council.settle(self._round_id)
        raise Expelled(f"replica {self._council.replica} could not get round {self._round_id}: {why}; it joins again")

    def _pause(self) -> None:
        """Wait for news: words wake it, blobs are looked for."""
        with self._council.changed:
            if self._bid.only_waits and self._round_id not in self._council.view.decisions:
                self._council.changed.wait(_WAIT_S)
            else:
                self._council.changed.wait(_LOOK_S)
