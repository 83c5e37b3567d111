"""Values read from NCCL's own tools: Inspector timings and RAS states.

Both name a rank by its number in a communicator. The job's own number of it is that in the largest communicator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

# Kinds in which no rank can end before all have come. In the others a root may be done before the last one comes.
TOGETHER = frozenset({"AllReduce", "AllGather", "ReduceScatter", "All2All", "AllGatherV"})
# The Inspector keeps 16 characters of a communicator's hash, which are 18 with all digits; RAS writes all.
HASH_LETTERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Duration of one rank's kernel in one operation, with its wait for the other ranks.

    Attributes:
        communicator: The begin of its hash, such as `0x7f8c496ae9f661`.
        rank: Who writes, counted in the communicator.
        num_ranks: How many ranks the communicator has.
        kind: NCCL's name, such as `AllReduce` or `Send`.
        sequence: Of collectives, the operation's number among those of its kind in this communicator, the same on all
            ranks; of messages, the number among this rank's own.
        num_bytes: What this rank brings.
        time_s: From the kernel's begin to its end, of the channel with the longest.
        source: Who measured: `kernel_gpu`, `kernel_cpu`, `collective_cpu`, or empty where unknown.
        at_s: When it began, or, where that is not told, when it was written to the file; seconds since 1970 by the
            writer's host, comparable with other hosts' only as far as their clocks are set alike.
        peer: The other end of a message, counted in the communicator; -1 for collectives.
    """

    communicator: str
    rank: int
    num_ranks: int
    host: str
    pid: int
    kind: str
    sequence: int
    num_bytes: int
    time_s: float
    source: str = ""
    at_s: float
    peer: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of the job, as RAS names it."""

    host: str
    pid: int
    gpus: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank of a communicator, from a RAS status.

    Attributes:
        rank: Counted in the communicator.
        host: Its host's address; empty where unknown.
        counts: How many collectives of each kind it has launched, where told.
        status: `INIT`, `RUNNING`, `FINALIZE`, `ABORT` or `NOCOMM`; empty where not told.
        init_error: Why its initialisation failed; empty where it did not.
        async_error: What it has failed by since then; empty where it did not.
        lost: `dead` or `unresponsive` where RAS cannot reach it.
    """

    rank: int
    host: str = ""
    pid: int = -1
    gpu: int = -1
    counts: Mapping[str, int] = field(default_factory=dict)
    status: str = ""
    init_error: str = ""
    async_error: str = ""
    lost: str = ""

    @property
    def location(self) -> tuple[str, int, int] | None:
        """Host, process and GPU; None if unknown."""
        return (self.host, self.pid, self.gpu) if self.host and self.pid >= 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorState:
    """A communicator in one status.

    Attributes:
        communicator: Its hash, such as `0x7f8c496ae9f661a3`.
        size: How many ranks it has; -1 where unknown.
        members: Those that are told of, by rank.
        unlisted: Groups of ranks that are counted and not named: kind, operations launched, how many ranks.
        errors: What RAS itself says, such as `MISMATCH`; empty for its JSON, which leaves that to the reader.
    """

    communicator: str
    size: int
    members: Mapping[int, RankState]
    unlisted: tuple[tuple[str, int, int], ...] = ()
    errors: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One answer of RAS.

    Attributes:
        at_s: When, in seconds of the clock of the host that answered (its local time where RAS writes it, the file's
            else); none where unknown.
        communicators: Those that it told of: its text leaves out those that are well.
        is_whole: Whether it tells of all communicators and all counts, as its JSON does.
    """

    source: str
    at_s: float | None
    communicators: tuple[CommunicatorState, ...] = ()
    dead: tuple[Process, ...] = ()
    unresponsive: tuple[Process, ...] = ()
    is_whole: bool = False


@dataclass(slots=True)
class NcclRecords:
    """Records of NCCL's tools.

    Attributes:
        timings: In the order in which they were read, which of one rank is that in which they ended.
        snapshots: In the order in which they were read.
    """

    timings: list[Timing] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.timings) + len(self.snapshots)


class Numbers:
    """The job's own number of each rank of each communicator: the one in the largest communicator that it is in.

    Args:
        locations: Communicator, its size, a rank in it, and where that runs; none where unknown.

    Example:
        >>> pairs = [("world", 2, 0, "a"), ("world", 2, 1, "b"), ("other", 1, 0, "b")]
        >>> Numbers(pairs).of("other", 0), Numbers(pairs).of("unknown", 7)
        (1, 7)
    """

    def __init__(self, locations: Iterable[tuple[str, int, int, Hashable | None]]) -> None:
        self._seat_of: dict[tuple[str, int], Hashable] = {}
        ranks: dict[str, dict[Hashable, set[int]]] = defaultdict(lambda: defaultdict(set))
        size_of: dict[str, int] = {}
        for communicator, size, rank, location in locations:
            size_of[communicator] = max(size, size_of.get(communicator, size))
            if location is not None:
                self._seat_of[communicator, rank] = location
                ranks[communicator][location].add(rank)
        self._number: dict[Hashable, int] = {}
        if ranks:
            largest = max(ranks, key=lambda name: (size_of[name], len(ranks[name]), name))
            # a process that drives several GPUs has several ranks, and its records do not name them
            self._number = {location: min(own) for location, own in ranks[largest].items() if len(own) == 1}

    def of(self, communicator: str, rank: int) -> int:
        """Return the job's number of a rank, or its number in the communicator if that is unknown."""
        return self._number.get(self._seat_of.get((communicator, rank)), rank)
