"""Receiving side of a connection; the memory it takes is bounded, whatever the peer sends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch

from thinwire.errors import PayloadError, TransportError
from thinwire.transport.message import HEADER_BYTES, check_header
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
from thinwire.transport.wire.receive_window import Window
from thinwire.transport.wire.sending import key_of
from thinwire.transport.wire.transfer import WireTransfer

# Messages that are not wanted any more, of which some may still be on its way; the oldest are long since over.
_MOST_REFUSED = 4096


@dataclass(slots=True, kw_only=True, eq=False)
class _Early:
    number: int
    message_bytes: int
    body: torch.Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class _Room:
    transfer: WireTransfer
    message: torch.Tensor
    view: memoryview
    arrived: int
    asked: int


@dataclass(slots=True, kw_only=True)
class _Rest:
    """What may still come of a message that is not wanted any more: it was asked for, and is on its way."""

    arrived: int
    asked: int


class Receiving:
    """The messages that come in over one connection.

    A message is matched with the receives under its key in the order of their posting. Its opening is kept where there
    is none yet, up to `EARLY_MESSAGES` of them and `EARLY_BYTES`; the rest is asked for only once the opening's header
    states the message that a receive expects, a window at a time that all such messages share.

    Attributes:
        replies: What is to be sent back, oldest first; whoever sends it takes it out.
    """

    def __init__(self) -> None:
        self.replies: deque[Frame] = deque()
        self._posted: dict[Key, deque[WireTransfer]] = {}
        self._early: dict[Key, deque[_Early]] = {}
        self._early_messages = 0
        self._early_bytes = 0
        self._rooms: dict[int, _Room] = {}
        self._refused: dict[int, _Rest] = {}
        self._window = Window()
        self._next_number = 0

    def post(self, transfer: WireTransfer) -> None:
        """Add a receive; a message that came before it is taken at once."""
        found = self._kept(transfer)
        if found is None:
            self._posted.setdefault(key_of(transfer.envelope), deque()).append(transfer)
        elif found.body.numel() == found.message_bytes:
            self.replies.append(Matched(number=found.number))
            transfer.succeed(found.body)
        else:
            self._begin(transfer, number=found.number, message_bytes=found.message_bytes, opening=found.body)

    def give_up(self, transfer: WireTransfer) -> bool:
        """Ask for no more of a message that is not wanted any more; tell whether some of it had come."""
        number = next((number for number, room in self._rooms.items() if room.transfer is transfer), None)
        if number is None:
            return False
        room = self._rooms.pop(number)
        if not self._rooms:
            self._window.pause()
        self._refused[number] = _Rest(arrived=room.arrived, asked=room.asked)
        while len(self._refused) > _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        self.replies.append(Refused(number=number))
        transfer.fail(TransportError(f"{transfer.describe()} is not wanted any more"))
        return True

    def hand_over(self, transfer: WireTransfer) -> bool:
        """Give a receive what came before the connection ended; tell whether there was a whole message."""
        while (found := self._kept(transfer)) is not None:
            if found.body.numel() == found.message_bytes:
                transfer.succeed(found.body)
                return True
        return False

    def take(self, frame: Opening | Part, *, now_s: float) -> None:
        """Take in what came.

        Raises:
            FrameError: It is out of order, out of bounds, or nobody asked for it.
        """
        if isinstance(frame, Opening):
            self._open(frame)
        else:
            self._add(frame, now_s=now_s)

    def fail(self, error_of: Callable[[WireTransfer], TransportError]) -> None:
        """End all that has not ended; what came whole before is kept for `hand_over`."""
        rooms = (room.transfer for room in self._rooms.values())
        for transfer in (*rooms, *chain.from_iterable(self._posted.values())):
            transfer.fail(error_of(transfer))
        self._rooms, self._posted = {}, {}
        self.replies.clear()

    def _kept(self, transfer: WireTransfer) -> _Early | None:
        key = key_of(transfer.envelope)
        early = self._early.get(key)
        if not early:
            return None
        found = early.popleft()
        if not early:
            del self._early[key]
        self._early_messages -= 1
        self._early_bytes -= found.body.numel()
        return found

    def _open(self, frame: Opening) -> None:
        if frame.number != self._next_number:
            raise FrameError(f"message {frame.number} where {self._next_number} was next")
        self._next_number += 1
        is_whole = len(frame.body) == frame.message_bytes
        posted = self._posted.get(frame.key)
        if posted:
            transfer = posted.popleft()
            if not posted:
                del self._posted[frame.key]
            if is_whole:
                self.replies.append(Got(number=frame.number, is_matched=True))
                transfer.succeed(_copy(frame.body))
            else:
                self._begin(transfer, number=frame.number, message_bytes=frame.message_bytes, opening=_copy(frame.body))
            return
        if self._early_messages >= EARLY_MESSAGES or self._early_bytes + len(frame.body) > EARLY_BYTES:
            raise FrameError(
                f"more messages that nobody waits for than the {EARLY_MESSAGES}, of {EARLY_BYTES} bytes, that are kept"
            )
        self._early_messages += 1
        self._early_bytes += len(frame.body)
        found = _Early(number=frame.number, message_bytes=frame.message_bytes, body=_copy(frame.body))
        self._early.setdefault(frame.key, deque()).append(found)
        if is_whole:
            self.replies.append(Got(number=frame.number, is_matched=False))

    def _begin(self, transfer: WireTransfer, *, number: int, message_bytes: int, opening: torch.Tensor) -> None:
        """Check the opening of a message that is longer, and ask for its rest."""
        if transfer.done():  # nobody wants it any more
            self.replies.append(Refused(number=number))
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
            self.replies.append(Refused(number=number))
            transfer.fail(error)
            return
        message = torch.empty(message_bytes, dtype=torch.uint8)
        message[: opening.numel()] = opening
        room = _Room(
            transfer=transfer, message=message, view=message.numpy().data, arrived=OPENING_BYTES, asked=OPENING_BYTES
        )
        self._rooms[number] = room
        self._ask(number, room)

    def _add(self, frame: Part, *, now_s: float) -> None:
        room = self._rooms.get(frame.number)
        if room is None and (rest := self._refused.get(frame.number)) is not None:
            _check_order(frame, arrived=rest.arrived, asked=rest.asked)
            rest.arrived += len(frame.body)
            if rest.arrived == rest.asked:
                del self._refused[frame.number]
            return
        if room is None:
            raise FrameError(f"a part of message {frame.number}, which nobody asked for")
        _check_order(frame, arrived=room.arrived, asked=room.asked)
        end = frame.start + len(frame.body)
        room.view[frame.start : end] = frame.body
        room.arrived = end
        self._window.observe(len(frame.body), now_s=now_s)
        if room.arrived < len(room.view):
            self._ask(frame.number, room)
            return
        del self._rooms[frame.number]
        if not self._rooms:
            self._window.pause()
        self.replies.append(Got(number=frame.number, is_matched=True))
        room.transfer.succeed(room.message)

    def _ask(self, number: int, room: _Room) -> None:
        share = max(2 * PART_BYTES, self._window.num_bytes // len(self._rooms))
        if room.asked < len(room.view) and room.asked - room.arrived <= share // 2:
            room.asked = min(len(room.view), room.arrived + share)
            self.replies.append(Ask(number=number, end=room.asked))


def _check_order(frame: Part, *, arrived: int, asked: int) -> None:
    end = frame.start + len(frame.body)
    if frame.start != arrived or end > asked:
        raise FrameError(f"bytes {frame.start} to {end} of a message, expected {arrived} to {asked}")


def _copy(body: memoryview) -> torch.Tensor:
    copied = torch.empty(len(body), dtype=torch.uint8)
    if len(body):
        copied.numpy().data[:] = body
    return copied
