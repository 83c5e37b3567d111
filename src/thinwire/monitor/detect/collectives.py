"""Collective detector: slow or hanging collectives without recorded messages, found by calls, placed by connections."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

from thinwire.monitor.detect.change_points import CUSUM, ChangePointDetector
from thinwire.monitor.detect.connections import (
    CONNECTIONS,
    SlowerWires,
    are_watched,
    dead_wires,
    how_to_decide,
    is_probed,
    slower_wires,
    with_probes,
)
from thinwire.monitor.detect.delay_matrix import WIRE_REMEDY, probe_for
from thinwire.monitor.detect.link_history import size_class
from thinwire.monitor.detect.progress import PROGRESS
from thinwire.monitor.detect.timeline import Job
from thinwire.monitor.findings import Evidence, Finding, Place, joined


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveConfig:
    """Constants of the detector of slow collectives."""

    look_rounds: int = 24  # operations after an alarm that the ratio is taken from
    min_share: float = 0.5  # share of the operations' log ratio that a link must show to explain them
    unplaced_s: float = 2.5  # wait for readings of connections before a finding without a place is reported
    slow: float = math.log(2.0)  # log ratio below which a link may just share its host (LOG 2026-11-24, 1.5 times)


COLLECTIVES = CollectiveConfig()

_ROOTED = ("broadcast", "reduce", "gather", "scatter")


def find_slow_operations(job: Job) -> list[Finding]:
    """Return communicators whose operations take longer and have no recorded messages.

    The rank that waited least came last; its wait is the operation's own duration, on one clock. A rank that only
    sends is done when its kernel has the bytes, so that a full connection looks like a slow operation: operations with
    a root are left to the connections.
    """
    seen = {message.communicator for message in job.messages}
    watches: dict[str, dict[tuple[str, int], ChangePointDetector]] = defaultdict(
        lambda: defaultdict(ChangePointDetector)
    )
    for (communicator, sequence), own in sorted(job.operations.items(), key=lambda item: item[0][1]):
        # one clock each, so that errors between clocks do not matter
        waits = [op.done_s - op.posted_s for op in own.values() if op.done_s is not None]
        first = next(iter(own.values()))
        if communicator in seen or len(waits) < len(own) or len(own) < 2 or first.kind in _ROOTED:
            continue
        watch = watches[communicator][first.kind, size_class(first.count)]
        watch.add(sequence, first.posted_s, max(0.0, min(waits)))
    found = []
    for communicator, own_watches in sorted(watches.items()):
        slow = [watch for watch in own_watches.values() if watch.change is not None]
        slow = [watch for watch in slow if _lasting(watch) >= math.log(CUSUM.min_ratio)]
        if slow:  # of those that last, the one that became longest: a wire slows large operations by most
            worst = max(slow, key=lambda one: (
                one.change is not None and not one.change.is_over, one.usual_s * math.expm1(_lasting(one))
            ))  # fmt: skip
            finding = _slow_operation(job, communicator, worst)
            found += [] if _will_be_placed(job, finding) else [finding]
    return found


def _will_be_placed(job: Job, slow: Finding) -> bool:
    """Return whether the next readings of connections, or the next bursts, may show the place."""
    is_placed = slow.places[0].kind != "communicator"
    if slow.until_s is not None or (is_placed and len(slow.places) == 1):
        return False
    waited_s = job.now_s - slow.since_s
    if is_probed(job):
        return waited_s < CONNECTIONS.undecided_s
    return not is_placed and waited_s < COLLECTIVES.unplaced_s and are_watched(job)


def _lasting(watch: ChangePointDetector) -> float:
    assert watch.change is not None
    return watch.excess_in(watch.change.since_round, watch.change.last_round(COLLECTIVES.look_rounds))


def _slow_operation(job: Job, communicator: str, watch: ChangePointDetector) -> Finding:
    assert watch.change is not None
    change, ratio = watch.change, math.exp(_lasting(watch))
    wires = slower_wires(job, change.since_s, math.inf if change.until_s is None else change.until_s)
    if wires is not None and wires.explained.excess < COLLECTIVES.min_share * math.log(ratio):
        wires = None  # too little to explain the operations
    found = Finding(
        kind="communication slow",
        places=(Place(kind="communicator"),),
        since_s=change.since_s, since_round=change.since_round, seen_round=change.seen_round, until_s=change.until_s,
        evidence=Evidence(
            "slow_operation", times_longer=round(ratio, 2), communicator=communicator, usual_s=round(watch.usual_s, 6),
        ),
        text=f"Operations of {job.group_name(communicator)} take {ratio:.1f} times as long as they did, also for the "
        "rank that comes last",
        confidence=0.6 * job.trust,
        remedy="find the link first",
        probe="exchange messages in pairs of ranks, or use exchanges that are recorded by peer" + with_probes(job),
    )  # fmt: skip
    if wires is None:
        return replace(found, text=f"{found.text}; the records do not tell by which link.")
    return _placed(found, wires, job)


def _placed(found: Finding, wires: SlowerWires, job: Job) -> Finding:
    """Return slow operations with the connections that make them slow, by the kernels' counters."""
    explained = wires.explained
    is_little = wires.num_seen < CONNECTIONS.few_after or explained.excess < COLLECTIVES.slow
    most = 0.5 if len(explained.places) > 1 else PROGRESS.unsure if is_little else 0.9
    evidence = found.evidence.with_values(byte_times_longer=round(wires.times, 2), links=list(wires.links[:16]))
    if evidence.kind == "slow_operation":
        evidence = Evidence("placed_operation", **evidence)
    return replace(
        found, places=explained.places, confidence=min(most, explained.sure) * job.trust,
        probe=how_to_decide(job, explained.places), evidence=evidence, remedy=WIRE_REMEDY,
        text=f"{found.text}: a byte takes {wires.times:.1f} times as long over {joined(explained.places)}, by the "
        "kernel's counters.",
    )  # fmt: skip


def placed_hang(job: Job, hang: Finding) -> Finding:
    """Return a hang inside a collective with the links that are dead, if connections are read."""
    if not are_watched(job):
        return hang
    explained, num_known = dead_wires(job)
    evidence = hang.evidence.with_values(connections_known=num_known)
    if explained is not None:
        named = joined(explained.places)
        is_one = len(explained.places) == 1
        return replace(
            hang, places=explained.places, confidence=(0.6 + 0.35 * explained.fit if is_one else 0.5) * job.trust,
            text=f"{hang.text[:-1]}: nothing comes any more over {named}, no acknowledgement and no answer to what the "
            "kernel asks.",
            evidence=evidence, probe=probe_for(explained.places),
        )  # fmt: skip
    wires = slower_wires(job, hang.since_s)
    if wires is not None and wires.explained.excess >= COLLECTIVES.slow:
        slow = replace(hang, kind="communication slow", text=f"{hang.text[:-1]} yet", confidence=0.5 * job.trust)
        return replace(_placed(slow, wires, job), confidence=min(PROGRESS.unsure, slow.confidence))
    if not num_known:
        return hang
    return replace(
        hang, text=f"{hang.text[:-1]}, though all {num_known} connections between hosts that are known of answer.",
        evidence=evidence,
        remedy="take the stacks of all ranks (py-spy dump): it is no wire",
    )  # fmt: skip
