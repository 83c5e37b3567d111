"""Kernel view of this process's TCP connections to a host, also of those that a library holds.

gloo does not tell which of its connections leads where, so they are found by the address of their other end: that tells
replicas apart where each has an address of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from thinwire.transport.wire.liveness import TcpReading, read_tcp

_OPEN = Path("/proc/self/fd")
_AGAIN_S = 5.0


class OwnSockets:
    """Reads this process's connections by the address of their other end.

    Args:
        addresses: The IPv4 address of each rank, this one's too.
        now: Gives seconds that only grow.

    Example:
        >>> OwnSockets({0: "192.0.2.1", 1: "192.0.2.2"}).reading(1) is None  # nothing leads there
        True
    """

    def __init__(self, addresses: Mapping[int, str], *, now: Callable[[], float] = time.monotonic) -> None:
        shared = Counter(addresses.values())
        self._addresses = {rank: address for rank, address in addresses.items() if shared[address] == 1}
        self._now = now
        self._numbers: defaultdict[str, list[int]] = defaultdict(list)
        self._found_s = -math.inf

    def reading(self, rank: int) -> TcpReading | None:
        """Return what the kernel knows of all connections to a rank together.

        None where there is none, where others have the same address, and where the kernel does not tell.
        """
        address = self._addresses.get(rank)
        found = [] if address is None else [one for one in map(read_tcp, self._connections(address)) if one is not None]
        if not found:
            return None
        return TcpReading(
            silence_s=min(one.silence_s for one in found), rtt_s=max(one.rtt_s for one in found),
            sent_bytes=sum(one.sent_bytes for one in found), received_bytes=sum(one.received_bytes for one in found),
            busy_s=sum(one.busy_s for one in found), held_s=sum(one.held_s for one in found), has_signs=False,
        )  # fmt: skip

    def _connections(self, address: str) -> Iterator[socket.socket]:
        """Yield copies of the IPv4 connections to an address, each until the next one is asked for."""
        now_s = self._now()
        if now_s - self._found_s > _AGAIN_S:  # to look at all that is open takes a hundred times as long
            self._found_s = now_s
            self._numbers = defaultdict(list)
            for number in open_sockets():
                if (copy := copy_of(number)) is not None:
                    with contextlib.suppress(OSError), copy:
                        self._numbers[_address_of(copy)].append(number)
        for number in self._numbers.get(address, ()):
            if (copy := copy_of(number)) is not None:
                with contextlib.suppress(OSError), copy:
                    if _address_of(copy) == address:  # and not something else that has the number by now
                        yield copy


def _address_of(connection: socket.socket) -> str:
    """Return the IPv4 address of the other end; a socket over IPv6 is torch's store."""
    return str(connection.getpeername()[0]) if connection.family == socket.AF_INET else ""


def copy_of(number: int) -> socket.socket | None:
    """Return another descriptor of a socket; None where that number is none any more."""
    try:
        copy = os.dup(number)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:  # something else than a socket has the number by now
        os.close(copy)
        return None


def open_sockets() -> Iterator[int]:
    """Yield this process's descriptors that are sockets now; what has such a number later may be something else."""
    with contextlib.suppress(OSError):
        for path in list(_OPEN.iterdir()):
            with contextlib.suppress(OSError):
                if str(path.readlink()).startswith("socket:"):
                    yield int(path.name)
