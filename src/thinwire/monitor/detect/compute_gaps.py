"""Compute gaps of each rank between operations, and the start of each step, from the operations alone.

Where operations carry the number of a round, its longest gap is the work. Those of a plain torch job carry none, and
come several to a step: gradients in buckets follow each other closely, and then comes a long gap, the rest of the step.
So a step begins where all ranks but the slow ones have a long gap, and its work is all gaps since the step before.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from thinwire.monitor.detect.change_points import median
from thinwire.monitor.detect.timeline import Job
from thinwire.monitor.runlog.records import Operation

# A gap counts as long from this part of the one that half of all own time lies above.
_LONG = 0.4
_STRETCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One rank's time between two exchanges.

    Attributes:
        step: Its number.
        at_s: When it began.
        time_s: How long it took.
    """

    step: int
    at_s: float
    time_s: float


_Gaps = dict[int, dict[int, Work]]  # by sequence number, then by rank


def between_operations(job: Job) -> dict[int, list[Work]]:
    """Return each rank's work, one a round or a step; of several communicators that of the one with most of it."""
    rounds: dict[int, dict[int, Work]] = defaultdict(dict)
    steps: dict[str, _Gaps] = defaultdict(lambda: defaultdict(dict))
    ended: dict[tuple[str, int], Operation] = {}
    for (communicator, sequence), own in sorted(job.operations.items(), key=lambda item: item[0][1]):
        for rank, operation in own.items():
            gap = _gap(ended.get((communicator, rank)), operation)
            if gap is not None and operation.round < 0:
                steps[communicator][sequence][rank] = gap
            elif gap is not None:
                known = rounds[rank].get(gap.step)
                if known is None or known.time_s < gap.time_s:
                    rounds[rank][gap.step] = gap
            if operation.done_s is not None:
                ended[communicator, rank] = operation
    if rounds or not steps:
        return {rank: list(works.values()) for rank, works in rounds.items()}
    return _by_step(max(steps.values(), key=_total_s))


def _gap(before: Operation | None, operation: Operation) -> Work | None:
    """Return what lies between two operations that follow each other; none where they overlap."""
    if before is None or before.done_s is None or before.sequence != operation.sequence - 1:
        return None
    if operation.posted_s < before.done_s:
        return None
    step = operation.round if operation.round >= 0 else operation.sequence
    return Work(step=step, at_s=before.done_s, time_s=operation.posted_s - before.done_s)


def _by_step(gaps: _Gaps) -> dict[int, list[Work]]:
    ranks = {rank for own in gaps.values() for rank in own}
    found: dict[int, list[Work]] = {rank: [] for rank in ranks}
    since: dict[int, list[Work]] = defaultdict(list)
    step = 0
    for sequence, is_long in _long_ones(gaps, ranks):
        for rank, gap in gaps[sequence].items():
            since[rank].append(gap)
        if is_long:
            for rank, own in since.items():
                time_s = math.fsum(gap.time_s for gap in own)
                found[rank].append(Work(step=step, at_s=own[0].at_s, time_s=time_s))
            since.clear()
            step += 1
    return found


def _long_ones(gaps: _Gaps, ranks: Collection[int]) -> Iterator[tuple[int, bool]]:
    """Yield each sequence number, and whether its gap is long.

    What is long is told by the middle of many stretches: one wait of seconds would else make all other gaps short.
    """
    order = sorted(gaps)
    common = [
        _common_s([own[rank].time_s if rank in own else 0.0 for rank in ranks])
        for own in (gaps[sequence] for sequence in order)
    ]
    halves = [_weighted_median(common[begin : begin + _STRETCH]) for begin in range(0, len(common), _STRETCH)]
    long_s = _LONG * median(halves)
    yield from ((sequence, time_s >= long_s > 0) for sequence, time_s in zip(order, common, strict=True))


def _common_s(times_s: Sequence[float]) -> float:
    """Return what at least half of the ranks have, so that a slow one alone makes no step."""
    return sorted(times_s)[(len(times_s) - 1) // 2]


def _weighted_median(times_s: Sequence[float]) -> float:
    """Return the time that half of all time is in times as long or longer.

    Example:
        >>> _weighted_median([1.0, 1.0, 1.0, 8.0, 8.0])
        8.0
    """
    left_s = math.fsum(times_s) / 2
    for time_s in sorted(times_s, reverse=True):
        left_s -= time_s
        if left_s <= 0:
            return time_s
    return 0.0


def _total_s(gaps: Mapping[int, Mapping[int, Work]]) -> float:
    return math.fsum(gap.time_s for own in gaps.values() for gap in own.values())
