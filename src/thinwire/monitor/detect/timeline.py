"""Timeline of a job: its records on one clock, with both ends of each message paired."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from thinwire.monitor.detect.change_points import median
from thinwire.monitor.detect.clocks import Alignment, ClockFit, Sighting, SightingBook, align
from thinwire.runlog.nccl_values import NcclRecords
from thinwire.runlog.reader import Records
from thinwire.runlog.records import (
    Arrival,
    Beat,
    Communicator,
    Flow,
    Operation,
    PathReading,
    Probe,
    ProcessState,
    Span,
    TransferEnd,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineConfig:
    """Constants of the timeline."""

    max_sightings: int = 200_000  # messages that clocks are fitted to
    missed_beats: float = 3.5  # heartbeats: one or two are late where cores are shared
    again: float = 2.0  # usual delays of a heartbeat that are too long
    heard_silence_s: float = 3.5  # silence of a rank whose messages arrive: those in flight do so after it stopped
    max_beside: int = 16  # bytes of the job over those of a burst; above it the burst says little
    min_beat_s: float = 0.25  # shortest period of heartbeats
    max_beat_s: float = 10.0  # longest period of heartbeats


TIMELINE = TimelineConfig()

_SYMMETRIC = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
_Shift = Callable[[int, float | None], float | None]


@dataclass(slots=True)
class Message:
    """Both ends of one message, in seconds of the reference clock."""

    source: int  # the rank that sends
    destination: int  # the rank that receives
    communicator: str  # of its operation
    operation: int  # the operation's or round's number
    part: int  # which message of this pair in this operation
    num_bytes: int  # its size
    sent_posted_s: float | None = None  # when the sender was ready; none where it has not said so
    sent_done_s: float | None = None  # when it had left
    received_posted_s: float | None = None  # when the receiver was ready; none where it has not said so
    received_done_s: float | None = None  # when it was there
    error: str = ""  # what went wrong at either end
    retries: int = 0  # of both ends
    sent_begun_s: float | None = None  # when the sender began, where it had waited for something else first

    @property
    def begin_s(self) -> float | None:
        """Time from which only the link was waited for; None if an end has not reported."""
        if self.sent_posted_s is None or self.received_posted_s is None:
            return None
        ready_s = self.sent_begun_s or self.sent_posted_s
        if self.sent_posted_s > ready_s:
            ready_s = self.sent_posted_s
        return ready_s if ready_s > self.received_posted_s else self.received_posted_s

    @property
    def transfer_s(self) -> float | None:
        """Seconds from when both ends were ready to the arrival; None if an end is missing."""
        begin_s = self.begin_s
        return None if begin_s is None or self.received_done_s is None else self.received_done_s - begin_s

    @property
    def is_stuck(self) -> bool:
        """Whether both ends were ready and it has not arrived."""
        ready = self.sent_posted_s is not None and self.received_posted_s is not None
        return ready and self.received_done_s is None


@dataclass(slots=True)
class Job:
    """Records of a job on one clock."""

    host_of: dict[int, str] = field(default_factory=dict)  # the host of each rank
    communicators: Mapping[str, Communicator] = field(default_factory=dict)  # by name
    # by communicator and sequence number, then by rank
    operations: dict[tuple[str, int], dict[int, Operation]] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)  # all messages
    spans: list[Span] = field(default_factory=list)  # all work, in order of its step
    last_seen_s: dict[int, float] = field(default_factory=dict)  # when each rank last wrote anything
    has_beats: bool = False  # whether ranks said that they live
    # when each rank said that it ends, and why where that is a fault of its own
    goodbyes: dict[int, tuple[float, str]] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)  # ranks of whom a call has failed, because they lost another one
    now_s: float = -math.inf  # the latest time of all
    # how the clocks were brought together
    alignment: Alignment = field(default_factory=lambda: Alignment(reference="", fits={}))
    clock_of: dict[int, str] = field(default_factory=dict)  # the clock of each rank
    error_s: dict[int, float] = field(default_factory=dict)  # what the clock of each rank may be wrong by
    unsteady: frozenset[int] = frozenset()  # ranks whose clock was set; their times are compared with nobody's
    trust: float = 1.0  # part of the lines that could be used, in [0, 1]
    # usual seconds between two beats of each rank that gives any
    beat_s: dict[int, float] = field(default_factory=dict)
    # when the latest message of each rank reached another one, as that one wrote
    heard_s: dict[int, float] = field(default_factory=dict)
    # by how much the signs of life of ranks come late again and again, see `HeartbeatDelays`
    late_s: dict[int, float] = field(default_factory=dict)
    # when, and how many bytes had come from a source to a destination then, in order; while a message was open
    arrivals: dict[tuple[int, int], list[tuple[float, int]]] = field(default_factory=dict)
    # when, and what the kernel of a source knew then of its connections to a destination's host, in order
    flows: dict[tuple[int, int], list[tuple[float, Flow]]] = field(default_factory=dict)
    # when, and the state of each path then, by source, destination and path, in order
    paths: dict[tuple[int, int, int], list[tuple[float, PathReading]]] = field(default_factory=dict)
    # when a burst from a source to a destination's host began and ended, and the seconds a byte of it took
    probes: dict[tuple[int, int], list[tuple[float, float, float]]] = field(default_factory=dict)
    # sources and destinations whose connections have signs of life of their own
    signalled: set[tuple[int, int]] = field(default_factory=set)
    # what NCCL's own tools wrote; its clocks are not brought together
    nccl: NcclRecords = field(default_factory=NcclRecords)
    # when each rank's training thread was sampled, and its state then, in order
    samples: dict[int, list[tuple[float, Beat]]] = field(default_factory=dict)
    # when the process of a silent rank was read by another one, and its state then; the latest of each
    processes: dict[int, tuple[float, ProcessState]] = field(default_factory=dict)

    def silence_s(self, rank: int) -> float:
        """Return the seconds of silence after which a rank counts as stopped."""
        beat_s = self.beat_s.get(rank, TIMELINE.min_beat_s)
        limit_s = max(TIMELINE.missed_beats * beat_s, TIMELINE.again * self.late_s.get(rank, 0.0))
        if self.heard_s.get(rank, -math.inf) > self.last_seen_s.get(rank, math.inf) + beat_s:
            limit_s = max(limit_s, TIMELINE.heard_silence_s)
        # a clock without messages to others says nothing about the present
        return limit_s + self.error_s.get(rank, 0.0)

    def group_name(self, communicator: str) -> str:
        """Return a communicator as a sentence names it: by its ranks, and by its name if these are not all ranks."""
        known = self.communicators.get(communicator)
        if known is None:
            return communicator
        if len(known.ranks) == 2 and communicator.partition(" tag ")[0].endswith("{}->{}".format(*known.ranks)):
            return "the messages from rank {} to rank {}".format(*known.ranks)
        if len(known.ranks) > 1 and set(known.ranks) == set(self.host_of):
            return "all ranks"
        return f"rank{'s' * (len(known.ranks) != 1)} {rank_ranges(known.ranks)} ({communicator})"


def rank_ranges(ranks: Iterable[int]) -> str:
    """Return ranks as one phrase.

    Example:
        >>> rank_ranges([0, 1, 2, 3, 6, 9, 8])
        '0-3, 6, 8, 9'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    named = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(named[:16]) + (" and more" if len(named) > 16 else "")


