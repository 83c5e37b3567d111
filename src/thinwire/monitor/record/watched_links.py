"""The wires of a watched job at one rank: where ranks are, what kernels tell of connections, and bursts that probe."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinwire.monitor.record.connection_records import FlowLines, addresses_of_others
from thinwire.monitor.runlog.records import Probe, to_line
from thinwire.transport.addresses import clock_name, host_name, outer_addresses
from thinwire.transport.burst_probe import BURST_BYTES, BurstProbe
from thinwire.transport.collective_hooks import TEXT_BYTES
from thinwire.transport.tcp_stats import HostFlows

_MOST_UNTOLD = 256
# Where it takes so long so often in a row to count what the job sends, this is not done any more.
_LONG_S, _MOST_LONG = 0.002, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank is, as it tells the others.

    Attributes:
        host: What its host is called.
        clock: Equal for ranks that share a clock.
        addresses: Its host's, see `outer_addresses`, as many as there was room for.
        port: Where it takes bursts in; 0 where it does not.
    """

    host: str
    clock: str
    addresses: tuple[str, ...] = ()
    port: int = 0

    def to_word(self) -> str:
        """Return a text of at most `TEXT_BYTES` bytes."""
        word = f"{self.host}\n{self.clock}\n{self.port}\n"
        for address in self.addresses:
            longer = f"{word}{address} "
            word = longer if len(longer.encode()) <= TEXT_BYTES else word
        return word

    @classmethod
    def of_word(cls, word: str) -> RankPlace:
        """Read what another rank told; what is no port and no address counts for nothing.

        Example:
            >>> place = RankPlace(host="a", clock="b", addresses=("192.0.2.1", "192.0.2.2"), port=80)
            >>> RankPlace.of_word(place.to_word()) == place
            True
        """
        host, clock, port, addresses = (*word.split("\n"), "", "", "")[:4]
        number = int(port) if port.isascii() and port.isdigit() and len(port) < 6 else 0
        told = tuple(address for address in addresses.split() if _is_address(address))
        return cls(host=host, clock=clock, addresses=told, port=number if number < 65_536 else 0)


def _is_address(text: str) -> bool:
    """Return whether a text is an address, and not a name that somebody else would have to be asked about.

    One with a scope (`fe80::1%eth0`) is not: it holds on one link only, and the scope may be any text.
    """
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text


def own_place(*, port: int = 0) -> RankPlace:
    """Return where this process is.

    Args:
        port: Where it takes bursts in; 0 where it does not.
    """
    return RankPlace(host=host_name(), clock=clock_name(), addresses=outer_addresses(), port=port)


class WatchedWires:
    """Makes the records of a rank's wires to other hosts, until it is closed.

    Args:
        rank: Who writes.
        places: Of all ranks, in order.
        store: The port of the store that the ranks met at, which carries nothing of the job's; 0 where it is not known.
        door: Where bursts of other hosts come in, see `open_door`; none where wires are not probed. The lowest rank of
            each host keeps it, the others close it.
        clock: Seconds that only grow.

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
        self._bursts: deque[str] = deque(maxlen=_MOST_UNTOLD)
        others = addresses_of_others(rank, hosts, addresses)
        told = {peer: (own, places[peer].port) for peer, own in others.items() if places[peer].port}
        self._probes: BurstProbe | None = None
        if door is not None and told and hosts.index(hosts[rank]) == rank:
            self._beside = HostFlows(others, without=ports, now=clock)
            self._probes = BurstProbe(
                door, told, self._take_burst, is_used=lambda host: host in self._flows.used, carried=self._carried,
                clock=clock,
            )  # fmt: skip
        elif door is not None:
            door.close()

    def lines(self, *, is_waiting: bool) -> list[str]:
        """Return what is new, as lines.

        Args:
            is_waiting: Whether a call has been open for long, so that idle connections are to be asked.
        """
        try:
            found = self._flows.lines(is_waiting=is_waiting)
        except (OSError, ValueError):  # no descriptor is left, or /proc is not there: all else is recorded
            found = []
        while self._bursts:
            found.append(self._bursts.popleft())
        return found

    def note_call(self, *, is_open: bool) -> None:
        """Say that the job calls something, or that nothing it has called is open: wires are probed in between."""
        if self._probes is not None:
            self._probes.note_call(is_open=is_open)

    def close(self) -> None:
        """Send no more bursts, and leave the job's connections as they were. A second call does nothing."""
        self._flows.close()
        if self._probes is not None:
            self._probes.close()

    def _carried(self) -> tuple[int, int]:
        """Return the bytes that the job has sent to other hosts and received from them, as far as is known.

        Of thousands of connections that takes too long, and is always the same then.
        """
        if self._num_long >= _MOST_LONG:
            return self._known
        begun_s = time.thread_time()
        with contextlib.suppress(OSError, ValueError):  # no descriptor is left, or /proc is not there
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
