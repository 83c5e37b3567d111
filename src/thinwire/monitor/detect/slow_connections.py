"""Wires that became slower by what kernels count alone, whatever the calls that run over them show of it.

A wire of two thirds of its rate makes calls longer by a tenth, since ranks also wait and work in them, and that is
within what a busy machine does. The seconds that a byte takes show all of it.

The same holds for thinwire's own rounds on a machine that is busy: their messages take as long as it takes to wake up.
These are recorded, and judged by that first; here only what they do not show is found.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque

from thinwire.monitor.detect.change_points import Change, Watch, is_at_once, median
from thinwire.monitor.detect.collectives import UNDECIDED_S, how_to_decide
from thinwire.monitor.detect.connections import (
    LATEST,
    LEAST_S,
    SlowerWires,
    heavy_ways,
    is_probed,
    seconds_a_byte,
    slower_wires,
)
from thinwire.monitor.detect.delay_matrix import LEAST_ALONE, LEAST_END, WIRE_REMEDY, Cell
from thinwire.monitor.detect.progress import UNSURE
from thinwire.monitor.detect.timeline import Job
from thinwire.monitor.findings import Finding

# Calls whose size is so many times another one are not alike.
_ALIKE = 1.5
# Half of what lies between two looks at a kernel, so that no two of them have the same number.
_LOOK_S = 0.25
_BITS, _MILLION = 8.0, 1e6
# The middle of so many bursts over a way is what is usual there.
_FEW = 3
# In rounds everybody sends to everybody, so that times vary with who shares an access, and it takes long until a wire
# is sure to be as usual again: what its bytes took together in the latest seconds tells that sooner.
_LATELY_S = 4.0
# Where so many alarms of hundreds of wires have no place, the others will have none either.
_MOST_LOOKS = 16


def find_slow_flows(job: Job) -> list[Finding]:
    """Return the places over whose wires bytes take longer than they did: what lasts first, then what is over.

    Jobs whose messages are recorded are judged by these, unless they are thinwire's own rounds.
    """
    has_rounds = _has_rounds(job)
    if job.messages and not has_rounds:
        return []
    watches = watch_flows(job)
    alarms = [(watch.change, frozenset([cell])) for cell, watch in watches.items() if watch.change is not None]
    alarms += [(watch.change, cells) for cells, watch in watch_bursts(job).items() if watch.change is not None]
    alarms.sort(key=lambda one: (one[0].is_over, one[0].seen_round, sorted(one[1])))
    found: list[Finding] = []
    told: list[tuple[Change, frozenset[Cell]]] = []
    num_looks = 0
    for change, cells in alarms:
        if any(cells & others and is_at_once(change, other) for other, others in told):
            continue
        num_looks += 1
        if num_looks > _MOST_LOOKS:
            break
        until_s = math.inf if change.until_s is None else change.until_s
        wires = slower_wires(job, change.since_s, until_s) if _are_calls_alike(job, change.since_s, until_s) else None
        if wires is None or not _is_told_by(wires, cells) or _will_be_placed(job, wires, change):
            continue
        if has_rounds and change.until_s is None and not _is_still_so(job, wires, change):
            continue
        found.append(_slow_flow(job, wires, change))
        told.append((change, wires.explained.cells))
    return found


def watch_flows(job: Job) -> dict[Cell, Watch]:
    """Watch the seconds that a million bytes take over each way that carries enough, one value a look."""
    watches: dict[Cell, Watch] = {}
    ways = heavy_ways(job)
    begin_s = min((job.flows[cell][0][0] for cell in ways), default=0.0)
    for cell in sorted(ways):
        watch = watches[cell] = Watch()
        for at_s, each_s in seconds_a_byte(job.flows[cell]):
            watch.add(int((at_s - begin_s) / _LOOK_S), at_s, _MILLION * each_s)
    return watches


def watch_bursts(job: Job) -> dict[frozenset[Cell], Watch]:
    """Watch the bursts over each way, and over all from a rank and to it: one way alone may have few.

    Each counts as a ratio to the middle of those before it over the same way.
    """
    timed = sorted((done_s, cell, each_s) for cell, probes in job.probes.items() for _, done_s, each_s in probes)
    own_ends: dict[tuple[int, int], list[Cell]] = defaultdict(list)
    for cell in job.probes:
        for index in (0, 1):
            own_ends[index, cell[index]].append(cell)
    all_of = {end: frozenset(cells) for end, cells in own_ends.items()}
    ends = {cell: {frozenset([cell]), all_of[0, cell[0]], all_of[1, cell[1]]} for cell in job.probes}
    watches = {own: Watch() for found in ends.values() for own in found}
    usual: dict[Cell, deque[float]] = {cell: deque(maxlen=LATEST) for cell in job.probes}
    begin_s = timed[0][0] if timed else 0.0
    for done_s, cell, each_s in timed:
        known = usual[cell]
        ratio = each_s / max(median(known), LEAST_S) if len(known) >= _FEW else 1.0
        if len(known) >= _FEW:
            for own in ends[cell]:
                watches[own].add(int((done_s - begin_s) / _LOOK_S), done_s, ratio)
        if ratio < LEAST_END:  # what is slow must not become what is usual
            known.append(each_s)
    return watches


def _are_calls_alike(job: Job, since_s: float, until_s: float) -> bool:
    """Return whether calls are about as large as before: a byte of small ones takes longer on any wire."""
    before: list[int] = []
    after: list[int] = []
    for own in job.operations.values():
        operation = next(iter(own.values()))
        if operation.count >= 0 and operation.posted_s < until_s:
            (before if operation.posted_s < since_s else after).append(operation.count)
    if not before or not after:
        return True
    least, most = sorted((sum(before) / len(before), sum(after) / len(after)))
    return most <= _ALIKE * least


def _is_told_by(wires: SlowerWires, cells: frozenset[Cell]) -> bool:
    """Return whether a place has a wire that gave the alarm, and is slower by enough to be told."""
    explained = wires.explained
    if not cells & explained.cells or explained.excess < math.log(LEAST_END):
        return False
    # bursts share nothing: what they show as well is no wire that is shared more than before
    return not explained.is_wire_alone or max(wires.times, wires.burst_times) >= LEAST_ALONE


def _will_be_placed(job: Job, wires: SlowerWires, change: Change) -> bool:
    """Return whether the next bursts over other wires may say which of several places it is."""
    is_young = change.until_s is None and job.now_s - change.since_s < UNDECIDED_S
    return is_young and len(wires.explained.places) > 1 and is_probed(job)


def _has_rounds(job: Job) -> bool:
    """Return whether these are thinwire's own rounds."""
    return any(one.kind == "round" for own in job.operations.values() for one in own.values())


