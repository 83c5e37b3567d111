"""TCP statistics from the Linux kernel (`TCP_INFO`), of connections that thinwire or another library opened.

gloo and NCCL do not report how their connections do, nor which of them leads where; the kernel does. A connection is
found by the address of its other end.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# struct tcp_info of Linux: 8 bytes of flags and counts, 24 numbers of 32 bits, 4 of 64. The kernel only ever adds at
# its end: since 4.10 also 6 of 32 bits, and 4 of 64; since 4.19 also 2 of 32 bits, and 2 of 64.
_EARLY, _LATER = struct.Struct("<2x2B4x24I4Q"), struct.Struct("<2x2B4x24I4Q6I4Q")
_LATEST = struct.Struct("<2x2B4x24I4Q6I4Q2I2Q")
_SENT_AGAIN, _ASKED_AGAIN, _LAST_DATA_MS, _LAST_ACK_MS, _RTT_US = 0, 1, 13, 14, 17
_ACKED, _RECEIVED, _BUSY_US, _HELD_US, _SENT, _REPEATED = 28, 29, 37, 38, 42, 43


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionStats:
    """Statistics of one connection, or of all connections to one replica together.

    Attributes:
        silence_s: Seconds since data arrived.
        rtt_s: Smoothed round-trip time.
        sent_bytes: Bytes that the other end has acknowledged.
        busy_s: Seconds with unsent or unacknowledged bytes; 0 on kernels before 4.10, which do not count them.
        held_s: Seconds of these in which the other end's receive window was full; its process did not read.
        has_signs: Whether heartbeats arrive once a second, so that silence means a fault.
        transmitted_bytes: Bytes that TCP passed on to the network, each counted once (on kernels before 4.19 those
            acknowledged); at least `sent_bytes` less the segment that opened the connection, which counts as one
            acknowledged byte.
        ack_silence_s: Seconds since an acknowledgement arrived.
        unanswered: Retransmissions or keep-alive probes in a row without an answer.
        has_times: Whether the kernel counts `busy_s` and `held_s`.
    """

    silence_s: float
    rtt_s: float
    sent_bytes: int
    received_bytes: int
    busy_s: float = 0.0
    held_s: float = 0.0
    has_signs: bool = True
    transmitted_bytes: int = 0
    ack_silence_s: float = 0.0
    unanswered: int = 0
    has_times: bool = True


def connection_stats(connection: socket.socket) -> ConnectionStats | None:
    """Return the statistics of a connection; None if it is gone, or where the kernel is very old or not Linux's."""
    name = getattr(socket, "TCP_INFO", None)
    if name is None:
        return None
    try:
        raw = connection.getsockopt(socket.IPPROTO_TCP, name, _LATEST.size)
    except OSError:
        return None
    known = next((one for one in (_LATEST, _LATER, _EARLY) if len(raw) >= one.size), None)
    if known is None:
        return None
    found, has_times = known.unpack(raw[: known.size]), known is not _EARLY
    return ConnectionStats(
        silence_s=found[_LAST_DATA_MS] / 1e3, ack_silence_s=found[_LAST_ACK_MS] / 1e3, rtt_s=found[_RTT_US] / 1e6,
        sent_bytes=found[_ACKED], received_bytes=found[_RECEIVED], has_times=has_times,
        busy_s=found[_BUSY_US] / 1e6 if has_times else 0.0, held_s=found[_HELD_US] / 1e6 if has_times else 0.0,
        transmitted_bytes=found[_SENT] - found[_REPEATED] if known is _LATEST else found[_ACKED],
        unanswered=max(found[_SENT_AGAIN], found[_ASKED_AGAIN]),
    )  # fmt: skip


_OPEN = Path("/proc/self/fd")
_AGAIN_S = 5.0


