"""Interface of transports: messages from replica to replica, each with a deadline; small JSON notes to all."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable
from weakref import WeakKeyDictionary

import torch

from thinwire.errors import DeadlineExceeded, PayloadError, TransportError
from thinwire.transport.streams import CONTROL, KEY_BITS, OWNER_BITS, MessageAddress, Stream

if TYPE_CHECKING:
    from thinwire.transport.tcp_stats import ConnectionStats
    from thinwire.transport.wire.multipath import PathStats  # needs pyzmq, an extra

# In an open set, replica numbers only grow and are never used twice.
MOST_REPLICAS = 1 << 20
# Opaque bytes of a message that its stream uses, such as a hash.
NOTE_BYTES = 8
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """MessageAddress and size of a message, on which sender and receiver agree beforehand; the header proves them.

    Attributes:
        stream: What the message belongs to.
        key: One to three unsigned integers, which the stream names; the rest is 0.
        owner: Which of several owners on one transport it belongs to, counted from 0.
        codec_id: `wire_id` of the payload's codec, 0 for raw bytes.
        numel: Elements that the payload stands for.
        payload_bytes: Size of the payload; for a receiver that `takes_less`, the most it can be.
        note: Up to `NOTE_BYTES` that the stream sends along, such as a hash; zeros follow. They are handed on, and not
            compared.
        takes_less: For a receiver: whether the payload may be shorter. It does not travel.
        spread_s: Seconds over which the sender's own transport should spread the message. It does not travel; a
            transport may ignore it.

    Raises:
        ValueError: The payload is larger than the stream allows, or a number does not fit its field.
    """

    stream: Stream
    key: tuple[int, ...]
    owner: int = 0
    codec_id: int = 0
    numel: int = 0
    payload_bytes: int = 0
    note: bytes = field(default=b"", compare=False)
    takes_less: bool = field(default=False, compare=False)
    spread_s: float = field(default=0.0, compare=False)
    address: MessageAddress = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        stream, key = self.stream, (*self.key, *(0,) * (len(KEY_BITS) - len(self.key)))
        if not 1 <= len(self.key) <= len(KEY_BITS):
            raise ValueError(f"a key of stream {stream.name} has 1 to {len(KEY_BITS)} parts, got {self.key}")
        for place, (value, bits) in enumerate(zip(key, KEY_BITS, strict=True)):
            if not 0 <= value < 1 << bits:
                raise ValueError(
                    f"{stream.part_name(place)} of stream {stream.name} must be in 0..{(1 << bits) - 1}, got {value}"
                )
        if not 0 <= self.owner < 1 << OWNER_BITS:
            raise ValueError(f"owner must be in 0..{(1 << OWNER_BITS) - 1}, got {self.owner}")
        if not 0 <= self.payload_bytes <= stream.most_bytes:
            raise ValueError(
                f"a message of stream {stream.name} holds at most {stream.most_bytes} bytes, got {self.payload_bytes}; "
                f"split it, or register the stream with larger most_bytes"
            )
        if len(self.note) > NOTE_BYTES:
            raise ValueError(f"the note of a message holds at most {NOTE_BYTES} bytes, got {len(self.note)}")
        object.__setattr__(self, "address", MessageAddress(stream.number, self.owner, *key))
        object.__setattr__(self, "note", self.note.ljust(NOTE_BYTES, b"\0"))

    def describe(self) -> str:
        return self.stream.describe(self.address[2:], owner=self.owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message that arrived whole: its payload (uint8, `(payload_bytes,)`, CPU) and the sender's note."""

    payload: torch.Tensor
    note: bytes = bytes(NOTE_BYTES)


class Pending(Protocol):
    """A transfer in flight."""

    def done(self) -> bool:
        """Return, without waiting, whether `wait` would return or raise at once."""
        ...

    def wait(self, *, deadline_s: float) -> Received | None:
        """Wait until the transfer is done.

        Args:
            deadline_s: Seconds from now after which the peer counts as hung.

        Returns:
            The message for a receive, None for a send.

        Raises:
            DeadlineExceeded: Nothing came in time.
            PeerLost: The connection broke.
            PayloadError: The message is corrupt, foreign, or not the expected one.
        """
        ...


