"""Evaluation of an active test: measured pairs, expected times, slow links and hosts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

from thinwire.monitor.detect.change_points import median
from thinwire.monitor.detect.delay_matrix import Cell, DelayMatrix, Explanation, probe_for
from thinwire.monitor.findings import Evidence, Finding, Place, link_names, ranks_of
from thinwire.units import format_rate, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTest:
    """Test of one direction of a pair while no other replica sent to either."""

    rate_bits_per_s: float = 0.0  # of payload; 0 if not measured
    overhead_s: float = 0.0  # time of an empty message
    latency_s: float = 0.0  # one way: half of the shortest round trip
    fault: str = ""  # empty, `dead` (no connection, or a deadline passed) or `corrupt` (other bytes arrived)
    detail: str = ""  # message of the transport about the fault


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowTest:
    """One of many transfers at once: its bytes, and seconds from the start until it was there whole."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """A ring all-reduce."""

    order: tuple[int, ...]  # ranks around the ring
    num_bytes: int  # of the reduced vector
    seconds: float  # of the slowest rank, in the best of the runs
    wrong: tuple[Cell, ...] = ()  # links over which wrong sums came first


@dataclass(slots=True, kw_only=True)
class Measured:
    """All measurements, as they come; what was not measured is missing."""

    hosts: tuple[str, ...]  # the host of each rank
    # the machine of each rank, where they are known: hosts of one machine share its processor
    machines: tuple[str, ...] = ()
    absent: dict[int, str] = field(default_factory=dict)  # why a rank took no part, or not to the end
    # what a rank's host carries to itself, through the same transport
    loopback_bits_per_s: dict[int, float] = field(default_factory=dict)
    pairs: dict[Cell, PairTest] = field(default_factory=dict)  # by (source, destination)
    neighbours: dict[Cell, FlowTest] = field(default_factory=dict)  # transfers of a ring, all at once
    everyone: dict[Cell, FlowTest] = field(default_factory=dict)  # transfers from everyone to everyone, all at once
    all_reduce: AllReduce | None = None  # where one was done

    @property
    def host_of(self) -> dict[int, str]:
        """The host of each rank, by its number."""
        return dict(enumerate(self.hosts))

    @property
    def rates(self) -> dict[Cell, float]:
        """The rate of each pair that has one."""
        return {cell: pair.rate_bits_per_s for cell, pair in self.pairs.items() if pair.rate_bits_per_s > 0}


def rate_of(transfers: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return bits a second and the seconds that a message takes however short it is, from sizes and seconds.

    Other work can hold a transfer up and never speeds one up, so the shortest time of each size counts.

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


def expected_s(flows: Mapping[Cell, FlowTest], measured: Measured) -> dict[Cell, float]:
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
    """Return how long the processors of all machines take for what is sent at once."""
    # a loopback is the work of both ends on one machine, so each end is half of it
    halves: dict[str, int] = {}
    for cell, num_bytes in sent.items():
        for rank in cell if measured.machines else ():
            halves[measured.machines[rank]] = halves.get(measured.machines[rank], 0) + num_bytes
    most = 0.0
    for machine, num_bytes in halves.items():
        own = [rate for rank, rate in measured.loopback_bits_per_s.items() if measured.machines[rank] == machine]
        most = max(most, 8 * num_bytes / 2 / median(own)) if own else most
    return most


# A wire has a third less than the others, or all at once take half as long again as alone.
LEAST_SLOWER, LEAST_CROWDED = 1.3, 1.5
_LEAST_LOOPBACK, _LEAST_SHARED_LOOPBACK, _LEAST_ALL_REDUCE, _MOST_OF_EXPECTED = 2.0, 4.0, 2.0, 0.8
_MOST_FAULTS = 6
_TURN_S = 0.02  # in each step of a ring, a rank waits for its turn on a busy processor
_DEVIATIONS, _MAD = 3.0, 1.4826  # a normal distribution's standard deviation, in median deviations


def evaluate(measured: Measured, *, expect_bits_per_s: float | None = None) -> list[Finding]:
    """Return the findings, the worst first: absent, dead, corrupt, slow, slow only when all send.

    Args:
        measured: All results.
        expect_bits_per_s: What each wire should carry alone; without it, the wires are compared with each other.
    """
    found = [_absent(rank, why, measured) for rank, why in sorted(measured.absent.items())]
    found += _faulty(measured, "dead") + _faulty(measured, "corrupt")
    found += _slow_loopbacks(measured) + _slow_pairs(measured, expect_bits_per_s)
    if not any(finding.kind == "communication hang" for finding in found):
        found += _crowded(measured, ranks_of((place for one in found for place in one.places), measured.host_of))
    return found + _all_reduce(measured, found)


def suspects(measured: Measured, *, expect_bits_per_s: float | None = None) -> list[Cell]:
    """Return the pairs that look slow, which should be asked once more before they are blamed."""
    reference = reference_rate(list(measured.rates.values()))
    least = max(reference / LEAST_SLOWER, _MOST_OF_EXPECTED * (expect_bits_per_s or 0.0))
    return sorted(cell for cell, rate in measured.rates.items() if rate < least)


def _absent(rank: int, why: str, measured: Measured) -> Finding:
    host = measured.hosts[rank]
    # all meet at rank 0, so from there a rank that is dead looks as one that cannot reach it
    way = () if rank == 0 else (Place(kind="link both ways", ranks=(0, rank)),)
    return Finding(
        kind="non-communication hang",
        places=(Place(kind="rank", ranks=(rank,)), *way),
        since_s=0.0,
        evidence=Evidence("absent_rank", host=host or None, rank=rank),
        text=f"Rank {rank}{f' on {host}' if host else ''} {why}.",
        confidence=0.5,
        remedy="see whether its process and host are alive, and whether it reaches MASTER_ADDR and MASTER_PORT: "
        "thinwire doctor HOST:PORT there",
        probe="test again with another host as MASTER_ADDR and rank 0: if all come then, the link is at fault",
    )


def _faulty(measured: Measured, fault: Literal["dead", "corrupt"]) -> list[Finding]:
    """Return findings for pairs that are dead or corrupt, by the places that explain them."""
    found = []
    faulty = {cell: float(pair.fault == fault) for cell, pair in measured.pairs.items()}
    for explained, bad in _explained(faulty, measured):
        details = sorted({measured.pairs[cell].detail for cell in bad} - {""})
        named, ways = _named(explained.places, measured), f"{len(bad)} way{'' if len(bad) == 1 else 's'}"
        found.append(Finding(
            kind="communication hang" if fault == "dead" else "corrupt data", places=explained.places, since_s=0.0,
            evidence=Evidence("wire_fault", links=link_names(bad), said=details[:2]),
            text=f"Nothing gets over {named}: {ways} of {len(explained.cells)} stayed without an answer."
            if fault == "dead" else f"What arrives over {named} are not the bytes that were sent.",
            confidence=explained.confidence, probe=probe_for(explained.places),
            remedy="see that a firewall lets the replicas' ports pass there, then cable, route and host: thinwire "
            "doctor HOST:PORT" if fault == "dead" else "test memory and interface of both ends, and take that host "
            "out until then: checksums of TCP miss this",
        ))  # fmt: skip
    return found


def _explained(excess: Mapping[Cell, float], measured: Measured) -> Iterator[tuple[Explanation, list[Cell]]]:
    """Yield one place after the other, and its links with excess that none before it has explained."""
    left = dict(excess)
    for _ in range(_MOST_FAULTS):
        explained = DelayMatrix(left, measured.host_of).explain()
        if explained is None:
            return
        yield explained, sorted(cell for cell in explained.cells if left[cell])
        left |= dict.fromkeys(explained.cells, 0.0)


def slow_loopbacks(measured: Measured) -> dict[int, float]:
    """Return the ranks that carry far less to themselves than those of other hosts, with what those carry.

    Hosts of one machine share its processor, so that they differ by what else it action.
    """
    rates, found = measured.loopback_bits_per_s, {}
    machines = measured.machines or measured.hosts
    for rank, rate in sorted(rates.items()):
        others = [other for peer, other in rates.items() if measured.hosts[peer] != measured.hosts[rank]]
        least = _LEAST_LOOPBACK if machines.count(machines[rank]) == 1 else _LEAST_SHARED_LOOPBACK
        if len(others) >= 2 and rate * least < median(others):
            found[rank] = median(others)
    return found


def _slow_loopbacks(measured: Measured) -> list[Finding]:
    """Return hosts whose processor, and not a wire, is slow."""
    found = []
    for rank, usual in slow_loopbacks(measured).items():
        rate = measured.loopback_bits_per_s[rank]
        found.append(Finding(
            kind="non-communication slow",
            places=(Place(kind="rank", ranks=(rank,)),),
            since_s=0.0,
            evidence=Evidence(
                "slow_loopback", loopback_bits_per_s=rate, others_bits_per_s=usual, times_slower=round(usual / rate, 2),
            ),
            text=f"Rank {rank} on {measured.hosts[rank]} carries {format_rate(rate)} to itself, without any wire, "
            f"where the others carry {format_rate(usual)}.",
            confidence=min(0.9, 0.3 + 0.15 * usual / rate),
            remedy="see what else runs on its processor, and whether that is throttled",
        ))  # fmt: skip
    return found


def _slow_pairs(measured: Measured, expect_bits_per_s: float | None) -> list[Finding]:
    rates = measured.rates
    if not rates:
        return []
    reference, found = reference_rate(list(rates.values())), []
    if expect_bits_per_s is not None:
        if reference < _MOST_OF_EXPECTED * expect_bits_per_s:
            found.append(_all_slow(measured, reference, expect_bits_per_s))
        else:
            reference = expect_bits_per_s
    is_expected, usual = reference == expect_bits_per_s, format_rate(reference)
    beside = f"{usual} is expected" if is_expected else f"the others carry {usual}"
    excess = {cell: math.log(reference / rate) for cell, rate in rates.items()}
    for explained in _places(excess, measured, least=math.log(1 / _MOST_OF_EXPECTED if is_expected else LEAST_SLOWER)):
        ratio, named = math.exp(explained.excess), _named(explained.places, measured)
        rate = median([rates[cell] for cell in explained.cells])
        found.append(Finding(
            kind="communication slow", places=explained.places, since_s=0.0,
            text=f"{named[0].upper()}{named[1:]} carries {format_rate(rate)} alone, where {beside}: {ratio:.1f} times "
            "less.",
            evidence=Evidence(
                "link_rate", rate_bits_per_s=rate, reference_bits_per_s=reference, times_slower=round(ratio, 2),
                links=link_names(explained.cells), explained=round(explained.fit, 3),
            ),
            confidence=explained.confidence, probe=probe_for(explained.places),
            remedy="look at the interface (rate, duplex, errors), the cable and other traffic there; if this is the "
            "wire's own rate, let thinwire plan know by thinwire probe",
        ))  # fmt: skip
    return found


def _places(excess: Mapping[Cell, float], measured: Measured, *, least: float) -> list[Explanation]:
    """Return one place after the other that explains what is in excess by at least so much."""
    found: list[Explanation] = []
    bare = {cell: value if value >= least / 2 else 0.0 for cell, value in excess.items()}
    for explained, _ in _explained(bare, measured):
        if explained.excess < least:
            break
        others = [value for cell, value in excess.items() if cell not in explained.cells]
        # a place stands out by more than the others scatter
        middle = median(others) if others else 0.0
        spread = _MAD * median([abs(value - middle) for value in others]) if others else 0.0
        if explained.excess < middle + _DEVIATIONS * spread / math.sqrt(len(explained.cells)):
            break
        found.append(explained)
    return found


def _all_slow(measured: Measured, reference: float, expect: float) -> Finding:
    own = [rate for rate in measured.loopback_bits_per_s.values() if rate < expect]
    limit = f" No host carries more than {format_rate(max(own))} to itself, so what is measured may be the hosts." if (
        own and len(own) == len(measured.loopback_bits_per_s)
    ) else ""  # fmt: skip
    return Finding(
        kind="communication slow", places=(Place(kind="job"),), since_s=0.0,
        evidence=Evidence("network_rate", rate_bits_per_s=reference, expected_bits_per_s=expect),
        text=f"All wires carry less than is expected: {format_rate(reference)} instead of "
        f"{format_rate(expect)}.{limit}",
        confidence=0.5 if limit else 0.9,
        remedy="look at what all share (switch, access, settings of the interfaces), or expect less",
    )  # fmt: skip


def _crowded(measured: Measured, named: Set[int]) -> list[Finding]:
    """Return what is slow only where others send at the same time."""
    # whose wire is named already is left out: acknowledgements wait in a queue that is full, so the other way of a slow
    # wire becomes slow too
    # the first test that shows a fault is reported; the other would report the same
    for flows, when in ((measured.neighbours, "all neighbours send"), (measured.everyone, "everyone sends to all")):
        if not flows:
            continue
        due = expected_s(flows, measured)
        excess = {cell: math.log(max(flow.seconds, 1e-9) / due[cell]) for cell, flow in flows.items()}
        least = math.log(LEAST_CROWDED)
        # one slow host of three leaves a third of the transfers as they should be
        common = sorted(excess.values())[len(excess) // 4]
        if common >= least and len(excess) > 2:
            ratio = math.exp(common)
            return [Finding(
                kind="communication slow", places=(Place(kind="job"),), since_s=0.0,
                evidence=Evidence("contention", times_slower_than_alone=round(ratio, 2)),
                text=f"While {when}, transfers take {ratio:.1f} times as long as their wires allow: all share "
                "something.",
                confidence=0.6,
                remedy="look at what all wires share: the switch, its way up, or the processor where replicas share a "
                "machine",
            )]  # fmt: skip
        found = []
        for explained in _places(excess, measured, least=least):
            if not all(named & set(cell) for cell in explained.cells):
                ratio, where = math.exp(explained.excess), _named(explained.places, measured)
                rate = median([8 * flows[cell].num_bytes / flows[cell].seconds for cell in explained.cells])
                found.append(Finding(
                    kind="communication slow", places=explained.places, since_s=0.0,
                    evidence=Evidence(
                        "contention", times_slower_than_alone=round(ratio, 2), rate_bits_per_s=rate,
                        links=link_names(explained.cells),
                    ),
                    text=f"While {when}, transfers over {where} take {ratio:.1f} times as long as what both ends carry "
                    "alone allows.",
                    confidence=0.8 * explained.confidence, probe=probe_for(explained.places),
                    remedy="look for a half-duplex interface, a small queue or other traffic there",
                ))  # fmt: skip
        if found:
            return found
    return []


def _all_reduce(measured: Measured, found: Sequence[Finding]) -> list[Finding]:
    done = measured.all_reduce
    if done is None:
        return []
    findings: list[Finding] = []
    if done.wrong:
        places = tuple(Place(kind="sender", ranks=(source,)) for source, _ in done.wrong)
        findings.append(Finding(
            kind="corrupt data", places=places, since_s=0.0, confidence=0.9 if len(places) == 1 else 0.6,
            evidence=Evidence("wrong_sum", links=link_names(done.wrong), elements=done.num_bytes // 4),
            text=f"The all-reduce came to another sum than the exact one, first in what "
            f"{_named(places, measured)} sent.",
            remedy="test memory and processor of that host, and take it out until then",
        ))  # fmt: skip
    due_s = all_reduce_s(done, measured)
    ratio = done.seconds / due_s
    if done.seconds >= _LEAST_ALL_REDUCE * due_s + 2 * (len(done.order) - 1) * _TURN_S and not found:
        findings.append(Finding(
            kind="communication slow", places=(Place(kind="job"),), since_s=0.0, confidence=0.5,
            evidence=Evidence("slow_all_reduce", seconds=done.seconds, expected_s=due_s, num_bytes=done.num_bytes),
            text=f"A ring all-reduce takes {format_seconds(done.seconds)}, {ratio:.1f} times as long as its wires "
            f"allow ({format_seconds(due_s)}), though each of them is as expected.",
            remedy="look at what the hosts compute meanwhile: their processors, and other programs on them",
        ))  # fmt: skip
    return findings


def _named(places: Sequence[Place], measured: Measured) -> str:
    """Return places in words that hold the hosts' names too."""
    named = []
    for place in places:
        hosts = " to ".join(measured.hosts[rank] for rank in place.ranks)
        named.append(f"{place} ({hosts})" if hosts.replace(" to ", "") else str(place))
    return " or ".join(named)
