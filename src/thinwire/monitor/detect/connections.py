"""Slow and dead wires of a collective, from the kernel's counters of its connections.

A collective's messages are not recorded. But the kernel counts, for each connection, the time with bytes to send and
the bytes acknowledged (TCP_INFO). The seconds a byte takes belong to the link, however long ranks wait for each other.
Of an idle connection it knows the time since the last segment.

A link of two thirds of its rate makes calls longer by a tenth, since ranks also wait and compute in them. The seconds a
byte takes show all of it. The same holds for thinwire's own rounds on busy machines, where a message takes as long as
its receiver needs to wake up. Their messages are recorded and come first; counters find the slow links they miss.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from thinwire.monitor.detect.change_points import CUSUM, Change, ChangePointDetector, is_at_once, median
from thinwire.monitor.detect.delay_matrix import DELAYS, WIRE_REMEDY, Cell, DelayMatrix, Explanation, probe_for
from thinwire.monitor.detect.progress import PROGRESS
from thinwire.monitor.detect.timeline import Job
from thinwire.monitor.findings import Evidence, Finding, Place, PlaceKind, joined
from thinwire.runlog.records import Flow


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionConfig:
    """Constants of the detectors that use the kernel's counters of connections."""

    dead_s: float = 1.5  # silence of a dead link: a live one answers keep-alives each second, plus a round trip
    placed_s: float = 2.0  # age of a hang until its link is looked up, so that both ends have seen the silence
    fresh_s: float = 1.5  # age of a reading that still shows the present
    probed_s: float = 60.0  # longest time between two bursts over a link
    # of a stretch; the time of fewer bytes is that of round trips and delayed acknowledgements
    min_bytes: int = 16_384
    long_busy_s: float = 0.5  # busy seconds from which fewer bytes count too
    min_busy_s: float = 0.02  # busy seconds of a stretch; kernels count in ticks of 1 to 10 ms
    # share of the busiest link below which bytes are acknowledgements; 0.05 named wrong places (LOG 2026-11-24)
    light_share: float = 0.2
    undecided_s: float = 5.0  # wait for bursts that distinguish several places
    max_gap_s: float = 5.0  # between two readings of one stretch
    min_before: int = 3  # stretches before the change
    min_after: int = 2  # stretches since the change
    few_after: int = 4  # stretches since the change for more than a low confidence
    latest: int = 64  # stretches that a usual value is taken from
    settled_s: float = 0.5  # after the change: the operation in which it began was slow in part
    min_s: float = 1e-12  # seconds a byte, so that the logarithm is finite
    median_of: int = 2  # quantile of the job's own bytes, as 1/n
    quartile_of: int = 4  # quantile of bursts, as 1/n: those that met the job's bytes are slower
    alike: float = 1.5  # ratio of operation sizes that are comparable
    reading_s: float = 0.25  # half the time between two readings, so that no two have one number
    min_bursts: int = 3  # bursts over a way until their median is used
    # latest bytes of an own round that must be slow too: alarms there end late (LOG 2026-11-24)
    lately_s: float = 4.0
    max_alarms: int = 16  # alarms that are placed: if so many have no place, the others will have none


CONNECTIONS = ConnectionConfig()