class LocalSockets:
    """Reads this process's connections by the address of their other end.

    Args:
        addresses: The IPv4 address of each rank, this one's too.

    Example:
        >>> LocalSockets({0: "192.0.2.1", 1: "192.0.2.2"}).reading(1) is None  # nothing leads there
        True
    """

    def __init__(self, addresses: Mapping[int, str], *, now: Callable[[], float] = time.monotonic) -> None:
        shared = Counter(addresses.values())
        self._all = frozenset(addresses.values())
        self._addresses = {rank: address for rank, address in addresses.items() if shared[address] == 1}
        self._now = now
        self._numbers: defaultdict[str, list[int]] = defaultdict(list)
        self._found_s = -math.inf

    def reading(self, rank: int) -> ConnectionStats | None:
        """Return the statistics of all connections to a rank together.

        None without a connection, if other ranks have the same address, or if the kernel has no statistics.
        """
        address = self._addresses.get(rank)
        connections = () if address is None else self._connections(address)
        found = [one for one in map(connection_stats, connections) if one is not None]
        if not found:
            return None
        return ConnectionStats(
            silence_s=min(one.silence_s for one in found), rtt_s=max(one.rtt_s for one in found),
            sent_bytes=sum(one.sent_bytes for one in found), received_bytes=sum(one.received_bytes for one in found),
            busy_s=sum(one.busy_s for one in found), held_s=sum(one.held_s for one in found), has_signs=False,
            transmitted_bytes=sum(one.transmitted_bytes for one in found),
        )  # fmt: skip

    def connections(self) -> dict[Hashable, ConnectionStats]:
        """Return the statistics of each connection to any of the addresses, by its two ends; shared addresses too."""
        found: dict[Hashable, ConnectionStats] = {}
        for address in self._all:
            for connection in self._connections(address):
                if (one := connection_stats(connection)) is not None:
                    found[connection.getsockname(), connection.getpeername()] = one
        return found

    def _connections(self, address: str) -> Iterator[socket.socket]:
        """Yield copies of the IPv4 connections to an address, each until the next one is asked for."""
        now_s = self._now()
        if now_s - self._found_s > _AGAIN_S:  # listing all descriptors takes a hundred times as long
            self._found_s = now_s
            numbers: defaultdict[str, list[int]] = defaultdict(list)
            for number in open_sockets():
                if (copy := duplicate_socket(number)) is not None:
                    with contextlib.suppress(OSError), copy:
                        numbers[_address_of(copy)].append(number)
            self._numbers = numbers  # whole at once: another thread may read it
        for number in self._numbers.get(address, ()):
            if (copy := duplicate_socket(number)) is not None:
                with contextlib.suppress(OSError), copy:
                    if _address_of(copy) == address:  # the number may have been reused
                        yield copy


def _address_of(connection: socket.socket) -> str:
    """Return the IPv4 address of the other end; a socket over IPv6 is torch's store."""
    return str(connection.getpeername()[0]) if connection.family == socket.AF_INET else ""


def duplicate_socket(number: int) -> socket.socket | None:
    """Return another descriptor of a socket; None if that number is no socket any more."""
    try:
        copy = os.dup(number)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:  # the number was reused by something else
        os.close(copy)
        return None


def open_sockets() -> Iterator[int]:
    """Yield this process's descriptors that are sockets now; a number may be reused later."""
    with contextlib.suppress(OSError):
        for path in list(_OPEN.iterdir()):
            with contextlib.suppress(OSError):
                if str(path.readlink()).startswith("socket:"):
                    yield int(path.name)


