"""Live detector of a running job: takes records as they are written, and returns findings that are new or have ended.

Nothing here runs by itself: the owner of the files calls `add` and `update`.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar

from thinwire.monitor.detect.clocks import SightingBook
from thinwire.monitor.detect.diagnose import DetectorState, findings_of
from thinwire.monitor.detect.heartbeats import HeartbeatDelays, find_silent
from thinwire.monitor.detect.progress import PROGRESS
from thinwire.monitor.detect.timeline import build
from thinwire.monitor.findings import Finding, ranks_of
from thinwire.runlog.reader import Records, members_of
from thinwire.runlog.records import (
    Arrival,
    Beat,
    Communicator,
    Flow,
    Operation,
    PathReading,
    Probe,
    ProcessState,
    Record,
    Span,
    TransferEnd,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveConfig:
    """Bounds of the live detector's memory."""

    max_communicators: int = 256
    max_flows: int = 4096  # readings of connections, and bursts
    max_ranks: int = 1 << 16
    max_beats: int = 16  # heartbeats of a rank
    max_arrivals: int = 8  # byte counts of a link
    many: int = 16  # records of a rank or way
    many_total: int = 12_000  # records in all up to which `many` are kept of each
    few: int = 2  # records of a rank or way in larger jobs
    max_records: int = 1 << 18  # records in all
    max_cases: int = 64  # open causes
    # waits of a hang that may be a slow message until it counts as ended, so that it is reported once
    held: float = 2.0


LIVE = LiveConfig()


_Kept = TypeVar("_Kept")
_Key = TypeVar("_Key")


class FirstAndLatest(Generic[_Kept]):
    """Bounded number of values: the first quarter, which shows how things were without a fault, and the latest."""

    def __init__(self, most: int) -> None:
        self.hold(most)
        self._first: dict[Hashable, _Kept] = {}
        self._latest: OrderedDict[Hashable, _Kept] = OrderedDict()

    def hold(self, most: int) -> None:
        """Change the capacity; the first values stay."""
        self.most = most
        self._most_first, self._most_latest = most // 4, most - most // 4

    def put(self, key: Hashable, value: _Kept) -> None:
        """Add a value; it replaces one of the same key."""
        if key in self._first or (len(self._first) < self._most_first and not self._latest):
            self._first[key] = value
            return
        self._latest[key] = value
        if len(self._latest) > self._most_latest:
            self._latest.popitem(last=False)

    def get(self, key: Hashable) -> _Kept | None:
        """Return the value of a key."""
        return self._first.get(key) or self._latest.get(key)

    def drop(self, is_gone: Callable[[_Kept], bool]) -> None:
        """Leave out some values."""
        self._first = {key: value for key, value in self._first.items() if not is_gone(value)}
        self._latest = OrderedDict((key, value) for key, value in self._latest.items() if not is_gone(value))

    def values(self) -> list[_Kept]:
        """Return all values in the order of their keys' arrival."""
        return [*self._first.values(), *self._latest.values()]


_KEYS: Mapping[type, Callable[[Any], Hashable]] = {
    Operation: attrgetter("communicator", "rank", "sequence"),
    TransferEnd: attrgetter("communicator", "rank", "peer", "direction", "operation", "part"),
    Span: attrgetter("rank", "kind", "step"),
    Flow: attrgetter("rank", "peer", "at_s"),
    Probe: attrgetter("rank", "peer", "at_s"),
    PathReading: attrgetter("rank", "peer", "path", "at_s"),
}


