"""One round of an elastic run at one replica: offer the own part, gather the others', vote, and get what was decided.

A part's blob is 8 bytes, the hash of the global value that it refers to and zeros, and the part itself. Whoever holds
a blob offers it in turn, so that it can be had after its sender has gone.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from thinwire.errors import Expelled, PayloadError, TransportError
from thinwire.membership.council import Council
from thinwire.membership.rounds import Decision
from thinwire.transport.base import Received

_HEAD = struct.Struct("<IxxxxQ")
HEAD_BYTES = _HEAD.size
_LOOK_S = 0.02
# After so long somebody is asked again who could not give a part.
_AGAIN_S = 0.2
# For so long, at least, parts of a decided round are sought while none comes.
_LEAST_FETCH_S = 60.0


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


class Proposal:
    """See the module. `wait` drives it, from any one thread; every wait in it ends by a measured time or by `Expelled`.

    Args:
        council: This replica's seat.
        shelf: Its blobs and the others'.
        round_id: The round.
        launch_step: The step that it is launched at.
        part: uint8, one-dimensional, CPU; None where this replica has none to offer.
        reference_hash: Of the global value that it refers to.
        most_bytes: Size of a part, at most.
    """

    def __init__(
        self, *, council: Council, shelf: Shelf, round_id: int, launch_step: int, part: torch.Tensor | None,
        reference_hash: int, most_bytes: int,
    ) -> None:  # fmt: skip
        self._council = council
        self._shelf = shelf
        self._round_id = round_id
        self._launch_step = launch_step
        self._hash = reference_hash
        self._most_bytes = most_bytes + HEAD_BYTES
        self._parts: dict[int, torch.Tensor] = {}
        self._asked: dict[tuple[int, int], tuple[float, Fetch]] = {}  # by whose part it is, and who was asked
        self._failed: dict[int, float] = {}
        self._called_s: float | None = None
        self.agreed: Agreed | None = None
        if part is not None and self._decision() is None:
            self._offer(council.replica, part)
            council.launch(round_id, launch_step=launch_step)
            self._ask_active()

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
        decision = self._vote_and_wait() if self._parts else self._await_decision()
        self._council.settle(self._round_id)
        self._fetch_missing(decision)
        with self._council.changed:
            closed_step = self._council.view.closed_step
        parts = {member: self._parts[member][HEAD_BYTES:] for member in decision.members}
        self.agreed = Agreed(parts=parts, step=decision.step, closed_step=closed_step)
        self._cancel_all()
        return Received(payload=torch.empty(0, dtype=torch.uint8), reference_hash=self._hash)

    # -- before the decision

    def _vote_and_wait(self) -> Decision:
        while (decision := self._decision()) is None:
            self._council.check()
            self._ask_active()
            self._collect()
            called = self._called()
            if called is not None and self._has_enough(called):
                has = tuple(sorted(self._parts))
                self._council.vote(self._round_id, has=has, reference_hash=self._hash)
                return self._await_decision()
            self._pause()
        return decision

    def _await_decision(self) -> Decision:
        while (decision := self._decision()) is None:
            self._council.check()
            with self._council.changed:
                self._council.changed.wait(0.5)
        return decision

    def _has_enough(self, called: tuple[int, ...]) -> bool:
        assert self._called_s is not None
        missing = [one for one in called if one not in self._parts]
        return not missing or time.monotonic() > self._called_s + self._council.transfers.limit_s

    def _called(self) -> tuple[int, ...] | None:
        with self._council.changed:
            called = self._council.view.calls.get(self._round_id)
        if called is not None and self._called_s is None:
            self._called_s = time.monotonic()
        return called

    def _decision(self) -> Decision | None:
        with self._council.changed:
            return self._council.view.decisions.get(self._round_id)

    def _ask_active(self) -> None:
        for peer in self._council.active():
            is_wanted = peer != self._council.replica and peer not in self._parts
            if is_wanted and (peer, peer) not in self._asked and self._is_due(peer):
                self._ask(peer, peer)

    def _ask(self, source: int, member: int) -> None:
        self._failed.pop(member, None)
        name = blob_name(self._round_id, member)
        fetch = self._shelf.get(source, name, most_bytes=self._most_bytes)
        self._asked[member, source] = time.monotonic(), fetch

    def _collect(self) -> None:
        """Take in what has come."""
        for (member, source), (asked_s, fetch) in list(self._asked.items()):
            if (member, source) not in self._asked or not fetch.done():
                continue
            del self._asked[member, source]
            now_s = time.monotonic()
            try:
                self._take(member, fetch.wait(deadline_s=0.0))
            except TransportError:
                self._failed[member] = now_s
                continue
            since_s = now_s if self._called_s is None else max(asked_s, self._called_s)
            self._council.transfers.observe(max(0.0, now_s - since_s))
            self._cancel(member)

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
        if member not in self._parts:
            self._parts[member] = blob
            self._shelf.publish(blob_name(self._round_id, member), blob)

    def _offer(self, member: int, part: torch.Tensor) -> None:
        head = torch.frombuffer(bytearray(_HEAD.pack(self._hash, self._round_id)), dtype=torch.uint8)
        self._parts[member] = torch.cat([head, part])
        self._shelf.publish(blob_name(self._round_id, member), self._parts[member])

    # -- after it

    def _fetch_missing(self, decision: Decision) -> None:
        """Get the parts of the mean that this replica lacks, from whoever holds them.

        Raises:
            Expelled: Nobody gives them.
        """
        idle_s = max(_LEAST_FETCH_S, 3 * self._council.transfers.limit_s)
        until_s, num_parts, turn = time.monotonic() + idle_s, len(self._parts), 0
        while missing := self._missing(decision):
            self._council.check()
            if len(self._parts) > num_parts:
                until_s, num_parts = time.monotonic() + idle_s, len(self._parts)
            for member in missing:
                sources = self._sources(decision, member)
                if not sources or time.monotonic() > until_s:
                    self._give_up(member, sources)
                free = [source for source in sources if (member, source) not in self._asked]
                if free and self._is_due(member):
                    self._ask(free[(turn + member) % len(free)], member)
                    turn += 1
            self._pause()

    def _missing(self, decision: Decision) -> list[int]:
        self._collect()
        return [member for member in decision.members if member not in self._parts]

    def _is_due(self, member: int) -> bool:
        """Tell whether a part is not on its way, or has been for so long that another one is asked too.

        Those that were asked before go on: on a wire that has become slow, a part that is asked for anew never comes.
        """
        asked = [asked_s for (one, _), (asked_s, _) in self._asked.items() if one == member]
        if asked:
            return time.monotonic() > max(asked) + self._council.transfers.limit_s * 2.0 ** (len(asked) - 1)
        return time.monotonic() > self._failed.get(member, -_AGAIN_S) + _AGAIN_S

    def _sources(self, decision: Decision, member: int) -> list[int]:
        with self._council.changed:
            there = dict(self._council.view.neighbours)
        there.pop(self._council.replica, None)
        holders = there.keys() & {member, *decision.holders}
        # where all have gone that held it then, others have fetched it from them meanwhile
        return sorted(holders or (replica for replica, found in there.items() if found.is_active))

    def _give_up(self, member: int, sources: list[int]) -> None:
        who = f"none of the replicas {sources} gave" if sources else "nobody that is left holds"
        why = f"{who} the part of replica {member}"
        self._council.tell("stuck", round=self._round_id, why=why)
        self._council.settle(self._round_id)
        raise Expelled(f"replica {self._council.replica} could not get round {self._round_id}: {why}; it joins again")

    def _cancel_all(self) -> None:
        for member, _ in list(self._asked):
            self._cancel(member)

    def _cancel(self, member: int) -> None:
        for key in [key for key in self._asked if key[0] == member]:
            self._asked.pop(key)[1].cancel()

    def _pause(self) -> None:
        with self._council.changed:
            self._council.changed.wait(_LOOK_S)
