"""Records of a rank's connections to other hosts, from its kernel: see `Flow`."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

from thinwire.monitor.runlog.records import Flow, to_line
from thinwire.transport.tcp_stats import HostFlow, HostFlows

# Of so much time only one part goes into asking the kernel, however many connections there are.
_PARTS = 200.0
_MOST_LINES = 64
MUCH_BYTES, _MUCH_SHARE = 65_536, 0.2


class _Pace:
    """Lets only one part of so many of the time go into asking, by what it took the last time."""

    def __init__(self, timer: Callable[[], float]) -> None:
        self._timer, self._next_s = timer, -math.inf

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._next_s

    @contextlib.contextmanager
    def measured(self, now_s: float) -> Iterator[None]:
        begun_s = self._timer()
        yield
        self._next_s = now_s + _PARTS * (self._timer() - begun_s)


class FlowLines:
    """Reads connections to other hosts again and again, and makes lines of what is new.

    Args:
        rank: Who writes.
        hosts: The host of each rank.
        addresses: Those of each rank's host.
        without: Ports whose connections are none of the job's.
        clock: Seconds that only grow.
        timer: The same, to measure what the asking itself takes.

    Attributes:
        used: Hosts to which at least `MUCH_BYTES` went between the last two looks, and a fifth of what went to any.
    """

    def __init__(
        self, rank: int, *, hosts: Sequence[str], addresses: Sequence[Sequence[str]],
        without: Collection[int] = (), clock: Callable[[], float] = time.monotonic,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._rank, self._clock, self._pace = rank, clock, _Pace(timer)
        self._flows = HostFlows(addresses_of_others(rank, hosts, addresses), without=without, now=clock)
        self._told: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self.used: frozenset[int] = frozenset()

    def close(self) -> None:
        """Leave the job's connections as they were."""
        with contextlib.suppress(OSError, ValueError):  # whatever is gone is as it was
            self._flows.close()

    def lines(self, *, is_waiting: bool) -> list[str]:
        """Return lines of those over which bytes went since the last look, or of all while a call does not end."""
        now_s = self._clock()
        if not self._pace.is_due(now_s):
            return []
        with self._pace.measured(now_s):
            found = self._flows.read(is_asking=is_waiting)
        fresh = {peer: one for peer, one in found.items() if is_waiting or one.num_bytes != self._told.get(peer)}
        # where there are too many, those that nothing comes from tell most
        worst = sorted(fresh, key=lambda peer: -(fresh[peer].silence_s or 0.0))[:_MOST_LINES]
        self._told |= {peer: fresh[peer].num_bytes for peer in worst}
        carried = {peer: one.num_bytes - self._before.get(peer, one.num_bytes) for peer, one in found.items()}
        much = max(MUCH_BYTES, _MUCH_SHARE * max(carried.values(), default=0))
        self.used = frozenset(peer for peer, num_bytes in carried.items() if num_bytes >= much)
        self._before = {peer: one.num_bytes for peer, one in found.items()}
        return [to_line(_flow(self._rank, peer, fresh[peer], now_s)) for peer in sorted(worst)]


class FlowSource(Protocol):
    """What the kernel knows of a connection that this rank sends over."""

    @property
    def sent_bytes(self) -> int:
        """That the other end has acknowledged."""
        ...

    @property
    def busy_s(self) -> float:
        """For how long there was something to send, or that was not acknowledged; 0 where that is not known."""
        ...

    @property
    def held_s(self) -> float:
        """For how much of that the other end would take no more."""
        ...


class PeerFlows:
    """Asks a rank's own transport about its connections again and again, and makes records of what is new.

    Args:
        rank: Who writes.
        timer: Seconds that only grow, to measure what the asking itself takes.
    """

    def __init__(self, rank: int, *, timer: Callable[[], float] = time.monotonic) -> None:
        self._rank, self._pace = rank, _Pace(timer)
        self._peers: set[int] = set()
        self._told: dict[int, int] = {}

    def note_send(self, peer: int) -> None:
        """Say that something is sent to another rank; beyond `_MOST_LINES` others are not asked about."""
        if len(self._peers) < _MOST_LINES:
            self._peers.add(peer)

    def records(self, at_s: float, reading: Callable[[int], FlowSource | None]) -> list[Flow]:
        """Return a record of each connection over which bytes went since the last one.

        Args:
            at_s: When this is.
            reading: What is known of the connection to a rank, if anything.
        """
        if not self._pace.is_due(at_s):
            return []
        with self._pace.measured(at_s):
            known = {peer: one for peer in sorted(self._peers) if (one := reading(peer)) is not None and one.busy_s}
        fresh = {peer: one for peer, one in known.items() if one.sent_bytes != self._told.get(peer)}
        # ranks that are gone leave their room to others; whoever is sent to again is asked about again
        self._peers.intersection_update(known)
        self._told = {peer: one.sent_bytes for peer, one in known.items()}
        return [
            Flow(
                rank=self._rank, peer=peer, at_s=at_s, num_bytes=one.sent_bytes, busy_s=round(one.busy_s, 6),
                held_s=round(one.held_s, 6),
            )
            for peer, one in fresh.items()
        ]  # fmt: skip


def _flow(rank: int, peer: int, one: HostFlow, at_s: float) -> Flow:
    return Flow(
        rank=rank, peer=peer, at_s=round(at_s, 6), num_bytes=one.num_bytes, busy_s=round(one.busy_s, 6),
        held_s=round(one.held_s, 6), silence_s=one.silence_s, unanswered=one.unanswered,
    )  # fmt: skip


def addresses_of_others(
    rank: int, hosts: Sequence[str], addresses: Sequence[Sequence[str]]
) -> Mapping[int, tuple[str, ...]]:
    """Return the addresses of each other host, by its lowest rank; those that several hosts have tell nothing.

    Example:
        >>> own, other = ["192.0.2.1", "172.17.0.1"], ["192.0.2.2", "172.17.0.1"]
        >>> addresses_of_others(0, ["a", "a", "b", "b"], [own, own, other, other])
        {2: ('192.0.2.2',)}
    """
    lowest: dict[str, int] = {}
    for number, host in enumerate(hosts):
        lowest.setdefault(host, number)
    counts = Counter(address for number in lowest.values() for address in set(addresses[number]))
    return {
        number: tuple(address for address in addresses[number] if counts[address] == 1)
        for host, number in lowest.items()
        if host != hosts[rank]
    }