def build(records: Records, book: SightingBook | None = None) -> Job:
    """Bring records to one clock, and pair both ends of messages."""
    job = Job(communicators=records.communicators, has_beats=bool(records.beats), nccl=records.nccl)
    clock_of = _places(job, records)
    ends = _latest_reports(records.transfers)
    messages = _sightings(ends, clock_of)
    sightings = [seen for _, seen in messages] if book is None else book.take(messages, of=clock_of.values())
    job.alignment = align(clock_of.values(), sightings or _sightings_of_operations(records.operations, clock_of))
    fits = {rank: job.alignment.fits[clock] for rank, clock in clock_of.items()}
    job.clock_of, job.error_s = clock_of, {rank: fit.error_s for rank, fit in fits.items()}
    job.unsteady = frozenset(rank for rank, fit in fits.items() if not fit.is_steady)

    def shift(rank: int, time_s: float | None) -> float | None:
        return None if time_s is None else fits[rank].to_reference(time_s)

    for operation in records.operations:
        own = job.operations.setdefault((operation.communicator, operation.sequence), {})
        known = own.get(operation.rank)
        if known is None or known.done_s is None:
            own[operation.rank] = _shifted(operation, fits[operation.rank].to_reference)
        _see(job, operation.rank, operation.posted_s, operation.done_s)
    _pair(job, ends, shift)
    for end in ends.values():
        _see(job, end.rank, end.posted_s, end.done_s)
    for span in records.spans:
        to_reference = fits[span.rank].to_reference
        job.spans.append(Span(
            rank=span.rank, kind=span.kind, step=span.step, started_s=to_reference(span.started_s),
            done_s=to_reference(span.done_s), loss=span.loss, forward_s=span.forward_s, backward_s=span.backward_s,
            stalled_s=span.stalled_s,
        ))  # fmt: skip
        _see(job, span.rank, span.done_s)
    for beat in records.beats:
        _see(job, beat.rank, beat.at_s)
        if beat.stack:
            job.samples.setdefault(beat.rank, []).append((fits[beat.rank].to_reference(beat.at_s), beat))
        if beat.is_last:
            job.goodbyes[beat.rank] = (fits[beat.rank].to_reference(beat.at_s), beat.error)
    for process in sorted(records.processes, key=lambda one: one.at_s):  # both ranks share a clock
        job.processes[process.peer] = fits[process.peer].to_reference(process.at_s), process
    _take_wires(job, records, fits)
    job.left = {beat.rank for beat in records.beats if beat.error and not beat.is_last}
    job.spans.sort(key=lambda span: span.step)
    job.last_seen_s = {rank: fits[rank].to_reference(at_s) for rank, at_s in job.last_seen_s.items()}
    # a clock that was set says nothing about the present
    steady = [at_s for rank, at_s in job.last_seen_s.items() if rank not in job.unsteady]
    job.now_s = max(steady or job.last_seen_s.values(), default=-math.inf)
    job.beat_s = usual_beats(records.beats)
    job.trust = 1.0 - records.refused_share
    return job


