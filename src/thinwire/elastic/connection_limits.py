"""Rate limits of the connections at the coordinator's port; honest replicas send a few messages a second."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.rate_limit import RateLimit
from thinwire.transport.wire.connection import KernelConnection

_MESSAGES_A_SECOND, _BURST_MESSAGES = 200.0, 2000.0
# Bytes that a connection may have received beyond its delivered messages. ZeroMQ keeps a message of many frames until
# its last one, so the sender of endless frames is cut off. Messages in the queue and heartbeats are allowed.
UNSEEN_BYTES = 1 << 25
_FRAME_OVERHEAD_BYTES, _BEAT_BYTES_A_SECOND = 128, 512.0


@dataclass(slots=True, kw_only=True)
class _Connection:
    tap: KernelConnection
    since_s: float
    limit: RateLimit
    is_reported: bool = False
    num_bytes: int = 0
    num_frames: int = 0


class ConnectionLimits:
    """All connections that have sent a message."""

    def __init__(self) -> None:
        self._connections: dict[int, _Connection] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def allows(self, fd: int, *, num_bytes: int, now_s: float) -> bool:
        """Note a message of a connection, by its descriptor; return whether it is within the limit."""
        connection = self._connections.get(fd)
        if connection is None:
            limit = RateLimit(a_second=_MESSAGES_A_SECOND, at_once=_BURST_MESSAGES)
            connection = self._connections[fd] = _Connection(tap=KernelConnection(fd), since_s=now_s, limit=limit)
        connection.num_bytes += num_bytes
        connection.num_frames += 1
        return connection.limit.take(now_s=now_s)

    def origin(self, fd: int) -> str:
        """Return where a connection comes from that has sent a message, see `origin_of`; empty where it is gone."""
        return self._connections[fd].tap.origin if fd in self._connections else ""

    def is_first_excess(self, fd: int) -> bool:
        """Return, once, that a connection exceeds its limit."""
        connection = self._connections[fd]
        is_first, connection.is_reported = not connection.is_reported, True
        return is_first

    def ended(self, fd: int) -> None:
        """Forget a connection."""
        self._connections.pop(fd, None)

    def guard(self, *, now_s: float) -> int:
        """End connections that received far more bytes than they delivered; return how many."""
        num_ended = 0
        for fd, connection in list(self._connections.items()):
            reading = connection.tap.reading()
            if reading is None:
                if connection.tap.is_closed():
                    del self._connections[fd]
                continue
            known_bytes = connection.num_bytes + connection.num_frames * _FRAME_OVERHEAD_BYTES
            beat_bytes = (now_s - connection.since_s) * _BEAT_BYTES_A_SECOND
            if reading.received_bytes > known_bytes + beat_bytes + UNSEEN_BYTES:
                connection.tap.shut()
                num_ended += 1
        return num_ended