_OF_HOSTS: dict[str, PlaceKind] = {
    "link": "host link", "link both ways": "host link both ways", "sender": "host sender", "receiver": "host receiver",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowerWires:
    """Place where bytes take longer than before."""

    explained: Explanation  # the place, or several that the links in use cannot distinguish
    times: float  # ratio of the seconds a byte takes
    burst_times: float  # ratio of the bursts' durations; 1 without bursts
    usual_s: float  # seconds a byte took before
    num_seen: int  # stretches since the change
    links: tuple[str, ...]  # ways, as texts


def are_watched(job: Job) -> bool:
    """Return whether there are fresh readings of connections between hosts."""
    return any(job.now_s - points[-1][0] <= CONNECTIONS.fresh_s for points in job.flows.values())


def is_probed(job: Job) -> bool:
    """Return whether bursts are sent over the links that a collective leaves idle."""
    return any(job.now_s - probes[-1][1] <= CONNECTIONS.probed_s for probes in job.probes.values())


def dead_wires(job: Job) -> tuple[Explanation | None, int]:
    """Return the place whose links are dead, None if all answer, and the number of ways with a reading."""
    # a host that hears nothing shows the way to itself
    fresh = {
        way[::-1]: points[-1] for way, points in job.flows.items() if job.now_s - points[-1][0] <= CONNECTIONS.fresh_s
    }
    known = {
        way: float(one.silence_s >= CONNECTIONS.dead_s) for way, (_, one) in fresh.items() if one.silence_s is not None
    }
    for source, destination in [way for way, dead in known.items() if dead]:
        # the other end looks at the same connection at another time, and may not know yet
        at_s, back = fresh.get((destination, source), (job.now_s, None))
        if back is not None and (back.silence_s is None or back.silence_s + job.now_s - at_s >= CONNECTIONS.dead_s):
            known[destination, source] = 1.0
    explained, _ = _explain(job, known, min)
    return explained, len(known)


def slower_wires(job: Job, since_s: float, until_s: float = math.inf) -> SlowerWires | None:
    """Return the place where a byte takes longer than before; None if no link explains it."""
    heavy = heavy_ways(job)
    seen: dict[Cell, tuple[float, int]] = {}
    usual_s: dict[Cell, float] = {}
    for cell in sorted({*heavy, *job.probes}):
        before, after = _before_and_after(job, cell, since_s, until_s, is_heavy=cell in heavy)
        if len(before) >= CONNECTIONS.min_before and len(after) >= CONNECTIONS.min_after:
            at = CONNECTIONS.median_of if cell in heavy else CONNECTIONS.quartile_of
            # the first values count too: a link that has been slow for long is not compared with itself
            least_s = min(_low(before[: CONNECTIONS.latest], at), _low(before[-CONNECTIONS.latest :], at))
            usual_s[cell] = max(least_s, CONNECTIONS.min_s)
            now_s = max(_low(after[-CONNECTIONS.latest :], at), CONNECTIONS.min_s)
            seen[cell] = math.log(now_s / usual_s[cell]), len(after)
    # a busy machine slows all links alike, which two ways alone cannot show
    common = max(0.0, min((longer for longer, _ in seen.values()), default=0.0)) if len(seen) > 2 else 0.0
    # bursts differ from the job's own bytes in size, so they only show whether a link is slow too
    most = max((longer for cell, (longer, _) in seen.items() if cell in heavy), default=0.0)
    bare = {cell: min(longer, most) - common for cell, (longer, _) in seen.items()}
    excess = {cell: longer if longer >= math.log(CUSUM.min_ratio) / 2 else 0.0 for cell, longer in bare.items()}
    explained, cells = _explain(job, excess, median)
    if explained is None or explained.excess < math.log(CUSUM.min_ratio):
        return None
    bursts = [seen[cell][0] - common for cell in cells if cell not in heavy]
    return SlowerWires(
        explained=explained, times=math.exp(explained.excess), burst_times=math.exp(median(bursts)) if bursts else 1.0,
        usual_s=median([usual_s[cell] for cell in cells]), num_seen=min(seen[cell][1] for cell in cells),
        links=tuple(f"{source} -> {destination}" for source, destination in sorted(cells)),
    )  # fmt: skip


def usual_and_now(job: Job, *, latest: int) -> dict[Cell, tuple[float, float]]:
    """Return the seconds that a byte takes over each link, usually and lately."""
    heavy = heavy_ways(job)
    found: dict[Cell, tuple[float, float]] = {}
    for cell in sorted({*heavy, *job.probes}):
        before, _ = _before_and_after(job, cell, math.inf, math.inf, is_heavy=cell in heavy)
        if len(before) >= CONNECTIONS.min_before:
            at = CONNECTIONS.median_of if cell in heavy else CONNECTIONS.quartile_of
            found[cell] = _low(before[: CONNECTIONS.latest], at), _low(before[-latest:], at)
    return found


def _low(values: Sequence[float], at: int) -> float:
    """Return the 1/n quantile."""
    return sorted(values)[(len(values) - 1) // at]


def _before_and_after(
    job: Job, cell: Cell, since_s: float, until_s: float, *, is_heavy: bool
) -> tuple[list[float], list[float]]:
    """Return the seconds a byte took over a link, from the job's bytes or, if these are few, from bursts."""
    if is_heavy:
        points = job.flows[cell]
        before = [point for point in points if point[0] <= since_s]
        after = [point for point in points if since_s <= point[0] <= until_s]
        return [each_s for _, each_s in seconds_a_byte(before)], [each_s for _, each_s in seconds_a_byte(after)]
    probes = job.probes[cell]
    # the fault may have come in the middle of the first operation that was slow
    settled_s = since_s + CONNECTIONS.settled_s
    return (
        [each_s for _, done_s, each_s in probes if done_s <= since_s],
        [each_s for began_s, _, each_s in probes if settled_s <= began_s <= until_s],
    )


def heavy_ways(job: Job) -> set[Cell]:
    """Return the ways that carry enough bytes to be timed."""
    carried = {
        cell: sum(max(0, later.num_bytes - early.num_bytes) for (_, early), (_, later) in pairwise(points))
        for cell, points in job.flows.items()
    }
    most = max(carried.values(), default=0)
    return {cell for cell, num_bytes in carried.items() if num_bytes > CONNECTIONS.light_share * most}


def seconds_a_byte(points: Sequence[tuple[float, Flow]]) -> list[tuple[float, float]]:
    """Return the end of each stretch with enough bytes, and the seconds that a byte took in it.

    Time in which the receiving process did not read is subtracted.
    """
    found: list[tuple[float, float]] = []
    sent, busy_s = 0, 0.0
    for (early_s, early), (later_s, later) in pairwise(points):
        more, longer_s = later.num_bytes - early.num_bytes, later.busy_s - early.busy_s
        held_s = later.held_s - early.held_s
        if more < 0 or longer_s < 0 or held_s < 0 or later_s - early_s > CONNECTIONS.max_gap_s:
            sent, busy_s = 0, 0.0  # reconnected, or not read for long
            continue
        sent, busy_s = sent + more, busy_s + max(0.0, longer_s - held_s)
        if busy_s >= CONNECTIONS.min_busy_s and (
            sent >= CONNECTIONS.min_bytes or (sent and busy_s >= CONNECTIONS.long_busy_s)
        ):
            found.append((later_s, busy_s / sent))
            sent, busy_s = 0, 0.0
    return found


def _explain(
    job: Job, excess: Mapping[Cell, float], joined: Callable[[list[float]], float]
) -> tuple[Explanation | None, set[Cell]]:
    """Return the place that explains a matrix of connections between hosts, and the ways that it explains."""
    first: dict[str, int] = {}
    for rank, host in sorted(job.host_of.items()):
        first.setdefault(host, rank)
    own: dict[Cell, list[Cell]] = defaultdict(list)
    for source, destination in excess:
        own[first[job.host_of[source]], first[job.host_of[destination]]].append((source, destination))
    matrix = {cell: joined([excess[one] for one in ways]) for cell, ways in own.items() if cell[0] != cell[1]}
    explained = DelayMatrix(matrix, {rank: host for host, rank in first.items()}).explain()
    if explained is None:
        return None, set()
    ways = {one for cell in explained.cells for one in own[cell]}
    if len(first) == len(job.host_of):
        return explained, ways
    # ranks stand for their hosts
    places = dict.fromkeys(
        Place(kind=_OF_HOSTS[place.kind], hosts=tuple(job.host_of[rank] for rank in place.ranks))
        if place.kind in _OF_HOSTS else place
        for place in explained.places
    )  # fmt: skip
    return replace(explained, places=tuple(places)), ways


_BITS, _MILLION = 8.0, 1e6


def how_to_decide(job: Job, places: Sequence[Place]) -> str:
    """Return the measurement that would distinguish several places; empty if there is one."""
    return probe_for(places) + with_probes(job) if len(places) > 1 else ""


def with_probes(job: Job) -> str:
    """Return the advice to time bursts, for jobs that do not."""
    if job.messages or is_probed(job):  # thinwire's own rounds, whose messages are recorded, are not watched
        return ""
    return "; or let hosts time bursts to each other: thinwire.watch(..., probe_wires=True)"


def find_slow_flows(job: Job) -> list[Finding]:
    """Return the places whose links need more seconds a byte: lasting slowdowns first, then those that have ended.

    Jobs with recorded messages are left to these, unless they are thinwire's own rounds.
    """
    has_rounds = any(one.kind == "round" for own in job.operations.values() for one in own.values())  # thinwire's own
    if job.messages and not has_rounds:
        return []
    watches = watch_flows(job)
    alarms = [(watch.change, frozenset([cell])) for cell, watch in watches.items() if watch.change is not None]
    alarms += [(watch.change, cells) for cells, watch in watch_bursts(job).items() if watch.change is not None]
    alarms.sort(key=lambda one: (one[0].is_over, one[0].seen_round, sorted(one[1])))
    found: list[Finding] = []
    reported: list[tuple[Change, frozenset[Cell]]] = []
    num_alarms = 0
    for change, cells in alarms:
        if any(cells & others and is_at_once(change, other) for other, others in reported):
            continue
        num_alarms += 1
        if num_alarms > CONNECTIONS.max_alarms:
            break
        until_s = math.inf if change.until_s is None else change.until_s
        wires = slower_wires(job, change.since_s, until_s) if _are_calls_alike(job, change.since_s, until_s) else None
        if wires is None or not _is_found(job, wires, change, cells):
            continue
        if has_rounds and change.until_s is None and not _is_still_so(job, wires, change):
            continue
        found.append(_slow_flow(job, wires, change))
        reported.append((change, wires.explained.cells))
    return found


def watch_flows(job: Job) -> dict[Cell, ChangePointDetector]:
    """Return a detector of the seconds that a million bytes take for each way that carries enough."""
    watches: dict[Cell, ChangePointDetector] = {}
    ways = heavy_ways(job)
    begin_s = min((job.flows[cell][0][0] for cell in ways), default=0.0)
    for cell in sorted(ways):
        watch = watches[cell] = ChangePointDetector()
        for at_s, each_s in seconds_a_byte(job.flows[cell]):
            watch.add(int((at_s - begin_s) / CONNECTIONS.reading_s), at_s, _MILLION * each_s)
    return watches


def watch_bursts(job: Job) -> dict[frozenset[Cell], ChangePointDetector]:
    """Return a detector of the bursts over each way, and over all ways of a sender or receiver: one way has few.

    Each burst counts as a ratio to the median of those before it over the same way.
    """
    timed = sorted((done_s, cell, each_s) for cell, probes in job.probes.items() for _, done_s, each_s in probes)
    own_ends: dict[tuple[int, int], list[Cell]] = defaultdict(list)
    for cell in job.probes:
        for index in (0, 1):
            own_ends[index, cell[index]].append(cell)
    all_of = {end: frozenset(cells) for end, cells in own_ends.items()}
    ends = {cell: {frozenset([cell]), all_of[0, cell[0]], all_of[1, cell[1]]} for cell in job.probes}
    watches = {own: ChangePointDetector() for found in ends.values() for own in found}
    usual: dict[Cell, deque[float]] = {cell: deque(maxlen=CONNECTIONS.latest) for cell in job.probes}
    begin_s = timed[0][0] if timed else 0.0
    for done_s, cell, each_s in timed:
        known = usual[cell]
        ratio = each_s / max(median(known), CONNECTIONS.min_s) if len(known) >= CONNECTIONS.min_bursts else 1.0
        if len(known) >= CONNECTIONS.min_bursts:
            for own in ends[cell]:
                watches[own].add(int((done_s - begin_s) / CONNECTIONS.reading_s), done_s, ratio)
        if ratio < DELAYS.min_endpoint:  # a slow burst must not become usual
            known.append(each_s)
    return watches


def _are_calls_alike(job: Job, since_s: float, until_s: float) -> bool:
    """Return whether calls are about as large as before: a byte of small ones takes longer on any link."""
    before: list[int] = []
    after: list[int] = []
    for own in job.operations.values():
        operation = next(iter(own.values()))
        if operation.count >= 0 and operation.posted_s < until_s:
            (before if operation.posted_s < since_s else after).append(operation.count)
    if not before or not after:
        return True
    least, most = sorted((sum(before) / len(before), sum(after) / len(after)))
    return most <= CONNECTIONS.alike * least


def _is_found(job: Job, wires: SlowerWires, change: Change, cells: frozenset[Cell]) -> bool:
    """Return whether a place has a link that raised the alarm, and is slow enough to be reported."""
    explained = wires.explained
    if not cells & explained.cells or explained.excess < math.log(DELAYS.min_endpoint):
        return False
    # bursts share nothing, so a single link that they show too is no access that is shared more than before
    if explained.is_wire_alone and max(wires.times, wires.burst_times) < DELAYS.min_link:
        return False
    # the next bursts over other links may decide between several places
    is_young = change.until_s is None and job.now_s - change.since_s < CONNECTIONS.undecided_s
    return not (is_young and len(explained.places) > 1 and is_probed(job))


def _is_still_so(job: Job, wires: SlowerWires, change: Change) -> bool:
    """Return whether a byte takes at least half of that longer in the latest seconds too."""
    begin_s = max(change.since_s, job.now_s - CONNECTIONS.lately_s)
    longer = []
    for cell in wires.explained.cells:
        points = [one for at_s, one in job.flows.get(cell, ()) if at_s >= begin_s]
        num_bytes = points[-1].num_bytes - points[0].num_bytes if points else 0
        if num_bytes > 0:
            busy_s = points[-1].busy_s - points[-1].held_s - points[0].busy_s + points[0].held_s
            longer.append(math.log(max(busy_s / num_bytes, CONNECTIONS.min_s) / wires.usual_s))
    return not longer or median(longer) >= math.log(wires.times) / 2


def _slow_flow(job: Job, wires: SlowerWires, change: Change) -> Finding:
    explained = wires.explained
    named = joined(explained.places)
    usual_mbit = _BITS / wires.usual_s / _MILLION
    return Finding(
        kind="communication slow", places=explained.places, since_s=change.since_s, until_s=change.until_s,
        evidence=Evidence(
            "slow_bytes", times_longer=round(wires.times, 2), usual_mbit_a_second=round(usual_mbit, 3),
            now_mbit_a_second=round(usual_mbit / wires.times, 3), links=list(wires.links[:16]),
        ),
        text=f"A byte takes {wires.times:.1f} times as long over {named} as it did, by the kernels' counters.",
        confidence=min(0.5 if len(explained.places) > 1 else PROGRESS.unsure, explained.sure) * job.trust,
        remedy=WIRE_REMEDY,
        probe=how_to_decide(job, explained.places),
    )  # fmt: skip
