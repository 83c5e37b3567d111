"""Listener of a replica: bounds unproven connections, checks CURVE keys (ZAP), and receives frames.

A connection that has not proved a key of the job costs little and ends after `HANDSHAKE_S`. If there are too many, some
end at once, see `thinwire.transport.admission`. libzmq asks about each client key by ZAP (RFC 27), over an inproc
socket of the same context, so no other program can answer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from thinwire.errors import ConnectError
from thinwire.transport.addresses import host_port
from thinwire.transport.admission import PendingConnections
from thinwire.transport.tcp_stats import ConnectionStats
from thinwire.transport.wire.connection import HANDSHAKE_S, KernelConnection, KeyPair, set_socket_options
from thinwire.transport.wire.zeromq import recv_monitor_message, zmq

ACCEPTED, TAKEN, UNKNOWN = b"200", b"400", b"500"
# Connections without a proven key, from one address and in all. Many replicas of one host dial at the same time.
MAX_UNPROVEN_EACH, MAX_UNPROVEN = 64, 256
# Connections that the kernel accepts in advance: a flood must not fill it while this process is busy.
_BACKLOG = 1024
_BURST = 256
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_DOMAIN = b"thinwire"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedFrame:
    """A received frame and its connection."""

    caller: bytes  # routing identity of the connection
    replica: int  # the replica whose key the connection proved
    fd: int
    frame: memoryview | None  # its bytes, None if the message was not a single frame


class AcceptedConnection:
    """Connection that a replica dialled; see `Connection`."""

    def __init__(self, door: Listener, *, caller: bytes, tap: KernelConnection) -> None:
        self._door, self.caller, self.tap = door, caller, tap

    def send(self, raw: bytearray) -> bool:
        """Queue one frame; on a connection that is gone it is lost, which the monitor reports soon."""
        return self._door.send(self.caller, raw)

    @property
    def source_port(self) -> int | None:
        return None if self.tap.peer is None else self.tap.peer[1]

    @property
    def is_relayed(self) -> bool:
        return self.tap.is_relayed

    def close(self) -> None:
        self.tap.shut()

    def reading(self) -> ConnectionStats | None:
        return self.tap.reading()

    def is_closed(self) -> bool:
        return self.tap.is_closed()


class Listener:
    """A bound ROUTER with its monitor and ZAP socket; used from one thread.

    Args:
        context: Its ZAP handler becomes this listener.
        address: The IP address to listen on; `::` is all of IPv6 and IPv4.
        callers: Replicas by the public keys with which they may dial.
        decide: Returns `ACCEPTED`, `TAKEN` or `UNKNOWN` for a replica that proved its key.
        ports: Ports to try one after the other; 0 stands for a free one.
        prepare: Sets the socket's bounds and time-outs.

    Raises:
        ConnectError: The address cannot be listened on.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], *, address: str, keys: KeyPair, callers: Mapping[bytes, int],
        decide: Callable[[int], bytes], ports: Sequence[int] = (0,),
        prepare: Callable[[zmq.Socket[bytes]], None] = set_socket_options,
    ) -> None:  # fmt: skip
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
        self._bind(address, ports)
        self.port = int(self.plug.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    def _bind(self, address: str, ports: Sequence[int]) -> None:
        self.plug.setsockopt(zmq.IPV6, ":" in address)
        for port in ports:
            try:
                self.plug.bind(f"tcp://{host_port(address, port or '*')}")
                return
            except zmq.ZMQError as error:
                if error.errno == zmq.EADDRINUSE and port != ports[-1]:
                    continue
                self.close()
                where = f"{address}, port {port}" if port else address
                where += f", nor on any of {len(ports)} ports before it" if len(ports) > 1 else ""
                raise ConnectError(f"this host cannot listen on its address {where}: {error.strerror}") from None

    def decisions(self) -> None:
        """Answer libzmq's ZAP requests about connections that have just proven a key."""
        for _ in range(_BURST):
            try:
                asked = self.decider.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            # request: identity, empty, version, request id, domain, address, routing id, mechanism, client key
            if len(asked) != 9 or asked[7] != b"CURVE":
                code, replica = UNKNOWN, -1
            else:
                replica = self._callers.get(asked[8], -1)
                code = UNKNOWN if replica < 0 else self._decide(replica)
            answer = [asked[0], b"", b"1.0", asked[3] if len(asked) > 3 else b"", code, b"", b"%d" % replica, b""]
            self.decider.send_multipart(answer)

    def departed(self) -> Iterator[int]:
        """Record new connections, and yield the descriptors of connections that ended."""
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self.monitor, zmq.DONTWAIT)
                if event["event"] == zmq.EVENT_ACCEPTED:
                    tap = KernelConnection(fd := event["value"])
                    self._unproven[fd] = (time.monotonic(), tap)
                    # never by closing the port: libzmq would close all of its connections too
                    ending = self._pending.add(fd, tap.origin)
                    if ending is not None:
                        self._unproven.pop(ending)[1].shut()
                elif event["event"] == zmq.EVENT_DISCONNECTED:
                    self._forget(event["value"])
                    yield event["value"]

    def _forget(self, fd: int) -> KernelConnection | None:
        self._pending.remove(fd)
        _, tap = self._unproven.pop(fd, (0.0, None))
        return tap

    def delivered(self) -> Iterator[ReceivedFrame]:
        """Yield received frames, at most a burst: one flooding peer must not starve the others."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_BURST):
                caller, *frames = self.plug.recv_multipart(zmq.DONTWAIT, copy=False)
                if frames:
                    yield ReceivedFrame(
                        caller=caller.bytes, replica=int(frames[0].get("User-Id")), fd=int(frames[0].get(zmq.SRCFD)),
                        frame=frames[0].buffer if len(frames) == 1 else None,
                    )  # fmt: skip

    def admit(self, found: ReceivedFrame) -> AcceptedConnection:
        """Return the connection of a replica that sent its hello."""
        kernel = self.know(found.fd) or KernelConnection(found.fd)
        return AcceptedConnection(self, caller=found.caller, tap=kernel)

    def know(self, fd: int) -> KernelConnection | None:
        """Mark a connection as identified, so that `guard` leaves it alone; return it if it was not before."""
        tap = self._forget(fd)
        if tap is not None and tap.peer is not None:
            self._pending.trust(tap.origin)
        return tap

    def turn_away(self, fd: int) -> None:
        """Close a connection that proved a key but broke the protocol."""
        # a ROUTER cannot disconnect one peer, so its socket is shut down under libzmq
        _, tap = self._unproven.get(fd, (0.0, None))
        (tap or KernelConnection(fd)).shut()

    def send(self, caller: bytes, raw: bytearray) -> bool:
        """Queue one frame for a connection; return whether there was room for it."""
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
        """Close connections that never identified themselves."""
        now_s = time.monotonic()
        for since_s, tap in list(self._unproven.values()):
            # libzmq closes those without a handshake; this is for those that then send nothing
            if now_s - since_s > 2 * HANDSHAKE_S:
                tap.shut()

    def close(self) -> None:
        self.plug.disable_monitor()
        for plug in (self.plug, self.decider, self.monitor):
            plug.close()
