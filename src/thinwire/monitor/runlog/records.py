"""Record types that a rank writes: communicators, operations, transfer ends, work spans and heartbeats.

A rank's times are seconds on its own clock, which only grows; ranks of one host share a clock.
`thinwire.monitor.detect.clocks` brings them together.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

FORMAT = "thinwire-records"
VERSION = 1

Direction = Literal["sent", "received"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """Ranks that take part in the same operations.

    Attributes:
        communicator: Its name, the same on all ranks.
        ranks: Its members.
        hosts: The host of each member, in the same order.
        clocks: The clock of each member; empty where ranks of a host share one and hosts do not.
    """

    communicator: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    clocks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One rank's part in one operation of a communicator.

    Attributes:
        communicator: Whose operation.
        rank: Who writes.
        sequence: Counts this rank's operations in this communicator, from 0.
        kind: What it does, such as `all_reduce`.
        dtype: Of its elements; empty where unknown.
        count: Elements; -1 where unknown, or where ranks may differ.
        posted_s: When the rank asked for it.
        started_s: When it began; none where unknown.
        done_s: When it was done; none while it is not.
        round: The round that it belongs to; -1 where there are none.
    """

    communicator: str
    rank: int
    sequence: int
    kind: str
    dtype: str = ""
    count: int = -1
    posted_s: float
    started_s: float | None = None
    done_s: float | None = None
    round: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEnd:
    """One end of one message.

    Attributes:
        communicator: The communicator of its operation.
        rank: Who writes.
        peer: The other end.
        direction: Seen from `rank`.
        operation: The operation's sequence number, or the round's number where rounds may overtake each other.
        part: Which of the messages between these two in this operation.
        num_bytes: Its size.
        posted_s: When this end was ready for it.
        started_s: When it could begin at this end; none where that was when it was posted, or is unknown.
        done_s: When it was done at this end; none while it is not, or failed.
        retries: How often it was tried again.
        error: What went wrong, or an empty text.
    """

    communicator: str
    rank: int
    peer: int
    direction: Direction
    operation: int
    part: int = 0
    num_bytes: int
    posted_s: float
    started_s: float | None = None
    done_s: float | None = None
    retries: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of a rank's own work.

    Attributes:
        rank: Who writes.
        kind: `compute` for work between two exchanges, `step` for a whole step.
        step: Its number.
        started_s: When it began.
        done_s: When it was done.
        loss: The loss of the step; none where unknown.
        forward_s: Seconds of it that the forward passes took; none where they were not timed.
        backward_s: Seconds of it that the backward passes took; none where they were not timed.
    """

    rank: int
    kind: str
    step: int
    started_s: float
    done_s: float
    loss: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A rank's recorder is alive, whatever the rank itself waits for.

    Attributes:
        rank: Who writes.
        at_s: When.
        is_last: Whether the rank says goodbye: it ends, and its silence means nothing from here on.
        error: Why it ends, where that is a fault of its own; empty at the end of its work, or where it lost others. Of
            one that has not ended: why a call of it has failed.
    """

    rank: int
    at_s: float
    is_last: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """How much has come over a connection, while a message that is to come over it is open.

    Attributes:
        rank: Who writes, and receives.
        peer: The other end.
        at_s: When.
        num_bytes: What the kernel has received since the connection was made, of all messages and with their frames.
        has_signs: Whether a sign of life comes over it once a second while it is well.
    """

    rank: int
    peer: int
    at_s: float
    num_bytes: int
    has_signs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What a kernel knows of all connections from a rank to another host.

    Attributes:
        rank: Who writes, and sends.
        peer: A rank of that host: the only one, or the lowest.
        at_s: When.
        num_bytes: That the other end has acknowledged so far.
        busy_s: For how long so far there was something to send, or that was not acknowledged.
        held_s: For how much of that the other end's process did not read, so that no more could be sent.
        silence_s: Since anything has come from there, of a wire over which something comes at least once a second while
            it is well; none where that is not known.
        unanswered: How often in a row the same was sent again without an answer.
    """

    rank: int
    peer: int
    at_s: float
    num_bytes: int
    busy_s: float
    held_s: float = 0.0
    silence_s: float | None = None
    unanswered: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A burst of bytes to another host, sent only to be timed.

    Attributes:
        rank: Who writes, and sent it.
        peer: The lowest rank of that host, which answered when all had come.
        at_s: When it began.
        num_bytes: Its size.
        took_s: Until the answer.
        num_beside: Bytes of the job that crossed the same host's access meanwhile, at one end or the other, whichever
            is more.
    """

    rank: int
    peer: int
    at_s: float
    num_bytes: int
    took_s: float
    num_beside: int = 0


Record = Communicator | Operation | TransferEnd | Span | Beat | Arrival | Flow | Probe

KINDS: dict[str, type[Record]] = {
    "communicator": Communicator,
    "operation": Operation,
    "transfer": TransferEnd,
    "span": Span,
    "beat": Beat,
    "arrival": Arrival,
    "flow": Flow,
    "probe": Probe,
}
_NAMES = {kind: name for name, kind in KINDS.items()}


def header_line() -> str:
    """Return the first line of a file of records, without the line's end.

    Example:
        >>> header_line()
        '{"format":"thinwire-records","version":1}'
    """
    return json.dumps({"format": FORMAT, "version": VERSION}, separators=(",", ":"))


def to_line(record: Record) -> str:
    """Write a record as one JSON line without the line's end; what has its default value is left out.

    Example:
        >>> to_line(Beat(rank=2, at_s=1.5))
        '{"record":"beat","rank":2,"at_s":1.5}'
    """
    told: dict[str, Any] = {"record": _NAMES[type(record)]}
    for field in fields(record):
        value = getattr(record, field.name)
        if value != field.default:
            told[field.name] = str(value) if isinstance(value, float) and not math.isfinite(value) else value
    return json.dumps(told, separators=(",", ":"), allow_nan=False)


class RecordRing:
    """The latest records of one rank, a fixed number of each kind, so that memory does not grow with the run.

    Args:
        capacity: How many of each kind are kept.

    Example:
        >>> ring = RecordRing(capacity=2)
        >>> for second in range(5):
        ...     ring.add(Beat(rank=0, at_s=float(second)))
        >>> [record.at_s for record in ring], ring.num_dropped
        ([3.0, 4.0], 3)
    """

    def __init__(self, *, capacity: int = 8192) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self._rings: dict[type[Record], deque[Record]] = {kind: deque(maxlen=capacity) for kind in KINDS.values()}
        self.num_dropped = 0

    def add(self, record: Record) -> None:
        """Keep a record; the oldest of its kind falls out where there are too many."""
        ring = self._rings[type(record)]
        self.num_dropped += len(ring) == ring.maxlen
        ring.append(record)

    def __iter__(self) -> Iterator[Record]:
        for ring in self._rings.values():
            yield from list(ring)

    def __len__(self) -> int:
        return sum(map(len, self._rings.values()))

    def lines(self) -> Iterator[str]:
        """Yield the lines of a file of records, the header first."""
        yield header_line()
        yield from map(to_line, self)
