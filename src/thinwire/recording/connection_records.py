"""Records of a rank's connections to other hosts: kernel counters (`Flow`) and burst probes (`Probe`)."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from thinwire.runlog.records import Flow, PathReading, Probe, to_line
from thinwire.transport.burst_probe import BURST_BYTES, BurstProbe
from thinwire.transport.default_group import TEXT_BYTES
from thinwire.transport.tcp_stats import ConnectionStats, HostFlows

if TYPE_CHECKING:  # needs pyzmq, an extra
    from thinwire.transport.wire.multipath import PathStats

# One part in so many of the time goes into reading kernel counters, however many connections there are.
_PARTS = 200.0
_MOST_LINES = 64
MUCH_BYTES, _MUCH_SHARE = 65_536, 0.2


class _Pace:
    """Limits the readings to one part in `_PARTS` of the time, by the duration of the last one."""

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
    """Polls the kernel counters of connections to other hosts, and returns lines of what is new.

    Args:
        without: Ports of connections that do not belong to the job.
        timer: Monotonic seconds, to measure the duration of a reading.

    Attributes:
        used: Hosts that got at least `MUCH_BYTES` between the last two polls, and a fifth of the busiest host's bytes.
    """

    def __init__(
        self, rank: int, *, hosts: Sequence[str], addresses: Sequence[Sequence[str]],
        without: Collection[int] = (), clock: Callable[[], float] = time.monotonic,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._rank, self._clock, self._pace = rank, clock, _Pace(timer)
        self._flows = HostFlows(addresses_of_others(rank, hosts, addresses), without=without, now=clock)
        self._written: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self.used: frozenset[int] = frozenset()

    def close(self) -> None:
        """Leave the job's connections as they were."""
        with contextlib.suppress(OSError, ValueError):  # whatever is gone is as it was
            self._flows.close()

    def lines(self, *, is_waiting: bool) -> list[str]:
        """Return lines of connections with bytes since the last poll, or of all while a call is open for long."""
        now_s = self._clock()
        if not self._pace.is_due(now_s):
            return []
        with self._pace.measured(now_s):
            found = self._flows.read(is_asking=is_waiting)
        fresh = {peer: one for peer, one in found.items() if is_waiting or one.num_bytes != self._written.get(peer)}
        # beyond the bound, the most silent ones matter most
        worst = sorted(fresh, key=lambda peer: -(fresh[peer].silence_s or 0.0))[:_MOST_LINES]
        self._written |= {peer: fresh[peer].num_bytes for peer in worst}
        carried = {peer: one.num_bytes - self._before.get(peer, one.num_bytes) for peer, one in found.items()}
        much = max(MUCH_BYTES, _MUCH_SHARE * max(carried.values(), default=0))
        self.used = frozenset(peer for peer, num_bytes in carried.items() if num_bytes >= much)
        self._before = {peer: one.num_bytes for peer, one in found.items()}
        return [
            to_line(Flow(
                rank=self._rank, peer=peer, at_s=round(now_s, 6), num_bytes=one.num_bytes, busy_s=round(one.busy_s, 6),
                held_s=round(one.held_s, 6), silence_s=one.silence_s, unanswered=one.unanswered,
            ))
            for peer, one in sorted(fresh.items()) if peer in worst
        ]  # fmt: skip


class PeerFlows:
    """Polls the connections of a rank's own transport, and returns records of what is new.

    Args:
        timer: Monotonic seconds, to measure the duration of a reading.
    """

    def __init__(self, rank: int, *, timer: Callable[[], float] = time.monotonic) -> None:
        self._rank, self._pace = rank, _Pace(timer)
        self._peers: set[int] = set()
        self._written: dict[int, int] = {}
        self._paths: dict[tuple[int, int], PathReading] = {}

    def note_send(self, peer: int) -> None:
        """Note that something is sent to a rank; at most `_MOST_LINES` ranks are polled."""
        if len(self._peers) < _MOST_LINES:
            self._peers.add(peer)

    def records(self, at_s: float, reading: Callable[[int], ConnectionStats | None]) -> list[Flow]:
        """Return a record of each connection with bytes since the last poll."""
        if not self._pace.is_due(at_s):
            return []
        with self._pace.measured(at_s):
            known = {peer: one for peer in sorted(self._peers) if (one := reading(peer)) is not None and one.busy_s}
        fresh = {peer: one for peer, one in known.items() if one.sent_bytes != self._written.get(peer)}
        # ranks that are gone leave their room to others, until something is sent to them again
        self._peers.intersection_update(known)
        self._written = {peer: one.sent_bytes for peer, one in known.items()}
        return [
            Flow(
                rank=self._rank, peer=peer, at_s=at_s, num_bytes=one.sent_bytes, busy_s=round(one.busy_s, 6),
                held_s=round(one.held_s, 6),
            )
            for peer, one in fresh.items()
        ]  # fmt: skip

    def path_records(self, at_s: float, paths: Callable[[int], Sequence[PathStats]]) -> list[PathReading]:
        """Return a record of each path that has changed since the last poll."""
        found = []
        for peer in sorted(self._peers):
            for one in paths(peer):
                record = PathReading(
                    rank=self._rank, peer=peer, path=one.path, at_s=at_s, num_bytes=one.sent_bytes,
                    busy_s=round(one.busy_s, 6), held_s=round(one.held_s, 6), share=round(one.share, 4),
                    limit=one.limit, source_port=one.source_port, is_up=one.is_connected and not one.is_stalled,
                )  # fmt: skip
                before = self._paths.get((peer, one.path))
                # one that is down is written again: that it stays down is what is new
                if before is None or not record.is_up or replace(before, at_s=at_s) != record:
                    found.append(record)
                    self._paths[peer, one.path] = record
        return found


