"""Hang detector: finds the rank that makes the others wait, inside and outside of communication.

Every rank records an operation before it waits in it. So a rank that is missing from the operation that the others wait
in hangs outside of communication (MegaScale, arXiv 2402.15627). If all have come, a message that does not arrive though
both ends are ready shows the place: each chain of waits ends there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from thinwire.monitor.detect.change_points import median
from thinwire.monitor.detect.collectives import placed_hang
from thinwire.monitor.detect.connections import CONNECTIONS, are_watched
from thinwire.monitor.detect.delay_matrix import Cell, DelayMatrix, probe_for
from thinwire.monitor.detect.heartbeats import unrecorded
from thinwire.monitor.detect.partition import cut_off, one_sided, partitioned
from thinwire.monitor.detect.progress import PROGRESS, is_dead, is_still, slow_ranks, slow_wires
from thinwire.monitor.detect.thread_activity import activity_of, silent_activity
from thinwire.monitor.detect.timeline import Job, Message
from thinwire.monitor.detect.wait_graph import WaitGraph
from thinwire.monitor.findings import Evidence, EvidenceKind, Finding, Place, joined
from thinwire.runlog.records import FULL_DISK, Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class HangConfig:
    """Constants of the hang detector."""

    silence_s: float = 3.0  # limit of a rank's silence where it writes heartbeats, however rare operations are
    periods: float = 3.0  # usual times between operations, or of a message, that are too long
    durations: float = 1.5  # longest usual operations that are too long: checkpoints and evaluation are no hang
    max_chain: int = 12  # ranks in a printed chain of waits
    latest_messages: int = 256  # messages that the usual duration is taken from
    tail_share: int = 20  # one message of this many may have been longer by an earlier fault
    # usual durations of a message below which it may be slow and not lost; links of 20 times exist (LOG 2026-11-24)
    very_slow: float = 25.0
    max_unsure_s: float = 60.0  # until a live rank that does not come is a sure hang
    one_packet: int = 1000  # bytes of a message that fits into a packet of any path, headers included
    near_operations: int = 8  # operations that belong to one stretch
    alike: float = 1.5  # ratio of durations that are alike


HANGS = HangConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standstill:
    """An operation that does not end: ranks inside, missing ranks, begin, and limits."""

    communicator: str
    sequence: int
    inside: Mapping[int, Operation]
    missing: tuple[int, ...]
    since_s: float
    limit_s: float
    gone_s: float
    left_behind: frozenset[int] = frozenset()
    ended: frozenset[int] = frozenset()  # of the missing ranks, those that have said goodbye

    @property
    def round(self) -> int:
        first = next(iter(self.inside.values()))
        return first.round if first.round >= 0 else self.sequence

    def evidence(self, job: Job, kind: EvidenceKind, **values: Any) -> Evidence:
        return Evidence(
            kind, waited_s=round(max(0.0, job.now_s - self.since_s), 3), communicator=self.communicator,
            operation=self.sequence, longer_than_s=round(self.limit_s, 3), **values,
        )  # fmt: skip


def find_hangs(job: Job) -> list[Finding]:
    """Return one finding for each communicator that stands still for longer than its own history allows.

    The limit is the longest of 1 s, three times the usual time between operations, and 1.5 times the longest
    operation that is usual. Before the first operation has been repeated, it is three usual steps: replicas that share
    cores are steps apart by then. Where a rank has ended by a fault of its own, the others stand still because of it.
    """
    failed = sorted((at_s, rank) for rank, (at_s, error) in job.goodbyes.items() if error)
    found = [_failed(job, rank) for _, rank in failed[:1]]
    dark = unrecorded(job)  # their progress is unknown
    for communicator in sorted({name for name, _ in job.operations}):
        left_behind = set(dark)
        while (still := _standstill(job, communicator, left_behind)) is not None:
            if not (failed and still.since_s <= failed[0][0] + still.gone_s):
                found += _findings_of(job, still)
            # if the others have gone on without these ranks, they may stand still elsewhere
            are_silent = set(still.inside) <= set(_silent(job, still.gone_s)) - left_behind
            without = left_behind | set(still.inside)
            own = [
                ops for (name, _), ops in job.operations.items() if name == communicator and not ops.keys() & without
            ]
            if not are_silent or not any(op.done_s is not None for ops in own for op in ops.values()):
                break  # the others wait for these
            left_behind = without
    # one finding for each place: several communicators may wait for one rank, or for one circle
    first: dict[object, Finding] = {}
    for one in sorted(found, key=lambda one: one.since_s):
        is_wait = one.evidence.kind in ("missing_rank", "ended_rank", "deadlock")
        first.setdefault((one.kind, one.places) if is_wait else id(one), one)
    return list(first.values()) or _given_up(job)


def _given_up(job: Job) -> list[Finding]:
    """Return the standstill at which the first rank gave up: a rank that loses a peer ends without an own error."""
    # messages that never arrived stay in the records as failed. Later errors of the other ranks follow from the first,
    # so that only the first counts
    found = []
    for communicator in sorted({name for name, _ in job.operations}):
        ranks = _ranks_that_gave_up(job, communicator)
        if not ranks:
            continue
        first_s, first = min((job.goodbyes[rank][0], rank) for rank in ranks)
        has_gone_on = any(
            name == communicator and rank not in ranks and op.done_s is not None and op.done_s > first_s
            for (name, _), ops in job.operations.items()
            for rank, op in ops.items()
        )
        if not has_gone_on:  # an elastic run goes on without ranks that leave
            found.append(_hang_at_end(job, communicator, ranks, first=first, first_s=first_s))
    return found


def _ranks_that_gave_up(job: Job, communicator: str) -> set[int]:
    """Return the ranks that ended without an own error inside an operation with a failed message."""
    failed = {
        (rank, m.operation) for m in job.messages
        if m.communicator == communicator and m.error and m.received_done_s is None
        for rank in (m.source, m.destination)
    }  # fmt: skip
    return {
        rank for (name, number), ops in job.operations.items() if name == communicator
        for rank, op in ops.items()
        if op.done_s is None and (rank, number) in failed and not job.goodbyes.get(rank, (0.0, "lives"))[1]
    }  # fmt: skip


def _hang_at_end(job: Job, communicator: str, ranks: Set[int], *, first: int, first_s: float) -> Finding:
    """Return the finding at the moment when the first rank gave up."""
    unfinished = {
        number: ops
        for (name, number), ops in sorted(job.operations.items())
        if name == communicator and any(ops[rank].done_s is None for rank in ranks & ops.keys())
    }
    number, ops = next(iter(unfinished.items()))
    inside = {rank: op for rank, op in ops.items() if op.done_s is None and rank in ranks}
    # a killed rank writes no goodbye, and its last record is older than the first one
    killed = tuple(
        rank
        for rank, seen_s in sorted(job.last_seen_s.items())
        if rank not in job.goodbyes and rank not in job.unsteady and seen_s < first_s
    )
    gone_s, limit_s = limits_s(op for own in unfinished.values() for op in own.values())
    ended = () if killed else _awaited(job, communicator, number, set(job.goodbyes) - set(ranks))
    still = _Standstill(
        communicator=communicator, sequence=number, inside=inside, missing=killed or ended, gone_s=gone_s,
        limit_s=limit_s, since_s=min(first_s, max(op.posted_s for op in inside.values())), ended=frozenset(ended),
    )  # fmt: skip
    arrivals = {way: [one for one in seen if one[0] <= first_s] for way, seen in job.arrivals.items()}
    view = replace(job, now_s=first_s, goodbyes={}, arrivals={way: seen for way, seen in arrivals.items() if seen})
    messages = [m for m in job.messages if m.communicator == communicator and m.operation in unfinished]
    if killed:
        found = _outside(view, still, killed, killed, messages)
    elif ended:
        found = _ended_early(job, still)
    else:
        stuck = [m for m in messages if m.is_stuck and m.begin_s is not None and m.begin_s < first_s]
        own = [m for m in messages if m.error and m.received_done_s is None and first in (m.source, m.destination)]
        came = [m for m in messages if m.received_done_s is not None and m.received_done_s <= first_s]
        found = _inside(view, still, [*came, *(stuck or own)])
    errors = sorted({m.error for m in messages if m.error and first in (m.source, m.destination)})
    return replace(
        found,
        text=f"{found.text} Rank {first} was the first to give up, at {first_s:.3f} s.",
        evidence=found.evidence.with_values(gave_up=sorted(ranks)[:32], errors=errors[:4]),
    )


def limits_s(operations: Iterable[Operation]) -> tuple[float, float]:
    """Return the limits of an operation in seconds if a rank is silent, and if all live, from earlier ones in order."""
    posted: dict[int, list[float]] = defaultdict(list)
    durations: dict[int, float] = {}
    latest: dict[int, tuple[float, int]] = {}
    for operation in operations:
        number = operation.sequence
        posted[operation.rank].append(operation.posted_s)
        latest[number] = max(
            latest.get(number, (operation.posted_s, operation.rank)), (operation.posted_s, operation.rank)
        )
        if operation.done_s is not None:
            durations[number] = max(durations.get(number, 0.0), operation.done_s - operation.posted_s)
    gaps = [later - early for times in posted.values() for early, later in pairwise(times)]
    usual_s = median(gaps) if gaps else 0.0
    gone_s = max(PROGRESS.min_wait_s, HANGS.periods * usual_s)
    return gone_s, max(gone_s, HANGS.durations * _longest_usual_s(durations, latest))


def _first_limit_s(job: Job, own: Iterable[Mapping[int, Operation]]) -> float:
    """Return the limit of an operation if no rank has posted two: three usual steps of the recorded work; else 0."""
    posted = [rank for ops in own for rank in ops]
    if len(posted) > len(set(posted)):
        return 0.0
    steps = [span.done_s - span.started_s for span in job.spans if span.kind == "compute"]
    return HANGS.periods * median(steps) if steps else 0.0


def _longest_usual_s(durations: Mapping[int, float], latest: Mapping[int, tuple[float, int]]) -> float:
    """Return the longest usual operation; an earlier fault is no measure of the next one."""
    # a duration that occurred once, with the same rank last, and not in recent operations was a fault. One that recurs,
    # as with evaluation or checkpoints on one rank, is usual, and so are those of the latest operations
    numbers = sorted(durations)
    recent = set(numbers[-HANGS.near_operations :])
    left = sorted(numbers, key=lambda number: durations[number], reverse=True)
    for place, number in enumerate(left):
        if number in recent:
            return durations[number]
        for other in left[place + 1 :]:
            if HANGS.alike * durations[other] < durations[number]:
                break
            if abs(other - number) > HANGS.near_operations and latest[other][1] == latest[number][1]:
                return durations[number]
    return 0.0


def _standstill(job: Job, communicator: str, left_behind: Set[int]) -> _Standstill | None:
    own = sorted(
        (key[1], {rank: op for rank, op in ops.items() if rank not in left_behind})
        for key, ops in job.operations.items()
        if key[0] == communicator
    )
    still = [(sequence, ops) for sequence, ops in own if any(op.done_s is None for op in ops.values())]
    if not still:
        return None
    gone_s, limit_s = limits_s(op for _, all_ops in own for op in all_ops.values())
    limit_s = max(limit_s, _first_limit_s(job, (ops for _, ops in own)))
    # a killed rank's last operation stays open in the records: operations with failed calls come first
    failed = [
        (number, ops) for number, ops in still
        if {rank for rank, op in ops.items() if op.done_s is None} <= job.left
    ]  # fmt: skip
    sequence, ops = (failed or still)[0]
    known = job.communicators.get(communicator)
    members = set(known.ranks) if known is not None else {rank for _, all_ops in own for rank in all_ops}
    furthest = {rank: number for number, all_ops in own for rank in all_ops}
    # a rank without records may have come
    members &= set(job.last_seen_s) - left_behind
    missing = tuple(sorted(rank for rank in members - set(job.goodbyes) if furthest.get(rank, -1) < sequence))
    inside = {rank: op for rank, op in ops.items() if op.done_s is None}
    since_s = max(op.posted_s for op in inside.values())
    still_s = job.now_s - since_s
    if set(inside) <= set(job.goodbyes) and not missing:
        return None  # all of its ranks have ended, without a fault of their own
    # a rank that has ended is named only if no live one is missing: that one is the cause
    ended = () if missing else _awaited(job, communicator, sequence, members & set(job.goodbyes))
    missing = missing or ended
    # ranks whose calls have failed do not wait any more: the missing ones are gone
    is_left = bool(missing) and set(inside) <= job.left
    is_sure = is_left or still_s >= (gone_s if ended else limit_s)
    if not ended:
        is_sure = is_sure or (still_s >= PROGRESS.min_wait_s and bool(_silent(job, gone_s))) or bool(_survivors(job))
    may_be = still_s >= (min(gone_s, PROGRESS.min_wait_s) if job.arrivals else gone_s)
    if not is_sure and not (may_be and _has_stuck(job, communicator, sequence, is_long=still_s >= gone_s)):
        return None
    return _Standstill(
        communicator=communicator, sequence=sequence, inside=inside, missing=missing, since_s=since_s,
        limit_s=limit_s, gone_s=gone_s, left_behind=frozenset(left_behind), ended=frozenset(ended),
    )  # fmt: skip


def _awaited(job: Job, communicator: str, sequence: int, ended: Set[int]) -> tuple[int, ...]:
    """Return the ranks that have said goodbye and that others still wait for in an operation."""
    # an elastic run goes on without a rank that has left: an operation has ended since. Messages show who waits for
    # whom
    own = sorted((number, ops) for (name, number), ops in job.operations.items() if name == communicator)
    last = {rank: op for _, ops in own for rank, op in ops.items() if rank in ended}
    done = [number for number, ops in own if any(op.done_s is not None for op in ops.values())]
    messages = [m for m in job.messages if m.communicator == communicator and m.operation == sequence]
    open_ends = {rank for m in messages if m.received_done_s is None for rank in (m.source, m.destination)}
    return tuple(sorted(
        rank for rank in ended
        if (rank not in last or last[rank].done_s is not None)
        and max(done, default=-1) <= (last[rank].sequence if rank in last else -1) < sequence
        and (not messages or rank in open_ends)
    ))  # fmt: skip


def _has_stuck(job: Job, communicator: str, sequence: int, *, is_long: bool) -> bool:
    """Return whether a message takes three times as long as 95 % of the latest, though both ends are ready."""
    # durations of operations do not help, since most of them is waiting for late ranks. If no byte arrives, three times
    # the median suffices; else the operation must have stood for long too
    own = [m for m in job.messages if m.communicator == communicator]
    stuck = [m for m in own if m.operation == sequence and m.is_stuck and m.begin_s is not None]
    took = _took(own)
    if not stuck or not took:
        return False
    if is_still(job, stuck):
        longest_s = median(took)
    elif is_long:
        longest_s = took[-1 - len(took) // HANGS.tail_share]  # without the longest, which may be of an earlier fault
    else:
        return False
    waited_s = job.now_s - min(m.begin_s for m in stuck if m.begin_s is not None)
    return waited_s >= max(PROGRESS.min_wait_s, HANGS.periods * longest_s)


def _took(messages: Sequence[Message]) -> list[float]:
    return sorted(m.transfer_s for m in messages[-HANGS.latest_messages :] if m.transfer_s is not None)


def _findings_of(job: Job, still: _Standstill) -> list[Finding]:
    if still.ended:
        return [_ended_early(job, still)]
    messages = [m for m in job.messages if m.communicator == still.communicator and m.operation == still.sequence]
    if any(m.received_done_s is None and still.left_behind & {m.source, m.destination} for m in messages):
        return []  # these wait for ranks that stand still elsewhere
    silent = tuple(rank for rank in _silent(job, still.gone_s) if rank not in still.left_behind)
    inside = tuple(sorted(still.inside))
    if set(inside) <= job.left:  # ranks whose calls have failed write no more
        known_s = max(job.last_seen_s[rank] for rank in inside)
        silent += tuple(rank for rank in still.missing if job.last_seen_s[rank] < known_s and rank not in silent)
    # if all ranks inside are silent, the others have gone on: other silent ranks stand elsewhere
    culprits = still.missing or (inside if set(inside) <= set(silent) else silent)
    if culprits:
        # a host that hears from no other waits for the others, not for its own waiting ranks
        alone = None if set(culprits) & set(silent) else cut_off(job, [*still.inside, *culprits], since_s=still.since_s)
        if alone is not None:
            return [alone]
        if still.missing and len({name for name, _ in job.operations}) > 1:
            return _at_roots(job, still, silent, messages)
        return [_outside(job, still, culprits, silent, messages)]
    # until all have shown a sign of life, one of them may just have been paused or killed
    known_s = still.since_s + PROGRESS.min_wait_s
    if job.has_beats and any(job.last_seen_s[rank] < known_s for rank in still.inside if rank not in job.goodbyes):
        return []
    if not messages and job.now_s - still.since_s < CONNECTIONS.placed_s and are_watched(job):
        return []  # readings of connections will soon show which link is dead
    found = _inside(job, still, messages)
    return [found if messages else placed_hang(job, found)]


def _at_roots(
    job: Job, still: _Standstill, silent: tuple[int, ...], messages: list[Message]
) -> list[Finding]:  # fmt: skip
    """Return a finding where each chain of waits over all communicators ends: at ranks, or in a circle."""
    graph = WaitGraph(job, without={*silent, *still.left_behind, *job.goodbyes})
    found: list[Finding] = []
    alone: set[int] = set()
    for root in graph.roots(still.missing):
        if len(root) > 1:
            found.append(_deadlock(job, still, graph, root))
        elif not root & set(job.goodbyes) and not any(graph.is_inside(rank) for rank in root):
            alone |= root  # else the communicator that it is inside of shows the cause
    direct = alone & set(still.missing)
    if direct:
        found.append(_outside(job, still, tuple(sorted(direct)), silent, messages, graph=graph))
    for rank in sorted(alone - direct):
        wait = graph.wait_for(rank)
        assert wait is not None
        since_s = max(op.posted_s for op in wait.inside.values())
        own = [m for m in job.messages if m.communicator == wait.communicator and m.operation == wait.sequence]
        there = replace(still, communicator=wait.communicator, sequence=wait.sequence, inside=wait.inside,
                        missing=(rank,), since_s=since_s)  # fmt: skip
        found.append(_outside(job, there, (rank,), silent, own, graph=graph))
    return found


def _deadlock(job: Job, still: _Standstill, graph: WaitGraph, circle: frozenset[int]) -> Finding:
    """Return that ranks wait for each other, each in an operation that another one has not come to."""
    first = min(circle)
    steps = []
    for rank, wait, other in graph.path(first, {first}):
        one = wait.inside[rank]
        name = f"{one.kind} {wait.sequence} of {job.group_name(wait.communicator)}"
        steps.append(f"{rank} waits for {other} in {name}{f' at {one.site}' if one.site else ''}")
    chain = "; ".join(steps)
    waiting = sorted(graph.waiting_for(circle) | circle)
    named = ", ".join(map(str, sorted(circle)))
    return Finding(
        kind="desync", places=(Place(kind="rank", ranks=tuple(sorted(circle))),), since_s=still.since_s,
        since_round=still.round, seen_round=still.round,
        evidence=still.evidence(
            job, "deadlock", waiting=waiting[:32],
            last_sign_s=round(min(job.last_seen_s[rank] for rank in circle), 3), wait_chain=chain,
        ),
        text=f"Ranks {named} wait for each other in a circle: rank {chain}. They call these operations in "
        "different order.",
        confidence=0.9 * job.trust,
        remedy="call the operations of all groups in one order on all ranks; let one side of a pair receive first, or "
        "use batch_isend_irecv",
    )  # fmt: skip


def _silent(job: Job, limit_s: float) -> tuple[int, ...]:
    """Return ranks whose recorder has stopped: paused, killed, or on a host that is gone."""
    if not job.has_beats:
        return ()
    limit_s = min(limit_s, HANGS.silence_s)
    left = _survivors(job)
    quiet = [
        rank
        for rank, at_s in job.last_seen_s.items()
        if (job.now_s - at_s > max(limit_s, job.silence_s(rank)) or rank in left)
        and rank not in job.unsteady
        and rank not in job.goodbyes
    ]
    return tuple(sorted(quiet)) if len(quiet) < len(job.last_seen_s) else ()


def _survivors(job: Job) -> tuple[int, ...]:
    """Return the ranks without a goodbye if most have one: killed ranks write none, the others end by their loss."""
    left = tuple(sorted(set(job.last_seen_s) - set(job.goodbyes)))
    return left if 2 * len(left) < len(job.last_seen_s) else ()


def _failed(job: Job, rank: int) -> Finding:
    at_s, error = job.goodbyes[rank]
    is_written_for_it = error.startswith("was ")  # by the launcher; a rank's own error starts with its type
    place = Place(kind="rank", ranks=(rank,))
    return Finding(
        kind="non-communication hang", places=(place,), since_s=at_s,
        evidence=Evidence("own_error", error=error, others_ended=sorted(set(job.goodbyes) - {rank})[:32]),
        text=f"Rank {rank} {error}." if is_written_for_it else f"Rank {rank} has ended by an error of its own: {error}",
        confidence=0.95 * job.trust,
        remedy="make room on that disk, or write to another one" if FULL_DISK in error
        else "read this rank's log and the system's (dmesg names processes that ran out of memory); the others end "
        "because they lost this rank" if is_written_for_it
        else "mend what the error says; the others end because they lost this rank",
    )  # fmt: skip


def _ended_early(job: Job, still: _Standstill) -> Finding:
    """Return that ranks have ended without a fault while others wait for them: mostly uneven batches."""
    ended = tuple(sorted(still.ended))
    ended_s = min(job.goodbyes[rank][0] for rank in ended)
    own = [op for (name, _), ops in job.operations.items() if name == still.communicator for op in ops.values()]
    last = max((op.sequence for op in own if op.rank in still.ended), default=-1)
    place, waiting = Place(kind="rank", ranks=ended), sorted(still.inside)
    named = ", ".join(map(str, waiting[:16]))
    return Finding(
        kind="non-communication hang", places=(place,), since_s=ended_s, since_round=still.round,
        seen_round=still.round,
        evidence=replace(still, limit_s=still.gone_s).evidence(
            job, "ended_rank", waiting=waiting[:32], last_sign_s=round(ended_s, 3),
            wait_chain=f"{named} wait{'s' * (len(waiting) == 1)} for {', '.join(map(str, ended))}", last_operation=last,
        ),
        text=f"{place.title} said goodbye without an error after operation {last} of "
        f"{job.group_name(still.communicator)}, and {Place(kind='rank', ranks=tuple(waiting))} "
        f"wait{'s' * (len(waiting) == 1)} for {'it' if len(ended) == 1 else 'them'} in operation {still.sequence}: "
        "uneven batches.",
        confidence=0.95 * job.trust,
        remedy="give each rank the same number of batches (drop_last, a sampler that pads), or let short ranks join "
        "in until all have ended (torch.distributed.algorithms.Join)",
    )  # fmt: skip


def _outside(
    job: Job, still: _Standstill, culprits: tuple[int, ...], silent: tuple[int, ...], messages: list[Message], *,
    graph: WaitGraph | None = None,
) -> Finding:  # fmt: skip
    gone = tuple(rank for rank in culprits if rank in silent)
    culprits = gone or culprits  # ranks that are gone keep the others from coming
    lost = any(m.error for m in messages if {m.source, m.destination} & set(culprits))
    who = "has ended or is cut off" if gone and lost else "is paused, killed or cut off" if gone else "is alive"
    last_s = min(job.last_seen_s.get(rank, still.since_s) for rank in culprits)
    place = _place_of(job, culprits)
    came = "not come to" if still.missing else "stopped inside of"
    others = set(still.inside) - set(culprits)
    sitting = f", which {len(others)} other{'s sit' if len(others) > 1 else ' sits'} in" if others else ""
    # a live rank that others wait for may be very slow for so long
    sure_s = min(HANGS.very_slow * still.gone_s / HANGS.periods, max(HANGS.max_unsure_s, 2 * still.limit_s))
    is_unsure = not gone and not set(still.inside) <= job.left and job.now_s - still.since_s < sure_s
    if is_unsure and (slow := slow_ranks(job, culprits, place, waited_since_s=still.since_s)) is not None:
        return slow
    activity = silent_activity(job, gone[0], since_s=last_s) if gone else (
        activity_of(job, culprits[0], since_s=still.since_s)
    )  # fmt: skip
    if gone and activity is not None:
        who = "is silent"
    does = f" Rank {culprits[0]} {activity.text}." if activity is not None else ""
    found = Finding(
        kind="non-communication hang",
        places=(place,),
        since_s=min(last_s, still.since_s) if gone else still.since_s,
        since_round=still.round, seen_round=still.round,
        evidence=still.evidence(
            job, "missing_rank",
            waiting=sorted({*still.inside, *(graph.waiting_for(culprits) if graph else ())} - set(culprits))[:32],
            last_sign_s=round(last_s, 3), wait_chain=_chain(still, messages, culprits),
            activity=None if activity is None else activity.text, stack=None if activity is None else activity.stack,
        ),
        text=f"{place.title} has {came} operation {still.sequence} of {job.group_name(still.communicator)}{sitting}; "
        f"its recorder {who}{', and it may also be very slow' if is_unsure else ''}.{does}",
        confidence=(0.95 if gone else PROGRESS.unsure if is_unsure else 0.9) * job.trust,
        remedy=activity.remedy if activity is not None
        else "restart it or go on without it; its own log ends where it hangs" if gone
        else "take its stack (py-spy dump): it hangs in its own code, such as data loading, a lock or a file",
    )  # fmt: skip
    return partitioned(job, found)


def _inside(job: Job, still: _Standstill, messages: list[Message]) -> Finding:
    if (slow := slow_wires(job, messages)) is not None:
        return slow
    stuck = [m for m in messages if m.is_stuck or (m.error and m.received_done_s is None)]
    if (partial := one_sided(job, still.inside, since_s=still.since_s)) is not None:
        evidence = still.evidence(job, "one_sided", **partial.evidence)
        return replace(partial, since_round=still.round, seen_round=still.round, evidence=evidence)
    cells: dict[Cell, float] = {
        (m.source, m.destination): 0.0 for m in messages if m.received_done_s is not None and m.sent_posted_s
    }
    # a message that its sender is not ready for waits for that sender
    cells |= {(m.source, m.destination): 1.0 for m in stuck}
    explained = DelayMatrix(cells, job.host_of).explain() if stuck else None
    places = explained.places if explained is not None else (Place(kind="communicator"),)
    places = tuple(dict.fromkeys(_whole_connection(job, place, stuck) for place in places))
    named = joined(places)
    group = job.group_name(still.communicator)
    who = "All ranks" if group == "all ranks" else f"All of {group}"
    text = f"{who} are in operation {still.sequence}, and it does not end"
    text += f": {len(stuck)} messages that both ends are ready for do not arrive ({named})." if stuck else "."
    share = explained.fit if explained is not None else 0.0
    confidence = 0.5 if len(places) > 1 or not stuck else 0.6 + 0.35 * share
    text += _by_size(job, stuck)
    # the wait for the latest stuck message, in usual durations of a message
    usual_s = median(_took([m for m in job.messages if m.communicator == still.communicator]))
    begun_s = max((m.begin_s for m in stuck if m.begin_s is not None), default=-math.inf)
    times = (job.now_s - begun_s) / usual_s if usual_s > 0 else math.inf
    if is_dead(job, stuck):
        text += " Not a byte comes over it, nor a sign of life of the connection."
    elif times < HANGS.very_slow:
        confidence = min(confidence, PROGRESS.unsure)
        text += f" They have been waited for {times:.0f} times as long as usual: it may also be very slow."
    return Finding(
        kind="communication hang",
        places=places,
        since_s=still.since_s, since_round=still.round, seen_round=still.round,
        evidence=still.evidence(
            job, "stuck_message", stuck=[f"{m.source} -> {m.destination}" for m in stuck][:16],
            arrived=sum(m.received_done_s is not None for m in messages),
            errors=sorted({m.error for m in messages if m.error})[:4],
        ), text=text, confidence=confidence * job.trust,
        remedy="look at this wire: routes, firewalls, cables; thinwire doctor HOST:PORT there tests the size of its "
        "packets; send the same bytes over it outside of the job",
        probe=probe_for(places) or ("" if stuck else "exchange messages in pairs of ranks: none were recorded"),
    )  # fmt: skip


def _by_size(job: Job, stuck: Sequence[Message]) -> str:
    """Return that small messages pass where large ones are stuck, as on a path that loses full packets."""
    begun_s = {(m.source, m.destination): m.begin_s for m in stuck if m.begin_s is not None}
    passed = {
        (m.source, m.destination)
        for m in job.messages
        if m.num_bytes <= HANGS.one_packet
        and (m.received_done_s or 0.0) > begun_s.get((m.source, m.destination), math.inf)
    }
    if not begun_s or passed != set(begun_s) or min(m.num_bytes for m in stuck) <= HANGS.one_packet:
        return ""
    return " Messages of one small packet still arrive there: a part of the path may lose full packets."


def _whole_connection(job: Job, place: Place, stuck: list[Message]) -> Place:
    """Return both ways of a link that is stuck one way, unless the other way has worked since."""
    # a connection that is cut one way carries little the other way, since acknowledgements are lost. A message that
    # arrived the other way at about the time of the stuck one may have arrived before the cut
    if place.kind not in ("link", "host link"):
        return place
    host_of = job.host_of

    def is_of(message: Message, ends: tuple[object, ...]) -> bool:
        own = (message.source, message.destination)
        return (own if place.ranks else tuple(host_of[rank] for rank in own)) == ends

    way: tuple[object, ...] = place.ranks or place.hosts
    since_s = min((m.begin_s for m in stuck if is_of(m, way) and m.begin_s is not None), default=math.inf)
    usual_s = median([m.transfer_s for m in job.messages if m.transfer_s is not None and is_of(m, way)])
    sure_s = since_s + HANGS.periods * (0.0 if math.isnan(usual_s) else usual_s)
    if any((m.received_done_s or 0.0) > sure_s for m in job.messages if is_of(m, way[::-1])):
        return place
    if place.ranks:
        return Place(kind="link both ways", ranks=tuple(sorted(place.ranks)))
    return Place(kind="host link both ways", hosts=tuple(sorted(place.hosts)))


def _place_of(job: Job, ranks: tuple[int, ...]) -> Place:
    """Return the host with exactly these ranks, or the ranks."""
    hosts = {job.host_of[rank] for rank in ranks}
    if len(ranks) > 1 and set(ranks) == {rank for rank, host in job.host_of.items() if host in hosts}:
        return Place(kind="host", hosts=tuple(sorted(hosts)))
    return Place(kind="rank", ranks=ranks)


def _chain(still: _Standstill, messages: list[Message], culprits: tuple[int, ...]) -> str:
    """Return the chain of waits from a waiting rank to a culprit, as text."""
    waits: dict[int, set[int]] = defaultdict(set)
    for message in messages:
        if message.received_done_s is None and message.received_posted_s is not None:
            waits[message.destination].add(message.source)
    for start in sorted(waits):
        path, seen = [start], {start}
        while path[-1] not in culprits and len(path) < HANGS.max_chain:
            following = waits[path[-1]] - seen
            if not following:
                break
            path.append(min(following & set(culprits) or following))
            seen.add(path[-1])
        if path[-1] in culprits and len(path) > 1:
            return " waits for ".join(map(str, path))
    others = sorted(set(still.inside) - set(culprits))
    who = f"{', '.join(map(str, others[:16]))} wait{'s' * (len(others) == 1)}" if others else "nobody waits"
    return f"{who} for {', '.join(map(str, culprits))}"
