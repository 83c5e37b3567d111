"""Window of the latest records of each rank in fixed memory, for the delay matrix and the timeline."""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from typing import Any

from thinwire.monitor.detect.live import FirstAndLatest
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
    Record,
    Span,
    TransferEnd,
)
from thinwire.runlog.run_folder import ROUNDS, StepMetrics, end_of, operation_of

MOST_RECORDS = 12_000
_LEAST_A_RANK = 128
_MOST_COMMUNICATORS = 64
_MOST_ARRIVALS, _MOST_FLOWS = 8, 256
_State = Arrival | Flow | Probe | PathReading | ProcessState


class RankWindow:
    """The latest records of one rank, from its recorder, or from the lines of its metrics and transfers.

    Args:
        rank: The rank.

    Attributes:
        is_recorded: Whether they come from a recorder, which reports open operations too.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.is_recorded = False
        self.communicators: dict[str, Communicator] = {}
        self.restart()

    def restart(self) -> None:
        """Forget all records."""
        self.communicators.clear()
        self._operations: dict[tuple[str, int], Operation] = {}
        self._ends: dict[tuple[str, int, str, int, int], TransferEnd] = {}
        self._spans: dict[tuple[str, int], Span] = {}
        self._beat: Beat | None = None
        self._states: dict[type, dict[tuple[int, int], Any]] = defaultdict(dict)  # by peer and path
        self._parts: dict[tuple[int, int, str], int] = defaultdict(int)

    def add(self, record: Record, *, room: int) -> None:
        """Add a record; the oldest of its kind go where there are more than `room`.

        Raises:
            ValueError: It is another rank's, or there are too many communicators.
        """
        if isinstance(record, Communicator):
            if len(self.communicators) >= _MOST_COMMUNICATORS and record.communicator not in self.communicators:
                raise ValueError(f"more than {_MOST_COMMUNICATORS} communicators")
            self.communicators[record.communicator] = record
            return
        if record.rank != self.rank:
            raise ValueError(f"a record of rank {record.rank} in the file of rank {self.rank}")
        if isinstance(record, Beat):
            self._beat = record
        elif isinstance(record, _State):
            self._add_state(record, room=room)
        elif isinstance(record, Operation):
            _keep(self._operations, (record.communicator, record.sequence), record, room=room)
        elif isinstance(record, Span):
            _keep(self._spans, (record.kind, record.step), record, room=room)
        else:
            key = (record.communicator, record.peer, record.direction, record.operation, record.part)
            _keep(self._ends, key, record, room=room)

    def _add_state(self, record: _State, *, room: int) -> None:
        key, kept = (record.peer, record.path if isinstance(record, PathReading) else 0), self._states[type(record)]
        if key not in kept and len(kept) >= room:
            return
        if isinstance(record, Arrival | ProcessState):
            most = 1 if isinstance(record, ProcessState) else _MOST_ARRIVALS
            kept.setdefault(key, deque(maxlen=most)).append(record)
        else:
            kept.setdefault(key, FirstAndLatest(_MOST_FLOWS)).put(record.at_s, record)

    def add_transfer(self, line: dict[str, Any], *, room: int) -> None:
        """Add a line of a run's transfers.

        Raises:
            ValueError: It holds what cannot be.
        """
        if len(self._parts) > 8 * room:  # rounds that are long over
            for key in list(self._parts)[: 4 * room]:
                del self._parts[key]
        self.add(end_of(line, self.rank, self._parts), room=room)

    def add_steps(self, line: StepMetrics, before: StepMetrics | None, *, room: int) -> None:
        """Add the work between a line of metrics and the one before, with the waiting at its end."""
        begin_s = before.time_s if before is not None else 0.0
        if line.time_s > begin_s:
            work_s = (line.time_s - begin_s) * min(1.0, max(0.0, line.compute_fraction))
            span = Span(rank=self.rank, kind="compute", step=line.step, started_s=begin_s, done_s=begin_s + work_s)
            self.add(span, room=room)

    def to(self, records: Records) -> None:
        """Put all of them into `records`."""
        operations = list(self._operations.values())
        if not self.is_recorded:
            rounds: dict[int, list[TransferEnd]] = defaultdict(list)
            for end in self._ends.values():
                rounds[end.operation].append(end)
            operations = [operation_of(rounds[round], sequence=round) for round in sorted(rounds)]
        found: list[Record] = [
            *operations,
            *self._ends.values(),
            *self._spans.values(),
            *([self._beat] if self._beat else []),
            *(one for kept in self._states.values() for own in kept.values() for one in _values(own)),
        ]
        for record in found:
            records.num_lines += 1
            records.add(record)


def _values(kept: deque[Any] | FirstAndLatest[Any]) -> list[Any]:
    return list(kept) if isinstance(kept, deque) else kept.values()


def room_for(num_ranks: int) -> int:
    """Return the number of records of a kind that each of `num_ranks` may keep."""
    return max(_LEAST_A_RANK, MOST_RECORDS // max(1, num_ranks))


def joined(windows: list[RankWindow]) -> Records:
    """Return the records of all ranks; if they contradict each other about a communicator, the first rank counts."""
    records = Records()
    if not any(window.is_recorded for window in windows):
        ranks = tuple(sorted(window.rank for window in windows))
        if ranks:  # each replica's times begin with its own training
            hosts = tuple(f"replica-{rank}" for rank in ranks)
            records.communicators[ROUNDS] = Communicator(communicator=ROUNDS, ranks=ranks, hosts=hosts)
    for window in windows:
        for communicator in window.communicators.values():
            with contextlib.suppress(ValueError):  # ranks contradict each other: the first is believed
                records.add(communicator)
        window.to(records)
    return records


def _begin(record: Any) -> float:
    return float(record.started_s if isinstance(record, Span) else record.posted_s)


def _keep(kept: dict[Any, Any], key: Any, record: Record, *, room: int) -> None:
    known = kept.get(key)
    # a later line replaces an earlier one; a late line does not undo the end of an operation
    is_newer = known is None or known.done_s is None or _begin(record) > _begin(known)
    if is_newer or getattr(record, "done_s", None) is not None:
        kept.pop(key, None)
        kept[key] = record
    while len(kept) > room:
        kept.pop(next(iter(kept)))
