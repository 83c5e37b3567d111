"""Recording transport: logs the peer, bytes, times and error of every message."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

import torch

from thinwire.errors import DeadlineExceeded, TransportError
from thinwire.events import Direction, Posted, Transfer, TransferLog
from thinwire.transport.base import (
    Envelope,
    Pending,
    Received,
    Request,
    RequestTransport,
    Response,
    Transport,
    TransportWrapper,
)
from thinwire.transport.message import HEADER_BYTES


@runtime_checkable
class FinishNotifier(Protocol):
    """A pending transfer that calls back when it ends."""

    def on_finish(self, callback: Callable[[], None]) -> None:
        """Call back once when the transfer ended, well or not; at once if it has."""
        ...


class RecordingTransport(TransportWrapper):
    """Wrap a transport and record one `Transfer` for each message that ended, and for each deadline it missed.

    If the transport moves bytes in the background, a message's end is recorded when it happens; otherwise by `wait`. A
    failed transfer is recorded with its error's text.

    Args:
        inner: The transport that moves the bytes.
        log: Where the records go, a new log by default.
        clock: Monotonic time in seconds.

    Attributes:
        inner: The transport that moves the bytes.
        log: The records.

    Example:
        >>> from thinwire.transport.loopback import LoopbackWorld
        >>> transport = RecordingTransport(LoopbackWorld(1).transports[0])
        >>> len(transport.log)
        0
    """

    def __init__(
        self, inner: Transport, *, log: TransferLog | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(inner)
        self.log = TransferLog() if log is None else log
        self._clock = clock

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        """Start to send, see `Transport.send`."""
        entry = _Entry(self.log, self._clock, direction="sent", peer=to, envelope=envelope)
        pending = _begin(entry, partial(self.inner.send, payload, to=to, envelope=envelope))
        if pending.done():
            # a message that has left already needs no `wait`; a receive does, since waiting takes the message
            pending.settle()
        return pending

    def receive(self, *, source: int, envelope: Envelope) -> Pending:
        """Start to receive, see `Transport.receive`."""
        entry = _Entry(self.log, self._clock, direction="received", peer=source, envelope=envelope)
        return _begin(entry, partial(self.inner.receive, source=source, envelope=envelope))


class RecordingRequestTransport(RecordingTransport):
    """Wrap a transport with requests, and record requests and responses too, with kind `blob`.

    A request is recorded with the bytes that arrived, a response with the bytes sent, and a cancelled one with its
    error. Replicas are added to and removed from the wrapped transport itself.

    Args:
        inner: The transport that moves the bytes.
        log: Where the records go, a new log by default.
        clock: Monotonic time in seconds.

    Attributes:
        inner: The transport that moves the bytes.
        log: The records.
        on_request: The wrapped transport's.
        on_cancel: The wrapped transport's.
        on_lost: The wrapped transport's.
    """

    def __init__(
        self, inner: RequestTransport, *, log: TransferLog | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(inner, log=log, clock=clock)
        self._requests = inner
        # names of requests that are not answered yet, by replica and number
        self._open_requests: dict[tuple[int, int], bytes] = {}
        self._on_request: Callable[[int, int, bytes], None] | None = None
        self._on_lost: Callable[[int], None] | None = None

    @property
    def num_open_requests(self) -> int:
        """Number of requests of others without a response."""
        return len(self._open_requests)

    @property
    def on_request(self) -> Callable[[int, int, bytes], None] | None:
        """Called with a replica, the number of its request and the requested name."""
        return self._on_request

    @on_request.setter
    def on_request(self, handler: Callable[[int, int, bytes], None] | None) -> None:
        self._on_request = handler
        self._requests.on_request = None if handler is None else self._on_peer_request

    @property
    def on_cancel(self) -> Callable[[int, int], None] | None:
        """Called with a replica and the number of a cancelled request."""
        return self._on_cancel

    @on_cancel.setter
    def on_cancel(self, handler: Callable[[int, int], None] | None) -> None:
        self._on_cancel = handler
        self._requests.on_cancel = None if handler is None else self._on_peer_cancel

    @property
    def on_lost(self) -> Callable[[int], None] | None:
        """Called with a replica whose connection ended; its requests have ended too."""
        return self._on_lost

    @on_lost.setter
    def on_lost(self, handler: Callable[[int], None] | None) -> None:
        self._on_lost = handler
        self._requests.on_lost = None if handler is None else self._on_peer_lost

    def request(self, source: int, name: bytes, *, most_bytes: int) -> Request:
        """Send a request, see `RequestTransport.request`."""
        pending = self._requests.request(source, name, most_bytes=most_bytes)
        return _RecordedRequest(pending, self._entry("received", source, pending.envelope, name))

    def respond(
        self, peer: int, number: int, payload: torch.Tensor, *, is_there: bool = True, crc: int | None = None
    ) -> Response:
        """Respond to a request, see `RequestTransport.respond`."""
        pending = self._requests.respond(peer, number, payload, is_there=is_there, crc=crc)
        name = self._open_requests.pop((peer, number), b"")
        return _RecordedResponse(pending, self._entry("sent", peer, pending.envelope, name))

    def _on_peer_request(self, peer: int, number: int, name: bytes) -> None:
        handler = self._on_request  # another thread may unset it
        if handler is not None:
            self._open_requests[peer, number] = name
            handler(peer, number, name)

    def _on_peer_cancel(self, peer: int, number: int) -> None:
        self._open_requests.pop((peer, number), None)
        handler = self._on_cancel
        if handler is not None:
            handler(peer, number)

    def _on_peer_lost(self, peer: int) -> None:
        for key in [key for key in list(self._open_requests) if key[0] == peer]:
            self._open_requests.pop(key, None)
        handler = self._on_lost
        if handler is not None:
            handler(peer)

    def _entry(self, direction: Direction, peer: int, envelope: Envelope, name: bytes) -> _Entry:
        return _Entry(self.log, self._clock, direction=direction, peer=peer, envelope=envelope, name=name)


class _Entry:
    """Log record of one transfer, written at its end, and at most once before for a missed deadline."""

    def __init__(
        self,
        log: TransferLog,
        clock: Callable[[], float],
        *,
        direction: Direction,
        peer: int,
        envelope: Envelope,
        name: bytes = b"",
    ) -> None:
        self._log = log
        self._clock = clock
        self._direction: Direction = direction
        self._peer = peer
        self._envelope = envelope
        self._started_s = clock()
        self._lock = threading.Lock()
        self._has_ended = False
        self._has_missed = False
        self._name = name
        self._posted = Posted(
            direction=direction, peer=peer, kind=envelope.stream.name, owner=envelope.owner,
            round_id=envelope.address.number, fragment=envelope.address.part, phase=envelope.address.phase,
            num_bytes=envelope.payload_bytes, posted_s=self._started_s, name=name,
        )  # fmt: skip
        log.post(self._posted)

    def end(self, *, error: str, received: Received | None = None, begun_s: float | None = None) -> None:
        """Write the end; only the first call counts."""
        with self._lock:
            if not self._has_ended:
                self._has_ended = True
                self._log.settle(self._posted)
                self._write(error, received, begun_s)

    def miss(self, *, error: str) -> None:
        """Write that a deadline ran out; the transfer may still end well, and is then counted."""
        with self._lock:
            if not self._has_ended and not self._has_missed:
                self._has_missed = True
                self._write(error)

    def _write(self, error: str, received: Received | None = None, begun_s: float | None = None) -> None:
        envelope = self._envelope
        payload_bytes = envelope.payload_bytes if received is None else received.payload.numel()
        transfer = Transfer(
            direction=self._direction, peer=self._peer, kind=envelope.stream.name, owner=envelope.owner,
            round_id=envelope.address.number, fragment=envelope.address.part, phase=envelope.address.phase,
            payload_bytes=payload_bytes, wire_bytes=HEADER_BYTES + payload_bytes, started_s=self._started_s,
            finished_s=self._clock(), error=error, name=self._name, begun_s=begun_s,
        )  # fmt: skip
        self._log.add(transfer)


class _Recorded:
    def __init__(self, inner: Pending, entry: _Entry) -> None:
        self._inner = inner
        self._entry = entry

    def done(self) -> bool:
        return self._inner.done()

    def wait(self, *, deadline_s: float) -> Received | None:
        try:
            received = self._inner.wait(deadline_s=deadline_s)
        except DeadlineExceeded as error:
            self._entry.miss(error=str(error))
            raise
        except TransportError as error:
            self._entry.end(error=str(error))
            raise
        self._entry.end(error="", received=received, begun_s=getattr(self._inner, "begun_s", None))
        return received

    def settle(self) -> None:
        """Record the end of a transfer that is done."""
        with contextlib.suppress(TransportError):  # it is recorded here, and raised by the caller's `wait`
            self.wait(deadline_s=0.0)


class _RecordedOnFinish(_Recorded):
    def __init__(self, inner: Pending, entry: _Entry, announcing: FinishNotifier) -> None:
        super().__init__(inner, entry)
        self._announcing = announcing
        announcing.on_finish(self.settle)

    def on_finish(self, callback: Callable[[], None]) -> None:
        self._announcing.on_finish(callback)


class _RecordedResponse(_RecordedOnFinish):
    def __init__(self, inner: Response, entry: _Entry) -> None:
        super().__init__(inner, entry, inner)
        self.envelope = inner.envelope


class _RecordedRequest(_RecordedResponse):
    def __init__(self, inner: Request, entry: _Entry) -> None:
        super().__init__(inner, entry)
        self.cancel = inner.cancel


def _begin(entry: _Entry, begin: Callable[[], Pending]) -> _Recorded:
    try:
        pending = begin()
    except TransportError as error:
        entry.end(error=str(error))
        raise
    if isinstance(pending, FinishNotifier):
        return _RecordedOnFinish(pending, entry, pending)
    return _Recorded(pending, entry)
