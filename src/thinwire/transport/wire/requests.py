"""Requests by name between two replicas over one connection; both sides bound their number.

Each ask gets one answer, whose slot is free again when the whole answer is there. A connection that ends takes its asks
along: their numbers are never used again, so no answer to them can go over the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from thinwire.errors import TransportError
from thinwire.transport.base import Envelope, Kind
from thinwire.transport.wire.bounds import MOST_WANTS
from thinwire.transport.wire.framing import Cancel, FrameError, Want
from thinwire.transport.wire.transfer import WireTransfer

Later = Callable[[Callable[[], None]], None]


class _Counted(WireTransfer):
    """A transfer that tells its connection, in the thread that owns the sockets, when it is over."""

    def __init__(self, *, peer: int, envelope: Envelope, verb: str, later: Later) -> None:
        super().__init__(peer=peer, envelope=envelope, verb=verb, later=later)
        self.over: Callable[[], None] = lambda: None

    def succeed(self, message: torch.Tensor | None = None) -> None:
        """End well."""
        self.over()
        super().succeed(message)

    def fail(self, error: TransportError) -> None:
        """End with an error."""
        self.over()
        super().fail(error)


class AnswerTransfer(_Counted):
    """The answer to an ask of another replica.

    Args:
        peer: Who asked.
        number: Of the ask.
        num_bytes: Of the answer's payload.
        is_there: Whether the payload is what was asked for.
        later: Runs a task in the thread in which transfers end.
    """

    def __init__(self, *, peer: int, number: int, num_bytes: int, is_there: bool, later: Later) -> None:
        envelope = Envelope(kind=Kind.LIBRARY, round_id=number, payload_bytes=num_bytes, reference_hash=int(is_there))
        super().__init__(peer=peer, envelope=envelope, verb="take", later=later)


class AskTransfer(_Counted):
    """What this replica asks another one for.

    Args:
        peer: Whom it asks.
        number: Of the ask.
        name: What it asks for.
        most_bytes: The most that the answer's payload may be.
        later: Runs a task in the thread in which transfers end.
        withdraw: Lets the other know that nobody waits any more.
    """

    def __init__(
        self,
        *,
        peer: int,
        number: int,
        name: bytes,
        most_bytes: int,
        later: Later,
        withdraw: Callable[[AskTransfer], None],
    ) -> None:
        envelope = Envelope(kind=Kind.LIBRARY, round_id=number, payload_bytes=most_bytes, takes_less=True)
        super().__init__(peer=peer, envelope=envelope, verb="send", later=later)
        self.name = name
        self._withdraw = withdraw

    def describe(self) -> str:
        """Name what is asked for in an error's text."""
        return f"blob {ascii(self.name)[1:]}"

    def cancel(self) -> None:
        """End it, in the calling thread; where the answer comes all the same it is thrown away."""
        if not self.done():
            self.refuse(TransportError(f"{self.describe()} of replica {self.peer} is not wanted any more"))
            self._withdraw(self)


class Asking:
    """The asks of both sides over one connection; all of it is used from the thread that owns the sockets.

    Attributes:
        frames: What is to be sent, oldest first; whoever sends it takes it out. It must leave behind the receipts of
            the answers that came before: only then the other side counts as this one does.
    """

    def __init__(self) -> None:
        self.frames: deque[Want | Cancel] = deque()
        self._asked: set[int] = set()
        self._wanted: set[int] = set()
        self._cancelled: set[int] = set()
        self._answered: set[int] = set()

    @property
    def has_room(self) -> bool:
        """Whether one more ask may be sent."""
        return len(self._asked) < MOST_WANTS

    def ask(self, transfer: AskTransfer) -> None:
        """Send an ask, for whose answer a receive is posted."""
        number = transfer.envelope.round_id
        self._asked.add(number)
        transfer.over = lambda: self._asked.discard(number)
        self.frames.append(Want(number=number, name=transfer.name))

    def cancel(self, transfer: AskTransfer) -> None:
        """Let the other side know that nobody waits for an answer any more, unless it has come."""
        if transfer.envelope.round_id in self._asked:
            self.frames.append(Cancel(number=transfer.envelope.round_id))

    def take(self, frame: Want | Cancel) -> bool:
        """Note what the other side says; tell whether there is something to do about it.

        Raises:
            FrameError: It asks for too much, or twice under one number.
        """
        if isinstance(frame, Cancel):
            if frame.number in self._cancelled:
                raise FrameError(f"a second cancel of ask {frame.number}")
            if frame.number not in self._wanted:  # the whole answer is there, and the cancel crossed its receipt
                return False
            self._cancelled.add(frame.number)
            return frame.number not in self._answered
        if frame.number in self._wanted:
            raise FrameError(f"a second ask under the number {frame.number}")
        if len(self._wanted) >= MOST_WANTS:
            raise FrameError(f"more than {MOST_WANTS} asks without an answer")
        self._wanted.add(frame.number)
        return True

    def answer(self, transfer: AnswerTransfer) -> bool:
        """Note that an answer is on its way; tell whether the other side waits for it, on this connection."""
        number = transfer.envelope.round_id
        if number not in self._wanted or number in self._answered:
            return False
        self._answered.add(number)

        def over() -> None:
            for numbers in (self._wanted, self._cancelled, self._answered):
                numbers.discard(number)

        transfer.over = over
        return True
