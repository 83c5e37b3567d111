"""Activity of peers as seen by a replica's connections: silent peers, and whether its own link is busy."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

# Seconds. A connection sends a heartbeat once a second; any byte counts as one.
SILENT_S = 3.0
_SAMPLE_S = 0.5
# Share of the highest rate of the last minute from which a link counts as busy. A link that became ten times slower
# still counts as busy; one that carries only the trickle of a slow sender does not.
_BUSY_SHARE = 1 / 16
# Bytes a second: messages and heartbeats alone stay below this.
_IDLE_BYTES = 4096
_RECENT_S, _LONG_S = 2.0, 60.0


class _LinkReading(Protocol):
    @property
    def silence_s(self) -> float: ...

    @property
    def received_bytes(self) -> int: ...


class Connections(Protocol):
    """Connections with their kernel statistics."""

    def peers(self) -> Collection[int]:
        """Return the connected peers."""
        ...

    def reading(self, peer: int) -> _LinkReading | None:
        """Return the statistics of a connection, None if there is none."""
        ...


class PeerActivity:
    """Samples the connections twice a second at most, however often it is asked.

    Args:
        connections: Connections of this replica.
        now: Clock in seconds that never goes back.
    """

    def __init__(self, connections: Connections, *, now: Callable[[], float] = time.monotonic) -> None:
        self._connections = connections
        self._now = now
        self._sampled_s: float | None = None
        self._silent: frozenset[int] = frozenset()
        self._received_bytes: dict[int, int] = {}
        self._rates: deque[tuple[float, float, float]] = deque()  # begin, end, bytes a second

    def silent_peers(self) -> frozenset[int]:
        """Return the peers silent for `SILENT_S`; a lost connection is reported elsewhere and does not count."""
        self._sample()
        return self._silent

    def is_link_busy(self) -> bool:
        """Return whether the last seconds brought much, compared with what this link can carry."""
        self._sample()
        if not self._rates:
            return False
        now_s = self._rates[-1][1]
        recent = [(end_s - begin_s, rate) for begin_s, end_s, rate in self._rates if end_s > now_s - _RECENT_S]
        rate = sum(seconds * rate for seconds, rate in recent) / sum(seconds for seconds, _ in recent)
        return rate >= max(_IDLE_BYTES, _BUSY_SHARE * max(found for _, _, found in self._rates))

    def _sample(self) -> None:
        now_s = self._now()
        if self._sampled_s is not None and now_s - self._sampled_s < _SAMPLE_S:
            return
        readings = {peer: self._connections.reading(peer) for peer in self._connections.peers()}
        known = {peer: one for peer, one in readings.items() if one is not None}
        self._silent = frozenset(peer for peer, one in known.items() if one.silence_s > SILENT_S)
        totals = {peer: one.received_bytes for peer, one in known.items()}
        if self._sampled_s is not None:
            # a new connection counts from 0 again
            came = [total - before if total >= (before := self._received_bytes.get(peer, 0)) else total
                    for peer, total in totals.items()]  # fmt: skip
            self._rates.append((self._sampled_s, now_s, sum(came) / (now_s - self._sampled_s)))
            while self._rates[0][1] < now_s - _LONG_S:
                self._rates.popleft()
        self._received_bytes, self._sampled_s = totals, now_s
