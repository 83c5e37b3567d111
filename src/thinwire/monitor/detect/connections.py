"""Slow and dead wires of a collective, from the kernel's counters of its connections.

A collective's messages are recorded by nobody, but a kernel counts, for each connection, for how long it had something
to send and how much of it was acknowledged: the seconds that a byte takes are the wire's own, however long the ranks
wait for each other. Of a wire that is idle it knows since when nothing has come.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from thinwire.monitor.detect.change_points import LEAST_RATIO, median
from thinwire.monitor.detect.delay_matrix import Cell, DelayMatrix, Explanation
from thinwire.monitor.detect.timeline import Job
from thinwire.monitor.findings import Place, PlaceKind
from thinwire.monitor.runlog.records import Flow

# A wire that is well is silent for a second and a round trip at most; so a hang is placed when it has lasted so long.
DEAD_S, PLACED_S = 1.5, 2.0
# For so long what was seen last counts as what is.
_FRESH_S = 1.5
# Bursts over a wire may be so far apart.
_PROBED_S = 60.0
# Of fewer bytes the time is that of round trips, and of acknowledgements that wait; but where these take so long.
_LEAST_BYTES, _LONG_BUSY_S = 16_384, 0.5
# Kernels count this time in ticks of 1 to 10 ms.
_LEAST_BUSY_S = 0.02
# A way that carries less than this part of what the busiest one does tells little of its wire: its time is that of
# acknowledgements and words.
_LIGHT = 0.2
# Between two looks that are further apart lies what nobody kept.
_LONGEST_S = 5.0
_LEAST_BEFORE, _LEAST_AFTER, FEW_AFTER = 3, 2, 4
LATEST = 64
# Some bursts meet the job's own bytes all the same: the fastest quarter tells how the wire is.
_SETTLED_S = 0.5
LEAST_S = 1e-12
_MIDDLE, _QUARTER = 2, 4
_OF_HOSTS: dict[str, PlaceKind] = {
    "link": "host link", "link both ways": "host link both ways", "sender": "host sender", "receiver": "host receiver",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowerWires:
    """What explains that bytes take longer over some wires than they did.

    Attributes:
        explained: The place, or those that the wires in use cannot tell apart.
        times: How many times as long a byte takes there.
        burst_times: How many times as long bursts take there; 1 where none are sent over it.
        usual_s: How long a byte took before.
        num_seen: Stretches of time since then that tell of it.
        links: The ways, as texts.
    """

    explained: Explanation
    times: float
    burst_times: float
    usual_s: float
    num_seen: int
    links: tuple[str, ...]


def are_watched(job: Job) -> bool:
    """Return whether somebody has just looked at connections between hosts."""
    return any(job.now_s - points[-1][0] <= _FRESH_S for points in job.flows.values())


def is_probed(job: Job) -> bool:
    """Return whether bursts are sent over the wires that a collective leaves idle, so that more will be known soon."""
    return any(job.now_s - probes[-1][1] <= _PROBED_S for probes in job.probes.values())


def dead_wires(job: Job) -> tuple[Explanation | None, int]:
    """Return the place over whose wires nothing comes any more, none where all answer, and of how many ways is known.

    Args:
        job: All records.
    """
    # who hears nothing tells of the way to itself
    fresh = {way[::-1]: points[-1] for way, points in job.flows.items() if job.now_s - points[-1][0] <= _FRESH_S}
    known = {way: float(one.silence_s >= DEAD_S) for way, (_, one) in fresh.items() if one.silence_s is not None}
    for source, destination in [way for way, dead in known.items() if dead]:
        # the other end looks at the same connection at another time, and may not know yet
        at_s, back = fresh.get((destination, source), (job.now_s, None))
        if back is not None and (back.silence_s is None or back.silence_s + job.now_s - at_s >= DEAD_S):
            known[destination, source] = 1.0
    explained, _ = _explain(job, known, min)
    return explained, len(known)


def slower_wires(job: Job, since_s: float, until_s: float = math.inf) -> SlowerWires | None:
    """Return the place where a byte takes longer than before; none where that is no wire, or cannot be told.

    Args:
        job: All records.
        since_s: Since when something is slow, in seconds of the reference clock.
        until_s: When it was over.
    """
    heavy = heavy_ways(job)
    seen: dict[Cell, tuple[float, int]] = {}
    usual_s: dict[Cell, float] = {}
    for cell in sorted({*heavy, *job.probes}):
        before, after = _before_and_after(job, cell, since_s, until_s, is_heavy=cell in heavy)
        if len(before) >= _LEAST_BEFORE and len(after) >= _LEAST_AFTER:
            at = _MIDDLE if cell in heavy else _QUARTER
            # of the first ones too: what has been slow for long is not compared with itself
            usual_s[cell] = max(min(_low(before[:LATEST], at), _low(before[-LATEST:], at)), LEAST_S)
            seen[cell] = math.log(max(_low(after[-LATEST:], at), LEAST_S) / usual_s[cell]), len(after)
    # a busy machine slows all wires alike; where there are but two ways, nothing tells that from a slow one
    common = max(0.0, min((longer for longer, _ in seen.values()), default=0.0)) if len(seen) > 2 else 0.0
    # bursts are another measure than the job's own bytes, and tell only whether a wire is slow too
    most = max((longer for cell, (longer, _) in seen.items() if cell in heavy), default=0.0)
    bare = {cell: min(longer, most) - common for cell, (longer, _) in seen.items()}
    excess = {cell: longer if longer >= math.log(LEAST_RATIO) / 2 else 0.0 for cell, longer in bare.items()}
    explained, cells = _explain(job, excess, median)
    if explained is None or explained.excess < math.log(LEAST_RATIO):
        return None
    bursts = [seen[cell][0] - common for cell in cells if cell not in heavy]
    return SlowerWires(
        explained=explained, times=math.exp(explained.excess), burst_times=math.exp(median(bursts)) if bursts else 1.0,
        usual_s=median([usual_s[cell] for cell in cells]), num_seen=min(seen[cell][1] for cell in cells),
        links=tuple(f"{source} -> {destination}" for source, destination in sorted(cells)),
    )  # fmt: skip


def usual_and_now(job: Job, *, latest: int) -> dict[Cell, tuple[float, float]]:
    """Return how long a byte usually takes over each wire, and how long it took lately, in seconds.

    Args:
        job: All records.
        latest: How many of the latest times tell what is now.
    """
    heavy = heavy_ways(job)
    found: dict[Cell, tuple[float, float]] = {}
    for cell in sorted({*heavy, *job.probes}):
        before, _ = _before_and_after(job, cell, math.inf, math.inf, is_heavy=cell in heavy)
        if len(before) >= _LEAST_BEFORE:
            at = _MIDDLE if cell in heavy else _QUARTER
            found[cell] = _low(before[:LATEST], at), _low(before[-latest:], at)
    return found


def _low(values: Sequence[float], at: int) -> float:
    """Return the value at a half, or another part, of the way from the least to the most."""
    return sorted(values)[(len(values) - 1) // at]


def _before_and_after(
    job: Job, cell: Cell, since_s: float, until_s: float, *, is_heavy: bool
) -> tuple[list[float], list[float]]:
    """Return how long a byte took over a wire, by what the job sends or, where that is too little, by probes."""
    if is_heavy:
        points = job.flows[cell]
        before = [point for point in points if point[0] <= since_s]
        after = [point for point in points if since_s <= point[0] <= until_s]
        return [each_s for _, each_s in seconds_a_byte(before)], [each_s for _, each_s in seconds_a_byte(after)]
    probes = job.probes[cell]
    before_it = [each_s for _, done_s, each_s in probes if done_s <= since_s]
    settled_s = since_s + _SETTLED_S  # the fault may have come in the middle of the first operation that was slow
    after_it = [each_s for began_s, _, each_s in probes if settled_s <= began_s <= until_s]
    return before_it, after_it


def heavy_ways(job: Job) -> set[Cell]:
    """Return the ways that carry enough for their times to be those of bytes."""
    carried = {
        cell: sum(max(0, later.num_bytes - early.num_bytes) for (_, early), (_, later) in pairwise(points))
        for cell, points in job.flows.items()
    }
    most = max(carried.values(), default=0)
    return {cell for cell, num_bytes in carried.items() if num_bytes > _LIGHT * most}


def seconds_a_byte(points: Sequence[tuple[float, Flow]]) -> list[tuple[float, float]]:
    """Return how long a byte took in each stretch in which enough were sent, and when that ended, in order.

    Time in which the other end's process did not read is not the wire's.
    """
    found: list[tuple[float, float]] = []
    sent, busy_s = 0, 0.0
    for (early_s, early), (later_s, later) in pairwise(points):
        more, longer_s = later.num_bytes - early.num_bytes, later.busy_s - early.busy_s
        held_s = later.held_s - early.held_s
        if more < 0 or longer_s < 0 or held_s < 0 or later_s - early_s > _LONGEST_S:
            sent, busy_s = 0, 0.0  # a connection was made anew, or nobody looked
            continue
        sent, busy_s = sent + more, busy_s + max(0.0, longer_s - held_s)
        if busy_s >= _LEAST_BUSY_S and (sent >= _LEAST_BYTES or (sent and busy_s >= _LONG_BUSY_S)):
            found.append((later_s, busy_s / sent))
            sent, busy_s = 0, 0.0
    return found


def _explain(
    job: Job, excess: Mapping[Cell, float], joined: Callable[[list[float]], float]
) -> tuple[Explanation | None, set[Cell]]:
    """Return the place that explains a matrix of connections, which lead to hosts, and the ways that it explains."""
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
    places = tuple(dict.fromkeys(_of_hosts(job, place) for place in explained.places))
    return Explanation(
        places=places, cells=explained.cells, excess=explained.excess, fit=explained.fit, lead=explained.lead
    ), ways


def _of_hosts(job: Job, place: Place) -> Place:
    """Return a place of ranks that stand for their hosts as one of hosts."""
    if place.kind not in _OF_HOSTS:
        return place
    return Place(kind=_OF_HOSTS[place.kind], hosts=tuple(job.host_of[rank] for rank in place.ranks))