@runtime_checkable
class Transport(Protocol):
    """Point-to-point messages between the replicas of a run.

    Attributes:
        replica: This replica's number, 0 to `num_replicas - 1`.
        runs_in_background: Whether an exchange may be driven from a thread of its own. It may not over the loopback
            transport, where everything happens in one deterministic order.
    """

    @property
    def replica(self) -> int: ...

    @property
    def num_replicas(self) -> int: ...

    @property
    def runs_in_background(self) -> bool: ...

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        """Start to send a payload (uint8, one-dimensional, contiguous, CPU) to another replica."""
        ...

    def receive(self, *, source: int, envelope: Envelope) -> Pending:
        """Start to receive the message that `source` sends under the same envelope."""
        ...

    def close(self) -> None:
        """Release sockets and threads; may be called again."""
        ...


class Response(Pending, Protocol):
    """Response to another replica's request, in flight."""

    envelope: Envelope

    def on_finish(self, callback: Callable[[], None]) -> None:
        """Call back once when it ended, well or not; at once if it has."""
        ...


class Request(Response, Protocol):
    """Request to another replica, and its response, in flight."""

    def cancel(self) -> None:
        """Cancel it; a response that still arrives is dropped."""
        ...


@runtime_checkable
class RequestTransport(Transport, Protocol):
    """A transport over which replicas also request blobs from each other by name, as `WireTransport`.

    Attributes:
        on_request: Called with a replica, the number of its request and the requested name.
        on_cancel: Called with a replica and the number of a cancelled request.
        on_lost: Called with a replica whose connection ended; its requests have ended too.
    """

    on_request: Callable[[int, int, bytes], None] | None
    on_cancel: Callable[[int, int], None] | None
    on_lost: Callable[[int], None] | None

    def request(self, source: int, name: bytes, *, most_bytes: int) -> Request:
        """Request a blob that another replica has, or will have."""
        ...

    def respond(
        self, peer: int, number: int, payload: torch.Tensor, *, is_there: bool = True, crc: int | None = None
    ) -> Response:
        """Respond to a request; the payload is not copied, and must not change until the transfer ends."""
        ...


def check_peer(peer: int, *, replica: int, num_replicas: int) -> None:
    """Check that a replica can exchange with another one.

    Raises:
        ValueError: There is no other replica of that number.

    Example:
        >>> check_peer(1, replica=1, num_replicas=2)
        Traceback (most recent call last):
            ...
        ValueError: replica 1 can exchange with another of 0..1, got 1
    """
    if not 0 <= peer < num_replicas or peer == replica:
        raise ValueError(f"replica {replica} can exchange with another of 0..{num_replicas - 1}, got {peer}")


class TransportWrapper:
    """A transport that passes everything on to another one; a wrapper overrides what it is there for."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    @property
    def replica(self) -> int:
        return self.inner.replica

    @property
    def num_replicas(self) -> int:
        return self.inner.num_replicas

    @property
    def runs_in_background(self) -> bool:
        return self.inner.runs_in_background

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        return self.inner.send(payload, to=to, envelope=envelope)

    def receive(self, *, source: int, envelope: Envelope) -> Pending:
        return self.inner.receive(source=source, envelope=envelope)

    def reading(self, peer: int) -> ConnectionStats | None:
        """Return the kernel's statistics of the connection to a replica, None if the transport has none."""
        return self._ask("reading", None, peer)

    def connections(self) -> Mapping[Hashable, ConnectionStats]:
        """Return the kernel's statistics of all connections to other replicas, none if the transport has none."""
        return self._ask("connections", {})

    def paths(self, peer: int) -> list[PathStats]:
        """Return the state of each path to a replica; nothing where one connection leads there."""
        return self._ask("paths", [], peer)

    def limit_path(self, peer: int, path: int, weight: float) -> None:
        """Use a path to a replica for at most this part of its rate; see `WireTransport.limit_path`."""
        self._ask("limit_path", None, peer, path, weight)

    def close(self) -> None:
        self.inner.close()

    def _ask(self, method: str, otherwise: T, *arguments: Any) -> T:
        """Call a method that not all transports have."""
        found: Callable[..., T] | None = getattr(self.inner, method, None)
        return otherwise if found is None else found(*arguments)


