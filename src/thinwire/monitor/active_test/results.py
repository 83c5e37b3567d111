"""Results of active wire tests, and the expected time of each from earlier measurements.

A pair is measured alone; from the pairs follows what many transfers at once, and an all-reduce, should take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from thinwire.monitor.detect.change_points import median
from thinwire.monitor.detect.delay_matrix import Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTest:
    """What one replica sent to another while nobody sent to either of them.

    Attributes:
        rate_bits_per_s: Of payload; 0 where nothing was measured.
        overhead_s: What a message takes however short it is.
        latency_s: One way: half of a word and its answer.
        fault: Empty, `dead` (no connection, or nothing came in time) or `corrupt` (other bytes came).
        detail: What the transport said of the fault.
    """

    rate_bits_per_s: float = 0.0
    overhead_s: float = 0.0
    latency_s: float = 0.0
    fault: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One of many transfers at once: its bytes, and seconds from the start until it was there whole."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """A ring all-reduce.

    Attributes:
        order: Ranks around the ring.
        num_bytes: Of the reduced vector.
        seconds: Of the slowest rank, in the best of the runs.
        wrong: Links over which wrong sums came first.
    """

    order: tuple[int, ...]
    num_bytes: int
    seconds: float
    wrong: tuple[Cell, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All that was measured; what was not is not there.

    Attributes:
        hosts: The host of each rank.
        machines: The machine of each rank, where they are known: hosts of one machine share its processor.
        absent: Why a rank took no part, or not to the end.
        loopback_bits_per_s: What a rank's host carries to itself, through the same transport.
        pairs: By (source, destination).
        neighbours: Transfers of a ring, all at once.
        everyone: Transfers from everyone to everyone, all at once.
        all_reduce: Where one was done.
    """

    hosts: tuple[str, ...]
    machines: tuple[str, ...] = ()
    absent: Mapping[int, str] = field(default_factory=dict)
    loopback_bits_per_s: Mapping[int, float] = field(default_factory=dict)
    pairs: Mapping[Cell, PairTest] = field(default_factory=dict)
    neighbours: Mapping[Cell, Flow] = field(default_factory=dict)
    everyone: Mapping[Cell, Flow] = field(default_factory=dict)
    all_reduce: AllReduce | None = None

    @property
    def host_of(self) -> dict[int, str]:
        """The host of each rank, by its number."""
        return dict(enumerate(self.hosts))

    @property
    def rates(self) -> dict[Cell, float]:
        """The rate of each pair that has one."""
        return {cell: pair.rate_bits_per_s for cell, pair in self.pairs.items() if pair.rate_bits_per_s > 0}


def rate_of(transfers: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return bits a second and the seconds that a message takes however short it is.

    Other work can hold a transfer up and never speeds one up, so the shortest time of each size counts.

    Args:
        transfers: Bytes and seconds, of one size or more.

    Example:
        >>> rate_of([(25_000, 0.03), (100_000, 0.09), (100_000, 0.5)])
        (10000000.0, 0.01)
    """
    least: dict[int, float] = {}
    for num_bytes, seconds in transfers:
        least[num_bytes] = min(seconds, least.get(num_bytes, seconds))
    small, large = min(least), max(least)
    longer_s = least[large] - least[small]
    if longer_s <= 0.25 * least[large] * (1 - small / large) or small == large:
        return round(8 * large / least[large], 3), 0.0  # too short to tell overhead from time on the wire
    rate = 8 * (large - small) / longer_s
    return round(rate, 3), round(max(0.0, least[small] - 8 * small / rate), 9)


def reference_rate(rates: Sequence[float]) -> float:
    """Return what a wire of this job carries as a rule: the lower end of the fastest quarter.

    One slow host of three is in four of six wires, so the middle of them would be its own.

    Example:
        >>> reference_rate([10.0, 10.0, 3.0, 3.0, 3.0, 3.0])
        10.0
    """
    return sorted(rates, reverse=True)[len(rates) // 4] if rates else 0.0


def expected_s(flows: Mapping[Cell, Flow], measured: Measured) -> dict[Cell, float]:
    """Return how long each of many transfers at once should take, by what its two ends can do alone.

    An end that can send 50 Mbit/s to one peer should send as much to all of them together, as far as its machine's
    processor can do the work.
    """
    pairs = measured.pairs
    ways: dict[tuple[str, int], list[Cell]] = {}
    for cell in flows:
        ways.setdefault(("from", cell[0]), []).append(cell)
        ways.setdefault(("to", cell[1]), []).append(cell)
    ends = {
        end: 8 * sum(flows[cell].num_bytes for cell in cells) / max(pairs[cell].rate_bits_per_s for cell in cells)
        for end, cells in ways.items()
    }
    busy_s = _busy_s({cell: flow.num_bytes for cell, flow in flows.items()}, measured)
    return {
        (source, destination): pairs[source, destination].overhead_s
        + max(
            ends["from", source],
            ends["to", destination],
            8 * flow.num_bytes / pairs[source, destination].rate_bits_per_s,
            busy_s,
        )
        for (source, destination), flow in flows.items()
    }


def all_reduce_s(done: AllReduce, measured: Measured) -> float:
    """Return how long a ring all-reduce takes whose ranks do nothing but send: `2 (n - 1)` steps of the slowest wire.

    Example:
        >>> wire = PairTest(rate_bits_per_s=8e6, overhead_s=0.01)
        >>> measured = Measured(hosts=("a", "b"), pairs={(0, 1): wire, (1, 0): wire})
        >>> all_reduce_s(AllReduce(order=(0, 1), num_bytes=1_000_000, seconds=0.0), measured)
        1.02
    """
    links = list(zip(done.order, [*done.order[1:], done.order[0]], strict=True))
    part_bytes = done.num_bytes // len(done.order)
    wires = [measured.pairs[link] for link in links]
    slowest_s = max(wire.overhead_s + 8 * part_bytes / wire.rate_bits_per_s for wire in wires)
    step_s = max(slowest_s, _busy_s(dict.fromkeys(links, part_bytes), measured))
    return 2 * (len(done.order) - 1) * step_s


def _busy_s(sent: Mapping[Cell, int], measured: Measured) -> float:
    """Return how long the processors of all machines take for what is sent at once.

    A loopback is the work of both ends on one machine, so each end is half of it.
    """
    halves: dict[str, int] = {}
    for cell, num_bytes in sent.items():
        for rank in cell if measured.machines else ():
            halves[measured.machines[rank]] = halves.get(measured.machines[rank], 0) + num_bytes
    most = 0.0
    for machine, num_bytes in halves.items():
        own = [rate for rank, rate in measured.loopback_bits_per_s.items() if measured.machines[rank] == machine]
        most = max(most, 8 * num_bytes / 2 / median(own)) if own else most
    return most