def _is_still_so(job: Job, wires: SlowerWires, change: Change) -> bool:
    """Return whether a byte takes at least half of that longer in the latest seconds too."""
    begin_s = max(change.since_s, job.now_s - _LATELY_S)
    longer = []
    for cell in wires.explained.cells:
        points = [one for at_s, one in job.flows.get(cell, ()) if at_s >= begin_s]
        num_bytes = points[-1].num_bytes - points[0].num_bytes if points else 0
        if num_bytes > 0:
            busy_s = points[-1].busy_s - points[-1].held_s - points[0].busy_s + points[0].held_s
            longer.append(math.log(max(busy_s / num_bytes, LEAST_S) / wires.usual_s))
    return not longer or median(longer) >= math.log(wires.times) / 2


def _slow_flow(job: Job, wires: SlowerWires, change: Change) -> Finding:
    explained = wires.explained
    named = " or ".join(map(str, explained.places))
    usual_mbit = _BITS / wires.usual_s / _MILLION
    return Finding(
        kind="communication slow", places=explained.places, since_s=change.since_s, until_s=change.until_s,
        evidence={
            "times_longer": round(wires.times, 2), "usual_mbit_a_second": round(usual_mbit, 3),
            "now_mbit_a_second": round(usual_mbit / wires.times, 3), "links": list(wires.links[:16]),
        },
        text=f"A byte takes {wires.times:.1f} times as long over {named} as it did, by the kernels' counters.",
        confidence=min(0.5 if len(explained.places) > 1 else UNSURE, explained.sure) * job.trust,
        remedy=WIRE_REMEDY,
        probe=how_to_decide(job, explained.places),
    )  # fmt: skip
