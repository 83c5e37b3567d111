"""The records of a running job that are kept for judging: how things were at first, and how they are now."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

from thinwire.monitor.runlog.reader import Records, members_of, without_given_up
from thinwire.monitor.runlog.records import (
    Arrival,
    Beat,
    Communicator,
    Flow,
    Operation,
    Probe,
    Record,
    Span,
    TransferEnd,
)

_MOST_COMMUNICATORS = 256
_MOST_FLOWS = 4096
_MOST_RANKS, _MOST_BEATS, _MOST_ARRIVALS = 1 << 16, 16, 8
# So many records are kept of each rank or each way between two, as long as these are no more in all; of more, fewer.
_MANY, _MOST_MANY, _FEW = 16, 12_000, 2
_MOST_KEPT = 1 << 18

_Kept = TypeVar("_Kept")
_Key = TypeVar("_Key")


class _Ends(Generic[_Kept]):
    """The first and the latest of many: what a thing was like at first must not be forgotten by what it became."""

    def __init__(self, most: int) -> None:
        self.hold(most)
        self._first: dict[Hashable, _Kept] = {}
        self._latest: OrderedDict[Hashable, _Kept] = OrderedDict()

    def hold(self, most: int) -> None:
        """Hold so many from now on; the first ones stay those that they are."""
        self.most = most
        self._most_first, self._most_latest = most // 4, most - most // 4

    def put(self, key: Hashable, value: _Kept) -> None:
        """Take one in, in the place of that of the same key."""
        if key in self._first or (len(self._first) < self._most_first and not self._latest):
            self._first[key] = value
            return
        self._latest[key] = value
        if len(self._latest) > self._most_latest:
            self._latest.popitem(last=False)

    def values(self) -> list[_Kept]:
        """Return all, in the order in which their keys came."""
        return [*self._first.values(), *self._latest.values()]


class Window:
    """Records of a job, a bounded number: the first ones, and the latest.

    An operation or an end of a transfer that is written again takes the place of the earlier one.

    Args:
        most_records: How many are kept of operations and of spans; of ends of transfers twice as many. Of jobs with so
            many ranks that this is a few rounds, more are kept, a few rounds at least.

    Example:
        >>> window = Window(most_records=8)
        >>> for step in range(100):
        ...     window.add(Span(rank=0, kind="compute", step=step, started_s=step, done_s=step + 0.5))
        >>> [span.step for span in window.records().spans]
        [0, 1, 94, 95, 96, 97, 98, 99]
    """

    def __init__(self, *, most_records: int = 3000) -> None:
        if most_records < 4:
            raise ValueError(f"most_records must be at least 4, got {most_records}")
        # a rank may know itself only, so that each writes another record of the same communicator
        self._communicators: OrderedDict[Communicator, None] = OrderedDict()
        self._operations: _Ends[Operation] = _Ends(most_records)
        self._transfers: _Ends[TransferEnd] = _Ends(2 * most_records)
        self._spans: _Ends[Span] = _Ends(most_records)
        self._beats: dict[int, deque[Beat]] = {}
        self._arrivals: dict[tuple[int, int], deque[Arrival]] = {}
        self._flows: _Ends[Flow] = _Ends(_MOST_FLOWS)
        self._probes: _Ends[Probe] = _Ends(_MOST_FLOWS)
        self._writers: set[int] = set()
        self._ways: set[tuple[int, int, str]] = set()

    def add(self, record: Record) -> None:
        """Take a record in."""
        if isinstance(record, Communicator):
            self._communicators.pop(record, None)
            self._communicators[record] = None
            if len(self._communicators) > _MOST_COMMUNICATORS:
                self._communicators.popitem(last=False)
        elif isinstance(record, Arrival | Flow | Probe):
            self._add_of_wires(record)
        elif isinstance(record, Operation):
            if record.rank not in self._writers and len(self._writers) < _MOST_RANKS:
                self._writers.add(record.rank)
                for kept in (self._operations, self._spans, self._flows, self._probes):
                    kept.hold(max(kept.most, _most_of(len(self._writers))))
            self._operations.put((record.communicator, record.rank, record.sequence), record)
        elif isinstance(record, TransferEnd):
            one_way = (record.rank, record.peer, record.direction)
            if one_way not in self._ways and len(self._ways) < _MOST_KEPT:
                self._ways.add(one_way)
                self._transfers.hold(max(self._transfers.most, _most_of(len(self._ways))))
            key = (record.communicator, record.rank, record.peer, record.direction, record.operation, record.part)
            self._transfers.put(key, record)
        elif isinstance(record, Span):
            self._spans.put((record.rank, record.kind, record.step), record)
        else:
            _put_latest(self._beats, record.rank, record, most=_MOST_BEATS)

    def _add_of_wires(self, record: Arrival | Flow | Probe) -> None:
        if isinstance(record, Flow):
            self._flows.put((record.rank, record.peer, record.at_s), record)
        elif isinstance(record, Probe):
            self._probes.put((record.rank, record.peer, record.at_s), record)
        else:
            _put_latest(self._arrivals, (record.rank, record.peer), record, most=_MOST_ARRIVALS)

    def ranks(self) -> set[int]:
        """Return the ranks that wrote anything: a sign of life, or where they are."""
        return {*self._beats, *(rank for one in self._communicators for rank in one.ranks)}

    def hosts(self) -> dict[int, str]:
        """Return the host of each rank that a communicator names."""
        return {
            rank: host
            for one in self._communicators
            for rank, host in zip(one.ranks, one.hosts, strict=True)
        }  # fmt: skip

    def records(self, *, without: Collection[int] = frozenset()) -> Records:
        """Return what is to be judged.

        Args:
            without: Ranks that take part no more; what they wrote is left out, and what others wrote of them.
        """
        gone, found = frozenset(without), Records()
        for one in self._communicators:
            left = members_of(one, without=gone)
            if left is not None:
                with contextlib.suppress(ValueError):  # it contradicts what was said before
                    found.add(left)
        kept = [op for op in self._operations.values() if op.rank not in gone]
        found.operations = without_given_up(kept)
        found.transfers = [end for end in self._transfers.values() if end.rank not in gone and end.peer not in gone]
        found.spans = [span for span in self._spans.values() if span.rank not in gone]
        found.beats = [beat for rank, beats in self._beats.items() if rank not in gone for beat in beats]
        kept_ways = [own for way, own in self._arrivals.items() if gone.isdisjoint(way)]
        found.arrivals = [one for own in kept_ways for one in own]
        found.flows = [flow for flow in self._flows.values() if flow.rank not in gone and flow.peer not in gone]
        found.probes = [one for one in self._probes.values() if one.rank not in gone and one.peer not in gone]
        found.num_lines = found.num_records
        return found


def _put_latest(kept: dict[_Key, deque[_Kept]], key: _Key, record: _Kept, *, most: int) -> None:
    if key in kept or len(kept) < _MOST_RANKS:
        kept.setdefault(key, deque(maxlen=most)).append(record)


def _most_of(count: int) -> int:
    """Return how many records are kept of so many ranks or ways."""
    return min(_MOST_KEPT, max(min(_MANY * count, _MOST_MANY), _FEW * count))
