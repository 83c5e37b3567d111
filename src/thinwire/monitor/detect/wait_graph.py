"""Wait-for graph over all communicators: where the chain of waits of a standstill ends, at ranks or in a circle.

A rank inside an operation waits for the members that have not come. Such a member may itself wait in another
communicator, so that only a rank without waits of its own, or a circle of waits, is the cause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from thinwire.monitor.detect.timeline import Job
from thinwire.runlog.records import Operation


@dataclass(frozen=True, slots=True)
class OperationWait:
    """Ranks that wait in one operation of a communicator."""

    communicator: str  # its name
    sequence: int  # of the operation
    inside: Mapping[int, Operation]  # the operation of each rank that waits in it
    missing: frozenset[int]  # members that have not come


class WaitGraph:
    """Graph of the ranks that wait for each other, in all communicators.

    Args:
        job: All records.
        without: Ranks whose waits are not known or mean nothing: silent, or without records.
    """

    def __init__(self, job: Job, *, without: Collection[int] = ()) -> None:
        self._waits: dict[int, list[OperationWait]] = defaultdict(list)
        for wait in _waits(job):
            for rank in set(wait.inside) - set(without):
                self._waits[rank].append(wait)

    def waits_of(self, rank: int) -> list[OperationWait]:
        """Return the operations that a rank waits in."""
        return self._waits.get(rank, [])

    def is_inside(self, rank: int) -> bool:
        """Return whether a rank is in an operation that all have come to, so that it does not hang outside of one."""
        return any(not wait.missing for wait in self.waits_of(rank))

    def roots(self, ranks: Iterable[int]) -> list[frozenset[int]]:
        """Return where the chains of waits of some ranks end: single ranks that wait for none, or circles."""
        start = set(ranks)
        reached = {rank: self._reached(rank) for rank in start.union(*map(self._reached, start))}
        # the end of a chain is reached by all that it reaches itself
        ends = {rank for rank, ahead in reached.items() if all(rank in reached[other] for other in ahead)}
        found = []
        for circle in {frozenset({rank, *reached[rank]}) for rank in ends}:
            # ranks of a circle whose calls do not block them hang in their own code
            free = {rank for rank in circle if all(wait.inside[rank].is_async for wait in self.waits_of(rank))}
            found.append(frozenset(free) if len(circle) > 1 and free else circle)
        return sorted(found, key=min)

    def waiting_for(self, ranks: Collection[int]) -> set[int]:
        """Return all ranks that wait for some ranks, directly or by others."""
        return {rank for rank in self._waits if self._reached(rank) & set(ranks)} - set(ranks)

    def wait_for(self, rank: int) -> OperationWait | None:
        """Return the earliest operation that others wait for a rank in."""
        direct = [wait for waits in self._waits.values() for wait in waits if rank in wait.missing]
        return min(direct, key=lambda wait: max(op.posted_s for op in wait.inside.values()), default=None)

    def path(self, start: int, ends: Collection[int]) -> list[tuple[int, OperationWait, int]]:
        """Return a shortest chain of waits from a rank to one of some ranks."""
        before: dict[int, tuple[int, OperationWait]] = {}
        level = [start]
        while level and not before.keys() & set(ends):
            ahead = []
            for rank in level:
                for wait in self.waits_of(rank):
                    for other in sorted(wait.missing - before.keys()):
                        before[other] = rank, wait
                        ahead.append(other)
            level = ahead
        steps: list[tuple[int, OperationWait, int]] = []
        rank = min(before.keys() & set(ends), default=start)
        while rank in before and (not steps or rank != start):
            earlier, wait = before[rank]
            steps.append((earlier, wait, rank))
            rank = earlier
        return steps[::-1]

    def _reached(self, start: int) -> set[int]:
        found: set[int] = set()
        left = [start]
        while left:
            for wait in self.waits_of(left.pop()):
                left += wait.missing - found
                found |= wait.missing
        return found


def _waits(job: Job) -> Iterable[OperationWait]:
    """Yield each communicator's first operations that ranks are inside of."""
    own: dict[str, dict[int, Operation]] = defaultdict(dict)
    furthest: dict[tuple[str, int], int] = {}
    for (communicator, sequence), operations in sorted(job.operations.items(), key=lambda item: item[0][1]):
        for rank, operation in operations.items():
            furthest[communicator, rank] = sequence
            if operation.done_s is None:
                own[communicator].setdefault(rank, operation)
    for communicator, inside in own.items():
        known = job.communicators.get(communicator)
        members = set(known.ranks) if known is not None else {rank for name, rank in furthest if name == communicator}
        for sequence in sorted({operation.sequence for operation in inside.values()}):
            in_it = {rank: operation for rank, operation in inside.items() if operation.sequence == sequence}
            # a rank without records may have come
            missing = {rank for rank in members & set(job.last_seen_s)
                       if furthest.get((communicator, rank), -1) < sequence}  # fmt: skip
            yield OperationWait(communicator, sequence, in_it, frozenset(missing))
