"""Operations of NCCL side by side: what the Inspector of each rank wrote of the same one.

All ranks leave an operation of a kind in which none can end before all have come at about the same time. So how much
longer one rank's kernel was in it than another's is by how much it came sooner, and no clocks are compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from thinwire.monitor.detect.change_points import median
from thinwire.monitor.detect.link_history import size_class
from thinwire.monitor.nccl.values import TOGETHER, Numbers, Timing

# From so many ranks on, what the others took is taken from all ranks: one more is little among them.
_MANY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The operations of one kind in one communicator.

    Attributes:
        communicator: The begin of its hash.
        kind: NCCL's name of it.
        num_ranks: How many ranks the communicator has.
        operations: Sequence number and what each rank wrote, in order; those that at least two ranks wrote.
        seats: Host and process of each rank that wrote anything.
    """

    communicator: str
    kind: str
    num_ranks: int
    operations: list[tuple[int, dict[int, Timing]]] = field(default_factory=list)
    seats: Mapping[int, tuple[str, int]] = field(default_factory=dict)

    @property
    def unrecorded(self) -> int:
        """How many ranks wrote nothing."""
        return max(0, self.num_ranks - len(self.seats))

    @property
    def period_s(self) -> float:
        """Seconds from one operation to the next, on the ranks' own clocks; NaN where they do not tell."""
        first, last = self.operations[0], self.operations[-1]
        both = first[1].keys() & last[1].keys()
        spans = [last[1][rank].at_s - first[1][rank].at_s for rank in both]
        return median([span / (last[0] - first[0]) for span in spans if span > 0 and last[0] > first[0]])

    def usual_s(self) -> dict[int, float]:
        """Return what an operation of each size takes where the last rank has come: the middle of the shortest."""
        shortest: dict[int, list[float]] = defaultdict(list)
        for _, own in self.operations:
            shortest[class_of(own)].append(shortest_s(own))
        return {classed: median(times) for classed, times in shortest.items()}


def class_of(own: Mapping[int, Timing]) -> int:
    """Return the size of an operation, as a class of sizes that are alike for `changes.Watch`."""
    return 2 * size_class(next(iter(own.values())).num_bytes)


def shortest_s(own: Mapping[int, Timing]) -> float:
    """Return how long the rank that came last was in an operation: what the operation itself takes."""
    return min(one.time_s for one in own.values())


def late_s(own: Mapping[int, Timing]) -> dict[int, float]:
    """Return by how many seconds each rank came later than the middle one of the others; 0 where it did not.

    Example:
        >>> kernel = dict(communicator="0x1", num_ranks=3, host="a", pid=1, kind="AllReduce", sequence=0, num_bytes=8)
        >>> times = {0: 0.5, 1: 0.125, 2: 0.5}
        >>> late_s({rank: Timing(rank=rank, time_s=time_s, at_s=0.0, **kernel) for rank, time_s in times.items()})
        {0: 0.0, 1: 0.375, 2: 0.0}
    """
    if len(own) > _MANY:
        middle = median([one.time_s for one in own.values()])
        return {rank: max(0.0, middle - one.time_s) for rank, one in own.items()}
    return {
        rank: max(0.0, median([other.time_s for peer, other in own.items() if peer != rank]) - one.time_s)
        for rank, one in own.items()
    }


def is_usable(timing: Timing) -> bool:
    """Return whether a time is a kernel's: one by the CPU around the call holds the time in the queue too."""
    return timing.time_s > 0 and timing.source != "collective_cpu"


def numbers_of(timings: Iterable[Timing]) -> Numbers:
    """Return the job's own number of each rank."""
    seats = {(one.communicator, one.num_ranks, one.rank, (one.host, one.pid)) for one in timings}
    return Numbers(sorted(seats))


def series_of(timings: Iterable[Timing]) -> list[Series]:
    """Return the operations in which all ranks end together, by communicator and kind."""
    found: dict[tuple[str, str], dict[int, dict[int, Timing]]] = defaultdict(lambda: defaultdict(dict))
    size_of: dict[str, int] = {}
    seats: dict[str, dict[int, tuple[str, int]]] = defaultdict(dict)
    for one in timings:
        if one.kind in TOGETHER:
            size_of[one.communicator] = max(one.num_ranks, size_of.get(one.communicator, 0))
            seats[one.communicator].setdefault(one.rank, (one.host, one.pid))
            if is_usable(one):
                # a number that comes again, as graphs that are replayed may have it, is told by none
                found[one.communicator, one.kind][one.sequence].setdefault(one.rank, one)
    return [
        Series(communicator=name, kind=kind, num_ranks=size_of[name], operations=both, seats=seats[name])
        for (name, kind), own in sorted(found.items())
        if (both := list(_shared(own)))
    ]


def _shared(operations: Mapping[int, dict[int, Timing]]) -> Iterator[tuple[int, dict[int, Timing]]]:
    for sequence in sorted(operations):
        own = operations[sequence]
        # other sizes at one number are other operations: the ranks' counts have parted
        if len(own) > 1 and len({one.num_bytes for one in own.values()}) == 1:
            yield sequence, own
