"""Replicas that nothing comes from just now, as their connections tell: stopped ones, or behind a link that is cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Protocol

# A connection beats once a second; one of these, or any byte of a part, is a sign of life.
QUIET_S = 3.0
_LOOK_S = 0.5


class _Reading(Protocol):
    @property
    def silence_s(self) -> float: ...


class Connections(Protocol):
    """What knows when something came last."""

    def peers(self) -> Collection[int]:
        """Return those that take part."""
        ...

    def reading(self, peer: int) -> _Reading | None:
        """Return what the kernel knows of a connection, None where there is none."""
        ...


class QuietPeers:
    """Names the peers that have been quiet for `QUIET_S`; asked as often as one likes, it looks twice a second.

    Args:
        connections: This replica's.
        now: Gives seconds that only grow.
    """

    def __init__(self, connections: Connections, *, now: Callable[[], float] = time.monotonic) -> None:
        self._connections = connections
        self._now = now
        self._looked_s = -_LOOK_S
        self._found: frozenset[int] = frozenset()

    def __call__(self) -> frozenset[int]:
        """Return them; one without a connection is not among them, since somebody else tells of those."""
        now_s = self._now()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            readings = {peer: self._connections.reading(peer) for peer in self._connections.peers()}
            self._found = frozenset(peer for peer, one in readings.items() if one and one.silence_s > QUIET_S)
        return self._found
