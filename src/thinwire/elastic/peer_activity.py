"""Activity of peers as seen by a replica's connections: silent peers, and whether its own link is busy."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

# A connection beats once a second; one of these, or any byte of a part, is a sign of life.
QUIET_S = 3.0
_LOOK_S = 0.5
# A link is busy that brings at least this share of the most that it brought in a second of the last minute. A link that
# has become ten times slower is busy then too, and one over which only a sender trickles that is slow itself is not.
_BUSY_SHARE = 1 / 16
# Words and signs of life alone are no more than this a second.
_WORDS_BYTES = 4096
_RECENT_S, _LONG_S = 2.0, 60.0


class _Reading(Protocol):
    @property
    def silence_s(self) -> float: ...

    @property
    def received_bytes(self) -> int: ...


class Connections(Protocol):
    """What knows when something came last."""

    def peers(self) -> Collection[int]:
        """Return those that take part."""
        ...

    def reading(self, peer: int) -> _Reading | None:
        """Return what the kernel knows of a connection, None where there is none."""
        ...


class _Looks:
    """Looks at connections twice a second at most, however often it is asked.

    Args:
        connections: This replica's.
        now: Gives seconds that only grow.
    """

    def __init__(self, connections: Connections, *, now: Callable[[], float] = time.monotonic) -> None:
        self._connections = connections
        self._now = now
        self._looked_s: float | None = None

    def _readings(self) -> dict[int, _Reading]:
        """Return what the kernel knows of all connections that there are."""
        found = {peer: self._connections.reading(peer) for peer in self._connections.peers()}
        return {peer: one for peer, one in found.items() if one is not None}

    def _is_due(self, now_s: float) -> bool:
        return self._looked_s is None or now_s - self._looked_s >= _LOOK_S


class QuietPeers(_Looks):
    """Names the peers that have been quiet for `QUIET_S`."""

    def __init__(self, connections: Connections, *, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(connections, now=now)
        self._found: frozenset[int] = frozenset()

    def __call__(self) -> frozenset[int]:
        """Return them; one without a connection is not among them, since somebody else tells of those."""
        now_s = self._now()
        if self._is_due(now_s):
            self._looked_s = now_s
            self._found = frozenset(peer for peer, one in self._readings().items() if one.silence_s > QUIET_S)
        return self._found


class Inflow(_Looks):
    """Tells whether this replica's own link is busy with what comes."""

    def __init__(self, connections: Connections, *, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(connections, now=now)
        self._known: dict[int, int] = {}
        self._rates: deque[tuple[float, float, float]] = deque()  # from when, until when, bytes a second

    def is_busy(self) -> bool:
        """Tell whether much came in the last seconds, for this link."""
        self._look(self._now())
        if not self._rates:
            return False
        now_s = self._rates[-1][1]
        recent = [(end_s - begin_s, rate) for begin_s, end_s, rate in self._rates if end_s > now_s - _RECENT_S]
        rate = sum(seconds * rate for seconds, rate in recent) / sum(seconds for seconds, _ in recent)
        return rate >= max(_WORDS_BYTES, _BUSY_SHARE * max(found for _, _, found in self._rates))

    def _look(self, now_s: float) -> None:
        if not self._is_due(now_s):
            return
        found = {peer: one.received_bytes for peer, one in self._readings().items()}
        if self._looked_s is not None:
            # a connection that was made anew counts from 0 again
            came = [total - before if total >= (before := self._known.get(peer, 0)) else total
                    for peer, total in found.items()]  # fmt: skip
            self._rates.append((self._looked_s, now_s, sum(came) / (now_s - self._looked_s)))
            while self._rates[0][1] < now_s - _LONG_S:
                self._rates.popleft()
        self._known, self._looked_s = found, now_s
