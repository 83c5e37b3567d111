"""The port on which a replica is dialled: who may come in, and what those send who did.

Connections that have not proved a key of the job cost little and end after `HANDSHAKE_S`; where there are too many of
them, some end at once, see `thinwire.transport.admission`. libzmq asks the decider (ZAP, RFC 27) about each client key,
over an inproc socket of the same context, so no other program decides.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from thinwire.errors import ConnectError
from thinwire.transport.admission import PendingConnections
from thinwire.transport.tcp_stats import ConnectionStats
from thinwire.transport.wire.connection import HANDSHAKE_S, KernelConnection, KeyPair, set_socket_options

ACCEPTED, TAKEN, UNKNOWN = b"200", b"400", b"500"
# Connections without a proved key, from one address and in all. Many replicas of one host dial at the same time.
MAX_UNPROVEN_EACH, MAX_UNPROVEN = 64, 256
# What the kernel accepts beforehand: a flood must not fill it within the milliseconds that this process is busy.
_BACKLOG = 1024
_BURST = 256
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_DOMAIN = b"thinwire"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedFrame:
    """A frame that came in.

    Attributes:
        caller: Names the connection.
        replica: Whose key the connection proved.
        fd: The connection's descriptor.
        frame: Its bytes, None where it was not one frame.
    """

    caller: bytes
    replica: int
    fd: int
    frame: memoryview | None


class AcceptedConnection:
    """The connection to a replica that dialled this one."""

    def __init__(self, door: Listener, *, caller: bytes, tap: KernelConnection) -> None:
        self._door = door
        self.caller = caller
        self.tap = tap

    def send(self, raw: bytearray) -> bool:
        """Hand one frame over; where the connection is gone, it is lost, and the door tells so soon."""
        return self._door.send(self.caller, raw)

    def close(self) -> None:
        """End the connection at once."""
        self.tap.shut()

    def reading(self) -> ConnectionStats | None:
        """Return what the kernel knows of it."""
        return self.tap.reading()

    def is_closed(self) -> bool:
        """Tell whether the kernel has no such connection any more."""
        return self.tap.is_closed()


class Listener:
    """A bound ROUTER with its monitor and its decider; all of it is used from one thread.

    Args:
        context: Whose decider this becomes.
        address: The IPv4 address to listen on.
        keys: This replica's.
        callers: Replicas by the public keys with which they may dial.
        decide: Says `ACCEPTED`, `TAKEN` or `UNKNOWN` of a replica whose key was proved.
        port: The port, 0 for a free one.
        prepare: Sets the socket's bounds and times.

    Raises:
        ConnectError: The address cannot be listened on.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        address: str,
        keys: KeyPair,
        callers: Mapping[bytes, int],
        decide: Callable[[int], bytes],
        port: int = 0,
        prepare: Callable[[zmq.Socket[bytes]], None] = set_socket_options,
    ) -> None:
        self._callers = callers
        self._decide = decide
        self._unproven: dict[int, tuple[float, KernelConnection]] = {}
        self._pending = PendingConnections(most_each=MAX_UNPROVEN_EACH, most=MAX_UNPROVEN)
        self.decider = context.socket(zmq.ROUTER)
        self.decider.setsockopt(zmq.LINGER, 0)
        self.decider.bind("inproc://zeromq.zap.01")
        self.plug = context.socket(zmq.ROUTER)
        prepare(self.plug)
        self.plug.setsockopt(zmq.BACKLOG, _BACKLOG)
        self.plug.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.plug.setsockopt(zmq.CURVE_SERVER, 1)
        self.plug.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        self.plug.setsockopt(zmq.CURVE_SECRETKEY, keys.private)
        self.plug.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        self.monitor = self.plug.get_monitor_socket(_EVENTS)
        try:
            self.plug.bind(f"tcp://{address}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            where = f"{address}, port {port}" if port else address
            raise ConnectError(f"this host cannot listen on its address {where}: {error.strerror}") from None
        self.port = int(self.plug.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    def decisions(self) -> None:
        """Answer libzmq's questions about those that have just proved a key."""
        for _ in range(_BURST):
            try:
                asked = self.decider.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if len(asked) != 9 or asked[7] != b"CURVE":
                code, replica = UNKNOWN, -1
            else:
                replica = self._callers.get(asked[8], -1)
                code = UNKNOWN if replica < 0 else self._decide(replica)
            answer = [asked[0], b"", b"1.0", asked[3] if len(asked) > 3 else b"", code, b"", b"%d" % replica, b""]
            self.decider.send_multipart(answer)

    def departed(self) -> Iterator[int]:
        """Note who came to the port, and yield the descriptors of connections that ended."""
        with contextlib.suppress(zmq.Again):
            while True:
                told = recv_monitor_message(self.monitor, zmq.DONTWAIT)
                if told["event"] == zmq.EVENT_ACCEPTED:
                    self._on_accept(told["value"])
                elif told["event"] == zmq.EVENT_DISCONNECTED:
                    self._forget(told["value"])
                    yield told["value"]

    def _on_accept(self, fd: int) -> None:
        tap = KernelConnection(fd)
        self._unproven[fd] = (time.monotonic(), tap)
        # not by closing the port: libzmq ends all connections that came through it with it
        ending = self._pending.add(fd, "" if tap.peer is None else tap.peer[0])
        if ending is not None:
            self._unproven.pop(ending)[1].shut()

    def _forget(self, fd: int) -> KernelConnection | None:
        self._pending.remove(fd)
        _, tap = self._unproven.pop(fd, (0.0, None))
        return tap

    def delivered(self) -> Iterator[ReceivedFrame]:
        """Yield what came in, a burst at most."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_BURST):
                caller, *frames = self.plug.recv_multipart(zmq.DONTWAIT, copy=False)
                if frames:
                    yield ReceivedFrame(
                        caller=caller.bytes,
                        replica=int(frames[0].get("User-Id")),
                        fd=int(frames[0].get(zmq.SRCFD)),
                        frame=frames[0].buffer if len(frames) == 1 else None,
                    )

    def admit(self, found: ReceivedFrame) -> AcceptedConnection:
        """Return the connection of a replica that sent its hello."""
        kernel = self._take_pending(found.fd) or KernelConnection(found.fd)
        return AcceptedConnection(self, caller=found.caller, tap=kernel)

    def know(self, fd: int) -> None:
        """Count a connection no longer among those that never said who they are."""
        self._take_pending(fd)

    def _take_pending(self, fd: int) -> KernelConnection | None:
        tap = self._forget(fd)
        if tap is not None and tap.peer is not None:
            self._pending.trust(tap.peer[0])
        return tap

    def turn_away(self, found: ReceivedFrame) -> None:
        """End the connection of one that proved a key but does not behave."""
        _, tap = self._unproven.get(found.fd, (0.0, None))
        (tap or KernelConnection(found.fd)).shut()

    def send(self, caller: bytes, raw: bytearray) -> bool:
        """Hand one frame to a connection; tell whether there was room for it."""
        try:
            self.plug.send(caller, zmq.DONTWAIT | zmq.SNDMORE)
            self.plug.send(raw, zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
        return True

    def guard(self) -> None:
        """End connections that never said who they are."""
        now_s = time.monotonic()
        for since_s, tap in list(self._unproven.values()):
            # libzmq ends those that do not shake hands; this is for those that did and then say nothing
            if now_s - since_s > 2 * HANDSHAKE_S:
                tap.shut()

    def close(self) -> None:
        """Give the sockets back."""
        self.plug.disable_monitor()
        for plug in (self.plug, self.decider, self.monitor):
            plug.close()