# Keep-alive probes: the first after 1 s of silence, renewed at each read until 20 are unanswered. The kernel itself
# repeats them every 30 s and would end the connection after 127, an hour: any process group has given up by then.
_IDLE_S, _BETWEEN_S, _MOST_UNANSWERED, _MOST_AGAIN = 1, 30, 127, 20
# Time after the first probe at which an answer is expected; at least two round trips.
_ANSWER_S = 0.4
# With longer gaps between reads, probes are rarer than once a second, and a silence has no meaning.
_MAX_GAP_S = 0.8
# Connections that are probed at most: each costs a packet a second.
_MAX_PROBED = 64
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_Ends = tuple[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFlow:
    """Statistics of all connections to one host together.

    Attributes:
        num_bytes: Bytes that the other end has acknowledged.
        num_received: Bytes that have arrived from there.
        busy_s: Seconds with unsent or unacknowledged bytes.
        held_s: Seconds of these in which the other end's receive window was full; its process did not read.
        silence_s: Seconds since the last packet, with a probe a second; None if it is not probed, or may not have
            answered yet.
        unanswered: Retransmissions or probes in a row without an answer.
    """

    num_bytes: int
    num_received: int
    busy_s: float
    held_s: float
    silence_s: float | None
    unanswered: int


class HostFlows:
    """Statistics of this process's connections by host, and keep-alive probes of idle ones.

    Args:
        addresses: Addresses of each other host, by the number of a rank there.
        without: Ports whose connections are left out.

    Example:
        >>> HostFlows({1: ("192.0.2.1",)}).read()  # nothing leads there
        {}
    """

    def __init__(
        self, addresses: Mapping[int, Sequence[str]], *, without: Collection[int] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._host_of = {address: rank for rank, own in addresses.items() for address in own}
        self._without = frozenset(without)
        self._now = now
        self._numbers: list[int] = []
        self._found_s = self._looked_s = -math.inf
        self._is_close = False
        # start of the probes, by both endpoints of a connection
        self._asked_s: dict[_Ends, float] = {}

    def read(self, *, is_asking: bool = False) -> dict[int, HostFlow]:
        """Return the statistics of each connected host, by its rank.

        Args:
            is_asking: Let the kernel probe idle connections, until this is called without it.
        """
        now_s = self._now()
        if self._host_of and now_s - self._found_s > _AGAIN_S:
            self._numbers, self._found_s = list(open_sockets()), now_s
        self._is_close, self._looked_s = now_s - self._looked_s <= _MAX_GAP_S, now_s
        before, found = self._asked_s, dict[int, list[HostFlow]]()
        self._asked_s = {}  # those that are there still
        for number in self._numbers:
            if (copy := duplicate_socket(number)) is not None:
                with contextlib.suppress(OSError), copy:
                    self._take(copy, found, before, now_s if is_asking else None)
        return {rank: _together(readings) for rank, readings in sorted(found.items())}

    def close(self) -> None:
        """End the probes, and restore the connections' options."""
        if self._asked_s:
            self.read()

    def _take(
        self, copy: socket.socket, found: dict[int, list[HostFlow]], before: Mapping[_Ends, float],
        asking_s: float | None,
    ) -> None:  # fmt: skip
        # torch's store reaches an IPv4 address by an IPv6 socket, whose text differs
        rank = self._host_of.get(copy.getpeername()[0]) if copy.family in _FAMILIES else None
        if rank is None:
            return
        ends = (copy.getsockname(), copy.getpeername())
        if not self._without.isdisjoint((ends[0][1], ends[1][1])):
            return
        since_s = before.get(ends)
        if asking_s is None:
            if since_s is not None:
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
            since_s = None
        elif since_s is None and len(self._asked_s) < _MAX_PROBED and _may_be_asked(copy):
            since_s = asking_s
        known = connection_stats(copy)
        if since_s is not None:
            self._asked_s[ends] = since_s
            if known is None or not known.has_times or known.unanswered < _MOST_AGAIN:
                _ask(copy)
        if known is None or not known.has_times:
            return
        asked_s = None if since_s is None or asking_s is None or not self._is_close else asking_s - since_s
        is_answered = asked_s is not None and asked_s >= max(_ANSWER_S, 2 * known.rtt_s)
        found.setdefault(rank, []).append(HostFlow(
            num_bytes=known.sent_bytes, num_received=known.received_bytes, busy_s=known.busy_s, held_s=known.held_s,
            silence_s=min(known.silence_s, known.ack_silence_s) if is_answered else None, unanswered=known.unanswered,
        ))  # fmt: skip


def _may_be_asked(connection: socket.socket) -> bool:
    """Return whether the job has set no keep-alive or time-out of its own."""
    timeout = getattr(socket, "TCP_USER_TIMEOUT", None)
    return (
        timeout is not None
        and not connection.getsockopt(socket.IPPROTO_TCP, timeout)
        and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    )


def _ask(connection: socket.socket) -> None:
    """Let the kernel probe the other end after a second of silence."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _BETWEEN_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MOST_UNANSWERED)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # restarts the kernel's timer, from the last packet
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)


def _together(readings: Sequence[HostFlow]) -> HostFlow:
    """Combine connections to one host, which is alive while one of them answers."""
    silences = [one.silence_s for one in readings if one.silence_s is not None]
    return HostFlow(
        num_bytes=sum(one.num_bytes for one in readings), num_received=sum(one.num_received for one in readings),
        busy_s=sum(one.busy_s for one in readings), held_s=sum(one.held_s for one in readings),
        silence_s=min(silences, default=None), unanswered=max(one.unanswered for one in readings),
    )  # fmt: skip
