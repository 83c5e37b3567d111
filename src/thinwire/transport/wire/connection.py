"""Connection between two replicas: keys, socket options, the kernel's view of it, and its failure detector."""

from __future__ import annotations

import contextlib
import socket
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import zmq
from zmq.utils import z85

from thinwire.transport.secret import Secret
from thinwire.transport.tcp_stats import ConnectionStats, connection_stats, duplicate_socket
from thinwire.transport.wire.flow_control import MOST_BYTES
from thinwire.transport.wire.framing import (
    MAX_REQUESTS,
    MAX_UNEXPECTED,
    MAX_UNEXPECTED_BYTES,
    MOST_FRAME_BYTES,
)

Role = Literal["door", "dialler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A CURVE key pair, as libzmq takes it.

    Attributes:
        public: 40 characters of Z85.
        private: 40 characters of Z85.
    """

    public: bytes
    private: bytes = field(repr=False)

    @property
    def public_bytes(self) -> bytes:
        """The public key's 32 bytes, as libzmq shows them to who decides about a connection."""
        decoded: bytes = z85.decode(self.public)
        return decoded


def key_pair(secret: Secret, *, replica: int, role: Role) -> KeyPair:
    """Return the keys of a replica.

    Args:
        secret: The job's.
        replica: Whose keys.
        role: For the side that is dialled, or the one that dials.

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
    """How long a peer may be silent, from the round-trip times of the last minute.

    Three beats may be late, and four round trips (a lost packet is sent again after more than one of them), where a
    round trip is taken as the median and eight times the median deviation from it. A glitch of `LEAST_SILENCE_S` is
    always borne, and nobody is waited for longer than `MOST_SILENCE_S`.

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
        """Note a round-trip time."""
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
# What CURVE puts around a frame: a name, a nonce, flags and the authenticator.
_CURVE_BYTES = 64
# Frames that may stand in one of libzmq's queues. What we asked for and what may come unasked must fit: a full queue
# would stop libzmq from reading, and heartbeats with it.
_RECEIVE_FRAMES = MAX_UNEXPECTED + MAX_REQUESTS + 1024
_SEND_FRAMES = 128
# What libzmq's own heartbeats end, for systems whose kernel tells nothing: it sees whole frames only, and on the
# thinnest wires one of them takes a minute.
_BACKSTOP_MS = 300_000
# What may have come over a connection beyond what it brought us: a peer can send a message of frames without an end,
# and libzmq keeps them all until the last has come.
_UNSEEN_BYTES = MOST_BYTES + MAX_UNEXPECTED_BYTES + (1 << 25)
_UNSEEN_BYTES_PER_S = 512.0
_FRAME_OVERHEAD_BYTES = 128

Endpoint = tuple[str, int]


class Connection(Protocol):
    """One connection."""

    def send(self, raw: bytearray) -> bool:
        """Hand one frame over; tell whether there was room for it."""
        ...

    def close(self) -> None:
        """End the connection at once."""
        ...

    def reading(self) -> ConnectionStats | None:
        """Return what the kernel knows of it, None where it does not tell."""
        ...

    def is_closed(self) -> bool:
        """Tell whether the kernel has no such connection any more."""
        ...


def set_socket_options(plug: zmq.Socket[bytes]) -> None:
    """Set the bounds and times that all sockets of the wire have in common."""
    plug.setsockopt(zmq.LINGER, 0)
    plug.setsockopt(zmq.MAXMSGSIZE, MOST_FRAME_BYTES + _CURVE_BYTES)
    plug.setsockopt(zmq.RCVHWM, _RECEIVE_FRAMES)
    plug.setsockopt(zmq.SNDHWM, _SEND_FRAMES)
    plug.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))
    plug.setsockopt(zmq.HEARTBEAT_IVL, round(HEARTBEAT_S * 1000))
    plug.setsockopt(zmq.HEARTBEAT_TIMEOUT, _BACKSTOP_MS)


@contextlib.contextmanager
def borrow_socket(fd: int, *, peer: Endpoint | None) -> Iterator[socket.socket | None]:
    """Look at a connection of libzmq's by its descriptor, of which libzmq may have made another one meanwhile.

    Args:
        fd: The descriptor.
        peer: The address and port that it must be connected to; None to take what is there.

    Yields:
        A socket for the connection, None where there is none such.
    """
    copy = duplicate_socket(fd)
    if copy is None:
        yield None
        return
    with copy:
        yield copy if peer is None or endpoint_of(copy) == peer else None


def endpoint_of(connection: socket.socket) -> Endpoint | None:
    """Return the other end's address and port, None where there is none."""
    try:
        found: Any = connection.getpeername()
    except OSError:
        return None
    return (str(found[0]), int(found[1])) if isinstance(found, tuple) else None


class KernelConnection:
    """A connection of libzmq's as the kernel sees it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        with borrow_socket(fd, peer=None) as connection:
            self.peer = None if connection is None else endpoint_of(connection)

    def reading(self) -> ConnectionStats | None:
        """Return what the kernel knows of it, None where it is gone."""
        if self.peer is None:
            return None
        with borrow_socket(self.fd, peer=self.peer) as connection:
            return None if connection is None else connection_stats(connection)

    def is_closed(self) -> bool:
        """Tell whether the kernel has no such connection any more."""
        if self.peer is None:
            return True
        with borrow_socket(self.fd, peer=self.peer) as connection:
            return connection is None

    def shut(self) -> None:
        """End the connection under libzmq, which then drops it: there is no other way to end one of a ROUTER's."""
        if self.peer is None:
            return
        with borrow_socket(self.fd, peer=self.peer) as connection, contextlib.suppress(OSError):
            if connection is not None:
                connection.shutdown(socket.SHUT_RDWR)


def unseen_limit_bytes(*, seen_bytes: int, seen_frames: int, age_s: float) -> int:
    """Return how many bytes a connection may have brought the kernel, where it brought us so many."""
    overhead = seen_frames * _FRAME_OVERHEAD_BYTES + round(age_s * _UNSEEN_BYTES_PER_S)
    return seen_bytes + overhead + _UNSEEN_BYTES
