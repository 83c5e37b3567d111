"""Record types that a rank writes: communicators, operations, transfer ends, work spans and heartbeats.

Of all of them `rank` is the rank that wrote it, `peer` the other end, `at_s` the time of the reading, and an empty
`error` none. A rank's times are seconds on its own clock, which only grows; ranks of one host share a clock.
`thinwire.monitor.detect.clocks` brings them together.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from msgspec import Meta

FORMAT = "thinwire-records"
VERSION = 1
MOST_RANKS = 1 << 20
FULL_DISK = "the disk is full"  # in the error of a last heartbeat, whatever else it says
STOPPED, ENDED = "stopped", "ended"  # of a silent rank's process
# Of a transfer's operation: above them stands the owner, so that rounds of two owners are two operations.
ROUND_BITS = 48

# Bounds of what a line may hold; the reader refuses the rest.
Direction = Literal["sent", "received"]
Rank = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
CountOrUnknown = Annotated[int, Meta(ge=-1, le=1 << 53)]
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]
Duration = Annotated[float, Meta(ge=0, le=1e12)]
Text = Annotated[str, Meta(max_length=500)]
Frames = Annotated[tuple[Text, ...], Meta(max_length=32)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A group of ranks that take part in the same operations.

    Attributes:
        communicator: Its name, the same on all ranks.
        ranks: Its members.
        hosts: The host of each member, in the same order.
        clocks: The clock of each member; empty if each host has one.
    """

    communicator: Text
    ranks: tuple[Rank, ...]
    hosts: tuple[Text, ...]
    clocks: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One rank's part in one operation of a communicator.

    Attributes:
        sequence: Number of this rank's operation in this communicator, from 0.
        kind: Such as `all_reduce`.
        dtype: Of its elements; empty if unknown.
        count: Elements; -1 if unknown, or if ranks may differ.
        posted_s: Time of the call.
        started_s: Begin of the work; None if unknown.
        done_s: End; None while it is open.
        round: The round that it belongs to; -1 if there are no rounds.
        site: File and line of the call in the user's code; empty if unknown.
        is_async: Whether the rank went on before it had ended.
    """

    communicator: Text
    rank: Rank
    sequence: Count
    kind: Text
    dtype: Text = ""
    count: CountOrUnknown = -1
    posted_s: Seconds
    started_s: Seconds | None = None
    done_s: Seconds | None = None
    round: CountOrUnknown = -1
    site: Text = ""
    is_async: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEnd:
    """One end of one message.

    Attributes:
        communicator: That of its operation.
        direction: Seen from `rank`.
        operation: The operation's sequence number, or the round's number if rounds may overtake each other.
        part: Index among the messages between these two in this operation.
        posted_s: This end was ready for it.
        started_s: It could begin at this end; None if that was `posted_s`, or is unknown.
        done_s: End at this end; None while it is open, or if it failed.
    """

    communicator: Text
    rank: Rank
    peer: Rank
    direction: Direction
    operation: Count
    part: Count = 0
    num_bytes: Count
    posted_s: Seconds
    started_s: Seconds | None = None
    done_s: Seconds | None = None
    retries: Count = 0
    error: Text = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span of a rank's own work.

    Attributes:
        kind: `compute` for work between two exchanges, `step` for a whole step.
        loss: The loss of the step; None if unknown.
        forward_s: Seconds of the forward passes; None if not timed.
        backward_s: Seconds of the backward passes; None if not timed.
        stalled_s: Seconds after it in which the rank waited for the network; None if unknown.
    """

    rank: Rank
    kind: Text
    step: Count
    started_s: Seconds
    done_s: Seconds
    loss: float | None = None
    forward_s: Duration | None = None
    backward_s: Duration | None = None
    stalled_s: Duration | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A heartbeat: the rank's recorder is alive, whatever the rank itself waits for.

    Attributes:
        is_last: Whether the rank ends, so that its silence from here on means nothing.
        error: Why it ends, if that is a fault of its own; empty at the end of its work, or if it lost others. Without
            `is_last`: why a call has failed.
        stack: Frames of the training thread, innermost first, if it has made no call for long.
        cpu: Share of a core that this thread ran or waited to run, in [0, 1]; -1 if unknown.
        sleeps_in: The kernel's function that it sleeps in, after `disk: ` if nothing can interrupt it; empty if it ran.
        workers: Child processes, with what they sleep in.
    """

    rank: Rank
    at_s: Seconds
    is_last: bool = False
    error: Text = ""
    stack: Frames = ()
    cpu: Annotated[float, Meta(ge=-1, le=1)] = -1.0
    sleeps_in: Text = ""
    workers: Frames = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """State of a silent rank's process, as another process of its host reads it from the kernel.

    Attributes:
        rank: The rank that wrote it; the silent one if it was no rank.
        peer: The silent rank.
        cpu: Share of a core that its threads ran or waited to run, in [0, 1]; -1 if unknown.
        sleeps_in: As in `Beat`, of its main thread; `stopped` or `ended` for a process that is.
    """

    rank: Rank
    peer: Rank
    at_s: Seconds
    cpu: Annotated[float, Meta(ge=-1, le=1)] = -1.0
    sleeps_in: Text = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Bytes received over a connection while a message over it is open.

    Attributes:
        rank: The rank that receives.
        num_bytes: Bytes that the kernel has received since the connection was made, frames included.
        has_signs: Whether a healthy connection carries a heartbeat once a second.
    """

    rank: Rank
    peer: Rank
    at_s: Seconds
    num_bytes: Count
    has_signs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Kernel counters of all connections from a rank to another host.

    Attributes:
        peer: A rank of that host: the only one, or the lowest.
        num_bytes: Bytes that the other end has acknowledged so far.
        busy_s: Seconds so far with something to send or not yet acknowledged.
        held_s: Of these, seconds in which the other end's process did not read, so that no more could be sent.
        silence_s: Seconds since the last byte from there, of a connection that carries something once a second while
            it is well; None if unknown.
        unanswered: Retransmissions in a row without an answer.
    """

    rank: Rank
    peer: Rank
    at_s: Seconds
    num_bytes: Count
    busy_s: Duration
    held_s: Duration = 0.0
    silence_s: Duration | None = None
    unanswered: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A timed burst of bytes to another host.

    Attributes:
        rank: The rank that wrote and sent it.
        peer: The lowest rank of that host, which answered after the last byte.
        took_s: Seconds until the answer.
        num_beside: Bytes of the job over the same host's access meanwhile, at the end with more of them.
    """

    rank: Rank
    peer: Rank
    at_s: Seconds
    num_bytes: Count
    took_s: Duration
    num_beside: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PathReading:
    """State of one of several connections from a rank to another, which take planned paths.

    Attributes:
        num_bytes: Bytes that have arrived over it so far.
        busy_s: Seconds so far with bytes under way.
        held_s: Of these, seconds in which the other end's process did not read.
        share: Its share of the bytes.
        limit: Part of its measured rate that counts, because of a finding.
        source_port: Port of the end that dialled; 0 if unknown.
        is_up: Whether it is connected and delivers.
    """

    rank: Rank
    peer: Rank
    path: Annotated[int, Meta(ge=0, lt=256)]
    at_s: Seconds
    num_bytes: Count
    busy_s: Duration
    held_s: Duration = 0.0
    share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    limit: Annotated[float, Meta(gt=0, le=1)] = 1.0
    source_port: Annotated[int, Meta(ge=0, lt=65_536)] = 0
    is_up: bool = True