_Timed = TypeVar("_Timed", Arrival, Flow, PathReading, Probe)


def _take_wires(job: Job, records: Records, fits: Mapping[int, ClockFit]) -> None:
    def timed(found: Iterable[_Timed]) -> Iterator[tuple[float, _Timed]]:
        for one in sorted(found, key=lambda one: one.at_s):
            yield fits[one.rank].to_reference(one.at_s), one

    signs: list[Arrival | Flow | PathReading] = [*records.arrivals, *records.flows, *records.paths]
    for sign in signs:
        _see(job, sign.rank, sign.at_s)
    for at_s, one in timed(records.arrivals):
        job.arrivals.setdefault((one.peer, one.rank), []).append((at_s, one.num_bytes))
        if one.has_signs:
            job.signalled.add((one.peer, one.rank))
    for at_s, flow in timed(records.flows):
        job.flows.setdefault((flow.rank, flow.peer), []).append((at_s, flow))
    for at_s, path in timed(records.paths):
        job.paths.setdefault((path.rank, path.peer, path.path), []).append((at_s, path))
    for at_s, probe in timed(records.probes):
        # a burst with a small share of the access says little, and its count of the other bytes may be wrong
        if probe.num_bytes > 0 and probe.num_beside <= TIMELINE.max_beside * probe.num_bytes:
            # divided by all bytes, since it had only its share of the access
            each_s = probe.took_s / (probe.num_bytes + probe.num_beside)
            job.probes.setdefault((probe.rank, probe.peer), []).append((at_s, at_s + probe.took_s, each_s))


def _see(job: Job, rank: int, *times: float | None) -> None:
    seen_s = job.last_seen_s.get(rank, -math.inf)
    for time_s in times:
        if time_s is not None and time_s > seen_s:
            seen_s = time_s
    job.last_seen_s[rank] = seen_s


def usual_beats(beats: Iterable[Beat]) -> dict[int, float]:
    """Return the usual seconds between two beats, for each rank that gives any.

    Example:
        >>> usual_beats(Beat(rank=0, at_s=2.0 * second) for second in range(5))
        {0: 2.0}
    """
    times: dict[int, list[float]] = {}
    for beat in beats:
        times.setdefault(beat.rank, []).append(beat.at_s)
    gaps = {
        rank: [later - early for early, later in pairwise(sorted(own)) if later > early] for rank, own in times.items()
    }
    return {
        rank: min(TIMELINE.max_beat_s, max(TIMELINE.min_beat_s, median(own))) if own else 1.0
        for rank, own in gaps.items()
    }


def _places(job: Job, records: Records) -> dict[int, str]:
    """Set the host of each rank, and return its clock; a rank outside all communicators has a host of its own."""
    clock_of: dict[int, str] = {}
    for communicator in records.communicators.values():
        clocks = communicator.clocks or communicator.hosts
        for rank, host, clock in zip(communicator.ranks, communicator.hosts, clocks, strict=True):
            job.host_of.setdefault(rank, host)
            clock_of.setdefault(rank, clock)
    told: list[Iterable[int]] = [
        {operation.rank for operation in records.operations}, {end.rank for end in records.transfers},
        {end.peer for end in records.transfers}, {span.rank for span in records.spans},
        {beat.rank for beat in records.beats}, {process.peer for process in records.processes},
        *({one.rank for one in own} | {one.peer for one in own}
          for own in (records.arrivals, records.flows, records.probes, records.paths)),
    ]  # fmt: skip
    for rank in sorted(set().union(*told)):
        job.host_of.setdefault(rank, f"rank-{rank}")
        clock_of.setdefault(rank, job.host_of[rank])
    return clock_of


