"""Window of the latest records of a run in fixed memory, for the charts of the page and its diagnosis."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from thinwire.monitor.detect.live import RecordWindow
from thinwire.runlog.reader import Records
from thinwire.runlog.records import Communicator, Record, Span, TransferEnd
from thinwire.runlog.run_folder import ROUNDS, StepMetrics, end_of, operation_of

MOST_RECORDS = 6_000
_MOST_PARTS = 1 << 13


class RunWindow:
    """Latest records of all ranks: from their recorders, or from their lines of metrics and transfers without one."""

    def __init__(self) -> None:
        self._kept = RecordWindow(most_records=MOST_RECORDS)
        self._parts: dict[int, dict[tuple[int, int, str], int]] = {}
        self.ranks: set[int] = set()  # ranks with files
        self.recorded: set[int] = set()  # of these, those with a recorder, which reports open operations too

    def restart(self, rank: int) -> None:
        """Forget what a rank has written."""
        self._kept.forget(rank)
        self._parts.pop(rank, None)

    def add_record(self, rank: int, record: Record) -> None:
        """Add a record of a rank's recorder; it is more exact than metrics, which are forgotten.

        Raises:
            ValueError: It is another rank's.
        """
        if rank not in self.recorded:
            self.restart(rank)
            self.recorded.add(rank)
        if not isinstance(record, Communicator) and record.rank != rank:
            raise ValueError(f"a record of rank {record.rank} in the file of rank {rank}")
        self._kept.add(record)

    def add_transfer(self, rank: int, line: dict[str, Any]) -> None:
        """Add a line of a run's transfers.

        Raises:
            ValueError: It holds what cannot be.
        """
        parts = self._parts.setdefault(rank, defaultdict(int))
        for key in list(parts)[: len(parts) - _MOST_PARTS]:  # rounds that are long over
            del parts[key]
        self._kept.add(end_of(line, rank, parts))

    def add_steps(self, rank: int, line: StepMetrics, before: StepMetrics | None) -> None:
        """Add the work between a line of metrics and the one before, with the waiting at its end."""
        begin_s = before.time_s if before is not None else 0.0
        if line.time_s > begin_s:
            work_s = (line.time_s - begin_s) * min(1.0, max(0.0, line.compute_fraction))
            self._kept.add(Span(rank=rank, kind="compute", step=line.step, started_s=begin_s, done_s=begin_s + work_s))

    def records(self) -> Records:
        """Return the records that are kept; each replica without a recorder has a clock of its own."""
        found = self._kept.records()
        if self.ranks and not self.recorded:
            ranks = tuple(sorted(self.ranks))
            hosts = tuple(f"replica-{rank}" for rank in ranks)
            found.communicators[ROUNDS] = Communicator(communicator=ROUNDS, ranks=ranks, hosts=hosts)
        rounds: dict[int, dict[int, list[TransferEnd]]] = defaultdict(lambda: defaultdict(list))
        for end in found.transfers:
            if end.rank not in self.recorded:
                rounds[end.rank][end.operation].append(end)
        for own in rounds.values():
            found.operations += [operation_of(own[round], sequence=round) for round in sorted(own)]
        return found
