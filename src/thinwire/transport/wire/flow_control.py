"""Flow control of one connection: credit-based sending, bounded receiving, and the adaptive receive window."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch

from thinwire.errors import PayloadError, TransportError
from thinwire.transport.message import HEADER_BYTES, check_header
from thinwire.transport.streams import BLOBS, MessageAddress
from thinwire.transport.wire.framing import (
    MAX_UNEXPECTED,
    MAX_UNEXPECTED_BYTES,
    MAX_WINDOW_BYTES,
    OPENING_BYTES,
    PART_BYTES,
    Credit,
    Frame,
    FrameError,
    MessagePart,
    MessageRefused,
    MessageStart,
    Receipt,
    ReceivePosted,
)
from thinwire.transport.wire.transfer import WireTransfer

LEAST_BYTES = 1 << 17
# A doubled window stays only if the rate grew by this factor; the next try follows after so many windows.
_GAIN = 1.2
_EPOCHS_UNTIL_RETRY = 64


class ReceiveWindow:
    """Receive window: bytes of a peer that may be in flight; doubles as long as that raises the rate by a fifth.

    So neither a fast nor a distant link idles. On a slow link the window stays small: bytes in flight wait in a queue
    there, and a short message waits behind them.

    Args:
        least: Bytes at the start, and the minimum.

    Attributes:
        num_bytes: Bytes that may be in flight now.

    Example:
        >>> window, now_s = ReceiveWindow(), 0.0
        >>> for _ in range(8):  # a wire of 10 MB/s whatever the window
        ...     now_s += window.num_bytes / 10e6
        ...     window.observe(window.num_bytes, now_s=now_s)
        >>> window.num_bytes == LEAST_BYTES
        True
    """

    def __init__(self, *, least: int = LEAST_BYTES, most: int = MAX_WINDOW_BYTES) -> None:
        self.num_bytes = least
        self._least, self._most = least, most
        self._arrived_bytes = 0
        self._began_s: float | None = None
        self._smaller_bytes_per_s: float | None = None
        self._left_epochs = 1

    def pause(self) -> None:
        """Discard the current epoch: no bytes are expected."""
        self._began_s, self._arrived_bytes = None, 0

    def observe(self, num_bytes: int, *, now_s: float) -> None:
        """Count bytes that arrived; an epoch ends when a whole window has."""
        if self._began_s is None:
            self._began_s = now_s  # these bytes were sent before the epoch
            return
        self._arrived_bytes += num_bytes
        if self._arrived_bytes < self.num_bytes:
            return
        bytes_per_s = self._arrived_bytes / max(1e-6, now_s - self._began_s)
        self._began_s, self._arrived_bytes = now_s, 0
        before, self._smaller_bytes_per_s = self._smaller_bytes_per_s, None
        if before is not None and bytes_per_s < _GAIN * before:
            # doubling did not raise the rate: the link, not the window, is the limit
            self.num_bytes = max(self._least, self.num_bytes // 2)
            self._left_epochs = _EPOCHS_UNTIL_RETRY
            return
        if before is None:
            self._left_epochs -= 1
            if self._left_epochs > 0:
                return
        if self.num_bytes < self._most:
            # double on trial; the next epoch compares its rate with this one's
            self._smaller_bytes_per_s = bytes_per_s
            self.num_bytes *= 2


@dataclass(slots=True, kw_only=True, eq=False)
class _Outgoing:
    transfer: WireTransfer
    header: bytes
    rest: memoryview
    posted_s: float
    number: int = 0
    sent: int = 0
    asked: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.header) + len(self.rest)

    @property
    def priority(self) -> int:
        return self.transfer.envelope.stream.priority

    def piece(self, start: int, end: int) -> memoryview:
        """Return some of its bytes; a copy only if they span the header and the payload."""
        skipped = len(self.header)
        if start >= skipped:
            return self.rest[start - skipped : end - skipped]
        return memoryview(self.header[start:end] + self.rest[: max(0, end - skipped)])

    def due_s(self) -> float | None:
        """Return when its next part is due, None without credit for one."""
        end = min(self.sent + PART_BYTES, self.asked)
        if end <= self.sent:
            return None
        spread_s = self.transfer.envelope.spread_s
        if spread_s <= 0:
            return self.posted_s
        return self.posted_s + spread_s * (end - OPENING_BYTES) / (self.num_bytes - OPENING_BYTES)


class OutgoingMessages:
    """The messages that go out over one connection: by the priority of their streams, then in the order of posting.

    Parts of equal priority take turns.
    """

    def __init__(self) -> None:
        # by priority: those that have not begun, and those whose parts take turns
        self._waiting: dict[int, deque[_Outgoing]] = {}
        self._turns: dict[int, deque[_Outgoing]] = {}
        self._known: dict[int, _Outgoing] = {}
        self._unmatched: dict[int, int] = {}
        self._unmatched_bytes = 0
        self._next_number = 0

    def post(self, transfer: WireTransfer, message: torch.Tensor, *, now_s: float, header: bytes = b"") -> None:
        """Add a packed message, or a payload and its header; the bytes are read until the transfer ends."""
        outgoing = _Outgoing(transfer=transfer, header=header, rest=message.numpy().data, posted_s=now_s)
        if outgoing.priority not in self._turns:  # kept in the order of priority
            for queues in (self._waiting, self._turns):
                ordered = sorted({**queues, outgoing.priority: deque()}.items())
                queues.clear()
                queues.update(ordered)
        self._waiting[outgoing.priority].append(outgoing)

    def next_frame(self, *, now_s: float) -> MessageStart | MessagePart | None:
        """Return what may go out now."""
        for priority, waiting in self._waiting.items():
            # the receiver keeps no more unexpected messages than these, and disconnects a sender that exceeds them
            has_room = len(self._unmatched) < MAX_UNEXPECTED
            left_bytes = MAX_UNEXPECTED_BYTES - self._unmatched_bytes
            if waiting and has_room and min(waiting[0].num_bytes, OPENING_BYTES) <= left_bytes:
                return self._open(waiting.popleft())
            turns = self._turns[priority]
            for _ in range(len(turns)):
                outgoing = turns[0]
                turns.rotate(-1)
                due_s = outgoing.due_s()
                if due_s is not None and due_s <= now_s:
                    start, outgoing.sent = outgoing.sent, min(outgoing.sent + PART_BYTES, outgoing.asked)
                    return MessagePart(number=outgoing.number, start=start, body=outgoing.piece(start, outgoing.sent))
        return None

    def due_s(self) -> float | None:
        """Return when the next part is due, None without credit for one."""
        return min(
            (due_s for outgoing in chain(*self._turns.values()) if (due_s := outgoing.due_s()) is not None),
            default=None,
        )

    def take(self, frame: Frame) -> None:
        """Act on the receiver's frame about a message.

        Raises:
            FrameError: It fits no message in flight.
        """
        if isinstance(frame, ReceivePosted):
            if frame.number not in self._unmatched or frame.number in self._known:
                raise FrameError(f"a frame about message {frame.number}, which is not waiting for a receive")
            self._match(frame.number)
            return
        assert isinstance(frame, Credit | Receipt | MessageRefused)
        outgoing = self._known.get(frame.number)
        if outgoing is None:
            raise FrameError(f"a frame about message {frame.number}, which is not on its way")
        if isinstance(frame, Credit):
            if not outgoing.asked < frame.end <= outgoing.num_bytes:
                raise FrameError(f"a request up to byte {frame.end} of {outgoing.num_bytes}, after {outgoing.asked}")
            outgoing.asked = frame.end
            self._match(frame.number)
        elif isinstance(frame, Receipt):
            if outgoing.sent < outgoing.num_bytes:
                raise FrameError(f"a receipt for message {frame.number}, of which only {outgoing.sent} bytes were sent")
            self._end(outgoing, error=None)
            if frame.is_matched:
                self._match(frame.number)
        else:
            self._match(frame.number)
            who, what = f"replica {outgoing.transfer.peer}", outgoing.transfer.describe()
            if outgoing.transfer.envelope.stream is BLOBS:
                text = f"{who} took {what} no further: it does not want it any more, or asked for less"
                self._end(outgoing, error=TransportError(text))
            else:
                self._end(outgoing, error=PayloadError(
                    f"{who} refused {what}, because it expected another message there; the replicas run different "
                    f"set-ups: see its log"
                ))  # fmt: skip

    def fail(self, error_of: Callable[[WireTransfer], TransportError]) -> None:
        """Fail all transfers in flight; nothing may be posted after."""
        for outgoing in chain(self._known.values(), *self._waiting.values()):
            outgoing.transfer.fail(error_of(outgoing.transfer))

    def _open(self, outgoing: _Outgoing) -> MessageStart:
        outgoing.number, self._next_number = self._next_number, self._next_number + 1
        outgoing.sent = outgoing.asked = min(outgoing.num_bytes, OPENING_BYTES)
        self._known[outgoing.number] = outgoing
        if outgoing.sent < outgoing.num_bytes:
            self._turns[outgoing.priority].append(outgoing)
        self._unmatched[outgoing.number] = outgoing.sent
        self._unmatched_bytes += outgoing.sent
        return MessageStart(
            number=outgoing.number,
            address=outgoing.transfer.envelope.address,
            message_bytes=outgoing.num_bytes,
            body=outgoing.piece(0, outgoing.sent),
        )

    def _match(self, number: int) -> None:
        self._unmatched_bytes -= self._unmatched.pop(number, 0)

    def _end(self, outgoing: _Outgoing, *, error: TransportError | None) -> None:
        del self._known[outgoing.number]
        if outgoing in self._turns[outgoing.priority]:
            self._turns[outgoing.priority].remove(outgoing)
        if error is None:
            outgoing.transfer.succeed()
        else:
            outgoing.transfer.fail(error)


# Cancelled messages of which parts may still be in flight; the oldest ended long ago.
_MAX_CANCELLED = 4096


@dataclass(slots=True, kw_only=True, eq=False)
class _Unexpected:
    number: int
    message_bytes: int
    body: torch.Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class _Incoming:
    transfer: WireTransfer
    message: torch.Tensor
    view: memoryview
    arrived: int
    asked: int


@dataclass(slots=True, kw_only=True)
class _Cancelled:
    """Bytes of a cancelled message that may still arrive: credit for them was sent."""

    arrived: int
    asked: int


class IncomingMessages:
    """Messages that arrive over one connection; their memory is bounded, whatever the peer sends.

    A message is matched with the posted receives of its key, in posting order. The start of an unexpected message is
    kept, up to `MAX_UNEXPECTED` of them and `MAX_UNEXPECTED_BYTES`. Credit for the rest is sent only after the start's
    header states the message that a receive expects. All such messages share one window.

    Attributes:
        replies: Frames to send back, oldest first; the sender pops them.
    """

    def __init__(self) -> None:
        self.replies: deque[Frame] = deque()
        self._posted: dict[MessageAddress, deque[WireTransfer]] = {}
        self._unexpected: dict[MessageAddress, deque[_Unexpected]] = {}
        self._num_unexpected = 0
        self._unexpected_bytes = 0
        self._arriving: dict[int, _Incoming] = {}
        self._refused: dict[int, _Cancelled] = {}
        self._window = ReceiveWindow()
        self._next_number = 0

    def post(self, transfer: WireTransfer) -> None:
        """Post a receive; an unexpected message that matches is delivered at once."""
        found = self._pop_unexpected(transfer)
        if found is None:
            self._posted.setdefault(transfer.envelope.address, deque()).append(transfer)
        elif found.body.numel() == found.message_bytes:
            self.replies.append(ReceivePosted(number=found.number))
            transfer.succeed(found.body)
        else:
            self._begin(transfer, number=found.number, message_bytes=found.message_bytes, opening=found.body)

    def cancel_receive(self, transfer: WireTransfer) -> bool:
        """Send no more credit for a message; return whether a part of it had arrived."""
        number = next((number for number, room in self._arriving.items() if room.transfer is transfer), None)
        if number is None:
            return False
        room = self._arriving.pop(number)
        if not self._arriving:
            self._window.pause()
        self._refused[number] = _Cancelled(arrived=room.arrived, asked=room.asked)
        while len(self._refused) > _MAX_CANCELLED:
            del self._refused[next(iter(self._refused))]
        self.replies.append(MessageRefused(number=number))
        transfer.fail(TransportError(f"{transfer.describe()} is not wanted any more"))
        return True

    def take_unexpected(self, transfer: WireTransfer) -> bool:
        """Deliver a message that arrived before the connection ended; return whether there was one."""
        while (found := self._pop_unexpected(transfer)) is not None:
            if found.body.numel() == found.message_bytes:
                transfer.succeed(found.body)
                return True
        return False

    def take(self, frame: MessageStart | MessagePart, *, now_s: float) -> None:
        """Store the bytes of a frame.

        Raises:
            FrameError: It is out of order, out of bounds, or without credit.
        """
        if isinstance(frame, MessageStart):
            self._open(frame)
        else:
            self._add(frame, now_s=now_s)

    def fail(self, error_of: Callable[[WireTransfer], TransportError]) -> None:
        """Fail all transfers in flight; whole unexpected messages are kept for `take_unexpected`."""
        rooms = (room.transfer for room in self._arriving.values())
        for transfer in (*rooms, *chain.from_iterable(self._posted.values())):
            transfer.fail(error_of(transfer))
        self._arriving, self._posted = {}, {}
        self.replies.clear()

    def _pop_unexpected(self, transfer: WireTransfer) -> _Unexpected | None:
        key = transfer.envelope.address
        early = self._unexpected.get(key)
        if not early:
            return None
        found = early.popleft()
        if not early:
            del self._unexpected[key]
        self._num_unexpected -= 1
        self._unexpected_bytes -= found.body.numel()
        return found

    def _open(self, frame: MessageStart) -> None:
        if frame.number != self._next_number:
            raise FrameError(f"message {frame.number} where {self._next_number} was next")
        self._next_number += 1
        is_whole = len(frame.body) == frame.message_bytes
        posted = self._posted.get(frame.address)
        if posted:
            transfer = posted.popleft()
            if not posted:
                del self._posted[frame.address]
            if is_whole:
                self.replies.append(Receipt(number=frame.number, is_matched=True))
                transfer.succeed(_copy(frame.body))
            else:
                self._begin(transfer, number=frame.number, message_bytes=frame.message_bytes, opening=_copy(frame.body))
            return
        if self._num_unexpected >= MAX_UNEXPECTED or self._unexpected_bytes + len(frame.body) > MAX_UNEXPECTED_BYTES:
            raise FrameError(
                f"more unexpected messages than the {MAX_UNEXPECTED}, of {MAX_UNEXPECTED_BYTES} bytes, that are kept"
            )
        self._num_unexpected += 1
        self._unexpected_bytes += len(frame.body)
        found = _Unexpected(number=frame.number, message_bytes=frame.message_bytes, body=_copy(frame.body))
        self._unexpected.setdefault(frame.address, deque()).append(found)
        if is_whole:
            self.replies.append(Receipt(number=frame.number, is_matched=False))

    def _begin(self, transfer: WireTransfer, *, number: int, message_bytes: int, opening: torch.Tensor) -> None:
        """Check the start of a longer message, and send credit for its rest."""
        if transfer.done():  # it was cancelled
            self.replies.append(MessageRefused(number=number))
            transfer.fail(TransportError(f"{transfer.describe()} is not wanted any more"))
            return
        try:
            header = check_header(opening.numpy().data, source=transfer.peer, envelope=transfer.envelope)
            if HEADER_BYTES + header.payload_bytes != message_bytes:
                raise PayloadError(
                    f"{transfer.envelope.describe()} from replica {transfer.peer}: a message of {message_bytes} bytes "
                    f"was announced, expected {HEADER_BYTES + header.payload_bytes}"
                )
        except PayloadError as error:
            self.replies.append(MessageRefused(number=number))
            transfer.fail(error)
            return
        # allocated only now: the size is that of a posted receive, not whatever a peer announces
        message = torch.empty(message_bytes, dtype=torch.uint8)
        message[: opening.numel()] = opening
        room = _Incoming(
            transfer=transfer, message=message, view=message.numpy().data, arrived=OPENING_BYTES, asked=OPENING_BYTES
        )
        self._arriving[number] = room
        self._send_credit(number, room)

    def _add(self, frame: MessagePart, *, now_s: float) -> None:
        room = self._arriving.get(frame.number) or self._refused.get(frame.number)
        if room is None:
            raise FrameError(f"a part of message {frame.number}, for which no credit was sent")
        end = frame.start + len(frame.body)
        if frame.start != room.arrived or end > room.asked:
            raise FrameError(f"bytes {frame.start} to {end} of a message, expected {room.arrived} to {room.asked}")
        room.arrived = end
        if isinstance(room, _Cancelled):
            if room.arrived == room.asked:
                del self._refused[frame.number]
            return
        room.view[frame.start : end] = frame.body
        self._window.observe(len(frame.body), now_s=now_s)
        if room.arrived < len(room.view):
            self._send_credit(frame.number, room)
            return
        del self._arriving[frame.number]
        if not self._arriving:
            self._window.pause()
        self.replies.append(Receipt(number=frame.number, is_matched=True))
        room.transfer.succeed(room.message)

    def _send_credit(self, number: int, room: _Incoming) -> None:
        # Messages that arrive at the same time share the window. Credit is renewed at half of it, so that the sender
        # need not wait a round trip; with less than two parts it would stop after each.
        share = max(2 * PART_BYTES, self._window.num_bytes // len(self._arriving))
        if room.asked < len(room.view) and room.asked - room.arrived <= share // 2:
            room.asked = min(len(room.view), room.arrived + share)
            self.replies.append(Credit(number=number, end=room.asked))


def _copy(body: memoryview) -> torch.Tensor:
    copied = torch.empty(len(body), dtype=torch.uint8)
    if len(body):
        copied.numpy().data[:] = body
    return copied
