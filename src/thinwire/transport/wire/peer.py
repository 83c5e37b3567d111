"""One peer: at most one connection at a time, and the messages over it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from thinwire.errors import PeerLost, TransportError
from thinwire.transport.wire.connection import Line, Liveness, unseen_limit_bytes
from thinwire.transport.wire.flow_control import Receiving, Sending
from thinwire.transport.wire.framing import (
    MOST_WANTS,
    Ask,
    Bye,
    Cancel,
    FrameError,
    Got,
    Hello,
    Matched,
    Opening,
    Part,
    Refused,
    Want,
    read,
    write,
)
from thinwire.transport.wire.transfer import AnswerTransfer, Asking, AskTransfer, WireTransfer

# Answers that a peer has not taken; one that sends and never reads is not to be answered without an end.
_MOST_REPLIES = 8192
_BURST = 64
_REDIAL_S, _LONGEST_REDIAL_S = 1.0, 30.0
# Where replicas come and go, a door that does not know this one will know it soon.
_OPEN_REDIAL_S = 0.5
_HELP = "see its log; restart it and resume from the last checkpoint"
_OPEN_HELP = "see its log; the others go on without it"


Heard = Callable[[int, "Want | Cancel | None"], None]


def left_out(transfer: WireTransfer) -> PeerLost:
    """Say of a replica that it is none of those that this one was told of, or is none any more."""
    return PeerLost(
        f"replica {transfer.peer} does not take part during {transfer.describe()}: it has left, or has not come yet; "
        f"the others go on without it"
    )


@dataclass(slots=True, kw_only=True)
class Seen:
    """What came over a connection.

    Attributes:
        since_s: When it began.
        num_bytes: Of frames.
        num_frames: How many.
    """

    since_s: float
    num_bytes: int = 0
    num_frames: int = 0


class Link:
    """The state of one peer; all of it is used from the thread that owns the sockets.

    Args:
        peer: The other replica.
        own: What this replica says first.
        is_open: Whether replicas come and go, and the others go on without this one.
        heard: Told what the peer asks for and cancels, and None when the connection ends.

    Attributes:
        line: The connection, None where there is none.
        reason: What ended the last one, as the end of "replica 3 ...".
        is_over: Whether there will be no other: the peer said goodbye, or broke the protocol.
        redial_s: When to dial again.
    """

    def __init__(
        self, *, peer: int, own: Hello, is_open: bool = False, heard: Heard = lambda peer, frame: None
    ) -> None:
        self.peer = peer
        self.line: Line | None = None
        self.reason = "is not connected"
        self.is_over = False
        self.redial_s = 0.0
        self._own = own
        self._is_open = is_open
        self._heard = heard
        self._incarnation: bytes | None = None
        self._patience_s = _REDIAL_S
        self._held: bytearray | None = None
        self._has_said_bye = self._has_heard_bye = False
        self._begin()

    @property
    def is_up(self) -> bool:
        """Whether messages can go over it."""
        return self.line is not None and not self.is_over

    @property
    def is_held(self) -> bool:
        """Whether a frame waits for room in libzmq's queue."""
        return self._held is not None

    @property
    def has_parted(self) -> bool:
        """Whether nothing has to be waited for before the sockets go: the peer is gone, or has heard our goodbye."""
        return self.line is None or (self._has_heard_bye and not self._receiving.replies and not self.is_held)

    def greet(self, hello: Hello) -> None:
        """Check who speaks at the other end.

        Raises:
            FrameError: It is not who it should be.
        """
        if hello.replica != self.peer:
            raise FrameError(f"a hello of replica {hello.replica}, expected {self.peer}")
        if hello.num_replicas != self._own.num_replicas:
            raise FrameError(f"a hello of {hello.num_replicas} replicas, expected {self._own.num_replicas}")
        if self._incarnation not in (None, hello.incarnation):
            raise FrameError("a hello of another process than the one that this run began with")

    def open(self, line: Line, hello: Hello) -> None:
        """Begin to use a connection whose other end was greeted."""
        self._begin()
        self.line = line
        self._incarnation = hello.incarnation
        self._patience_s = _REDIAL_S

    def post_send(self, transfer: WireTransfer, message: torch.Tensor) -> None:
        """Send a message, or fail it where there is no connection."""
        if self.is_up:
            self._sending.post(transfer, message, now_s=time.monotonic())
        else:
            transfer.fail(self._lost(transfer))

    def post_receive(self, transfer: WireTransfer) -> None:
        """Wait for a message; where there is no connection, take what came before it ended, or fail."""
        if self.is_up:
            self._receiving.post(transfer)
        elif not self._receiving.hand_over(transfer):
            transfer.fail(self._lost(transfer))

    def post_ask(self, transfer: AskTransfer) -> None:
        """Ask for something by its name, or fail where there is no connection."""
        if not self.is_up:
            transfer.fail(self._lost(transfer))
        elif not self._asking.has_room:
            transfer.fail(
                TransportError(
                    f"{transfer.describe()}: {MOST_WANTS} asks of replica {self.peer} wait for their answers; ask for "
                    f"more when some have come"
                )
            )
        else:
            self._receiving.post(transfer)
            self._asking.ask(transfer)

    def post_cancel(self, transfer: AskTransfer) -> None:
        """Let the peer know that nobody waits for an answer any more, also where some of it has come."""
        if not self._receiving.give_up(transfer):
            self._asking.cancel(transfer)

    def post_answer(self, transfer: AnswerTransfer, message: torch.Tensor, *, header: bytes = b"") -> None:
        """Answer an ask that came over this connection; one of an earlier connection has nobody who waits."""
        if self.is_up and self._asking.answer(transfer):
            self._sending.post(transfer, message, now_s=time.monotonic(), header=header)
        else:
            transfer.fail(PeerLost(f"replica {self.peer} does not wait for the answer to its ask any more"))

    def take(self, raw: memoryview | None) -> None:
        """Act on a frame.

        Raises:
            FrameError: The peer broke the protocol.
        """
        if raw is None:
            raise FrameError("a message of several frames, expected one")
        self._seen.num_bytes += len(raw)
        self._seen.num_frames += 1
        frame = read(raw)
        if isinstance(frame, Bye):
            self._has_heard_bye = True
        if self.is_over:
            return
        if isinstance(frame, Opening | Part):
            self._receiving.take(frame, now_s=time.monotonic())
            if len(self._receiving.replies) > _MOST_REPLIES:
                raise FrameError(f"messages without an end while it leaves {_MOST_REPLIES} answers unread")
        elif isinstance(frame, Ask | Got | Matched | Refused):
            self._sending.take(frame)
        elif isinstance(frame, Want | Cancel):
            if self._asking.take(frame):
                self._heard(self.peer, frame)
        elif isinstance(frame, Bye):
            self._end("closed its connection", error_of=self._lost)
            self.is_over = True
            self.say_bye()
        else:
            raise FrameError("a second hello")

    def flush(self) -> bool:
        """Hand out what may go now, a burst at most; tell whether more may."""
        line = self.line
        for _ in range(_BURST):
            raw = self._held or self._next()
            if raw is None or line is None:
                return False
            if not line.send(raw):
                self._held = raw
                return False
            self._held = None
        return True

    def due_s(self) -> float | None:
        """When the next paced part may go."""
        return self._sending.due_s() if self.is_up else None

    def say_bye(self) -> None:
        """Tell the peer, behind all else, that nothing follows."""
        if not self._has_said_bye:
            self._has_said_bye = True
            self._receiving.replies.append(Bye())

    def drop(self, reason: str, *, for_good: bool = False) -> None:
        """Lose the connection: all that was on its way fails with the reason.

        Args:
            reason: As the end of "replica 3 ...".
            for_good: Whether there will be no other.
        """
        line, self.line, self._held = self.line, None, None
        if line is not None:
            line.hang_up()
        self.postpone()
        if not self.is_over:
            self._end(reason, error_of=self._lost)
        self.is_over = self.is_over or for_good

    def postpone(self) -> None:
        """Wait before it is dialled again, longer each time."""
        if self._is_open:
            self.redial_s = time.monotonic() + _OPEN_REDIAL_S
            return
        self.redial_s = time.monotonic() + self._patience_s
        self._patience_s = min(2 * self._patience_s, _LONGEST_REDIAL_S)

    def close(self) -> None:
        """End what is on its way because this side closes."""

        def closed(transfer: WireTransfer) -> TransportError:
            return TransportError(
                f"the transport was closed with {transfer.describe()} of replica {self.peer} in flight"
            )

        receipts = tuple(self._receiving.replies)  # for what did arrive
        self._end(self.reason, error_of=closed)
        self._receiving.replies.extend(receipts)
        self.is_over = True
        self.say_bye()

    def check(self) -> str:
        """Look at the connection with the kernel's eyes; return what is wrong with it."""
        if self.line is None:
            return ""
        if self.line.is_gone():  # libzmq should have told; whatever the reason that it did not, nothing comes any more
            return "closed its connection"
        reading = self.line.reading()
        if reading is None:
            return ""
        self._liveness.observe(reading.rtt_s)
        limit_s = self._liveness.limit_s
        if reading.silence_s > limit_s:
            return f"was silent for {reading.silence_s:.1f} s (its link allows {limit_s:.3g} s)"
        age_s = time.monotonic() - self._seen.since_s
        limit_bytes = unseen_limit_bytes(
            seen_bytes=self._seen.num_bytes, seen_frames=self._seen.num_frames, age_s=age_s
        )
        if reading.received_bytes > limit_bytes:
            return f"sent {reading.received_bytes} bytes that make no messages and was disconnected"
        return ""

    def _begin(self) -> None:
        self._sending, self._receiving, self._asking = Sending(), Receiving(), Asking()
        self._liveness = Liveness()
        self._seen = Seen(since_s=time.monotonic())
        self._held = None
        self._has_said_bye = self._has_heard_bye = False

    def _next(self) -> bytearray | None:
        if self._receiving.replies:
            return write(self._receiving.replies.popleft())
        if self.is_over:
            return None
        if self._asking.frames:
            return write(self._asking.frames.popleft())
        frame = self._sending.next_frame(now_s=time.monotonic())
        return None if frame is None else write(frame)

    def _end(self, reason: str, *, error_of: Callable[[WireTransfer], TransportError]) -> None:
        self.reason = reason
        sending, self._sending = self._sending, Sending()
        sending.fail(error_of)
        self._receiving.fail(error_of)
        self._asking = Asking()
        self._heard(self.peer, None)

    def _lost(self, transfer: WireTransfer) -> PeerLost:
        return PeerLost(
            f"replica {self.peer} {self.reason} during {transfer.describe()}; {_OPEN_HELP if self._is_open else _HELP}"
        )
