"""History of each rank's work, built from all records at once or incrementally while a job runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from thinwire.monitor.detect.change_points import LEAST_HISTORY, Watch, median
from thinwire.monitor.detect.compute_gaps import Work, between_operations
from thinwire.monitor.detect.peer_baseline import Company
from thinwire.monitor.detect.timeline import Job

LEAST_LONGER_S = 0.01
_LEAST_BESIDE = 3
# A rank that is so many steps behind is not waited for.
_BEHIND = 64


@dataclass(slots=True)
class WorkTimes:
    """What is known of each rank's work.

    Attributes:
        own: Against its own history.
        beside: Against the middle of all ranks in the same step; only with three ranks or more.
        first: The first seconds of each.
        least_longer_s: By how much work must grow to be told; more where steps had to be found in plain calls.
    """

    own: dict[int, Watch] = field(default_factory=dict)
    beside: dict[int, Watch] = field(default_factory=dict)
    first: dict[int, list[float]] = field(default_factory=dict)
    least_longer_s: float = 0.0

    @property
    def usual(self) -> dict[int, float]:
        """The middle of the first times of each."""
        return {rank: median(values) for rank, values in self.first.items() if values}


def work_of(job: Job) -> dict[int, list[Work]]:
    """Return the work of each rank: its compute spans, or what lay between its operations where it wrote none."""
    spans: dict[int, list[Work]] = defaultdict(list)
    for span in job.spans:
        if span.kind == "compute":
            spans[span.rank].append(Work(step=span.step, at_s=span.started_s, time_s=span.done_s - span.started_s))
    return dict(spans) if spans else between_operations(job)


def work_times(job: Job) -> WorkTimes:
    """Watch the work of every rank."""
    return WorkHistory().take(job, is_all=True)


class WorkHistory:
    """Remembers how long each rank's work took.

    Attributes:
        newest: The latest step that was taken in, -1 before there is one.
    """

    def __init__(self) -> None:
        self._times = WorkTimes()
        self._plain, self._compared = Company(), Company()
        self._taken: dict[int, int] = {}
        self._held: dict[int, dict[int, Work]] = {}  # by step, then by rank: not all have come so far
        self.newest = -1

    def take(self, job: Job, *, is_all: bool) -> WorkTimes:
        """Take in what is new, and return all that is known of the ranks in the job.

        Args:
            job: What was recorded lately.
            is_all: Whether nothing more will come.
        """
        times = self._times
        works = {rank: works for rank, works in work_of(job).items() if rank not in job.unsteady}
        for rank, own in works.items():
            if rank not in times.own:
                times.own[rank], times.beside[rank] = Watch(company=self._plain), Watch(company=self._compared)
                times.first[rank] = []
            for work in own:
                if work.step > self._taken.get(rank, -1):
                    self._add(rank, work)
        done = max(self._held, default=-1) if is_all else self._all_done(job, works)
        for step in sorted(step for step in self._held if step <= done):
            self._compare(step, self._held.pop(step))
        if all(operation.round < 0 for own in job.operations.values() for operation in own.values()):
            times.least_longer_s = LEAST_LONGER_S
        return _within(times, works)

    def _add(self, rank: int, work: Work) -> None:
        times = self._times
        self._taken[rank] = work.step
        self.newest = max(self.newest, work.step)
        self._held.setdefault(work.step, {})[rank] = work
        times.own[rank].add(work.step, work.at_s, work.time_s)
        if len(times.first[rank]) < 4 * LEAST_HISTORY:
            times.first[rank].append(work.time_s)

    def _all_done(self, job: Job, ranks: Iterable[int]) -> int:
        """Return the last step that all ranks which can be waited for have done."""
        alive = [rank for rank in ranks if job.now_s - job.last_seen_s.get(rank, job.now_s) <= job.silence_s(rank)]
        steps = [self._taken[rank] for rank in alive if rank in self._taken]
        return min((step for step in steps if step >= self.newest - _BEHIND), default=-1)

    def _compare(self, step: int, works: dict[int, Work]) -> None:
        middle = median([work.time_s for work in works.values()])
        if len(works) >= _LEAST_BESIDE and middle > 0:
            for rank, work in works.items():
                self._times.beside[rank].add(step, work.at_s, work.time_s / middle)


def _within(times: WorkTimes, ranks: Iterable[int]) -> WorkTimes:
    """Return what is known of some ranks."""
    present = set(ranks)
    kept = [rank for rank in times.own if rank in present]
    if len(kept) == len(times.own):
        return times
    own, beside, first = ({rank: known[rank] for rank in kept} for known in (times.own, times.beside, times.first))
    return WorkTimes(own=own, beside=beside, first=first, least_longer_s=times.least_longer_s)  # type: ignore[arg-type]
