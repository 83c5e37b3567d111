"""Burst probe: timed bursts between the hosts of a job, which measure links that a collective leaves idle.

A ring uses one link of each host. Only other links show whether that link, its sender or its receiver is slow. Each
host sends `BURST_BYTES` to one other host at a time. It answers when all bytes have arrived, with the bytes of the
job that arrived meanwhile. Received bytes are counted and dropped; only addresses of the job's hosts are accepted.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import statistics
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

BURST_BYTES = 131_072
# Bursts take a hundredth of a host's time, by the median of the last 16, and start at least 0.25 s apart.
_PARTS, _LEAST_GAP_S, _USUAL = 100.0, 0.25, 16
# Idle time of the job before a burst: between two successive calls a burst would delay the second.
_QUIET_S = 0.003
# Delay of the next try after the job called something meanwhile.
_VAIN_S = 0.02
_CONNECT_S, _GIVE_UP_S, _AGAIN_S = 5.0, 30.0, 10.0
_CLOSE_S = 5.0
# Connections of each address of the job's hosts, and further ones in all: a spoofed address cannot use up the others'.
_MOST_EACH, _MORE = 4, 8
_BURST = memoryview(bytes(BURST_BYTES))
# The kernel's prefix of an IPv4 address on a dual-stack listener.
_MAPPED = "::ffff:"
# Answer: bytes of the job that arrived at the other host during the burst.
_ANSWER = struct.Struct("<I")
_MOST_BESIDE = (1 << 32) - 1

OnBurst = Callable[[int, float, float, int], None]


@dataclass(slots=True)
class _Target:
    """Connection to one host.

    Attributes:
        addresses: Its addresses, the next to be tried first.
        left: Bytes of the burst under way that are not handed to the kernel yet; none where no burst is under way.
        is_open: Whether the connection has been made.
        since_s: When the burst, or the making of the connection, began.
        sent: Bytes of the job that had been sent when the burst began.
    """

    addresses: deque[str]
    port: int
    connection: socket.socket | None = None
    left: int | None = None
    is_open: bool = False
    since_s: float = 0.0
    rest_s: float = 0.0
    sent: int = 0
    answer: bytes = b""


@dataclass(slots=True)
class _Source:
    """Connection from another host."""

    connection: socket.socket
    address: str
    count: int = 0  # bytes that have come of the burst under way
    received: int = 0  # bytes of the job that had come when it began


def open_probe_port() -> socket.socket:
    """Return a listening socket for other hosts' bursts, over IPv4 and IPv6, on a port of the kernel's choice.

    Raises:
        OSError: The kernel gives none.
    """
    is_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_both else socket.AF_INET
    door = socket.create_server(("", 0), family=family, dualstack_ipv6=is_both, backlog=64)
    door.setblocking(False)
    return door


class BurstProbe:
    """Sends bursts to other hosts in turn and answers theirs, in a thread of its own.

    Args:
        door: Listener for the others' bursts, see `open_probe_port`; closed with this.
        hosts: For each other host, by the number it is known by: its addresses, and its port.
        on_burst: Called with each answered burst: the host, its start, the seconds until the answer, and the bytes of
            the job that crossed this host's access or the other one's meanwhile, whichever is more.
        is_used: Returns whether the job sends so much to a host that no burst is needed.
        carried: Returns the bytes that the job has sent to other hosts, and received from them.
    """

    def __init__(
        self, door: socket.socket, hosts: Mapping[int, tuple[Sequence[str], int]],
        on_burst: OnBurst, *, is_used: Callable[[int], bool] = lambda host: False,
        carried: Callable[[], tuple[int, int]] = lambda: (0, 0), clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._door, self._on_burst, self._is_used, self._carried, self._clock = door, on_burst, is_used, carried, clock
        self._ways = {host: _Target(deque(addresses), port) for host, (addresses, port) in hosts.items() if addresses}
        self._known = {address for addresses, _ in hosts.values() for address in addresses}
        self._order = deque(sorted(self._ways))
        self._usual: deque[float] = deque(maxlen=_USUAL)
        self._next_s = clock()
        self._idle_s: float | None = clock()
        self._hope_s: float | None = None
        self._is_due = False
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._scratch = bytearray(BURST_BYTES)
        self._selector = selectors.DefaultSelector()
        self._selector.register(door, selectors.EVENT_READ, None)
        self._selector.register(self._ear, selectors.EVENT_READ, self._ear)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="thinwire-watch-probe", daemon=True)
        self._thread.start()

    def note_call(self, *, is_open: bool) -> None:
        """Report that the job starts a call, or that none of its calls is open; cheap, from any thread."""
        self._idle_s = None if is_open else self._clock()
        if self._is_due and not is_open:
            with contextlib.suppress(OSError):  # a wake-up is queued already, or the thread has ended
                self._bell.send(b"\0")

    def close(self) -> None:
        """Send no more, and close all connections. A second call does nothing."""
        self._is_over.set()
        self._thread.join(_CLOSE_S)

    def _go_on(self) -> None:
        try:
            while not self._is_over.is_set():
                for key, events in self._selector.select(self._begin_next()):
                    with contextlib.suppress(BlockingIOError):
                        self._serve(key.fileobj, key.data, events)
                now_s = self._clock()
                for way in self._ways.values():
                    limit_s = _GIVE_UP_S if way.is_open else _CONNECT_S
                    is_under_way = way.connection is not None and (way.left is not None or not way.is_open)
                    if is_under_way and now_s - way.since_s > limit_s:
                        self._part(way)
        finally:
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
            self._bell.close()
            self._selector.close()

    def _serve(self, connection: object, data: _Target | _Source | socket.socket | None, events: int) -> None:
        if data is None:
            self._let_in()
        elif isinstance(data, _Source):
            self._take(data)
        elif isinstance(data, socket.socket):
            data.recv(64)
        elif isinstance(connection, socket.socket) and data.connection is connection:
            try:
                self._go_on_with(data, connection, events)
            except BlockingIOError:
                raise
            except OSError:
                self._part(data)

    # -- bursts of others

    def _let_in(self) -> None:
        try:
            connection, name = self._door.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: whoever waits at the door would keep this thread busy
            self._selector.unregister(self._door)
            self._door.close()
            return
        most = _MOST_EACH * len(self._known) + _MORE
        address = name[0].removeprefix(_MAPPED)
        others = [key.data.address for key in self._selector.get_map().values() if isinstance(key.data, _Source)]
        is_full = others.count(address) >= _MOST_EACH or len(self._selector.get_map()) >= most
        if address not in self._known or is_full:
            connection.close()
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, _Source(connection, address))

    def _take(self, sink: _Source) -> None:
        """Throw away what has come; answer at the end of a burst."""
        try:
            if not sink.count:
                sink.received = self._carried()[1]
            count = sink.connection.recv_into(self._scratch, BURST_BYTES - sink.count)
            sink.count += count
            if sink.count == BURST_BYTES:
                sink.count = 0
                beside = max(0, self._carried()[1] - sink.received)
                sink.connection.send(_ANSWER.pack(min(beside, _MOST_BESIDE)))
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self._selector.unregister(sink.connection)
            sink.connection.close()

    # -- bursts of this host

    def _begin_next(self) -> float:
        """Begin the next burst if it is due and the job is quiet, and return for how long there is nothing to begin."""
        now_s, idle_s = self._clock(), self._idle_s
        if self._hope_s is not None and self._hope_s != idle_s:
            self._next_s = now_s + _VAIN_S  # the job has called something meanwhile
        self._hope_s = None
        self._is_due = now_s >= self._next_s
        if self._is_due and idle_s is not None:
            if now_s - idle_s < _QUIET_S:
                self._hope_s = idle_s
                return _QUIET_S
            self._begin(now_s)
        return min(_LEAST_GAP_S, max(0.0, self._next_s - now_s)) or _LEAST_GAP_S

    def _begin(self, now_s: float) -> None:
        self._next_s = now_s + max(_LEAST_GAP_S, _PARTS * statistics.median(self._usual) if self._usual else 0.0)
        for _ in range(len(self._order)):
            self._order.rotate(-1)
            if not self._is_used(self._order[-1]):
                break
        else:
            return
        way = self._ways[self._order[-1]]
        if way.left is not None or now_s < way.rest_s or (way.connection is not None and not way.is_open):
            return
        way.since_s = now_s
        if way.connection is not None:
            way.sent, way.answer = self._carried()[0], b""
            way.left, way.since_s = BURST_BYTES, self._clock()
            self._selector.modify(way.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, way)
            return
        family = socket.AF_INET6 if ":" in way.addresses[0] else socket.AF_INET
        try:
            connection = way.connection = socket.socket(family, socket.SOCK_STREAM)
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(connection, selectors.EVENT_WRITE, way)
            connection.connect((way.addresses[0], way.port))
        except BlockingIOError:
            return
        except OSError:  # also where this host has nothing of that family
            self._part(way)

    def _go_on_with(self, way: _Target, connection: socket.socket, events: int) -> None:
        if not way.is_open:
            if error := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, "the connection was not made")
            way.is_open = True
            # the first burst is sent at the next turn: it would be timed with the making of the connection
            self._selector.modify(connection, selectors.EVENT_READ, way)
            return
        if events & selectors.EVENT_READ:
            self._take_answer(way, connection)
        if way.left and events & selectors.EVENT_WRITE:
            way.left -= connection.send(_BURST[: way.left])
            if not way.left:
                self._selector.modify(connection, selectors.EVENT_READ, way)

    def _take_answer(self, way: _Target, connection: socket.socket) -> None:
        came = connection.recv(_ANSWER.size - len(way.answer))
        if not came or way.left != 0:
            raise OSError("the other end has closed, or answers what nobody sent")
        way.answer += came
        if len(way.answer) < _ANSWER.size:
            return
        way.left, took_s = None, self._clock() - way.since_s
        self._usual.append(took_s)
        host = next(host for host, other in self._ways.items() if other is way)
        (received,) = _ANSWER.unpack(way.answer)
        self._on_burst(host, way.since_s, took_s, max(received, self._carried()[0] - way.sent))

    def _part(self, way: _Target) -> None:
        """Close a connection, and try the host's next address after a while."""
        if way.connection is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(way.connection)
            way.connection.close()
        way.connection, way.left, way.is_open = None, None, False
        way.addresses.rotate(-1)
        way.rest_s = self._clock() + _AGAIN_S
