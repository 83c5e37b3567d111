"""Server of the coordinator: an authenticated, encrypted, bounded socket around the state machine, in one thread."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.elastic.connection_limits import ConnectionLimits
from thinwire.elastic.coordinator import Coordinator
from thinwire.elastic.one_time_invitations import InvitedCallers
from thinwire.elastic.protocol import MOST_BYTES, MOST_BYTES_HERE, decode, encode
from thinwire.errors import PayloadError
from thinwire.rate_limit import RateLimit
from thinwire.transport.addresses import RelayPlace, is_own
from thinwire.transport.relay.member import RelayMember, is_relayed_origin
from thinwire.transport.secret import Secret, make_secret, read_secret
from thinwire.transport.wire.connection import HANDSHAKE_S, KeyPair, set_socket_options
from thinwire.transport.wire.listener import ACCEPTED, Listener, ReceivedFrame
from thinwire.transport.wire.zeromq import z85, zmq

KEY_FILE = "coordinator.key"
TOKEN_BYTES = 16
_QUEUE = 20_000
# Messages of one connection that may wait here.
_MAX_WAITING = 256
_TICK_S, _GUARD_S = 0.05, 0.5
_LINGER_MS = 1000
# Invalid messages reported of one connection: it may run another version.
_MAX_INVALID = 16
# Limit on reports about the port, a second and at once; and their length.
_REPORTS_A_SECOND, _BURST_REPORTS = 0.2, 64.0
_MAX_REPORT_LENGTH = 300


def own_key(run_dir: Path, *, is_made: bool = False) -> Secret | None:
    """Return what a coordinator's keys are derived from, of which no holder of the job's secret knows anything.

    Args:
        run_dir: The coordinator's folder, in which it lasts, so that a restarted coordinator has the same keys.
        is_made: Whether to make it where there is none.

    Returns:
        None where there is none: the keys then follow from the job's secret.
    """
    path = run_dir / KEY_FILE
    if path.exists():
        return read_secret(path)
    return make_secret(path) if is_made else None


def coordinator_keys(secret: Secret) -> KeyPair:
    """Return the coordinator's keys, of its own key or of the job's secret."""
    return _pair(secret, "thinwire membership v1 coordinator")


def client_keys(secret: Secret) -> KeyPair:
    """Return the keys with which replicas and admin commands prove that they have the secret."""
    return _pair(secret, "thinwire membership v1 caller")


def _pair(secret: Secret, label: str) -> KeyPair:
    private = z85.encode(secret.derive(label))
    return KeyPair(public=zmq.curve_public(private), private=private)


def set_coordinator_socket_options(plug: zmq.Socket[bytes]) -> None:
    """Set bounds and times for both ends of the coordinator's connections."""
    silence_ms = round(HANDSHAKE_S * 1000)
    set_socket_options(plug, most_bytes=MOST_BYTES, receive_frames=_QUEUE, send_frames=_QUEUE, silence_ms=silence_ms)


