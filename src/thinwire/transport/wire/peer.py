"""Peer of a replica: at most one connection at a time, and the messages over it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from thinwire.errors import PeerLost, TransportError
from thinwire.transport.wire.connection import Connection, Liveness, unseen_limit_bytes
from thinwire.transport.wire.flow_control import IncomingMessages, OutgoingMessages
from thinwire.transport.wire.framing import (
    MAX_REQUESTS,
    CancelFrame,
    Credit,
    FrameError,
    Goodbye,
    Hello,
    MessagePart,
    MessageRefused,
    MessageStart,
    Receipt,
    ReceivePosted,
    RequestFrame,
    read,
    write,
)
from thinwire.transport.wire.transfer import RequestTable, RequestTransfer, ResponseTransfer, WireTransfer

# Unread replies (receipts, credit) of a peer: one that sends and never reads must not fill the memory.
_MAX_REPLIES = 8192
_BURST = 64
_REDIAL_S, _MAX_REDIAL_S = 1.0, 30.0
# In an open set, a listener that does not know this replica yet will know it soon.
_OPEN_REDIAL_S = 0.5
_HELP = "see its log; restart it and resume from the last checkpoint"
_OPEN_HELP = "see its log; the others go on without it"


OnRequest = Callable[[int, "RequestFrame | CancelFrame | None"], None]


def not_a_member(transfer: WireTransfer) -> PeerLost:
    """Return the error of a transfer with a replica that is not in the set."""
    return PeerLost(
        f"replica {transfer.peer} does not take part during {transfer.describe()}: it has left, or has not come yet; "
        f"the others go on without it"
    )


class Peer:
    """State of one peer; used only from the thread that owns the sockets.

    Args:
        is_open: Whether the set of replicas is open: it goes on without a lost peer.
        on_request: Called with each request and cancellation of the peer, and with None when the connection ends.

    Attributes:
        connection: The connection, None if there is none.
        reason: Reason why the last one ended, as the end of "replica 3 ...".
        is_over: Whether there will be no other: the peer sent a goodbye, or broke the protocol.
        role: What it does in the run, as its latest hello says.
    """

    def __init__(
        self, *, peer: int, own: Hello, is_open: bool = False, on_request: OnRequest = lambda peer, frame: None
    ) -> None:
        self.peer, self.role = peer, own.role
        self.connection: Connection | None = None
        self.reason = "is not connected"
        self.is_over = False
        self.redial_s = 0.0
        self._own, self._is_open, self._on_request = own, is_open, on_request
        self._incarnation: bytes | None = None
        self._redial_delay_s = _REDIAL_S
        self._held: bytearray | None = None
        self._has_sent_goodbye = self._has_received_goodbye = False
        self._begin()

    @property
    def is_up(self) -> bool:
        """Whether messages can be sent."""
        return self.connection is not None and not self.is_over

    @property
    def is_held(self) -> bool:
        """Whether a frame waits for room in libzmq's queue."""
        return self._held is not None

    @property
    def has_drained(self) -> bool:
        """Whether the sockets can close now: the peer is gone, or has answered our goodbye."""
        if self.connection is None:
            return True
        return self._has_received_goodbye and not self._incoming.replies and not self.is_held

    def check_hello(self, hello: Hello) -> None:
        """Check the identity of the other end.

        Raises:
            FrameError: It is not the expected replica, set or process.
        """
        if hello.replica != self.peer:
            raise FrameError(f"a hello of replica {hello.replica}, expected {self.peer}")
        if hello.num_replicas != self._own.num_replicas:
            raise FrameError(f"a hello of {hello.num_replicas} replicas, expected {self._own.num_replicas}")
        if self._incarnation not in (None, hello.incarnation):
            raise FrameError("a hello of another process than the one that this run began with")

    def open(self, line: Connection, hello: Hello) -> None:
        """Start to use a connection whose hello was checked."""
        self._begin()
        self.connection = line
        self._incarnation, self.role = hello.incarnation, hello.role
        self._redial_delay_s = _REDIAL_S

    def post_send(self, transfer: WireTransfer, message: torch.Tensor) -> None:
        """Send a message, or fail it if there is no connection."""
        if self.is_up:
            self._outgoing.post(transfer, message, now_s=time.monotonic())
        else:
            transfer.fail(self._lost(transfer))

    def post_receive(self, transfer: WireTransfer) -> None:
        """Post a receive; without a connection, deliver a message that arrived before it ended, or fail."""
        if self.is_up:
            self._incoming.post(transfer)
        elif not self._incoming.take_unexpected(transfer):
            transfer.fail(self._lost(transfer))

    def post_request(self, transfer: RequestTransfer) -> None:
        """Send a request, or fail it if there is no connection."""
        if not self.is_up:
            transfer.fail(self._lost(transfer))
        elif not self._requests.has_room:
            transfer.fail(
                TransportError(
                    f"{transfer.describe()}: {MAX_REQUESTS} requests to replica {self.peer} are unanswered; send more "
                    f"when some have been answered"
                )
            )
        else:
            self._incoming.post(transfer)
            self._requests.request(transfer)

    def post_cancel(self, transfer: RequestTransfer) -> None:
        """Cancel a request, even if a part of its response has arrived."""
        if not self._incoming.cancel_receive(transfer):
            self._requests.cancel(transfer)

    def post_response(self, transfer: ResponseTransfer, message: torch.Tensor, *, header: bytes = b"") -> None:
        """Send a response; a request of an earlier connection is not answered any more."""
        if self.is_up and self._requests.respond(transfer):
            self._outgoing.post(transfer, message, now_s=time.monotonic(), header=header)
        else:
            transfer.fail(PeerLost(f"replica {self.peer} does not wait for the response to its request any more"))

    def take(self, raw: memoryview | None) -> None:
        """Act on a frame.

        Raises:
            FrameError: The peer broke the protocol.
        """
        if raw is None:
            raise FrameError("a message of several frames, expected one")
        self._seen_bytes += len(raw)
        self._seen_frames += 1
        frame = read(raw)
        if isinstance(frame, Goodbye):
            self._has_received_goodbye = True
        if self.is_over:
            return
        if isinstance(frame, MessageStart | MessagePart):
            self._incoming.take(frame, now_s=time.monotonic())
            if len(self._incoming.replies) > _MAX_REPLIES:
                raise FrameError(f"messages without an end while it leaves {_MAX_REPLIES} replies unread")
        elif isinstance(frame, Credit | Receipt | ReceivePosted | MessageRefused):
            self._outgoing.take(frame)
        elif isinstance(frame, RequestFrame | CancelFrame):
            if self._requests.take(frame):
                self._on_request(self.peer, frame)
        elif isinstance(frame, Goodbye):
            self._end("closed its connection", error_of=self._lost)
            self.is_over = True
            self.send_goodbye()
        else:
            raise FrameError("a second hello")

    def flush(self) -> bool:
        """Send what may be sent now, at most a burst; return whether there may be more."""
        connection = self.connection
        for _ in range(_BURST):
            raw = self._held or self._next()
            if raw is None or connection is None:
                return False
            if not connection.send(raw):
                self._held = raw
                return False
            self._held = None
        return True

    def due_s(self) -> float | None:
        """Return when the next paced part is due, None if there is none."""
        return self._outgoing.due_s() if self.is_up else None

    def send_goodbye(self) -> None:
        """Queue a goodbye behind all else."""
        if not self._has_sent_goodbye:
            self._has_sent_goodbye = True
            self._incoming.replies.append(Goodbye())

    def drop(self, reason: str, *, for_good: bool = False) -> None:
        """Close the connection, and fail all transfers in flight; `reason` is the end of "replica 3 ..."."""
        connection, self.connection, self._held = self.connection, None, None
        if connection is not None:
            connection.close()
        self.back_off()
        if not self.is_over:
            self._end(reason, error_of=self._lost)
        self.is_over = self.is_over or for_good

    def back_off(self) -> None:
        """Delay the next attempt to dial, by twice as long each time."""
        if self._is_open:
            self.redial_s = time.monotonic() + _OPEN_REDIAL_S
            return
        self.redial_s = time.monotonic() + self._redial_delay_s
        self._redial_delay_s = min(2 * self._redial_delay_s, _MAX_REDIAL_S)

    def close(self) -> None:
        """Fail all transfers in flight, because this side closes."""

        def closed(transfer: WireTransfer) -> TransportError:
            return TransportError(
                f"the transport was closed with {transfer.describe()} of replica {self.peer} in flight"
            )

        receipts = tuple(self._incoming.replies)  # of messages that arrived
        self._end(self.reason, error_of=closed)
        self._incoming.replies.extend(receipts)
        self.is_over = True
        self.send_goodbye()

    def check(self) -> str:
        """Check the connection by the kernel's statistics; return what is wrong with it, or an empty text."""
        if self.connection is None:
            return ""
        if self.connection.is_closed():  # libzmq should have reported it; nothing arrives any more in any case
            return "closed its connection"
        reading = self.connection.reading()
        if reading is None:
            return ""
        self._liveness.observe(reading.rtt_s)
        limit_s = self._liveness.limit_s
        if reading.silence_s > limit_s:
            return f"was silent for {reading.silence_s:.1f} s (its link allows {limit_s:.3g} s)"
        age_s = time.monotonic() - self._since_s
        limit_bytes = unseen_limit_bytes(seen_bytes=self._seen_bytes, seen_frames=self._seen_frames, age_s=age_s)
        if reading.received_bytes > limit_bytes:
            return f"sent {reading.received_bytes} bytes that make no messages and was disconnected"
        return ""

    def _begin(self) -> None:
        self._outgoing, self._incoming, self._requests = OutgoingMessages(), IncomingMessages(), RequestTable()
        self._liveness = Liveness()
        # of the connection: its begin, and bytes and number of the frames that it has delivered
        self._since_s, self._seen_bytes, self._seen_frames = time.monotonic(), 0, 0
        self._held = None
        self._has_sent_goodbye = self._has_received_goodbye = False

    def _next(self) -> bytearray | None:
        if self._incoming.replies:
            return write(self._incoming.replies.popleft())
        if self.is_over:
            return None
        if self._requests.frames:
            return write(self._requests.frames.popleft())
        frame = self._outgoing.next_frame(now_s=time.monotonic())
        return None if frame is None else write(frame)

    def _end(self, reason: str, *, error_of: Callable[[WireTransfer], TransportError]) -> None:
        self.reason = reason
        sending, self._outgoing = self._outgoing, OutgoingMessages()
        sending.fail(error_of)
        self._incoming.fail(error_of)
        self._requests = RequestTable()
        self._on_request(self.peer, None)

    def _lost(self, transfer: WireTransfer) -> PeerLost:
        return PeerLost(
            f"{transfer.peer_name} {self.reason} during {transfer.describe()}; {_OPEN_HELP if self._is_open else _HELP}"
        )