def addresses_of_others(
    rank: int, hosts: Sequence[str], addresses: Sequence[Sequence[str]]
) -> Mapping[int, tuple[str, ...]]:
    """Return the addresses of each other host, by its lowest rank; shared ones are left out.

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


_MOST_BURSTS = 256
# After so many slow readings in a row the job's bytes are not counted any more.
_LONG_S, _MOST_LONG = 0.002, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Host, clock and addresses of a rank, as it reports them to the others."""

    host: str
    clock: str  # equal for ranks that share a clock
    addresses: tuple[str, ...] = ()  # its host's, see `outer_addresses`, as many as fit
    port: int = 0  # port that receives bursts; 0 if none

    def to_text(self) -> str:
        """Return a text of at most `TEXT_BYTES` bytes."""
        word = f"{self.host}\n{self.clock}\n{self.port}\n"
        for address in self.addresses:
            longer = f"{word}{address} "
            word = longer if len(longer.encode()) <= TEXT_BYTES else word
        return word

    @classmethod
    def from_text(cls, word: str) -> RankPlace:
        """Return a place that another rank reported; invalid ports and addresses are left out.

        Example:
            >>> place = RankPlace(host="a", clock="b", addresses=("192.0.2.1", "192.0.2.2"), port=80)
            >>> RankPlace.from_text(place.to_text()) == place
            True
        """
        host, clock, port, addresses = (*word.split("\n"), "", "", "")[:4]
        number = int(port) if port.isascii() and port.isdigit() and len(port) < 6 else 0
        valid = tuple(address for address in addresses.split() if _is_address(address))
        return cls(host=host, clock=clock, addresses=valid, port=number if number < 65_536 else 0)


def _is_address(text: str) -> bool:
    """Return whether a text is an address, and not a name that needs a look-up.

    One with a scope (`fe80::1%eth0`) is not: it holds on one link only, and the scope may be any text.
    """
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text


class WatchedWires:
    """Records of a rank's connections to other hosts, until it is closed.

    Args:
        store: Port of the rendezvous store, whose traffic is not the job's; 0 if unknown.
        door: Listener for bursts of other hosts, see `open_probe_port`; None without probes. The lowest rank of each
            host keeps it, the others close it.

    Attributes:
        num_bursts: Bursts of this rank that other hosts have answered.
    """

    def __init__(
        self, rank: int, places: Sequence[RankPlace], *, store: int = 0, door: socket.socket | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.num_bursts = 0
        self._known, self._num_long = (0, 0), 0
        self._rank = rank
        hosts, addresses = [place.host for place in places], [place.addresses for place in places]
        ports = {store, *(place.port for place in places)} - {0}
        self._flows = FlowLines(rank, hosts=hosts, addresses=addresses, without=ports, clock=clock)
        self._bursts: deque[str] = deque(maxlen=_MOST_BURSTS)
        others = addresses_of_others(rank, hosts, addresses)
        targets = {peer: (own, places[peer].port) for peer, own in others.items() if places[peer].port}
        self._probes: BurstProbe | None = None
        if door is not None and targets and hosts.index(hosts[rank]) == rank:
            self._beside = HostFlows(others, without=ports, now=clock)
            self._probes = BurstProbe(
                door, targets, self._take_burst, is_used=lambda host: host in self._flows.used, carried=self._carried,
                clock=clock,
            )  # fmt: skip
        elif door is not None:
            door.close()

    def lines(self, *, is_waiting: bool) -> list[str]:
        """Return new records as lines; while a call has been open for long, also of idle connections."""
        try:
            found = self._flows.lines(is_waiting=is_waiting)
        except (OSError, ValueError):  # no descriptor is left, or /proc is missing: the rest is recorded
            found = []
        while self._bursts:
            found.append(self._bursts.popleft())
        return found

    def note_call(self, *, is_open: bool) -> None:
        """Note whether a call of the job is open: probes run in between."""
        if self._probes is not None:
            self._probes.note_call(is_open=is_open)

    def close(self) -> None:
        """Stop the probes, and leave the job's connections as they were; closing twice is fine."""
        self._flows.close()
        if self._probes is not None:
            self._probes.close()

    def _carried(self) -> tuple[int, int]:
        """Return the known bytes that the job has sent to other hosts and received from them.

        If that takes too long, with thousands of connections, the last known value is returned.
        """
        if self._num_long >= _MOST_LONG:
            return self._known
        begun_s = time.thread_time()
        with contextlib.suppress(OSError, ValueError):  # no descriptor is left, or /proc is missing
            found = self._beside.read().values()
            self._known = sum(one.num_bytes for one in found), sum(one.num_received for one in found)
        self._num_long = self._num_long + 1 if time.thread_time() - begun_s > _LONG_S else 0
        return self._known

    def _take_burst(self, peer: int, began_s: float, took_s: float, num_beside: int) -> None:
        probe = Probe(
            rank=self._rank, peer=peer, at_s=round(began_s, 6), num_bytes=BURST_BYTES, took_s=round(took_s, 6),
            num_beside=num_beside,
        )  # fmt: skip
        self._bursts.append(to_line(probe))
        self.num_bursts += 1
