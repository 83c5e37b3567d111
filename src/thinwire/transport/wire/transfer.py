"""Transfers over the wire as their callers see them: messages, requests for blobs, and responses.

Each request gets one response, whose slot is free again when the whole response has arrived. The requests of a
connection end with it: their numbers are never used again, so no response to them can go over the next one.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

import torch

from thinwire.errors import TransportError
from thinwire.transport.base import Envelope, TransferFuture
from thinwire.transport.message import unpack
from thinwire.transport.streams import BLOBS
from thinwire.transport.wire.framing import MAX_REQUESTS, CancelFrame, FrameError, RequestFrame

# Note of a response that holds the requested blob; without it, the blob is not there and will not be.
IS_THERE = b"\1"
Later = Callable[[Callable[[], None]], None]


class CompletionThread:
    """Thread that completes transfers one after another: checksums and callbacks must not delay the sockets."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="thinwire-wire-finisher", daemon=True)
        self._thread.start()

    def later(self, task: Callable[[], None]) -> None:
        """Run a task after those submitted before."""
        self._tasks.put(task)

    def close(self, *, deadline_s: float) -> None:
        """Run the tasks submitted so far, and end the thread."""
        self._tasks.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=deadline_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


class WireTransfer(TransferFuture):
    """Message to or from another replica.

    Args:
        later: Runs a task in the completion thread.
    """

    def __init__(self, *, peer: int, envelope: Envelope, verb: str, later: Later, name: str = "") -> None:
        super().__init__(peer_name=name or f"replica {peer}", envelope=envelope, verb=verb)
        self.peer = peer
        self.envelope = envelope
        self._later = later
        self._release_slot: Callable[[], None] = lambda: None

    def occupy(self, release_slot: Callable[[], None]) -> None:
        """Call a function, in the thread that owns the sockets, once the transfer needs no slot any more."""
        self._release_slot = release_slot

    def succeed(self, message: torch.Tensor | None = None) -> None:
        """Complete, after a message that arrived was checked."""
        self._release_slot()
        self._later(lambda: self._complete(message))

    def fail(self, error: TransportError) -> None:
        self._release_slot()
        self._later(lambda: self._end(error))

    def fail_now(self, error: TransportError) -> None:
        """Fail in the calling thread: the completion thread has ended, or must not be waited for."""
        self._end(error)

    def _complete(self, message: torch.Tensor | None) -> None:
        if self.done():  # it was cancelled
            return
        try:
            if message is not None:
                self._received = unpack(message, source=self.peer, envelope=self.envelope)
        except TransportError as error:
            self._end(error)
        else:
            self._end(None)


class ResponseTransfer(WireTransfer):
    """Response to a request of another replica."""

    def __init__(self, *, peer: int, number: int, num_bytes: int, is_there: bool, later: Later) -> None:
        envelope = Envelope(stream=BLOBS, key=(number,), payload_bytes=num_bytes, note=IS_THERE if is_there else b"")
        super().__init__(peer=peer, envelope=envelope, verb="take", later=later)


class RequestTransfer(WireTransfer):
    """Request of this replica to another one.

    Args:
        withdraw: Sends a cancellation to the peer.
    """

    def __init__(
        self, *, peer: int, number: int, name: bytes, most_bytes: int, later: Later,
        withdraw: Callable[[RequestTransfer], None],
    ) -> None:  # fmt: skip
        envelope = Envelope(stream=BLOBS, key=(number,), payload_bytes=most_bytes, takes_less=True)
        super().__init__(peer=peer, envelope=envelope, verb="send", later=later)
        self.name = name
        self._withdraw = withdraw

    def describe(self) -> str:
        return f"blob {ascii(self.name)[1:]}"

    def cancel(self) -> None:
        """Fail it in the calling thread; a response that still arrives is dropped."""
        if not self.done():
            self.fail_now(TransportError(f"{self.describe()} of replica {self.peer} is not wanted any more"))
            self._withdraw(self)


class RequestTable:
    """Open requests of both sides of one connection; used only from the thread that owns the sockets.

    Attributes:
        frames: Frames to send, oldest first; the sender pops them. They must follow the receipts of responses that
            arrived before: only then both sides count the same open requests.
    """

    def __init__(self) -> None:
        self.frames: deque[RequestFrame | CancelFrame] = deque()
        self._sent: set[int] = set()
        self._received: set[int] = set()
        self._cancelled: set[int] = set()
        self._answered: set[int] = set()

    @property
    def has_room(self) -> bool:
        return len(self._sent) < MAX_REQUESTS

    def request(self, transfer: RequestTransfer) -> None:
        """Queue a request, for whose response a receive is posted."""
        number = transfer.envelope.address.number
        self._sent.add(number)
        transfer.occupy(lambda: self._sent.discard(number))
        self.frames.append(RequestFrame(number=number, name=transfer.name))

    def cancel(self, transfer: RequestTransfer) -> None:
        """Queue a cancellation, unless the response has arrived."""
        if transfer.envelope.address.number in self._sent:
            self.frames.append(CancelFrame(number=transfer.envelope.address.number))

    def take(self, frame: RequestFrame | CancelFrame) -> bool:
        """Count a request or cancellation of the other side; return whether it needs an action.

        Raises:
            FrameError: It has too many open requests, or uses a number twice.
        """
        if isinstance(frame, CancelFrame):
            if frame.number in self._cancelled:
                raise FrameError(f"a second cancel of request {frame.number}")
            if frame.number not in self._received:  # the whole response has arrived, and the cancel crossed its receipt
                return False
            self._cancelled.add(frame.number)
            return frame.number not in self._answered
        if frame.number in self._received:
            raise FrameError(f"a second request under the number {frame.number}")
        if len(self._received) >= MAX_REQUESTS:
            raise FrameError(f"more than {MAX_REQUESTS} requests without a response")
        self._received.add(frame.number)
        return True

    def respond(self, transfer: ResponseTransfer) -> bool:
        """Count a response in flight; return whether the other side waits for it, on this connection."""
        number = transfer.envelope.address.number
        if number not in self._received or number in self._answered:
            return False
        self._answered.add(number)

        def release() -> None:
            for numbers in (self._received, self._cancelled, self._answered):
                numbers.discard(number)

        transfer.occupy(release)
        return True
