"""Messages over torch.distributed's gloo, each in its own thread, each failure by name.

What gloo does (observed with torch 2.13), and what follows from it:

- `Work.is_completed()` of a send or receive stays False until somebody waits. So each transfer has a small thread that
  waits; the wait does not hold the interpreter's lock, and any number of threads may wait at once.
- A wait that times out closes the whole connection: every other message to that peer fails with it. So the threads wait
  without a limit, and a caller's deadline only ends the caller's wait. A peer that was merely late can still arrive.
- A message that is larger than the posted buffer ends the process (an exception in gloo's own thread); a smaller one
  arrives silently short. So every message starts with an opening of at most `OPENING_BYTES`, for which the receiver
  always has room; the rest is asked for only when the opening's header states the expected size. Messages above
  that size pay one more round trip, small against the time that their bytes take. The rest comes in parts whose number
  both ends know, so that a sender may spread them over time without a word to the receiver. Gloo authenticates
  nobody: a stranger who speaks gloo's own protocol is beyond this; hosts of a process group must trust each other.
- A receiver's word that it is ready travels in the same stream as what it sends itself. Behind a large message of its
  own it would come late, and the two directions would take turns. So where two replicas exchange under the same tag,
  each sends the rest of its message only after it has asked for the rest of the other's: both directions are then
  busy at once, and no round ends later, because each needs both.
- A tag is an int of 31 bits. Messages of one pair under the same tag are matched in the order of their posting.
- A wait with a tiny time limit is the one public way to end another thread's wait; `close` uses it.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from thinwire.errors import PeerLost, TransportError
from thinwire.transport.base import Envelope, Pending, StreamLimits, TransferFuture, check_peer
from thinwire.transport.message import HEADER_BYTES, Tamper, pack, unpack
from thinwire.transport.streams import SLOT_BITS
from thinwire.transport.tcp_stats import ConnectionStats, LocalSockets

OPENING_BYTES = 1 << 16
MOST_PARTS = 64
CLOSE_S = 10.0
# A `dist.ProcessGroup` of torch's world, or a `dist.ProcessGroupGloo` in no world; torch's types lack its send.
GlooGroup = Any
_FOREVER = timedelta(days=30)
_AT_ONCE = timedelta(milliseconds=1)
PAYLOAD_BYTES_AT = 32
# Beside 8 bits of the stream, those of the slot and one for the rest of a message: 31 in all.
_OWNER_BITS = 6


def tag_of(envelope: Envelope, *, rest: bool = False) -> int:
    """Return gloo's tag for a message: distinct for all that one pair has in flight at the same time.

    It holds the stream, the owner and the slot of the key in its stream, and whether it is of the part behind the
    opening; the header holds the whole address.

    Raises:
        ValueError: There are more owners than tags tell apart.

    Example:
        >>> from thinwire.transport.streams import ROUNDS, SETUP
        >>> tag_of(Envelope(stream=ROUNDS, key=(1,))) != tag_of(Envelope(stream=SETUP, key=(1,)))
        True
    """
    if envelope.owner >= 1 << _OWNER_BITS:
        raise ValueError(
            f"at most {1 << _OWNER_BITS} owners share a process group, got owner {envelope.owner + 1}; give all hosts "
            f"a secret, so that they connect without a process group"
        )
    tag = envelope.stream.number << _OWNER_BITS | envelope.owner
    tag = tag << SLOT_BITS | envelope.stream.slot(envelope.address[2:])
    return tag << 1 | rest


def part_offsets(message_bytes: int) -> list[int]:
    """Return where each part of a message ends: the opening, then up to `MOST_PARTS` even ones, not below its size.

    Example:
        >>> part_offsets(100), part_offsets(3 * OPENING_BYTES)
        ([100], [65536, 131072, 196608])
    """
    size = max(OPENING_BYTES, -(-(message_bytes - OPENING_BYTES) // MOST_PARTS))
    return [*range(OPENING_BYTES, message_bytes, size), message_bytes]


class ProcessGroupTransport:
    """A transport over a gloo group: rank = replica * ranks_per_replica + shard.

    A rank talks to the ranks that hold the same shard in the other replicas. Payloads travel from host memory, also
    where the model is on a GPU.

    Args:
        group: A gloo group of all ranks, used for these messages alone; torch's world need not exist.
        ranks_per_replica: Ranks that form one replica.
        release: Called once by `close`, for what the maker of the group made.
        sockets: Finds the kernel's statistics of connections to other replicas; None without them.

    Attributes:
        tamper: Called with each packed message that this replica sends.

    Raises:
        ValueError: `ranks_per_replica` does not divide the group's size.
    """

    runs_in_background = True

    def __init__(
        self, group: GlooGroup, *, ranks_per_replica: int = 1, release: Callable[[], None] | None = None,
        sockets: LocalSockets | None = None,
    ) -> None:  # fmt: skip
        world_size = int(group.size())
        if ranks_per_replica < 1 or world_size % ranks_per_replica:
            raise ValueError(
                f"ranks_per_replica must divide the number of ranks, got {ranks_per_replica} for {world_size} ranks"
            )
        self.tamper: Tamper | None = None
        self._group: GlooGroup | None = group
        self.ranks_per_replica, self._release, self._sockets = ranks_per_replica, release, sockets
        self.replica, self.shard = divmod(int(group.rank()), ranks_per_replica)
        self.num_replicas = world_size // ranks_per_replica
        self._in_flight: set[_Transfer] = set()
        self._limits = StreamLimits()
        # by peer and tag: set once a receive has asked for all of its message, or failed
        self._asked: dict[tuple[int, int], threading.Event] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        # A thread that gloo lets go while the interpreter ends would take the process down with it.
        atexit.register(self.close)

    def reading(self, peer: int) -> ConnectionStats | None:
        rank = peer * self.ranks_per_replica + self.shard
        return None if self._sockets is None else self._sockets.reading(rank)

    def connections(self) -> Mapping[Hashable, ConnectionStats]:
        return {} if self._sockets is None else self._sockets.connections()

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        """Start to send a payload to another replica; the transport keeps the bytes alive until they are out.

        Raises:
            ValueError: There is no other replica of that number, or the stream does not allow the message at once.
        """
        message: torch.Tensor | None = pack(payload, sender=self.replica, envelope=envelope)
        transfer = _Transfer(self, peer=to, rank=self._rank_of(to), envelope=envelope, verb="take")
        if self.tamper is not None and message is not None:
            message = self.tamper(message)
        transfer.start_send(message)
        return transfer

    def receive(self, *, source: int, envelope: Envelope) -> Pending:
        """Start to receive the message that `source` sends under the same envelope.

        Raises:
            ValueError: There is no other replica of that number, or the stream does not allow the message at once.
        """
        transfer = _Transfer(self, peer=source, rank=self._rank_of(source), envelope=envelope, verb="send")
        transfer.start_receive()
        return transfer

    def close(self) -> None:
        """End what is in flight and give back what was made for this transport, also when peers are dead."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            in_flight = list(self._in_flight)
        atexit.unregister(self.close)
        end = time.monotonic() + CLOSE_S
        for transfer in in_flight:
            transfer.abort()
        for transfer in in_flight:
            transfer.join(deadline_s=max(0.0, end - time.monotonic()))

        def give_back() -> None:
            if self._release is not None:
                self._release()
            self._group = None  # gloo alone ends with its last reference

        release_within(give_back, seconds=max(0.0, end - time.monotonic()))

    def _rank_of(self, replica: int) -> int:
        check_peer(replica, replica=self.replica, num_replicas=self.num_replicas)
        return replica * self.ranks_per_replica + self.shard