class RecordWindow:
    """Bounded number of records of a job: the first ones and the latest.

    An operation or an end of a transfer that is written again takes the place of the earlier one.

    Args:
        most_records: How many are kept of operations and of spans; of ends of transfers twice as many. Of jobs with so
            many ranks that this is a few rounds, more are kept, a few rounds at least.

    Example:
        >>> window = RecordWindow(most_records=8)
        >>> for step in range(100):
        ...     window.add(Span(rank=0, kind="compute", step=step, started_s=step, done_s=step + 0.5))
        >>> [span.step for span in window.records().spans]
        [0, 1, 94, 95, 96, 97, 98, 99]
    """

    def __init__(self, *, most_records: int = 3000) -> None:
        if most_records < 4:
            raise ValueError(f"most_records must be at least 4, got {most_records}")
        # a rank may know only itself, so that each writes another record of the same communicator
        self._communicators: OrderedDict[Communicator, None] = OrderedDict()
        most = {Operation: most_records, TransferEnd: 2 * most_records, Span: most_records}
        self._kept: dict[type, FirstAndLatest[Any]] = {
            kind: FirstAndLatest(most.get(kind, LIVE.max_flows)) for kind in _KEYS
        }
        self._beats: dict[int, deque[Beat]] = {}
        self._samples: dict[int, Beat] = {}  # the latest of each rank's training thread, which outlives its heartbeats
        self._processes: dict[int, ProcessState] = {}  # the latest of each rank
        self._arrivals: dict[tuple[int, int], deque[Arrival]] = {}
        self._writers: set[int] = set()
        self._ways: set[tuple[int, int, str]] = set()

    def add(self, record: Record) -> None:
        """Add a record; one that comes late does not undo an end."""
        if (kept := self._kept.get(type(record))) is not None:
            self._make_room(record)
            key = _KEYS[type(record)](record)
            if not _undoes(record, kept.get(key)):
                kept.put(key, record)
        elif isinstance(record, Communicator):
            self._communicators.pop(record, None)
            self._communicators[record] = None
            if len(self._communicators) > LIVE.max_communicators:
                self._communicators.popitem(last=False)
        elif isinstance(record, Arrival):
            _put_latest(self._arrivals, (record.rank, record.peer), record, most=LIVE.max_arrivals)
        elif isinstance(record, ProcessState):
            if record.peer in self._beats:
                self._processes[record.peer] = record
        elif isinstance(record, Beat):
            _put_latest(self._beats, record.rank, record, most=LIVE.max_beats)
            if record.stack and record.rank in self._beats:
                self._samples[record.rank] = record

    def _make_room(self, record: Record) -> None:
        """Keep a few records of each rank and way that writes, however many there are."""
        if isinstance(record, TransferEnd):
            one_way = (record.rank, record.peer, record.direction)
            if one_way not in self._ways and len(self._ways) < LIVE.max_records:
                self._ways.add(one_way)
                kept = self._kept[TransferEnd]
                kept.hold(max(kept.most, _most_of(len(self._ways))))
        elif isinstance(record, Operation) and record.rank not in self._writers and len(self._writers) < LIVE.max_ranks:
            self._writers.add(record.rank)
            for kind, kept in self._kept.items():
                kept.hold(kept.most if kind is TransferEnd else max(kept.most, _most_of(len(self._writers))))

    def forget(self, rank: int) -> None:
        """Forget what a rank has written."""
        for kept in self._kept.values():
            kept.drop(lambda record: record.rank == rank)
        self._communicators = OrderedDict.fromkeys(one for one in self._communicators if rank not in one.ranks)
        self._arrivals = {way: own for way, own in self._arrivals.items() if way[0] != rank}
        for known in (self._beats, self._samples, self._processes):
            known.pop(rank, None)

    def ranks(self) -> set[int]:
        """Return the ranks with a heartbeat or a communicator."""
        return {*self._beats, *(rank for one in self._communicators for rank in one.ranks)}

    def hosts(self) -> dict[int, str]:
        """Return the host of each rank that a communicator names."""
        return {rank: host for one in self._communicators for rank, host in zip(one.ranks, one.hosts, strict=True)}

    def records(self, *, without: Collection[int] = frozenset()) -> Records:
        """Return the kept records, but those by and about ranks that take no part any more."""
        found = Records(
            operations=self._kept[Operation].values(), transfers=self._kept[TransferEnd].values(),
            spans=self._kept[Span].values(), flows=self._kept[Flow].values(), probes=self._kept[Probe].values(),
            paths=self._kept[PathReading].values(),
            beats=[beat for beats in self._beats.values() for beat in beats],
            processes=list(self._processes.values()),
            arrivals=[one for own in self._arrivals.values() for one in own],
        )  # fmt: skip
        for one in self._communicators:
            left = members_of(one, without=frozenset(without))
            if left is not None:
                with contextlib.suppress(ValueError):  # it contradicts an earlier record
                    found.add(left)
        known = set(map(id, found.beats))
        found.beats[:0] = [one for one in self._samples.values() if id(one) not in known]
        found = found.without(without)
        found.num_lines = found.num_records
        return found


def _undoes(record: Record, known: Record | None) -> bool:
    """Return whether a record would open what has ended, and not for another time."""
    if not isinstance(record, Operation | TransferEnd) or not isinstance(known, Operation | TransferEnd):
        return False
    return record.done_s is None and known.done_s is not None and record.posted_s <= known.posted_s


def _put_latest(kept: dict[_Key, deque[_Kept]], key: _Key, record: _Kept, *, most: int) -> None:
    if key in kept or len(kept) < LIVE.max_ranks:
        kept.setdefault(key, deque(maxlen=most)).append(record)


def _most_of(count: int) -> int:
    """Return the capacity for so many ranks or ways."""
    return min(LIVE.max_records, max(min(LIVE.many * count, LIVE.many_total), LIVE.few * count))


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """A finding that is new or has ended."""

    case: int  # counts the causes of the run, from 0; the same for `new` and `over`
    state: Literal["new", "over"]  # `over` once it has ended
    finding: Finding  # its latest form
    age_s: float  # seconds from its begin to the latest record

    def to_json(self, *, at_s: float) -> dict[str, Any]:
        """Return a line of `findings.jsonl`; `at_s` in seconds since 1970."""
        return {
            "at": round(at_s, 3), "state": self.state, "case": self.case, "age_s": round(self.age_s, 3),
            "finding": self.finding.to_json(),
        }  # fmt: skip


