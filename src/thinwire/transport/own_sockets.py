"""What the kernel knows of this process's own TCP connections to a host, also of those that a library holds.

gloo does not tell which of its connections leads where, so they are found by the address of their other end: that tells
replicas apart where each has an address of its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from thinwire.transport.wire_liveness import TcpReading, read_tcp

_OPEN = Path("/proc/self/fd")


class OwnSockets:
    """Reads this process's connections by the address of their other end.

    Args:
        addresses: The IPv4 address of each rank, this one's too.

    Example:
        >>> OwnSockets({0: "192.0.2.1", 1: "192.0.2.2"}).reading(1) is None  # nothing leads there
        True
    """

    def __init__(self, addresses: Mapping[int, str]) -> None:
        shared = Counter(addresses.values())
        self._addresses = {rank: address for rank, address in addresses.items() if shared[address] == 1}

    def reading(self, rank: int) -> TcpReading | None:
        """Return what the kernel knows of all connections to a rank together.

        None where there is none, where others have the same address, and where the kernel does not tell.
        """
        address = self._addresses.get(rank)
        found = [] if address is None else [one for one in map(read_tcp, _connections(address)) if one is not None]
        if not found:
            return None
        return TcpReading(
            silence_s=min(one.silence_s for one in found), rtt_s=max(one.rtt_s for one in found),
            sent_bytes=sum(one.sent_bytes for one in found), received_bytes=sum(one.received_bytes for one in found),
            has_signs=False,
        )  # fmt: skip


def _connections(address: str) -> Iterator[socket.socket]:
    """Yield copies of this process's IPv4 connections to an address, each until the next one is asked for."""
    with contextlib.suppress(OSError):
        for path in list(_OPEN.iterdir()):
            with contextlib.suppress(OSError):
                if not str(path.readlink()).startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(path.name))) as copy:
                    # a socket over IPv6 is torch's store
                    if copy.family == socket.AF_INET and copy.getpeername()[0] == address:
                        yield copy