EndKey = tuple[str, int, int, str, int, int]


def _latest_reports(transfers: list[TransferEnd]) -> dict[EndKey, TransferEnd]:
    """Return the latest report of each end of a transfer."""
    ends: dict[EndKey, TransferEnd] = {}
    for end in transfers:
        key = (end.communicator, end.rank, end.peer, end.direction, end.operation, end.part)
        known = ends.get(key)
        # a transfer that failed a deadline may still end well; an open one says no more than a failed one
        if known is None or (known.done_s is None and (end.done_s is not None or not known.error)):
            ends[key] = end
    return ends


def _sightings(ends: dict[EndKey, TransferEnd], clock_of: dict[int, str]) -> list[tuple[int, Sighting]]:
    """Return the messages between clocks with their rounds, in posting order."""
    found: list[tuple[int, Sighting]] = []
    for (communicator, rank, peer, direction, operation, part), end in ends.items():
        if direction != "received" or end.done_s is None or clock_of[rank] == clock_of[peer]:
            continue
        sent = ends.get((communicator, peer, rank, "sent", operation, part))
        if sent is not None and len(found) < TIMELINE.max_sightings:
            found.append((operation, Sighting(clock_of[peer], clock_of[rank], sent.posted_s, end.done_s)))
    return sorted(found, key=lambda seen: seen[1].posted_s)


def _sightings_of_operations(operations: list[Operation], clock_of: dict[int, str]) -> list[Sighting]:
    """Return what collectives show clocks: none ends on any rank before all ranks have called it."""
    posted: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    done: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for operation in operations:
        key, clock = (operation.communicator, operation.sequence), clock_of[operation.rank]
        if operation.done_s is not None and operation.kind in _SYMMETRIC:
            posted[key][clock] = max(posted[key].get(clock, -math.inf), operation.posted_s)
            done[key][clock] = min(done[key].get(clock, math.inf), operation.done_s)
    found: list[Sighting] = []
    for key, own in posted.items():
        if len(own) * len(own) + len(found) <= TIMELINE.max_sightings:
            for sender, posted_s in own.items():
                found += [Sighting(sender, other, posted_s, done[key][other]) for other in own if other != sender]
    return sorted(found, key=lambda seen: seen.posted_s)


def _pair(job: Job, ends: dict[EndKey, TransferEnd], shift: _Shift) -> None:
    messages: dict[tuple[str, int, int, int, int], Message] = {}
    for end in ends.values():
        source, destination = (end.rank, end.peer) if end.direction == "sent" else (end.peer, end.rank)
        key = (end.communicator, source, destination, end.operation, end.part)
        message = messages.get(key)
        if message is None:
            message = messages[key] = Message(
                source, destination, end.communicator, end.operation, end.part, end.num_bytes
            )
        if end.direction == "sent":
            message.sent_posted_s, message.sent_done_s = shift(end.rank, end.posted_s), shift(end.rank, end.done_s)
            message.sent_begun_s = shift(end.rank, end.started_s)
        else:
            message.received_posted_s = shift(end.rank, end.posted_s)
            message.received_done_s = shift(end.rank, end.done_s)
        message.error = message.error or end.error
        message.retries += end.retries
    job.messages = sorted(messages.values(), key=lambda message: (message.operation, message.part))
    for message in job.messages:
        if message.received_done_s is not None and message.destination not in job.unsteady:
            known_s = job.heard_s.get(message.source, -math.inf)
            job.heard_s[message.source] = max(known_s, message.received_done_s)


def _shifted(operation: Operation, shift: Callable[[float], float]) -> Operation:
    # spelled out, since a job has very many: `dataclasses.replace` takes three times as long
    return Operation(
        communicator=operation.communicator, rank=operation.rank, sequence=operation.sequence, kind=operation.kind,
        dtype=operation.dtype, count=operation.count, round=operation.round, site=operation.site,
        is_async=operation.is_async, posted_s=shift(operation.posted_s),
        started_s=None if operation.started_s is None else shift(operation.started_s),
        done_s=None if operation.done_s is None else shift(operation.done_s),
    )  # fmt: skip