def innermost(transport: Transport) -> Any:
    """Return the transport that moves the bytes, without its wrappers."""
    found: Any = transport
    while hasattr(found, "inner"):
        found = found.inner
    return found


class RankSubset(TransportWrapper):
    """Some ranks of a transport between ranks, numbered from 0 in their order; this rank is one of them.

    Args:
        inner: Its replicas are ranks.
        ranks: Of the inner transport.
        release: Called after the inner transport was closed.

    Example:
        >>> from thinwire.transport.loopback import LoopbackWorld
        >>> one = RankSubset(LoopbackWorld(4).transports[3], [1, 3])
        >>> one.replica, one.num_replicas
        (1, 2)
    """

    def __init__(self, inner: Transport, ranks: Sequence[int], *, release: Callable[[], None] = lambda: None) -> None:
        super().__init__(inner)
        self._ranks, self._release = tuple(ranks), release

    @property
    def replica(self) -> int:
        return self._ranks.index(self.inner.replica)

    @property
    def num_replicas(self) -> int:
        return len(self._ranks)

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        check_peer(to, replica=self.replica, num_replicas=self.num_replicas)
        return self.inner.send(payload, to=self._ranks[to], envelope=envelope)

    def receive(self, *, source: int, envelope: Envelope) -> Pending:
        check_peer(source, replica=self.replica, num_replicas=self.num_replicas)
        return self.inner.receive(source=self._ranks[source], envelope=envelope)

    def reading(self, peer: int) -> ConnectionStats | None:
        return super().reading(self._ranks[peer])

    def paths(self, peer: int) -> list[PathStats]:
        return super().paths(self._ranks[peer])

    def limit_path(self, peer: int, path: int, weight: float) -> None:
        super().limit_path(self._ranks[peer], path, weight)

    def close(self) -> None:
        super().close()
        self._release()