def release_within(release: Callable[[], None], *, seconds: float = CLOSE_S) -> None:
    """End a group: a backend may wait for its peers as it ends, and a dead one must not keep this process."""
    thread = threading.Thread(target=release, daemon=True)
    thread.start()
    thread.join(seconds)


class _Transfer(TransferFuture):
    """One message on its way, and the thread that waits for it."""

    def __init__(self, transport: ProcessGroupTransport, *, peer: int, rank: int, envelope: Envelope, verb: str):
        super().__init__(peer_name=f"replica {peer} (rank {rank})", envelope=envelope, verb=verb)
        self._transport = transport
        self._peer = peer
        self._rank = rank
        self.works: list[dist.Work] = []
        self._thread: threading.Thread | None = None
        self._aborted = threading.Event()
        self.asked = threading.Event()
        self._counterpart: threading.Event | None = None
        self._has_posted = False
        self.begun_s: float | None = None  # when it did not wait for the other direction any more
        self._tags = tag_of(envelope), tag_of(envelope, rest=True)
        self.count(transport._limits, link=(peer, verb))

    def start_send(self, message: torch.Tensor | None) -> None:
        """Post the message's parts and watch them; None is a message lost on purpose."""
        if message is None:
            self._finish(error=None)
            return
        parts = _parts(message)
        try:
            self._post("send", parts[0], is_opening=True)
            if len(parts) > 1:
                self._counterpart = self._transport._asked.get((self._peer, self._tags[0]))
            may_wait = self._counterpart is not None and not self._counterpart.is_set()
            if len(parts) == 1 or not (self._envelope.spread_s > 0 or may_wait):
                for part in parts[1:]:
                    self._post("send", part)
                self._has_posted = True
        except RuntimeError as error:
            self._finish(error=self._name(error))
            return
        # The thread's arguments keep the bytes alive for as long as gloo reads them.
        self._watch(self._drive_send, message)

    def start_receive(self) -> None:
        """Post room for the message's opening and watch it."""
        expected = HEADER_BYTES + self._envelope.payload_bytes
        self._transport._asked[self._peer, self._tags[0]] = self.asked = threading.Event()
        # Pages that nothing arrives in are never touched, so the room costs address space only.
        room = torch.empty(max(expected, OPENING_BYTES), dtype=torch.uint8)
        room[:HEADER_BYTES] = 0  # a message shorter than a header must not find an old one here
        try:
            self._post("recv", room[:OPENING_BYTES], is_opening=True)
        except RuntimeError as error:
            self._finish(error=self._name(error))
            return
        self._watch(self._drive_receive, room)

    def abort(self) -> None:
        """Make the waiting thread return; this breaks the connection to the peer."""
        self._aborted.set()
        self.asked.set()
        for work in list(self.works):
            try:
                work.wait(_AT_ONCE)
            except RuntimeError:  # expected: this is how gloo lets go
                continue

    def join(self, *, deadline_s: float) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=deadline_s)

    def _watch(self, drive: Callable[[torch.Tensor], None], message: torch.Tensor) -> None:
        def run() -> None:
            try:
                drive(message)
            except TransportError as error:
                self._finish(error=error)
            except RuntimeError as error:
                self._finish(error=self._name(error))
            else:
                self._finish(error=None)

        self._thread = threading.Thread(target=run, name=f"thinwire-transfer-{self._peer}", daemon=True)
        self._thread.start()

    def _post(self, operation: Literal["send", "recv"], part: torch.Tensor, *, is_opening: bool = False) -> None:
        tag, transport = self._tags[0 if is_opening else 1], self._transport
        # Under the lock: after `close` looked at what is in flight, nothing may be added.
        with transport._lock:
            if transport._is_closed:
                raise RuntimeError("closed")
            assert transport._group is not None, "it is given back only after close"
            self.works.append(getattr(transport._group, operation)([part], self._rank, tag))
            transport._in_flight.add(self)

    def _drive_send(self, message: torch.Tensor) -> None:
        if not self._has_posted:
            if self._counterpart is not None:
                self._counterpart.wait()
                self.begun_s = time.monotonic()
            parts, began_s = _parts(message), time.monotonic()
            for number, part in enumerate(parts[1:], start=1):
                due_s = began_s + self._envelope.spread_s * number / len(parts)
                if self._aborted.wait(max(0.0, due_s - time.monotonic())):
                    break
                self._post("send", part)
        for work in self.works:
            work.wait(_FOREVER)

    def _drive_receive(self, room: torch.Tensor) -> None:
        self.works[0].wait(_FOREVER)
        # the size in a header that was not checked yet; a damaged one only leads to a refusal
        stated = int.from_bytes(bytes(room[PAYLOAD_BYTES_AT : PAYLOAD_BYTES_AT + 8].numpy()), "little")
        limit = self._envelope.payload_bytes
        if self._envelope.takes_less:
            limit = min(limit, stated)
        if HEADER_BYTES + limit <= OPENING_BYTES:
            # Copied, so that a small payload does not keep the whole room.
            arrived = room[: HEADER_BYTES + limit].clone()
        elif stated == limit:
            arrived = room[: HEADER_BYTES + limit]
            for part in _parts(arrived)[1:]:
                self._post("recv", part)
            self.asked.set()
            for work in self.works[1:]:
                work.wait(_FOREVER)
        else:
            # The peer means another message: nothing more is asked for, and the check finds what differs.
            arrived = room[:OPENING_BYTES]
        self._received = unpack(arrived, source=self._peer, envelope=self._envelope)

    def _finish(self, *, error: TransportError | None) -> None:
        self.asked.set()
        transport, key = self._transport, (self._peer, self._tags[0])
        with transport._lock:
            transport._in_flight.discard(self)
            if transport._asked.get(key) is self.asked:
                del transport._asked[key]
        self._end(error)

    def _name(self, error: RuntimeError) -> TransportError:
        what = self._envelope.describe()
        named = TransportError(f"the transport was closed with {what} of {self.peer_name} in flight")
        if not self._transport._is_closed:
            named = PeerLost(
                f"{self.peer_name} closed its connection during {what}; see its log; restart it and resume from the "
                f"last checkpoint"
            )
        named.__cause__ = error
        return named


def _parts(message: torch.Tensor) -> list[torch.Tensor]:
    ends = part_offsets(message.numel())
    return [message[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def available_backends() -> dict[str, bool]:
    """Return whether gloo and nccl are there.

    Example:
        >>> sorted(available_backends())
        ['gloo', 'nccl']
    """
    if not dist.is_available():
        return {"gloo": False, "nccl": False}
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
