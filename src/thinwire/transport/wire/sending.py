"""Sending side of a connection: openings at once but bounded, the rest on request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from thinwire.errors import PayloadError, TransportError
from thinwire.transport.base import Envelope, Kind
from thinwire.transport.wire.bounds import EARLY_BYTES, EARLY_MESSAGES
from thinwire.transport.wire.framing import (
    OPENING_BYTES,
    PART_BYTES,
    Ask,
    Frame,
    FrameError,
    Got,
    Key,
    Matched,
    Opening,
    Part,
    Refused,
)
from thinwire.transport.wire.transfer import WireTransfer


def key_of(envelope: Envelope) -> Key:
    """Return what a receive is matched by.

    Raises:
        ValueError: A number does not fit its field.
    """
    bounds = (("fragment", envelope.fragment, 32), ("phase", envelope.phase, 8), ("round_id", envelope.round_id, 64))
    for name, value, bits in bounds:
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name} must be in 0..{(1 << bits) - 1}, got {value}")
    return (int(envelope.kind), envelope.round_id, envelope.fragment, envelope.phase)


@dataclass(slots=True, kw_only=True, eq=False)
class _Outgoing:
    transfer: WireTransfer
    header: bytes
    rest: memoryview
    posted_s: float
    number: int = 0
    sent: int = 0
    asked: int = 0
    is_matched: bool = False

    @property
    def num_bytes(self) -> int:
        return len(self.header) + len(self.rest)

    def piece(self, start: int, end: int) -> memoryview:
        """Return some of its bytes; a copy only where they lie in two places."""
        skipped = len(self.header)
        if start >= skipped:
            return self.rest[start - skipped : end - skipped]
        return memoryview(self.header[start:end] + self.rest[: max(0, end - skipped)])

    def due_s(self) -> float | None:
        """When its next part may go, None where none is asked for."""
        end = min(self.sent + PART_BYTES, self.asked)
        if end <= self.sent:
            return None
        spread_s = self.transfer.envelope.spread_s
        if spread_s <= 0:
            return self.posted_s
        return self.posted_s + spread_s * (end - OPENING_BYTES) / (self.num_bytes - OPENING_BYTES)


class Sending:
    """The messages that go out over one connection, in the order in which they were posted; parts take turns."""

    def __init__(self) -> None:
        self._waiting: deque[_Outgoing] = deque()
        self._known: dict[int, _Outgoing] = {}
        self._turns: deque[_Outgoing] = deque()
        self._unmatched: dict[int, int] = {}
        self._unmatched_bytes = 0
        self._next_number = 0

    def post(self, transfer: WireTransfer, message: torch.Tensor, *, now_s: float, header: bytes = b"") -> None:
        """Add a packed message, or a payload and its header; the bytes are read until the transfer ends."""
        self._waiting.append(_Outgoing(transfer=transfer, header=header, rest=message.numpy().data, posted_s=now_s))

    def next_frame(self, *, now_s: float) -> Opening | Part | None:
        """Return what may go out now."""
        if self._waiting and self._has_room(min(self._waiting[0].num_bytes, OPENING_BYTES)):
            return self._open(self._waiting.popleft())
        for _ in range(len(self._turns)):
            outgoing = self._turns[0]
            self._turns.rotate(-1)
            due_s = outgoing.due_s()
            if due_s is not None and due_s <= now_s:
                start, outgoing.sent = outgoing.sent, min(outgoing.sent + PART_BYTES, outgoing.asked)
                return Part(number=outgoing.number, start=start, body=outgoing.piece(start, outgoing.sent))
        return None

    def due_s(self) -> float | None:
        """Return when the next part may go, None where none is asked for."""
        return min((due_s for outgoing in self._turns if (due_s := outgoing.due_s()) is not None), default=None)

    def take(self, frame: Frame) -> None:
        """Act on what the receiver says of a message.

        Raises:
            FrameError: It says what cannot be.
        """
        if isinstance(frame, Matched):
            if frame.number not in self._unmatched or frame.number in self._known:
                raise FrameError(f"a word on message {frame.number}, which is not waiting for a receive")
            self._match(frame.number)
            return
        assert isinstance(frame, Ask | Got | Refused)
        outgoing = self._known.get(frame.number)
        if outgoing is None:
            raise FrameError(f"a word on message {frame.number}, which is not on its way")
        if isinstance(frame, Ask):
            if not outgoing.asked < frame.end <= outgoing.num_bytes:
                raise FrameError(f"a request up to byte {frame.end} of {outgoing.num_bytes}, after {outgoing.asked}")
            outgoing.asked = frame.end
            self._match(frame.number)
        elif isinstance(frame, Got):
            if outgoing.sent < outgoing.num_bytes:
                raise FrameError(f"a receipt for message {frame.number}, of which only {outgoing.sent} bytes were sent")
            self._end(outgoing, error=None)
            if frame.is_matched:
                self._match(frame.number)
        else:
            self._match(frame.number)
            self._end(outgoing, error=_refusal(outgoing.transfer))

    def fail(self, error_of: Callable[[WireTransfer], TransportError]) -> None:
        """End all that has not ended; nothing may be added after."""
        for outgoing in (*self._known.values(), *self._waiting):
            outgoing.transfer.fail(error_of(outgoing.transfer))

    def _has_room(self, num_bytes: int) -> bool:
        return len(self._unmatched) < EARLY_MESSAGES and self._unmatched_bytes + num_bytes <= EARLY_BYTES

    def _open(self, outgoing: _Outgoing) -> Opening:
        outgoing.number, self._next_number = self._next_number, self._next_number + 1
        outgoing.sent = outgoing.asked = min(outgoing.num_bytes, OPENING_BYTES)
        self._known[outgoing.number] = outgoing
        if outgoing.sent < outgoing.num_bytes:
            self._turns.append(outgoing)
        self._unmatched[outgoing.number] = outgoing.sent
        self._unmatched_bytes += outgoing.sent
        return Opening(
            number=outgoing.number,
            key=key_of(outgoing.transfer.envelope),
            message_bytes=outgoing.num_bytes,
            body=outgoing.piece(0, outgoing.sent),
        )

    def _match(self, number: int) -> None:
        self._unmatched_bytes -= self._unmatched.pop(number, 0)

    def _end(self, outgoing: _Outgoing, *, error: TransportError | None) -> None:
        del self._known[outgoing.number]
        if outgoing in self._turns:
            self._turns.remove(outgoing)
        if error is None:
            outgoing.transfer.succeed()
        else:
            outgoing.transfer.fail(error)


def _refusal(transfer: WireTransfer) -> TransportError:
    who, what = f"replica {transfer.peer}", transfer.describe()
    if transfer.envelope.kind is Kind.LIBRARY:
        return TransportError(f"{who} took {what} no further: it does not want it any more, or asked for less")
    return PayloadError(
        f"{who} refused {what}, because it expected another message there; the replicas run different set-ups: see its "
        f"log"
    )
