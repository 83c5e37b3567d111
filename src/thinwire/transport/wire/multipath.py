"""Several connections to one peer, each over a path of its own, that act as one.

A switch picks the path of a connection by its ports, so connections from chosen source ports take planned paths (C4P,
arXiv 2406.04594). Frames are numbered and go out over all of them; the receiver delivers them in the order of their
numbers, so nothing above sees a difference. A frame is kept until the other end has reported its arrival:

- A connection that ends, or whose frames are not reported for too long, gives them to the others, which send them
  again. What arrives twice is dropped. So messages in flight survive as long as one path works.
- The next frame goes where it would be through first: bytes in flight over the path's share. The shares follow the
  measured rates (`PathBalancer`).
- The receiver keeps at most `MOST_EARLY_FRAMES` frames that arrived ahead of a missing one.

Each side does so for what it sends. A connection that was closed is dialled again, from a spare source port.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from thinwire.transport.tcp_stats import ConnectionStats
from thinwire.transport.wire.connection import Connection, Liveness
from thinwire.transport.wire.framing import FrameError, FramesArrived, NumberedFrame, read, write
from thinwire.transport.wire.path_balance import BalanceRules, PathBalancer

# Frames that a receiver keeps ahead of a missing one, 64 KiB each at most; the sender knows the bound too.
MOST_EARLY_FRAMES = 512
# Bytes in flight on one path; far more than a window that pays.
_MOST_IN_FLIGHT_BYTES = 1 << 22
# A path whose frames are not reported for this long is passed over: at least, and in mean times until a report.
_LEAST_STALL_S, _STALL_TIMES = 1.0, 8.0
# Of the latest report in the mean time.
_LATENCY_WEIGHT = 0.2
# Rates are measured over at least this time and so many bytes: a few short frames measure the latency.
_ROUND_S, _LEAST_ROUND_BYTES = 1.0, 1 << 17
# Slower than the defaults: rounds are short here, the choice of the next path follows short changes by itself, and two
# replicas on the same paths must not chase each other.
_RULES = BalanceRules(weight=0.3, num_in_row=4)
TICK_S = 0.25
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathStats:
    """One path to a peer.

    Attributes:
        is_stalled: Whether it is passed over, because its frames do not arrive.
        sent_bytes: Bytes of frames that arrived over it.
        bytes_per_s: Mean rate while it was in use; 0 if not measured yet.
        busy_s: Seconds with frames under way.
        held_s: Of these, seconds in which the other end's process took no more.
        limit: Part of the measured rate that counts, see `MultipathConnection.limit`.
        source_port: Port of the end that dialled; 0 if unknown.
    """

    path: int
    is_connected: bool
    is_stalled: bool
    share: float
    sent_bytes: int
    bytes_per_s: float
    busy_s: float = 0.0
    held_s: float = 0.0
    limit: float = 1.0
    source_port: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class _Path:
    """State of one connection; `sent` holds number, bytes and time of each frame that is not reported yet."""

    connection: Connection
    liveness: Liveness = field(default_factory=Liveness)
    sent: deque[tuple[int, int, float]] = field(default_factory=deque)
    in_flight_bytes: int = 0
    num_reported: int = 0
    num_received: int = 0
    owes_report: bool = False
    is_stalled: bool = False
    latency_s: float = 0.0
    busy_since_s: float | None = None

    @property
    def stall_s(self) -> float:
        return max(_LEAST_STALL_S, _STALL_TIMES * self.latency_s)


class MultipathConnection:
    """Connections to one replica that act as one; see `Connection`.

    Used only from the thread that owns the sockets, but for `stats` and `reading`.

    Args:
        shares: The first share of each; even by default.
    """

    def __init__(
        self, *, session: bytes, num_paths: int, shares: Sequence[float] | None = None,
        peer_name: str = "the replica", now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.session, self.num_paths, self._peer_name, self._now = session, num_paths, peer_name, now
        self._balancer = PathBalancer(num_paths, rules=_RULES, shares=shares)
        self._paths: dict[int, _Path] = {}
        self._next_number = 0
        self._unreported: dict[int, bytearray] = {}
        self._again: deque[int] = deque()
        self._expected = 0
        self._early: dict[int, memoryview] = {}
        self._limits = [1.0] * num_paths
        self._rates = [0.0] * num_paths
        self._completed_bytes = [0] * num_paths
        self._round_bytes = [0] * num_paths
        self._busy_s = [0.0] * num_paths
        self._total_busy_s = [0.0] * num_paths
        self._round_since_s = now()
        self._overhead_bytes = 0
        # totals of the connections that ended, and those there are; replaced whole, since other threads read it
        self._counted: tuple[ConnectionStats, tuple[Connection, ...]] = (
            ConnectionStats(silence_s=0.0, rtt_s=0.0, sent_bytes=0, received_bytes=0), (),
        )  # fmt: skip

    @property
    def is_empty(self) -> bool:
        return not self._paths

    @property
    def source_port(self) -> int | None:
        return None  # each path has its own

    @property
    def is_relayed(self) -> bool:
        return False  # a relay leads over no planned path

    def path_of(self, connection: Connection) -> int | None:
        """Return the path of a connection, None for another one."""
        return next((path for path, one in self._paths.items() if one.connection is connection), None)

    def attach(self, path: int, connection: Connection) -> None:
        """Use a connection whose hello was checked; an earlier one of the same path is closed."""
        if path in self._paths:
            earlier = self._paths[path].connection
            self.detach(earlier)
            earlier.close()
        self._paths[path] = _Path(connection=connection)
        ended, others = self._counted
        self._counted = ended, (*others, connection)

    def detach(self, connection: Connection) -> None:
        """Forget a connection that ended; the others send its frames again."""
        path = self.path_of(connection)
        if path is None:
            return
        self._hand_over(self._paths[path])
        self._keep_totals(self._paths.pop(path).connection)

    def take(self, connection: Connection, raw: memoryview | None) -> list[memoryview]:
        """Return the frames that are next in order, after one that arrived over a connection.

        Raises:
            FrameError: The peer broke the protocol.
        """
        if raw is None:
            raise FrameError("a message of several frames, expected one")
        path = self.path_of(connection)
        assert path is not None
        one, frame = self._paths[path], read(raw)
        if isinstance(frame, FramesArrived):
            self._overhead_bytes += len(raw)
            self._on_report(path, frame.count)
            return []
        if not isinstance(frame, NumberedFrame):
            raise FrameError("a frame without a number, on one of several connections")
        one.num_received += 1
        one.owes_report = True
        self._overhead_bytes += len(raw) - len(frame.frame)
        if frame.number < self._expected or frame.number in self._early:
            self._overhead_bytes += len(frame.frame)  # sent again, and both arrived
            return []
        if frame.number >= self._expected + MOST_EARLY_FRAMES:
            raise FrameError(f"frame {frame.number}, more than {MOST_EARLY_FRAMES} ahead of {self._expected}")
        self._early[frame.number] = frame.frame
        ready = []
        while (body := self._early.pop(self._expected, None)) is not None:
            self._expected += 1
            ready.append(body)
        return ready

    def send(self, raw: bytearray) -> bool:
        self._send_again()
        oldest = next(iter(self._unreported), self._next_number)
        if self._again or self._next_number - oldest >= MOST_EARLY_FRAMES:
            return False
        if not self._send_numbered(self._next_number, raw):
            return False
        self._unreported[self._next_number] = raw
        self._next_number += 1
        return True

    def flush(self) -> None:
        """Report what has arrived, and send again what was lost with a path."""
        for one in self._paths.values():
            if one.owes_report and one.connection.send(write(FramesArrived(count=one.num_received))):
                one.owes_report = False
        self._send_again()

    def tick(self) -> list[Connection]:
        """Pass over paths that do not deliver, and move the shares; return connections to close, which are silent.

        Call it about every `TICK_S`.
        """
        now_s = self._now()
        silent = []
        for one in self._paths.values():
            if (stats := one.connection.reading()) is not None:
                one.liveness.observe(stats.rtt_s)
                if stats.silence_s > one.liveness.limit_s:
                    silent.append(one.connection)
        for path, one in self._paths.items():
            if one.sent and not one.is_stalled and now_s - one.sent[0][2] > one.stall_s and self._has_other(one):
                one.is_stalled = True
                self._hand_over(one)
                _log.warning(
                    "path %d to %s has delivered nothing for %.1f s; the other paths send its messages again",
                    path, self._peer_name, now_s - one.sent[0][2],
                )  # fmt: skip
        self._send_again()
        if now_s - self._round_since_s >= _ROUND_S:
            self._end_round(now_s)
        return silent

    def limit(self, path: int, weight: float) -> None:
        """Take a path's rate for at most this part of what it measures, 1 by default; its share follows at once.

        For findings, see `thinwire.runlog.path_limits`, and for what the wire cannot measure, such as a link that
        other traffic needs.

        Raises:
            ValueError: There is no such path, or the weight is not in (0, 1].
        """
        if not (0 <= path < self.num_paths and 0 < weight <= 1):
            raise ValueError(f"path must be in 0..{self.num_paths - 1} and weight in (0, 1], got {path} and {weight}")
        factor = weight / self._limits[path]
        self._limits[path] = weight
        if factor != 1.0:
            self._balancer.scale(path, factor)

    def stats(self) -> list[PathStats]:
        paths = [self._paths.get(path) for path in range(self.num_paths)]
        kernel = [None if one is None else one.connection.reading() for one in paths]
        return [
            PathStats(
                path=path, is_connected=one is not None, is_stalled=one is not None and one.is_stalled,
                share=self._balancer.shares[path], sent_bytes=self._completed_bytes[path],
                bytes_per_s=self._rates[path], busy_s=self._total_busy_s[path],
                held_s=0.0 if stats is None else stats.held_s, limit=self._limits[path],
                source_port=0 if one is None else one.connection.source_port or 0,
            )
            for path, (one, stats) in enumerate(zip(paths, kernel, strict=True))
        ]  # fmt: skip

    def close(self) -> None:
        for one in list(self._paths.values()):
            self._keep_totals(one.connection)
            one.connection.close()
        self._paths.clear()

    def is_closed(self) -> bool:
        return all(one.connection.is_closed() for one in self._paths.values())

    def reading(self) -> ConnectionStats | None:
        """Return the kernel's statistics of all connections together; bytes are those of frames, each counted once."""
        ended, connections = self._counted
        found = [stats for one in connections if (stats := one.reading()) is not None]
        if not found:
            return None
        return _sum([ended, *found], overhead_bytes=self._overhead_bytes, current=found)

    def _keep_totals(self, connection: Connection) -> None:
        ended, connections = self._counted
        if (last := connection.reading()) is not None:
            ended = _sum([ended, last], overhead_bytes=0, current=[last])
        self._counted = ended, tuple(one for one in connections if one is not connection)

    def _has_other(self, one: _Path) -> bool:
        return any(other is not one and not other.is_stalled for other in self._paths.values())

    def _hand_over(self, one: _Path) -> None:
        lost = [number for number, _, _ in one.sent if number in self._unreported]
        self._again = deque(sorted({*self._again, *lost}))

    def _send_again(self) -> None:
        while self._again:
            number = self._again[0]
            raw = self._unreported.get(number)
            if raw is not None and not self._send_numbered(number, raw):
                return
            self._again.popleft()

    def _send_numbered(self, number: int, raw: bytearray) -> bool:
        size = len(raw)
        shares = self._balancer.shares
        order = sorted(
            (path for path, one in self._paths.items() if one.in_flight_bytes < _MOST_IN_FLIGHT_BYTES),
            key=lambda path: (
                self._paths[path].is_stalled, (self._paths[path].in_flight_bytes + size) / max(shares[path], 1e-6), path
            ),
        )  # fmt: skip
        framed = write(NumberedFrame(number=number, frame=memoryview(raw)))
        for path in order:
            one = self._paths[path]
            if one.is_stalled and self._has_other(one):
                return False  # the others are full, not dead
            if one.connection.send(framed):
                now_s = self._now()
                if not one.sent:
                    one.busy_since_s = now_s
                one.sent.append((number, size, now_s))
                one.in_flight_bytes += size
                return True
        return False

    def _on_report(self, path: int, count: int) -> None:
        one = self._paths[path]
        if not one.num_reported < count <= one.num_reported + len(one.sent):
            raise FrameError(f"a report of {count} frames, after {one.num_reported} of {len(one.sent)} more")
        now_s = self._now()
        for _ in range(count - one.num_reported):
            number, size, sent_s = one.sent.popleft()
            one.in_flight_bytes -= size
            self._completed_bytes[path] += size
            self._round_bytes[path] += size
            self._unreported.pop(number, None)
            one.latency_s += _LATENCY_WEIGHT * (now_s - sent_s - one.latency_s) if one.latency_s else now_s - sent_s
        one.num_reported = count
        if one.is_stalled:
            one.is_stalled = False
            _log.info("path %d to %s delivers again", path, self._peer_name)
        self._count_busy(path, now_s)

    def _count_busy(self, path: int, now_s: float) -> None:
        one = self._paths[path]
        if one.busy_since_s is not None:
            self._busy_s[path] += now_s - one.busy_since_s
            self._total_busy_s[path] += now_s - one.busy_since_s
        one.busy_since_s = now_s if one.sent else None

    def _end_round(self, now_s: float) -> None:
        """Give the rates of the last round to the balancer; a path that was hardly in use keeps its rate."""
        self._round_since_s = now_s
        is_measured = False
        for path in range(self.num_paths):
            if path in self._paths:
                self._count_busy(path, now_s)
            if self._round_bytes[path] >= _LEAST_ROUND_BYTES:
                self._rates[path] = self._round_bytes[path] / max(self._busy_s[path], 1e-6)
                is_measured = True
                self._round_bytes[path], self._busy_s[path] = 0, 0.0
        alive = [path in self._paths and not self._paths[path].is_stalled for path in range(self.num_paths)]
        known = [rate for rate in self._rates if rate]
        changed = any(is_alive != bool(share) for is_alive, share in zip(alive, self._balancer.shares, strict=True))
        if known and (is_measured or changed):
            mean = sum(known) / len(known)
            self._balancer.observe(
                [
                    limit * (rate or mean) if is_alive else 0.0
                    for is_alive, rate, limit in zip(alive, self._rates, self._limits, strict=True)
                ]
            )


def _sum(
    parts: Sequence[ConnectionStats], *, overhead_bytes: int, current: Sequence[ConnectionStats]
) -> ConnectionStats:
    """Return the statistics of connections together; silence and round trips are those of the current ones."""
    return ConnectionStats(
        silence_s=min(one.silence_s for one in current), rtt_s=max(one.rtt_s for one in current),
        sent_bytes=sum(one.sent_bytes for one in parts),
        received_bytes=max(0, sum(one.received_bytes for one in parts) - overhead_bytes),
        busy_s=max(one.busy_s for one in parts), held_s=max(one.held_s for one in parts),
        transmitted_bytes=sum(one.transmitted_bytes for one in parts),
    )  # fmt: skip
