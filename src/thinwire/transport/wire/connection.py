"""Connection between two replicas: keys, socket options, the kernel's view of it, and its failure detector."""

from __future__ import annotations

import contextlib
import socket
import statistics
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from thinwire.transport.forked import keep_from_children
from thinwire.transport.relay.member import is_relayed, origin_of
from thinwire.transport.secret import Secret
from thinwire.transport.tcp_stats import ConnectionStats, connection_stats, duplicate_socket
from thinwire.transport.wire.framing import (
    MAX_REQUESTS,
    MAX_UNEXPECTED,
    MAX_UNEXPECTED_BYTES,
    MAX_WINDOW_BYTES,
    MOST_FRAME_BYTES,
)
from thinwire.transport.wire.zeromq import z85, zmq

Role = Literal["door", "dialler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """CURVE key pair in libzmq's form."""

    public: bytes
    private: bytes = field(repr=False)

    @property
    def public_bytes(self) -> bytes:
        """The public key's 32 bytes, as libzmq passes them to ZAP."""
        decoded: bytes = z85.decode(self.public)
        return decoded


def key_pair(secret: Secret, *, replica: int, role: Role) -> KeyPair:
    """Return the keys of a replica: one pair a replica and direction, derived from the job's secret.

    A replica proves its number with its pair. Any holder of the secret can derive all pairs, so the number protects
    against mistakes, not against holders of the secret.

    Example:
        >>> secret = Secret(key=bytes(32))
        >>> one, two = (key_pair(secret, replica=number, role="door") for number in (0, 1))
        >>> len(one.public), one.public == two.public
        (40, False)
    """
    private = z85.encode(secret.derive(f"thinwire wire v1 {role} {replica}"))
    return KeyPair(public=zmq.curve_public(private), private=private)


HEARTBEAT_S = 1.0
LEAST_SILENCE_S = 10.0
MOST_SILENCE_S = 30.0
_SAMPLES = 64


class Liveness:
    """Failure detector: the longest silence allowed, from the round-trip times of the last minute.

    Both ends send a ZMTP heartbeat every `HEARTBEAT_S`, from libzmq's own thread. So a replica whose Python is busy is
    not taken for dead, but a stopped process or a host that left the network is. The kernel reports when the last byte
    arrived: a slow link in the middle of a large frame is not silent, nor are bytes that this process has not read yet.

    The limit allows three late heartbeats and four round trips (a lost packet is sent again after more than one), where
    a round trip is the median plus eight median deviations. It is at least `LEAST_SILENCE_S` and at most
    `MOST_SILENCE_S`.

    Example:
        >>> liveness = Liveness()
        >>> liveness.observe(0.05)
        >>> liveness.limit_s
        10.0
        >>> liveness = Liveness()
        >>> for rtt_s in (2.0, 2.5, 3.0):
        ...     liveness.observe(rtt_s)
        >>> liveness.limit_s  # 3 + 4 * (2.5 + 8 * 0.5)
        29.0
    """

    def __init__(self) -> None:
        self._rtts_s: deque[float] = deque(maxlen=_SAMPLES)

    def observe(self, rtt_s: float) -> None:
        self._rtts_s.append(rtt_s)

    @property
    def limit_s(self) -> float:
        """Seconds of silence after which the peer counts as lost."""
        if not self._rtts_s:
            return MOST_SILENCE_S
        median = statistics.median(self._rtts_s)
        deviation = statistics.median(abs(rtt_s - median) for rtt_s in self._rtts_s)
        trip_s = median + 8 * deviation
        return min(max(LEAST_SILENCE_S, 3 * HEARTBEAT_S + 4 * trip_s), MOST_SILENCE_S)


HANDSHAKE_S = 10.0
# CURVE's overhead of a frame: a name, a nonce, flags and the authenticator.
_CURVE_BYTES = 64
# Frames in one of libzmq's queues. Requested and unexpected messages must fit together: a full queue would stop libzmq
# from reading, and heartbeats with it.
_RECEIVE_FRAMES = MAX_UNEXPECTED + MAX_REQUESTS + 1024
_SEND_FRAMES = 128
# Time-out of libzmq's own heartbeats, for systems without TCP_INFO. libzmq sees whole frames only, and on the slowest
# links one frame takes a minute.
_BACKSTOP_MS = 300_000
# Bytes that the kernel received but libzmq has not delivered: a peer can send a multipart message without an end, which
# libzmq buffers until its last frame.
_UNSEEN_BYTES = MAX_WINDOW_BYTES + MAX_UNEXPECTED_BYTES + (1 << 25)
_UNSEEN_BYTES_PER_S = 512.0
_FRAME_OVERHEAD_BYTES = 128

Endpoint = tuple[str, int]


class Connection(Protocol):
    """Connection to one replica; which side dialled makes no difference."""

    @property
    def source_port(self) -> int | None:
        """Port of the end that dialled; None if unknown."""
        ...

    def send(self, raw: bytearray) -> bool:
        """Queue one frame; return whether there was room for it."""
        ...

    def close(self) -> None: ...

    @property
    def is_relayed(self) -> bool:
        """Whether it leads over a relay."""
        ...

    def reading(self) -> ConnectionStats | None: ...

    def is_closed(self) -> bool:
        """Return whether the kernel has no such connection any more."""
        ...


def set_socket_options(
    plug: zmq.Socket[bytes], *, most_bytes: int = MOST_FRAME_BYTES, receive_frames: int = _RECEIVE_FRAMES,
    send_frames: int = _SEND_FRAMES, silence_ms: int = _BACKSTOP_MS,
) -> None:  # fmt: skip
    """Set bounds and time-outs of a socket, by default those that all of the wire share.

    Args:
        plug: The socket.
        most_bytes: Of a frame, as it is before encryption.
        receive_frames: Of a connection that may wait here.
        send_frames: Of a connection that may wait to be sent.
        silence_ms: Time without a heartbeat after which a connection ends.
    """
    plug.setsockopt(zmq.LINGER, 0)
    plug.setsockopt(zmq.MAXMSGSIZE, most_bytes + _CURVE_BYTES)
    plug.setsockopt(zmq.RCVHWM, receive_frames)
    plug.setsockopt(zmq.SNDHWM, send_frames)
    plug.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))
    plug.setsockopt(zmq.HEARTBEAT_IVL, round(HEARTBEAT_S * 1000))
    plug.setsockopt(zmq.HEARTBEAT_TIMEOUT, silence_ms)