_owners: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class OwnedTransport(TransportWrapper):
    """Addresses the messages of one owner apart from those of all others on the same transport.

    Owners are counted as they come, so all replicas must make theirs in the same order.

    Args:
        inner: The transport that moves the bytes; also one that others use beside this.

    Example:
        >>> from thinwire.transport.loopback import LoopbackWorld
        >>> transport = LoopbackWorld(2).transports[0]
        >>> OwnedTransport(transport).owner, OwnedTransport(transport).owner
        (0, 1)
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        shared = innermost(inner)
        self.owner = _owners.get(shared, 0)
        _owners[shared] = self.owner + 1

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        return self.inner.send(payload, to=to, envelope=replace(envelope, owner=self.owner))

    def receive(self, *, source: int, envelope: Envelope) -> Pending:
        return self.inner.receive(source=source, envelope=replace(envelope, owner=self.owner))


def step_aside(transport: Transport) -> bool:
    """Let other replicas go on, where all of them run in this process in one order and one at a time.

    Args:
        transport: One that takes turns, or wraps one; with any other nothing happens.

    Returns:
        Whether another replica went on meanwhile.
    """
    found = innermost(transport)
    return bool(found.step_aside()) if hasattr(found, "step_aside") else False


class StreamLimits:
    """Messages of one direction that a transport has in flight; refuses what a stream does not allow at once."""

    def __init__(self) -> None:
        # by link, stream, owner and slot: the address, and how many messages have it
        self._slots: dict[Hashable, tuple[MessageAddress, int]] = {}
        self._lock = threading.Lock()

    def begin(self, envelope: Envelope, *, link: Hashable) -> Callable[[], None]:
        """Count a message on a link between two replicas; return what ends the count, at its first call.

        Raises:
            ValueError: A message is in flight there that the stream does not allow beside this one.
        """
        stream, address = envelope.stream, envelope.address
        place = (link, stream.number, address.owner, stream.slot(address[2:]))
        with self._lock:
            other, count = self._slots.get(place, (address, 0))
            if other != address:
                raise ValueError(
                    f"{stream.describe(address[2:], owner=address.owner)} cannot be in flight beside "
                    f"{stream.describe(other[2:])}: stream {stream.name} allows {stream.in_flight} consecutive values "
                    f"of its key at once; wait for the earlier one, or register the stream with larger in_flight"
                )
            self._slots[place] = address, count + 1
        is_over = False

        def end() -> None:
            nonlocal is_over
            with self._lock:
                if not is_over and self._slots[place][1] == 1:
                    del self._slots[place]
                elif not is_over:
                    self._slots[place] = address, self._slots[place][1] - 1
                is_over = True

        return end


class TransferFuture:
    """A `Pending` that calls back when it ends."""

    def __init__(self, *, peer_name: str, envelope: Envelope, verb: str) -> None:
        self.peer_name = peer_name
        self._envelope = envelope
        self._verb = verb
        self._finished = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._received: Received | None = None
        self._error: TransportError | None = None
        self._uncount: Callable[[], None] = lambda: None

    def count(self, in_flight: StreamLimits, *, link: Hashable) -> None:
        """Count it among the messages of a link that are in flight, until it ends.

        Raises:
            ValueError: Its stream does not allow it beside those that are.
        """
        self._uncount = in_flight.begin(self._envelope, link=link)

    def describe(self) -> str:
        return self._envelope.describe()

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self, *, deadline_s: float) -> Received | None:
        if not self._finished.wait(timeout=max(0.0, deadline_s)):
            raise DeadlineExceeded(
                f"{self.peer_name} did not {self._verb} {self.describe()} within {deadline_s:.3g} s, the "
                f"deadline that follows from measured times; it hangs, or its link became slower than that: see its log"
            )
        if self._error is not None:
            raise self._error
        return self._received

    def on_finish(self, callback: Callable[[], None]) -> None:
        """Call back once when the transfer ended, well or not, from the thread that ends it; at once if it has."""
        with self._lock:
            if not self._finished.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def _end(self, error: TransportError | None) -> None:
        """End once: with the message in `_received`, or with an error."""
        with self._lock:
            if self._finished.is_set():
                return
            self._error = error
            self._uncount()  # before a waiter can go on and send the next
            self._finished.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


JSON_BYTES = 8192


def all_gather_json(
    note: Mapping[str, Any], *, transport: Transport, number: int, deadline_s: float
) -> list[dict[str, Any]]:
    """Tell every replica a note and return the notes of all, in the replicas' order.

    Nobody returns before everybody has spoken, so it is a barrier too.

    Args:
        note: JSON values, at most `JSON_BYTES` as text.
        transport: Joins the replicas.
        number: The same on all replicas, another one for every call of a run.
        deadline_s: Seconds to wait for the others.

    Raises:
        TransportError: A replica did not speak, or sent no JSON object.
        ValueError: The note is too long.
    """
    own = json.dumps(dict(note))
    text = own.encode()
    if len(text) > JSON_BYTES:
        raise ValueError(f"a note holds at most {JSON_BYTES} bytes, got {len(text)}")
    payload = torch.frombuffer(bytearray(text.ljust(JSON_BYTES)), dtype=torch.uint8)
    envelope = Envelope(stream=CONTROL, key=(number,), payload_bytes=JSON_BYTES)
    others = [peer for peer in range(transport.num_replicas) if peer != transport.replica]
    receives = [transport.receive(source=peer, envelope=envelope) for peer in others]
    sends = [transport.send(payload, to=peer, envelope=envelope) for peer in others]
    notes = {transport.replica: json.loads(own)}
    for peer, pending in zip(others, receives, strict=True):
        received = pending.wait(deadline_s=deadline_s)
        assert received is not None
        notes[peer] = read_object(bytes(received.payload.numpy()), whose=f"the note of replica {peer}")
    for pending in sends:
        pending.wait(deadline_s=deadline_s)
    return [notes[replica] for replica in sorted(notes)]


def read_object(raw: bytes | str, *, whose: str) -> dict[str, Any]:
    """Read a JSON object that another process sent.

    Raises:
        PayloadError: It is no JSON object; names whose.
    """
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"{whose} is no JSON; run the same thinwire on all hosts") from error
    if not isinstance(found, dict):
        raise PayloadError(f"{whose} is no JSON object; run the same thinwire on all hosts")
    return found
