"""One message on its way over the wire, as its caller sees it; it ends in a thread that does nothing else."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

import torch

from thinwire.errors import TransportError
from thinwire.transport.base import Envelope, Kind, TransferFuture
from thinwire.transport.message import unpack
from thinwire.transport.wire.framing import MAX_REQUESTS, CancelFrame, FrameError, RequestFrame


class CompletionThread:
    """A thread that ends transfers one after another: checksums and callbacks must not hold up the sockets."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="thinwire-wire-finisher", daemon=True)
        self._thread.start()

    def later(self, task: Callable[[], None]) -> None:
        """Run a task after those that came before."""
        self._tasks.put(task)

    def close(self, *, deadline_s: float) -> None:
        """Run what was given so far and end."""
        self._tasks.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=deadline_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


class WireTransfer(TransferFuture):
    """A message over the wire.

    Args:
        peer: The replica at the other end.
        envelope: What the message is.
        verb: What the peer is to do: "send" or "take".
        later: Runs a task in the thread in which transfers end.
    """

    def __init__(
        self, *, peer: int, envelope: Envelope, verb: str, later: Callable[[Callable[[], None]], None]
    ) -> None:
        super().__init__(peer_name=f"replica {peer}", envelope=envelope, verb=verb)
        self.peer = peer
        self.envelope = envelope
        self._later = later

    def succeed(self, message: torch.Tensor | None = None) -> None:
        """End well: a message that arrived is checked first."""
        self._later(lambda: self._complete(message))

    def fail(self, error: TransportError) -> None:
        """End with an error."""
        self._later(lambda: self._end(error))

    def fail_now(self, error: TransportError) -> None:
        """End with an error at once: nobody ends transfers later any more."""
        self._end(error)

    def _complete(self, message: torch.Tensor | None) -> None:
        if self.done():  # nobody wants it any more
            return
        error: TransportError | None = None
        try:
            if message is not None:
                self._received = unpack(message, source=self.peer, envelope=self.envelope)
        except TransportError as found:
            error = found
        self._end(error)


Later = Callable[[Callable[[], None]], None]


class _SlotTransfer(WireTransfer):
    """A transfer that occupies a slot of its connection; the slot is released in the thread that owns the sockets."""

    def __init__(self, *, peer: int, envelope: Envelope, verb: str, later: Later) -> None:
        super().__init__(peer=peer, envelope=envelope, verb=verb, later=later)
        self._release_slot: Callable[[], None] = lambda: None

    def occupy(self, release_slot: Callable[[], None]) -> None:
        """Call a function once the transfer does not need its slot any more."""
        self._release_slot = release_slot

    def succeed(self, message: torch.Tensor | None = None) -> None:
        """End well."""
        self._release_slot()
        super().succeed(message)

    def fail(self, error: TransportError) -> None:
        """End with an error."""
        self._release_slot()
        super().fail(error)


class ResponseTransfer(_SlotTransfer):
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


class RequestTransfer(_SlotTransfer):
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
        withdraw: Callable[[RequestTransfer], None],
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
            self.fail_now(TransportError(f"{self.describe()} of replica {self.peer} is not wanted any more"))
            self._withdraw(self)


class RequestTable:
    """The asks of both sides over one connection; all of it is used from the thread that owns the sockets.

    Attributes:
        frames: What is to be sent, oldest first; whoever sends it takes it out. It must leave behind the receipts of
            the answers that came before: only then the other side counts as this one does.
    """

    def __init__(self) -> None:
        self.frames: deque[RequestFrame | CancelFrame] = deque()
        self._asked: set[int] = set()
        self._wanted: set[int] = set()
        self._cancelled: set[int] = set()
        self._answered: set[int] = set()

    @property
    def has_room(self) -> bool:
        """Whether one more ask may be sent."""
        return len(self._asked) < MAX_REQUESTS

    def ask(self, transfer: RequestTransfer) -> None:
        """Send an ask, for whose answer a receive is posted."""
        number = transfer.envelope.round_id
        self._asked.add(number)
        transfer.occupy(lambda: self._asked.discard(number))
        self.frames.append(RequestFrame(number=number, name=transfer.name))

    def cancel(self, transfer: RequestTransfer) -> None:
        """Let the other side know that nobody waits for an answer any more, unless it has come."""
        if transfer.envelope.round_id in self._asked:
            self.frames.append(CancelFrame(number=transfer.envelope.round_id))

    def take(self, frame: RequestFrame | CancelFrame) -> bool:
        """Note what the other side says; tell whether there is something to do about it.

        Raises:
            FrameError: It asks for too much, or twice under one number.
        """
        if isinstance(frame, CancelFrame):
            if frame.number in self._cancelled:
                raise FrameError(f"a second cancel of ask {frame.number}")
            if frame.number not in self._wanted:  # the whole answer is there, and the cancel crossed its receipt
                return False
            self._cancelled.add(frame.number)
            return frame.number not in self._answered
        if frame.number in self._wanted:
            raise FrameError(f"a second ask under the number {frame.number}")
        if len(self._wanted) >= MAX_REQUESTS:
            raise FrameError(f"more than {MAX_REQUESTS} asks without an answer")
        self._wanted.add(frame.number)
        return True

    def answer(self, transfer: ResponseTransfer) -> bool:
        """Note that an answer is on its way; tell whether the other side waits for it, on this connection."""
        number = transfer.envelope.round_id
        if number not in self._wanted or number in self._answered:
            return False
        self._answered.add(number)

        def release() -> None:
            for numbers in (self._wanted, self._cancelled, self._answered):
                numbers.discard(number)

        transfer.occupy(release)
        return True
