"""Kernel counters of this process's connections to other hosts, whatever library opened them.

gloo and NCCL over sockets tell nobody how a collective's wires do. The kernel does: how long a connection had something
to send, how much of that has been acknowledged, and since when the other end has been silent. So a wire's rate is
known without sending anything. Whether an idle wire is there still is asked while somebody waits, by TCP's keep-alives.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.transport.local_sockets import copy_of, open_sockets
from thinwire.transport.tcp_info import tcp_info

_AGAIN_S = 5.0
# What is silent for a second is asked again at each look, until so many were not answered: after 127 the kernel would
# end the connection. It asks on every 30 s by itself, which ends it after an hour, when any process group has given up.
_IDLE_S, _BETWEEN_S, _MOST_UNANSWERED, _MOST_AGAIN = 1, 30, 127, 20
# So long after the first question an answer may be expected; or after two round trips.
_ANSWER_S = 0.4
# Who looks more rarely than this asks more rarely than once a second, and so does not know what a silence means.
_LONGEST_GAP_S = 0.8
# More connections are not asked, which would be as many packets a second.
_MOST_ASKED = 64
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_Ends = tuple[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowReading:
    """What the kernel knows of all connections to one host together.

    Attributes:
        num_bytes: That the other end has acknowledged.
        num_received: Bytes that have come from there.
        busy_s: For how long there was something to send, or that was not acknowledged yet.
        held_s: For how much of that the other end would take no more, since its process did not read.
        silence_s: Since anything came from the other end, which is asked once a second; none where it is not asked, or
            may not have answered yet.
        unanswered: How often in a row the same was sent, or asked, again without an answer.
    """

    num_bytes: int
    num_received: int
    busy_s: float
    held_s: float
    silence_s: float | None
    unanswered: int


class Flows:
    """Reads this process's connections by the host they lead to.

    Args:
        addresses: For each other host, known by the number of a rank there, its addresses.
        without: Ports; connections from or to these are left out.
        now: Gives seconds that only grow.

    Example:
        >>> Flows({1: ("192.0.2.1",)}).read()  # nothing leads there
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
        # since when the kernel asks, by both ends of a connection
        self._asked_s: dict[_Ends, float] = {}

    def read(self, *, is_asking: bool = False) -> dict[int, FlowReading]:
        """Return what is known of each host that a connection leads to, by the rank it is known by.

        Args:
            is_asking: Let the kernel ask whether the other ends of idle connections are there, until this is called
                without it.
        """
        now_s = self._now()
        if self._host_of and now_s - self._found_s > _AGAIN_S:
            self._numbers, self._found_s = list(open_sockets()), now_s
        self._is_close, self._looked_s = now_s - self._looked_s <= _LONGEST_GAP_S, now_s
        before, found = self._asked_s, dict[int, list[FlowReading]]()
        self._asked_s = {}  # those that are there still
        for number in self._numbers:
            if (copy := copy_of(number)) is not None:
                with contextlib.suppress(OSError), copy:
                    self._take(copy, found, before, now_s if is_asking else None)
        return {rank: _together(readings) for rank, readings in sorted(found.items())}

    def close(self) -> None:
        """Leave the connections as they were: nobody is asked any more."""
        if self._asked_s:
            self.read()

    def _take(
        self, copy: socket.socket, found: dict[int, list[FlowReading]], before: Mapping[_Ends, float],
        asking_s: float | None,
    ) -> None:  # fmt: skip
        # torch's store reaches an address of IPv4 by a socket of IPv6, whose text is another one
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
        elif since_s is None and len(self._asked_s) < _MOST_ASKED and _may_be_asked(copy):
            since_s = asking_s
        asked_s = None if since_s is None or asking_s is None or not self._is_close else asking_s - since_s
        reading = _read(copy, asked_s=asked_s)
        if since_s is not None:
            self._asked_s[ends] = since_s
            if reading is None or reading.unanswered < _MOST_AGAIN:
                _ask(copy)
        if reading is not None:
            found.setdefault(rank, []).append(reading)


def _read(connection: socket.socket, *, asked_s: float | None) -> FlowReading | None:
    """Ask the kernel about a connection; None where it does not tell: it is old, or not Linux."""
    known = tcp_info(connection)
    if known is None or known.busy_s is None or known.held_s is None:
        return None
    is_answered = asked_s is not None and asked_s >= max(_ANSWER_S, 2 * known.rtt_s)
    return FlowReading(
        num_bytes=known.acked_bytes, num_received=known.received_bytes, busy_s=known.busy_s, held_s=known.held_s,
        silence_s=min(known.last_data_s, known.last_ack_s) if is_answered else None,
        unanswered=max(known.sent_again, known.asked_again),
    )  # fmt: skip


def _may_be_asked(connection: socket.socket) -> bool:
    """Return whether the job has no rules of its own for when a silent connection ends."""
    timeout = getattr(socket, "TCP_USER_TIMEOUT", None)
    return (
        timeout is not None
        and not connection.getsockopt(socket.IPPROTO_TCP, timeout)
        and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    )


def _ask(connection: socket.socket) -> None:
    """Let the kernel ask the other end as soon as nothing has come for a second."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _BETWEEN_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MOST_UNANSWERED)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # sets the kernel's timer anew, from when something came last
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)


def _together(readings: Sequence[FlowReading]) -> FlowReading:
    """Return what several connections to one host show: it is there while one of them answers."""
    silences = [one.silence_s for one in readings if one.silence_s is not None]
    return FlowReading(
        num_bytes=sum(one.num_bytes for one in readings),
        num_received=sum(one.num_received for one in readings),
        busy_s=sum(one.busy_s for one in readings),
        held_s=sum(one.held_s for one in readings),
        silence_s=min(silences, default=None),
        unanswered=max(one.unanswered for one in readings),
    )
