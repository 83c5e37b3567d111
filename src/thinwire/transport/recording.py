"""A transport that writes down every message: its peer, its bytes, its times, what went wrong."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from thinwire.errors import DeadlineExceeded, TransportError
from thinwire.events import Direction, Transfer, TransferLog
from thinwire.transport.base import Envelope, Pending, Received, Transport
from thinwire.transport.message import HEADER_BYTES


@runtime_checkable
class Announcing(Protocol):
    """A pending transfer that says when it ended, so that nobody needs to watch it."""

    def on_finish(self, callback: Callable[[], None]) -> None:
        """Call back once when the transfer ended either way, at once when it has."""
        ...


class RecordingTransport:
    """Wrap a transport and record one `Transfer` for each message that ended, and for each deadline it missed.

    Where the transport moves bytes in the background, a message's end is recorded when it happens, not when somebody
    asks; elsewhere it is recorded by `done` or `wait`. A failed transfer is recorded with its error's text.

    Args:
        inner: The transport that moves the bytes.
        log: Where the records go, a new log by default.
        clock: Seconds that only grow.

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
        self.inner = inner
        self.log = TransferLog() if log is None else log
        self._clock = clock

    @property
    def replica(self) -> int:
        """The number of the replica that this end belongs to."""
        return self.inner.replica

    @property
    def num_replicas(self) -> int:
        """How many replicas take part."""
        return self.inner.num_replicas

    @property
    def runs_in_background(self) -> bool:
        """Whether an exchange may be driven from a thread of its own."""
        return self.inner.runs_in_background

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        """Start to send, see `Transport.send`."""
        entry = _Entry(self.log, self._clock, direction="sent", peer=to, envelope=envelope)
        pending = _begin(entry, lambda: self.inner.send(payload, to=to, envelope=envelope))
        if pending.done():
            # Nobody has to wait for a message that has left already; a receive is left alone, since waiting takes it.
            pending.settle()
        return pending

    def receive(self, *, source: int, envelope: Envelope) -> Pending:
        """Start to receive, see `Transport.receive`."""
        entry = _Entry(self.log, self._clock, direction="received", peer=source, envelope=envelope)
        return _begin(entry, lambda: self.inner.receive(source=source, envelope=envelope))

    def close(self) -> None:
        """Close the wrapped transport; the log stays."""
        self.inner.close()


class _Entry:
    """One transfer's line in the log, written once at its end and at most once before for a missed deadline."""

    def __init__(
        self,
        log: TransferLog,
        clock: Callable[[], float],
        *,
        direction: Direction,
        peer: int,
        envelope: Envelope,
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

    def end(self, *, error: str, received: Received | None = None) -> None:
        """Write the end; only the first call counts."""
        with self._lock:
            if not self._has_ended:
                self._has_ended = True
                self._write(error, received)

    def miss(self, *, error: str) -> None:
        """Write that a deadline ran out; the transfer may still end well, and is then counted."""
        with self._lock:
            if not self._has_ended and not self._has_missed:
                self._has_missed = True
                self._write(error)

    def _write(self, error: str, received: Received | None = None) -> None:
        envelope = self._envelope
        payload_bytes = envelope.payload_bytes if received is None else received.payload.numel()
        self._log.add(
            Transfer(
                direction=self._direction,
                peer=self._peer,
                kind=envelope.kind.label,
                round_id=envelope.round_id,
                fragment=envelope.fragment,
                phase=envelope.phase,
                payload_bytes=payload_bytes,
                wire_bytes=HEADER_BYTES + payload_bytes,
                started_s=self._started_s,
                finished_s=self._clock(),
                error=error,
            )
        )


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
        self._entry.end(error="", received=received)
        return received

    def settle(self) -> None:
        """Record the end of a transfer that is done."""
        with contextlib.suppress(TransportError):  # it is in the record, and raised where somebody waits
            self.wait(deadline_s=0.0)


class _RecordedWhenItEnds(_Recorded):
    def __init__(self, inner: Pending, entry: _Entry, announcing: Announcing) -> None:
        super().__init__(inner, entry)
        self._announcing = announcing
        announcing.on_finish(self.settle)

    def on_finish(self, callback: Callable[[], None]) -> None:
        self._announcing.on_finish(callback)


def _begin(entry: _Entry, begin: Callable[[], Pending]) -> _Recorded:
    try:
        pending = begin()
    except TransportError as error:
        entry.end(error=str(error))
        raise
    if isinstance(pending, Announcing):
        return _RecordedWhenItEnds(pending, entry, pending)
    return _Recorded(pending, entry)