Record = Communicator | Operation | TransferEnd | Span | Beat | ProcessState | Arrival | Flow | Probe | PathReading

KINDS: dict[str, type[Record]] = {
    "communicator": Communicator, "operation": Operation, "transfer": TransferEnd, "span": Span, "beat": Beat,
    "process": ProcessState, "arrival": Arrival, "flow": Flow, "probe": Probe, "path": PathReading,
}  # fmt: skip
_NAMES = {kind: name for name, kind in KINDS.items()}


def header_line() -> str:
    """Return the first line of a file of records, without newline.

    Example:
        >>> header_line()
        '{"format":"thinwire-records","version":1}'
    """
    return json.dumps({"format": FORMAT, "version": VERSION}, separators=(",", ":"))


def to_line(record: Record) -> str:
    """Return a record as one JSON line without newline; fields with their default value are left out.

    Example:
        >>> to_line(Beat(rank=2, at_s=1.5))
        '{"record":"beat","rank":2,"at_s":1.5}'
    """
    values: dict[str, Any] = {"record": _NAMES[type(record)]}
    for field in fields(record):
        value = getattr(record, field.name)
        if value != field.default:
            values[field.name] = str(value) if isinstance(value, float) and not math.isfinite(value) else value
    return json.dumps(values, separators=(",", ":"), allow_nan=False)
