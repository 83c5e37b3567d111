"""Connection to the coordinator: ZeroMQ with CURVE, with automatic reconnects."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from thinwire.elastic.coordinator_server import (
    TOKEN_BYTES,
    client_keys,
    coordinator_keys,
    set_coordinator_socket_options,
)
from thinwire.elastic.invitation import Invitation
from thinwire.elastic.protocol import Message, decode, encode
from thinwire.errors import ConnectError, PayloadError, WrongCoordinator
from thinwire.transport.addresses import host_port, needs_ipv6
from thinwire.transport.relay.member import LOOPBACK, RelayMember
from thinwire.transport.secret import Secret
from thinwire.transport.wire.zeromq import recv_monitor_message, z85, zmq

_REDIAL_MS, _LONGEST_REDIAL_MS = 200, 2000
_TICK_MS = 250
_LINGER_MS = 500
# What the other end does that has not the key which is asked of it.
_OTHER_KEY = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_EVENTS = _OTHER_KEY | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED


class MemberConnection(Protocol):
    """Connection to the coordinator, with automatic reconnects."""

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message soon; it waits while there is no connection."""
        ...

    def no_answer(self, *, deadline_s: float) -> ConnectError:
        """Return the error of a coordinator that has not answered within `deadline_s`."""
        ...

    def close(self) -> None:
        """Send queued messages, and close; may be called twice."""
        ...


def connect_coordinator(
    invitation: Invitation, *, secret: Secret, on_message: Callable[[Message], None],
    on_tick: Callable[[], None] = lambda: None, warn: Callable[[str], None] = lambda text: None,
) -> MemberConnection:  # fmt: skip
    """Connect to the coordinator by its address, or to the process that leads on the run's carrier."""
    if not invitation.carrier:
        return CoordinatorConnection(invitation, secret=secret, on_message=on_message, on_tick=on_tick)
    from thinwire.elastic.mailbox import MailboxConnection, open_run  # imports torch, which the wire does not need

    carrier = open_run(invitation.carrier, secret=secret)
    return MailboxConnection(carrier, on_message=on_message, on_tick=on_tick, warn=warn)


class CoordinatorConnection:
    """One connection, with a thread of its own.

    Args:
        invitation: Where the coordinator is, and the key that it must prove.
        secret: Secret of the job.
        on_message: Called with each validated message, from the thread; must be quick.
        on_tick: Called a few times a second, from the thread.
    """

    def __init__(
        self, invitation: Invitation, *, secret: Secret, on_message: Callable[[Message], None],
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._invitation = invitation
        self._last_event = 0
        self._on_message = on_message
        self._on_tick = on_tick
        self._outgoing: deque[bytes] = deque()
        self._is_closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        set_coordinator_socket_options(self._socket)
        keys = client_keys(secret)
        # never the byte zero first: ZeroMQ keeps such names for itself
        self._socket.setsockopt(zmq.IDENTITY, b"t" + secrets.token_bytes(TOKEN_BYTES - 1))
        key = invitation.coordinator_key
        key = key or coordinator_keys(secret).public_bytes
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(key))
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.private)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _REDIAL_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _LONGEST_REDIAL_MS)
        host, port = invitation.host, invitation.port
        self._relay = None if invitation.relay is None else RelayMember(invitation.relay)
        if self._relay is not None:
            host, port = LOOPBACK, self._relay.port_to(key)
        self._socket.setsockopt(zmq.IPV6, needs_ipv6(host))
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._socket.connect(f"tcp://{host_port(host, port)}")
        self._wake, self._woken = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._woken.bind("inproc://wake")
        self._wake.connect("inproc://wake")
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="thinwire-membership", daemon=True)
        self._thread.start()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message soon; it waits while there is no connection."""
        with self._lock:
            if self._is_closing:
                return
            self._outgoing.append(encode(kind, **fields))
            with contextlib.suppress(zmq.Again):
                self._wake.send(b"", zmq.DONTWAIT)

    def no_answer(self, *, deadline_s: float) -> ConnectError:
        """Return the error of a coordinator that has not answered within `deadline_s`."""
        host, port = self._invitation.host, self._invitation.port
        where = f"{host}, port {port}"
        if self._last_event & _OTHER_KEY:
            named = "the address names" if self._invitation.coordinator_key else "follows from the secret"
            return WrongCoordinator(
                f"what listens at {where}, has not proved the coordinator's key that {named}: it is no coordinator, "
                f"that of another run, or one that poses as it; take the whole address that the first host printed last"
            )
        if self._relay is not None and self._relay.problem:
            return ConnectError(self._relay.problem)
        return ConnectError(
            f"no coordinator answered at {where}, within {deadline_s:g} s: it is not there, a firewall drops it, or "
            f"the secret is another one; look with: thinwire doctor {host}:{port}"
        )

    def close(self) -> None:
        """Send queued messages, and close the sockets; may be called twice."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            with contextlib.suppress(zmq.Again):
                self._wake.send(b"", zmq.DONTWAIT)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        next_tick_s = time.monotonic()
        while not self._is_closing:
            ready = dict(poller.poll(_TICK_MS))
            if self._woken in ready:
                with contextlib.suppress(zmq.Again):
                    while True:
                        self._woken.recv(zmq.DONTWAIT)
            self._flush()
            self._receive()
            self._watch_handshakes()
            if time.monotonic() >= next_tick_s:
                next_tick_s = time.monotonic() + _TICK_MS / 1000
                self._on_tick()
        self._flush()
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        with self._lock:  # `close` may still be waking this thread
            self._socket.disable_monitor()
            for socket in (self._socket, self._monitor, self._woken, self._wake):
                socket.close()
        self._context.term()
        if self._relay is not None:
            self._relay.close()

    def _flush(self) -> None:
        with contextlib.suppress(zmq.Again):
            while self._outgoing:
                self._socket.send(self._outgoing[0], zmq.DONTWAIT)
                self._outgoing.popleft()

    def _watch_handshakes(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._last_event = recv_monitor_message(self._monitor, zmq.DONTWAIT)["event"]

    def _receive(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
                with contextlib.suppress(PayloadError):  # a peer of another version that has the secret
                    self._on_message(decode(b"".join(frames[:1]), to_member=True))


def send_command(invitation: Invitation, *, secret: Secret, deadline_s: float, **fields: Any) -> Message:
    """Send an admin command, fields `verb` and `target`, to the coordinator, and return its answer.

    Raises:
        ConnectError: It did not answer.
        WrongCoordinator: What answers there has not its key.
    """
    answers: deque[Message] = deque()
    has_come = threading.Event()

    def receive(message: Message) -> None:
        if message["kind"] == "answer":
            answers.append(message)
            has_come.set()

    connection = connect_coordinator(invitation, secret=secret, on_message=receive)
    try:
        connection.send("command", **fields)
        if not has_come.wait(deadline_s):
            raise connection.no_answer(deadline_s=deadline_s)
        return answers[0]
    finally:
        connection.close()