@dataclass(slots=True)
class _Case:
    """One cause, and the updates that showed it."""

    finding: Finding
    number: int = -1
    seen: int = 0
    gone: int = 0
    age_s: float = 0.0
    last_s: float = 0.0

    @property
    def is_reported(self) -> bool:
        return self.number >= 0


class LiveDetector:
    """Detectors of a running job, which report each cause once.

    A finding is new after several updates with it, and has ended after several without it. Two findings have one cause
    if they are of one kind and share a place, or the ranks of one are among the other's: an ambiguous finding that
    becomes exact is no second cause. A hang that may be a very slow link or rank has ended after twice its duration
    without another, so that it is reported once and not for each message.

    Attributes:
        num_failed: Updates at which the detectors themselves failed, without findings.
        problem: Latest of these errors.
    """

    def __init__(
        self, *, updates_until_new: int = 2, updates_until_over: int = 5, most_records: int = 3000, own_host: str = ""
    ) -> None:
        for name, value in (("updates_until_new", updates_until_new), ("updates_until_over", updates_until_over)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._until_new, self._until_over = updates_until_new, updates_until_over
        self._window = RecordWindow(most_records=most_records)
        self._history, self._book, self._lateness = DetectorState(), SightingBook(), HeartbeatDelays(own_host)
        self._cases: list[_Case] = []
        self._num_reported = 0
        self.num_failed = 0
        self.problem = ""

    def add(self, records: Iterable[Record]) -> None:
        """Take records in, in the order in which each rank wrote them."""
        for record in records:
            self._window.add(record)

    def ranks(self) -> frozenset[int]:
        """Return the ranks that are known."""
        return frozenset(self._window.ranks())

    def update(self, *, without: Collection[int] = frozenset()) -> list[News]:
        """Run the detectors, and return the findings that are new or have ended since the last update."""
        try:
            job = build(self._window.records(without=without), self._book)
            job.late_s = self._lateness.take(job)
            # a hang shows more than the silence of the same rank: it comes first, and they are one cause
            findings = [*findings_of(job, self._history), *find_silent(job)]
        except Exception as error:  # records may be forged: the run goes on
            self.num_failed += 1
            self.problem = f"{type(error).__name__}: {error}"[:300]
            return []
        hosts = self._window.hosts()
        seen: list[_Case] = []
        for finding in findings:
            case = None if finding.until_s is not None else self._case_of(finding, hosts)
            if case is None or any(case is other for other in seen):
                continue
            seen.append(case)
            case.age_s, case.last_s = max(0.0, job.now_s - finding.since_s), job.now_s
            if case.finding.since_s < finding.since_s:  # the latest form, with the earliest begin
                finding = replace(finding, since_s=case.finding.since_s, since_round=case.finding.since_round)
            case.finding = finding
        return self._count(seen, job.now_s)

    @property
    def is_unsure(self) -> bool:
        """Whether a finding is not confirmed yet, so that the next update should come soon."""
        return any(not case.is_reported for case in self._cases)

    def open_findings(self) -> list[News]:
        """Return the reported findings that have not ended, the oldest first."""
        told = sorted((case for case in self._cases if case.is_reported), key=lambda case: case.number)
        return [News(case=case.number, state="new", finding=case.finding, age_s=case.age_s) for case in told]

    def _case_of(self, finding: Finding, hosts: Mapping[int, str]) -> _Case | None:
        for case in self._cases:
            if is_one_cause(case.finding, finding, hosts=hosts):
                return case
        if len(self._cases) >= LIVE.max_cases:
            return None
        self._cases.append(_Case(finding))
        return self._cases[-1]

    def _count(self, seen: list[_Case], now_s: float) -> list[News]:
        news: list[News] = []
        for case in [*self._cases]:
            if any(case is one for one in seen):
                case.seen, case.gone = case.seen + 1, 0
                if not case.is_reported and case.seen >= self._until_new:
                    case.number, self._num_reported = self._num_reported, self._num_reported + 1
                    news.append(News(case=case.number, state="new", finding=case.finding, age_s=case.age_s))
                continue
            case.seen, case.gone = 0, case.gone + 1
            # a hang that may be a very slow message may recur with the next one
            held_s = LIVE.held * float(case.finding.evidence.get("waited_s", 0.0))
            may_return = case.finding.confidence <= PROGRESS.unsure and now_s - case.last_s < held_s
            if case.is_reported and (case.gone < self._until_over or may_return):
                continue
            self._cases.remove(case)
            if case.is_reported:
                news.append(News(case=case.number, state="over", finding=case.finding, age_s=case.age_s))
        return news


def is_one_cause(one: Finding, other: Finding, *, hosts: Mapping[int, str]) -> bool:
    """Return whether two findings have one cause."""
    if one.kind != other.kind:
        return False
    if set(one.places) & set(other.places):
        return True
    if any(place.kind == "path" for place in (*one.places, *other.places)):
        return False  # paths of one link fail one by one
    first, second = ranks_of(one.places, hosts), ranks_of(other.places, hosts)
    return bool(first) and bool(second) and (first <= second or second <= first)
