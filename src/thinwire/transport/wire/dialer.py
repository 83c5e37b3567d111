"""Dialer: one attempt to connect to a replica; a retry is a new attempt."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

from thinwire.transport.addresses import host_port, needs_ipv6
from thinwire.transport.tcp_stats import ConnectionStats
from thinwire.transport.wire.connection import HANDSHAKE_S, KernelConnection, KeyPair, set_socket_options
from thinwire.transport.wire.framing import Frame, write
from thinwire.transport.wire.listener import TAKEN
from thinwire.transport.wire.zeromq import recv_monitor_message, zmq

_BURST = 256
_NUMBERS = itertools.count()
# libzmq must not reconnect by itself: a retry is a new `DialedConnection`.
_NEVER_MS = 24 * 3600 * 1000
_REFUSED = "it takes no connection, or a firewall drops it"
_FAILED_HANDSHAKE = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_NO_CONNECTION = zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | _FAILED_HANDSHAKE | _NO_CONNECTION


class DialedConnection:
    """Connection that this replica dialled; see `Connection`. It is in use once the other end has sent its hello.

    Args:
        other: The other's public key, which it must prove.
        is_relayed: Whether address and port lead to a relay.
        connect_s: Longest wait for the kernel's connection.

    Attributes:
        problem: Reason why there is no connection, empty as long as there may be one.
        is_mistrusted: Whether the handshake failed, so that a retry will hardly help.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], *, address: str, port: int, own: KeyPair, other: bytes,
        hello: Frame, source_port: int | None = None, is_relayed: bool = False, connect_s: float = HANDSHAKE_S,
    ) -> None:  # fmt: skip
        self.since_s = time.monotonic()
        self.problem = ""
        self.is_mistrusted = False
        self.source_port, self.is_relayed = source_port, is_relayed
        self._tap: KernelConnection | None = None
        self.plug = context.socket(zmq.DEALER)
        try:
            set_socket_options(self.plug)
            self.plug.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
            self.plug.setsockopt(zmq.CONNECT_TIMEOUT, round(connect_s * 1000))
            self.plug.setsockopt(zmq.CURVE_SERVERKEY, other)
            self.plug.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
            self.plug.setsockopt(zmq.CURVE_SECRETKEY, own.private)
            # A name of our own: pyzmq names the monitor by the descriptor, which may be that of a socket closed just
            # now, whose monitor libzmq has not removed yet.
            self.monitor = self.plug.get_monitor_socket(_EVENTS, f"inproc://dial-{next(_NUMBERS)}")
            self.plug.setsockopt(zmq.IPV6, needs_ipv6(address))
            own_end = ""
            if source_port is not None:
                own_end = host_port("::" if needs_ipv6(address) else "0.0.0.0", source_port) + ";"
            self.plug.connect(f"tcp://{own_end}{host_port(address, port)}")
            # a connection that was refused at once has no room
            if not self.send(write(hello)):
                self.problem = self._refused
        except BaseException:
            self.plug.close(linger=0)  # an open socket would keep its context from terminating
            raise

    def read_events(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self.monitor, zmq.DONTWAIT)
                self._on_event(event["event"], event["value"])

    def delivered(self) -> Iterator[memoryview | None]:
        """Yield received frames, at most a burst; None for a message that was not a single frame."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_BURST):
                frames = self.plug.recv_multipart(zmq.DONTWAIT, copy=False)
                yield frames[0].buffer if len(frames) == 1 else None

    def send(self, raw: bytearray) -> bool:
        try:
            self.plug.send(raw, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        if not self.plug.closed:
            self.plug.disable_monitor()
            self.monitor.close()
            self.plug.close()

    def reading(self) -> ConnectionStats | None:
        return None if self._tap is None else self._tap.reading()

    def is_closed(self) -> bool:
        return self._tap is not None and self._tap.is_closed()

    @property
    def _refused(self) -> str:
        return _REFUSED if self.source_port is None else f"{_REFUSED}, or source port {self.source_port} is in use"

    def _on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._tap = KernelConnection(value)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            is_taken = value == int(TAKEN)
            self.is_mistrusted = not is_taken
            self.problem = (
                "another connection with this replica's number is still in use there"
                if is_taken
                else "this replica's number is not one that it waits for"
            )
        elif event & _FAILED_HANDSHAKE:
            self.is_mistrusted = True
            self.problem = (
                "the handshake failed: the secret there differs, or another program answers; give all hosts the same "
                "secret file"
            )
        elif not self.problem:
            if event & _NO_CONNECTION:
                self.problem = self._refused
            elif event == zmq.EVENT_DISCONNECTED:
                self.problem = "it closed the connection"
