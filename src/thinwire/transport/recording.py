"""Recording transport: logs the peer, bytes, times and error of every message."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial

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


class RecordingTransport(TransportWrapper):
    """Wrap a transport and record one `Transfer` for each message that ended, and for each deadline it missed.

    If the transport moves bytes in the background, a message's end is recorded when it happens; otherwise by `wait`. A
    failed transfer is recorded with its error's text.

    Args:
        inner: The transport that moves the bytes.
        log: Where the records go, a new log by default.
        clock: Monotonic time in seconds.

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
        self.clock = clock

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        """Start to send, see `Transport.send`."""
        begin = partial(self.inner.send, payload, to=to, envelope=envelope)
        pending = _Recorded(self, begin, direction="sent", peer=to, envelope=envelope)
        if pending.done():
            # a message that has left already needs no `wait`; a receive does, since waiting takes the message
            pending.settle()
        return pending

    def receive(self, *, source: int, envelope: Envelope) -> Pending:
        """Start to receive, see `Transport.receive`."""
        begin = partial(self.inner.receive, source=source, envelope=envelope)
        return _Recorded(self, begin, direction="received", peer=source, envelope=envelope)


class RecordingRequestTransport(RecordingTransport):
    """Wrap a transport with requests, and record requests and responses too, with kind `blob`.

    A request is recorded with the bytes that arrived, a response with the bytes sent, and a cancelled one with its
    error. Replicas are added to and removed from the wrapped transport itself.

    Attributes:
        on_request: See `RequestTransport`; also `on_cancel` and `on_lost`. Without it, no blob is there.
    """

    def __init__(
        self, inner: RequestTransport, *, log: TransferLog | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(inner, log=log, clock=clock)
        self.on_request: Callable[[int, int, bytes], None] | None = None
        self.on_cancel: Callable[[int, int], None] | None = None
        self.on_lost: Callable[[int], None] | None = None
        self._requests = inner
        # names of requests that are not answered yet, by replica and number
        self._open_requests: dict[tuple[int, int], bytes] = {}
        inner.on_request, inner.on_cancel, inner.on_lost = self._on_request, self._on_cancel, self._on_lost

    @property
    def num_open_requests(self) -> int:
        return len(self._open_requests)

    def request(self, source: int, name: bytes, *, most_bytes: int) -> Request:
        pending = self._requests.request(source, name, most_bytes=most_bytes)
        return _RecordedRequest(self, pending, direction="received", peer=source, name=name)

    def respond(
        self, peer: int, number: int, payload: torch.Tensor, *, is_there: bool = True, crc: int | None = None
    ) -> Response:
        pending = self._requests.respond(peer, number, payload, is_there=is_there, crc=crc)
        name = self._open_requests.pop((peer, number), b"")
        return _RecordedResponse(self, pending, direction="sent", peer=peer, name=name)

    def _on_request(self, peer: int, number: int, name: bytes) -> None:
        if (handler := self.on_request) is None:  # read once: another thread may unset it
            self._requests.respond(peer, number, torch.empty(0, dtype=torch.uint8), is_there=False)
        else:
            self._open_requests[peer, number] = name
            handler(peer, number, name)

    def _on_cancel(self, peer: int, number: int) -> None:
        self._open_requests.pop((peer, number), None)
        if (handler := self.on_cancel) is not None:
            handler(peer, number)

    def _on_lost(self, peer: int) -> None:
        for key in [key for key in list(self._open_requests) if key[0] == peer]:
            self._open_requests.pop(key, None)
        if (handler := self.on_lost) is not None:
            handler(peer)


class _Recorded:
    """A message under way; its record is written at its end, and at most once before for a missed deadline."""

    def __init__(
        self, recording: RecordingTransport, begin: Callable[[], Pending], *, direction: Direction, peer: int,
        envelope: Envelope, name: bytes = b"",
    ) -> None:  # fmt: skip
        self._log, self._clock = recording.log, recording.clock
        self._lock = threading.Lock()
        self._has_ended = self._has_missed = False
        self._posted = Posted(
            direction=direction, peer=peer, kind=envelope.stream.name, owner=envelope.owner,
            round_id=envelope.address.number, fragment=envelope.address.part, phase=envelope.address.phase,
            num_bytes=envelope.payload_bytes, posted_s=self._clock(), name=name,
        )  # fmt: skip
        self._log.post(self._posted)
        try:
            self._inner = begin()
        except TransportError as error:
            self._write(str(error))
            raise
        if (on_finish := getattr(self._inner, "on_finish", None)) is not None:
            self.on_finish = on_finish  # the transport moves bytes in the background
            on_finish(self.settle)

    def done(self) -> bool:
        return self._inner.done()

    def wait(self, *, deadline_s: float) -> Received | None:
        try:
            received = self._inner.wait(deadline_s=deadline_s)
        except DeadlineExceeded as error:  # it may still end well, and is then counted
            self._write(str(error), is_end=False)
            raise
        except TransportError as error:
            self._write(str(error))
            raise
        self._write("", received, begun_s=getattr(self._inner, "begun_s", None))
        return received

    def settle(self) -> None:
        """Record the end of a transfer that is done."""
        with contextlib.suppress(TransportError):  # it is recorded here, and raised by the caller's `wait`
            self.wait(deadline_s=0.0)

    def _write(
        self, error: str, received: Received | None = None, *, begun_s: float | None = None, is_end: bool = True
    ) -> None:
        with self._lock:
            if self._has_ended or (self._has_missed and not is_end):
                return
            self._has_ended, self._has_missed = is_end, True
            posted = self._posted
            if is_end:
                self._log.settle(posted)
            payload_bytes = posted.num_bytes if received is None else received.payload.numel()
            self._log.add(Transfer(
                direction=posted.direction, peer=posted.peer, kind=posted.kind, owner=posted.owner,
                round_id=posted.round_id, fragment=posted.fragment, phase=posted.phase, payload_bytes=payload_bytes,
                wire_bytes=HEADER_BYTES + payload_bytes, started_s=posted.posted_s, finished_s=self._clock(),
                error=error, name=posted.name, begun_s=begun_s,
            ))  # fmt: skip


class _RecordedResponse(_Recorded):
    def __init__(
        self, recording: RecordingTransport, inner: Response, *, direction: Direction, peer: int, name: bytes
    ) -> None:
        self.envelope = inner.envelope
        super().__init__(recording, lambda: inner, direction=direction, peer=peer, envelope=inner.envelope, name=name)


class _RecordedRequest(_RecordedResponse):
    def __init__(
        self, recording: RecordingTransport, inner: Request, *, direction: Direction, peer: int, name: bytes
    ) -> None:
        super().__init__(recording, inner, direction=direction, peer=peer, name=name)
        self.cancel = inner.cancel
