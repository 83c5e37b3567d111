"""Interface of transports: messages from replica to replica, each with a deadline; small JSON notes to all."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

import torch

from thinwire.errors import DeadlineExceeded, PayloadError, TransportError

# Each owner of messages on one transport numbers its rounds from another multiple of this on. Tags hold the number
# modulo 2^14, so what four owners have in flight stays apart there too.
OWNER_STRIDE = (1 << 48) + (1 << 12)
# In an open set, replica numbers only grow and are never used twice.
MOST_REPLICAS = 1 << 20


class Kind(IntEnum):
    """Purpose of a message; part of its header and of its tag."""

    ROUND = 1
    SETUP = 2
    BUFFERS = 3
    CONTROL = 4
    BLOB = 5

    @property
    def label(self) -> str:
        """The kind's name in records and errors."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Identity and size of a message, on which sender and receiver agree beforehand; the header proves it.

    Attributes:
        kind: Purpose of the message.
        round_id: The round, counted from 0 (for other kinds: their own running number).
        fragment: The fragment, counted from 0.
        phase: 0 for a round's first message, 1 for the second of a two-phase exchange.
        codec_id: `wire_id` of the payload's codec, 0 for raw bytes.
        numel: Elements that the payload stands for.
        payload_bytes: Size of the payload; for a receiver that `takes_less`, the most it can be.
        takes_less: For a receiver: whether the payload may be shorter. It does not travel.
        reference_hash: Hash of the global value that the payload refers to, 0 for none. It is not compared on
            arrival: the engine compares it over all replicas, so that it can name the odd one. In the response to a
            request it is 1 if the payload is the requested blob, and 0 if that is not there and will not be.
        data_hash: Hash of the data that the sender trains on, 0 for none; it is not compared on arrival.
        spread_s: Seconds over which the sender's own transport should spread the message. It does not travel; a
            transport may ignore it.
    """

    kind: Kind
    round_id: int
    fragment: int = 0
    phase: int = 0
    codec_id: int = 0
    numel: int = 0
    payload_bytes: int = 0
    reference_hash: int = 0
    data_hash: int = field(default=0, compare=False)
    takes_less: bool = field(default=False, compare=False)
    spread_s: float = field(default=0.0, compare=False)

    def describe(self) -> str:
        """Name the message in an error's text."""
        owner, number = divmod(self.round_id, OWNER_STRIDE)
        whose = f" of optimizer {owner + 1}" if owner else ""
        if self.kind is Kind.ROUND:
            return f"round {number} (fragment {self.fragment}){whose}"
        return f"{self.kind.label} {number}{whose}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message that arrived whole: its payload (uint8, `(payload_bytes,)`, CPU) and the sender's hashes."""

    payload: torch.Tensor
    reference_hash: int
    data_hash: int = 0


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
        num_replicas: Number of replicas.
        runs_in_background: Whether an exchange may be driven from a thread of its own. It may not over the loopback
            transport, where everything happens in one deterministic order.
    """

    @property
    def replica(self) -> int:
        """Its replica's number."""
        ...

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        ...

    @property
    def runs_in_background(self) -> bool:
        """Whether an exchange may be driven from a thread of its own."""
        ...

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        """Start to send a payload (uint8, one-dimensional, contiguous, CPU) to another replica."""
        ...

    def receive(self, *, source: int, envelope: Envelope) -> Pending:
        """Start to receive the message that `source` sends under the same envelope."""
        ...

    def close(self) -> None:
        """Release sockets and threads; may be called again."""
        ...


class Request(Pending, Protocol):
    """Request to another replica, and its response, in flight."""

    envelope: Envelope

    def cancel(self) -> None:
        """Cancel it; a response that still arrives is dropped."""
        ...

    def on_finish(self, callback: Callable[[], None]) -> None:
        """Call back once when it ended, well or not; at once if it has."""
        ...


class Response(Pending, Protocol):
    """Response to another replica's request, in flight."""

    envelope: Envelope

    def on_finish(self, callback: Callable[[], None]) -> None:
        """Call back once when it ended, well or not; at once if it has."""
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


def step_aside(transport: Transport) -> bool:
    """Let other replicas go on, where all of them run in this process in one order and one at a time.

    Args:
        transport: One that takes turns, or wraps one; with any other nothing happens.

    Returns:
        Whether another replica went on meanwhile.
    """
    innermost: Any = transport
    while hasattr(innermost, "inner"):
        innermost = innermost.inner
    return bool(innermost.step_aside()) if hasattr(innermost, "step_aside") else False


class TransferFuture:
    """A `Pending` that calls back when it ends.

    Args:
        peer_name: The other end's name in errors.
        envelope: The message's envelope.
        verb: The peer's part: "send" or "take".
    """

    def __init__(self, *, peer_name: str, envelope: Envelope, verb: str) -> None:
        self._peer_name = peer_name
        self._envelope = envelope
        self._verb = verb
        self._finished = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._received: Received | None = None
        self._error: TransportError | None = None

    def describe(self) -> str:
        """Name the transfer in an error's text."""
        return self._envelope.describe()

    def done(self) -> bool:
        """Return, without waiting, whether `wait` would return or raise at once."""
        return self._finished.is_set()

    def wait(self, *, deadline_s: float) -> Received | None:
        """Wait until the transfer is done; after a time-out it may be called again."""
        if not self._finished.wait(timeout=max(0.0, deadline_s)):
            raise DeadlineExceeded(
                f"{self._peer_name} did not {self._verb} {self.describe()} within {deadline_s:.3g} s, the "
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
            self._finished.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


NOTE_BYTES = 8192


def all_gather_json(
    note: Mapping[str, Any], *, transport: Transport, number: int, deadline_s: float
) -> list[dict[str, Any]]:
    """Tell every replica a note and return the notes of all, in the replicas' order.

    Nobody returns before everybody has spoken, so it is a barrier too.

    Args:
        note: JSON values, at most `NOTE_BYTES` as text.
        transport: Joins the replicas.
        number: The same on all replicas, another one for every call of a run.
        deadline_s: Seconds to wait for the others.

    Raises:
        TransportError: A replica did not speak, or sent no JSON object.
        ValueError: The note is too long.
    """
    own = json.dumps(dict(note))
    text = own.encode()
    if len(text) > NOTE_BYTES:
        raise ValueError(f"a note holds at most {NOTE_BYTES} bytes, got {len(text)}")
    payload = torch.frombuffer(bytearray(text.ljust(NOTE_BYTES)), dtype=torch.uint8)
    envelope = Envelope(kind=Kind.CONTROL, round_id=number, payload_bytes=NOTE_BYTES)
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

    Args:
        raw: What it sent.
        whose: Its name in the error, such as "the note of replica 1".

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