class CoordinatorServer:
    """Serves a coordinator.

    Args:
        secret: The job's.
        key: The coordinator's own, see `own_key`.
        relay: Where hosts reach it that cannot dial it; None for nowhere.
        address: The IP address to listen on; `::` is all of IPv6 and IPv4.
        port: The port; 0 takes a free one.
        say: Reports connections that were refused.
        invitations: File of the run's invitations.

    Raises:
        ConnectError: The address or port cannot be listened on.

    Attributes:
        port: The port.
        generation: Names this process among the job's coordinators.
    """

    def __init__(
        self, *, secret: Secret, address: str, port: int, say: Callable[[str], None], key: Secret | None = None,
        invitations: Path | None = None, relay: RelayPlace | None = None,
    ) -> None:  # fmt: skip
        self._say = say
        self._num_invalid: dict[bytes, int] = {}
        self._limits = ConnectionLimits()
        self._reports = RateLimit(a_second=_REPORTS_A_SECOND, at_once=_BURST_REPORTS)
        self._guard_s = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.generation = secrets.token_hex(8)
        self._callers = InvitedCallers(client_keys(secret).public_bytes, invitations)
        try:
            self._door = Listener(
                self._context, address=address, ports=(port,), keys=(keys := coordinator_keys(key or secret)),
                callers=self._callers, decide=lambda replica: ACCEPTED, prepare=_set_server_options,
            )  # fmt: skip
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.port = self._door.port
        self._relay = None if relay is None else RelayMember(relay)
        if self._relay is not None:
            self._relay.offer(keys.public_bytes, address=address, port=self.port)

    def send(self, token: bytes, kind: str, fields: dict[str, Any]) -> None:
        """Send a message to a connection; where its queue is full or it is gone, it is lost, and asked for again."""
        self._door.send(token, bytearray(encode(kind, **fields)))

    def serve(
        self, coordinator: Coordinator, *, until: Callable[[], bool], turn: Callable[[], None] = lambda: None
    ) -> None:  # fmt: skip
        """Serve until `until` returns true; `turn` is called after each round of the loop."""
        poller = zmq.Poller()
        for plug in (self._door.plug, self._door.monitor, self._door.decider):
            poller.register(plug, zmq.POLLIN)
        last_s = 0.0
        while not until():
            poller.poll(round(1000 * _TICK_S))
            self._callers.reload()
            for fd in self._door.departed():
                self._limits.ended(fd)  # its replica may dial again
            self._door.decisions()
            for found in self._door.delivered():
                self._handle(coordinator, found)
                self._door.know(found.fd)
            now_s = time.monotonic()
            if now_s - last_s >= _TICK_S:
                last_s = now_s
                coordinator.tick(now_s)
                self._guard(now_s)
            turn()

    def close(self) -> None:
        """Close the sockets."""
        self._door.plug.setsockopt(zmq.LINGER, _LINGER_MS)
        self._door.close()
        with contextlib.suppress(zmq.ZMQError):
            self._context.term()
        if self._relay is not None:
            self._relay.close()

    def _guard(self, now_s: float) -> None:
        self._door.guard()
        if now_s - self._guard_s < _GUARD_S:
            return
        self._guard_s = now_s
        for _ in range(self._limits.guard(now_s=now_s)):
            self._report("a connection sent a message without an end, and was cut off")

    def _handle(self, coordinator: Coordinator, found: ReceivedFrame) -> None:
        now_s, caller = time.monotonic(), found.caller
        size = 0 if found.frame is None else len(found.frame)
        if not self._limits.allows(found.fd, num_bytes=size, now_s=now_s):
            if self._limits.is_first_excess(found.fd):
                self._report("a connection sends more messages than a replica needs; the rest is dropped")
            return
        try:
            if found.frame is None:
                raise PayloadError("a message of several frames")
            message = decode(bytes(found.frame), to_member=False)
            origin, is_join = self._limits.origin(found.fd), message["kind"] == "join"
            coordinator.handle(
                caller, message, now_s=now_s, origin=origin, invitation=found.replica,
                is_own_host=is_join and bool(origin) and not is_relayed_origin(origin) and is_own(origin),
            )  # fmt: skip
        except PayloadError as error:
            self._num_invalid[caller] = self._num_invalid.get(caller, 0) + 1
            if self._num_invalid[caller] <= _MAX_INVALID:
                self._report(f"a connection sent {error}")
            if len(self._num_invalid) > _QUEUE:
                self._num_invalid.clear()

    def _report(self, text: str) -> None:
        if self._reports.take(now_s=time.monotonic()):
            self._say(text if len(text) <= _MAX_REPORT_LENGTH else text[:_MAX_REPORT_LENGTH] + " ...")


def _set_server_options(plug: zmq.Socket[bytes]) -> None:
    set_coordinator_socket_options(plug)
    plug.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES_HERE + 64)
    plug.setsockopt(zmq.RCVHWM, _MAX_WAITING)
    # a replica that dials again under its token takes the place of its old connection
    plug.setsockopt(zmq.ROUTER_HANDOVER, 1)