@contextlib.contextmanager
def borrow_socket(fd: int, *, peer: Endpoint | None) -> Iterator[socket.socket | None]:
    """Duplicate a socket of libzmq's by its descriptor, which libzmq may have closed and reused meanwhile.

    It must be connected to the peer; to any if that is None.

    Yields:
        A socket for the connection, None if there is no such connection.
    """
    copy = duplicate_socket(fd)
    if copy is None:
        yield None
        return
    with copy:
        yield copy if peer is None or endpoint_of(copy) == peer else None


def endpoint_of(connection: socket.socket) -> Endpoint | None:
    """Return the other end's address and port, None if it is not connected."""
    try:
        found: Any = connection.getpeername()
    except OSError:
        return None
    return (str(found[0]), int(found[1])) if isinstance(found, tuple) else None


class KernelConnection:
    """Kernel view of a connection that libzmq owns.

    Attributes:
        peer: The other end that the kernel sees; a relayed connection comes from this host.
        origin: Where the connection comes from, see `origin_of`.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        with borrow_socket(fd, peer=None) as connection:
            self.peer = None if connection is None else endpoint_of(connection)
        self.origin, self.is_relayed = origin_of(self.peer), is_relayed(self.peer)
        keep_from_children(fd)

    def reading(self) -> ConnectionStats | None:
        with self._borrowed() as connection:
            return None if connection is None else connection_stats(connection)

    def is_closed(self) -> bool:
        with self._borrowed() as connection:
            return connection is None

    def shut(self) -> None:
        """Shut the socket down, so that libzmq drops it: a ROUTER offers no other way to close one connection."""
        with self._borrowed() as connection, contextlib.suppress(OSError):
            if connection is not None:
                connection.shutdown(socket.SHUT_RDWR)

    def _borrowed(self) -> AbstractContextManager[socket.socket | None]:
        return contextlib.nullcontext() if self.peer is None else borrow_socket(self.fd, peer=self.peer)


def unseen_limit_bytes(*, seen_bytes: int, seen_frames: int, age_s: float) -> int:
    """Return how many bytes the kernel may have received on a connection that delivered so many frames."""
    overhead = seen_frames * _FRAME_OVERHEAD_BYTES + round(age_s * _UNSEEN_BYTES_PER_S)
    return seen_bytes + overhead + _UNSEEN_BYTES
