"""The connections at the coordinator's port, and how much each may send: honest replicas say a few words a second."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.transport.wire.connection import KernelConnection

MOST_A_SECOND, MOST_AT_ONCE = 200.0, 2000.0
# What may have come over a connection beyond what it brought us: a message of frames without an end is kept whole
# until the last has come, so who sends one is cut off. What may stand in the queue is allowed, and the beats.
UNSEEN_BYTES = 1 << 25
_FRAME_OVERHEAD_BYTES, _BEAT_BYTES_A_SECOND = 128, 512.0


class RateLimit:
    """So much a second, and so much at once; pure, time comes in as a number.

    Args:
        a_second: How much is given back each second.
        at_once: How much there is at most.

    Example:
        >>> allowance = RateLimit(a_second=1.0, at_once=2.0)
        >>> [allowance.take(now_s=0.0) for _ in range(3)], allowance.take(now_s=1.0)
        ([True, True, False], True)
    """

    def __init__(self, *, a_second: float, at_once: float) -> None:
        self._a_second = a_second
        self._at_once = at_once
        self._left = at_once
        self._taken_s: float | None = None

    def take(self, *, now_s: float, amount: float = 1.0) -> bool:
        """Take so much, and tell whether there was."""
        since_s = 0.0 if self._taken_s is None else now_s - self._taken_s
        self._taken_s = now_s
        self._left = min(self._at_once, self._left + since_s * self._a_second)
        if self._left < amount:
            return False
        self._left -= amount
        return True


def _per_connection() -> RateLimit:
    return RateLimit(a_second=MOST_A_SECOND, at_once=MOST_AT_ONCE)


@dataclass(slots=True, kw_only=True)
class _Connection:
    tap: KernelConnection
    since_s: float
    allowance: RateLimit = field(default_factory=_per_connection)
    is_told_of: bool = False
    num_bytes: int = 0
    num_frames: int = 0


class ConnectionLimits:
    """All connections from which something came."""

    def __init__(self) -> None:
        self._callers: dict[int, _Connection] = {}

    def __len__(self) -> int:
        return len(self._callers)

    def heard(self, fd: int, *, num_bytes: int, now_s: float) -> bool:
        """Note a message of a connection, by its descriptor; tell whether it may send so many."""
        caller = self._callers.get(fd)
        if caller is None:
            caller = self._callers[fd] = _Connection(tap=KernelConnection(fd), since_s=now_s)
        caller.num_bytes += num_bytes
        caller.num_frames += 1
        return caller.allowance.take(now_s=now_s)

    def is_news(self, fd: int) -> bool:
        """Tell, once, that a connection sends more than it may."""
        caller = self._callers[fd]
        is_news, caller.is_told_of = not caller.is_told_of, True
        return is_news

    def ended(self, fd: int) -> None:
        """Forget a connection."""
        self._callers.pop(fd, None)

    def guard(self, *, now_s: float) -> int:
        """End connections that brought far more than what arrived; return how many."""
        num_ended = 0
        for fd, caller in list(self._callers.items()):
            reading = caller.tap.reading()
            if reading is None:
                if caller.tap.is_closed():
                    del self._callers[fd]
                continue
            known_bytes = caller.num_bytes + caller.num_frames * _FRAME_OVERHEAD_BYTES
            beat_bytes = (now_s - caller.since_s) * _BEAT_BYTES_A_SECOND
            if reading.received_bytes > known_bytes + beat_bytes + UNSEEN_BYTES:
                caller.tap.shut()
                num_ended += 1
        return num_ended
