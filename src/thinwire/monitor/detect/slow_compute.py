"""Compute detector: ranks whose compute between exchanges became slow, becomes ever slower, or stalls regularly.

Compute is recorded as spans, or is the gap between operations. Operations with round numbers have one gap a round. A
plain torch job has several operations a step: gradient buckets follow each other closely, and then comes a long gap,
the rest of the step. So a step begins where all ranks but the slow ones have a long gap, and its compute is the sum of
all gaps since the step before.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from thinwire.monitor.detect.change_points import CUSUM, Baseline, ChangePointDetector, PeerGroup, at_least, median
from thinwire.monitor.detect.timeline import Job
from thinwire.monitor.findings import Evidence, Finding, Kind, Place
from thinwire.runlog.records import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeConfig:
    """Constants of the detectors of slow compute and stalls."""

    long_share: float = 0.4  # of the gap that half of all own time lies above: longer gaps begin a step
    stretch: int = 32  # gaps that one estimate of long gaps is taken from
    min_longer_s: float = 0.01  # growth of compute that is found in plain calls: a turn of another process
    min_peers: int = 3  # ranks until they are compared with each other
    max_behind: int = 64  # steps that a rank may lag to be waited for
    peers_ratio: float = 2.0  # where all ranks share the cores of a host
    best_share: float = 0.75  # of the fastest rank's speed: a rank below it was slow from the start, on several hosts
    peers_scores: float = 3.0  # standard errors by which a rank must be beyond that
    peers_steps: int = 24  # steps until ranks are compared
    look_steps: int = 24  # steps after an alarm that tell the ratio
    spike: float = math.log(2.0)  # log ratio of a stall; equals `long` of the change-point detector
    min_spikes: int = 5  # stalls; equals `often` of the change-point detector
    around: int = 25  # steps that a stall is compared with
    chance: float = 1e-6  # chance of so regular stalls without a cause


COMPUTE = ComputeConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Compute of one rank between two exchanges."""

    step: int  # its number
    at_s: float  # when it began
    time_s: float  # how long it took
    stalled_s: float | None = None  # how long the rank waited for the network after it; None if unknown


_Gaps = dict[int, dict[int, Work]]  # by sequence number, then by rank


def between_operations(job: Job) -> dict[int, list[Work]]:
    """Return the compute of each rank, by round or step; of several communicators the one with most counts."""
    rounds: dict[int, dict[int, Work]] = defaultdict(dict)
    steps: dict[str, _Gaps] = defaultdict(lambda: defaultdict(dict))
    ended: dict[tuple[str, int], Operation] = {}
    for (communicator, sequence), own in sorted(job.operations.items(), key=lambda item: item[0][1]):
        for rank, operation in own.items():
            gap = _gap(ended.get((communicator, rank)), operation)
            if gap is not None and operation.round < 0:
                steps[communicator][sequence][rank] = gap
            elif gap is not None:
                known = rounds[rank].get(gap.step)
                if known is None or known.time_s < gap.time_s:
                    rounds[rank][gap.step] = gap
            if operation.done_s is not None:
                ended[communicator, rank] = operation
    if rounds or not steps:
        return {rank: list(works.values()) for rank, works in rounds.items()}
    return _by_step(
        max(steps.values(), key=lambda gaps: math.fsum(g.time_s for own in gaps.values() for g in own.values()))
    )


def _gap(before: Operation | None, operation: Operation) -> Work | None:
    """Return the gap between two consecutive operations; None if they overlap."""
    if before is None or before.done_s is None or before.sequence != operation.sequence - 1:
        return None
    if operation.posted_s < before.done_s:
        return None
    step = operation.round if operation.round >= 0 else operation.sequence
    return Work(step=step, at_s=before.done_s, time_s=operation.posted_s - before.done_s)


def _by_step(gaps: _Gaps) -> dict[int, list[Work]]:
    ranks = {rank for own in gaps.values() for rank in own}
    found: dict[int, list[Work]] = {rank: [] for rank in ranks}
    since: dict[int, list[Work]] = defaultdict(list)
    step = 0
    for sequence, is_long in _long_ones(gaps, ranks):
        for rank, gap in gaps[sequence].items():
            since[rank].append(gap)
        if is_long:
            for rank, own in since.items():
                time_s = math.fsum(gap.time_s for gap in own)
                found[rank].append(Work(step=step, at_s=own[0].at_s, time_s=time_s))
            since.clear()
            step += 1
    return found


def _long_ones(gaps: _Gaps, ranks: Collection[int]) -> Iterator[tuple[int, bool]]:
    """Yield each sequence number, and whether its gap is long."""
    # the limit is a median over many stretches: else one wait of seconds would make all other gaps short
    order = sorted(gaps)
    common = [
        # the lower median over ranks, so that a slow one alone makes no step
        sorted(own[rank].time_s if rank in own else 0.0 for rank in ranks)[(len(ranks) - 1) // 2]
        for own in (gaps[sequence] for sequence in order)
    ]
    halves = [
        _weighted_median(common[begin : begin + COMPUTE.stretch]) for begin in range(0, len(common), COMPUTE.stretch)
    ]
    long_s = COMPUTE.long_share * median(halves)
    yield from ((sequence, time_s >= long_s > 0) for sequence, time_s in zip(order, common, strict=True))


def _weighted_median(times_s: Sequence[float]) -> float:
    """Return the duration at which half of all time lies in durations as long or longer.

    Example:
        >>> _weighted_median([1.0, 1.0, 1.0, 8.0, 8.0])
        8.0
    """
    left_s = math.fsum(times_s) / 2
    for time_s in sorted(times_s, reverse=True):
        left_s -= time_s
        if left_s <= 0:
            return time_s
    return 0.0


@dataclass(slots=True)
class WorkTimes:
    """Detectors of the compute of all ranks."""

    own: dict[int, ChangePointDetector] = field(default_factory=dict)  # against its own history
    # against the median of all ranks in the same step; needs three ranks
    beside: dict[int, ChangePointDetector] = field(default_factory=dict)
    least_longer_s: float = 0.0  # growth that is reported; more if steps are found in plain calls


def work_of(job: Job) -> dict[int, list[Work]]:
    """Return the compute of each rank: its spans, or the gaps between its operations."""
    spans: dict[int, list[Work]] = defaultdict(list)
    for span in job.spans:
        if span.kind == "compute":
            spans[span.rank].append(Work(
                step=span.step, at_s=span.started_s, time_s=span.done_s - span.started_s, stalled_s=span.stalled_s,
            ))  # fmt: skip
    return dict(spans) if spans else between_operations(job)


def work_times(job: Job) -> WorkTimes:
    """Return the history of all ranks from all records."""
    return WorkHistory().take(job, is_all=True)


class WorkHistory:
    """History of the compute of all ranks, updated with new records."""

    def __init__(self) -> None:
        self._times = WorkTimes()
        self._plain, self._compared = PeerGroup(), PeerGroup()
        self._taken: dict[int, int] = {}
        self._held: dict[int, dict[int, Work]] = {}  # by step, then by rank; incomplete steps
        self.newest = -1  # latest step taken in; -1 without one

    def take(self, job: Job, *, is_all: bool) -> WorkTimes:
        """Take new compute in, and return the history of the ranks in the job."""
        times = self._times
        works = {rank: works for rank, works in work_of(job).items() if rank not in job.unsteady}
        for rank, own in works.items():
            if rank not in times.own:
                times.own[rank] = ChangePointDetector(peers=self._plain)
                times.beside[rank] = ChangePointDetector(peers=self._compared)
            for work in own:
                if work.step > self._taken.get(rank, -1):
                    self._taken[rank] = work.step
                    self.newest = max(self.newest, work.step)
                    self._held.setdefault(work.step, {})[rank] = work
                    times.own[rank].add(work.step, work.at_s, work.time_s)
        # the last step that all live ranks have done
        alive = [rank for rank in works if job.now_s - job.last_seen_s.get(rank, job.now_s) <= job.silence_s(rank)]
        steps = [self._taken[rank] for rank in alive if rank in self._taken]
        all_done = min((step for step in steps if step >= self.newest - COMPUTE.max_behind), default=-1)
        done = max(self._held, default=-1) if is_all else all_done
        for step in sorted(step for step in self._held if step <= done):
            self._compare(step, self._held.pop(step))
        if all(operation.round < 0 for own in job.operations.values() for operation in own.values()):
            times.least_longer_s = COMPUTE.min_longer_s
        present = {rank: watch for rank, watch in times.own.items() if rank in works}
        return replace(times, own=present, beside={rank: times.beside[rank] for rank in present})

    def _compare(self, step: int, works: dict[int, Work]) -> None:
        middle = median([work.time_s for work in works.values()])
        if len(works) >= COMPUTE.min_peers and middle > 0:
            for rank, work in works.items():
                self._times.beside[rank].add(step, work.at_s, work.time_s / middle)


def find_slow_work(job: Job, times: WorkTimes) -> list[Finding]:
    """Return the ranks or hosts whose compute takes longer than before, or was slow from the start.

    Lasting slowdowns come before those that have ended.
    """
    lasting = _slower_ranks(job, times, is_over=False) or _slower_job(job, times)
    over = _slower_ranks(job, times, is_over=True)
    return lasting + over or _slower_than_peers(job, times)


def _slower_job(job: Job, times: WorkTimes) -> list[Finding]:
    """Return that all ranks are slower, if they are."""
    everyone = [rank for rank, watch in times.own.items() if watch.change is not None and not watch.change.is_over]
    if len(everyone) < 3 or len(everyone) < len(times.own):
        return []
    found = _slow_work(job, times, times.own, everyone, Place(kind="job"))
    # ranks that share a machine become slow together under other load
    return [found] if _is_relevant(found, times) and (found.times_longer or 0.0) >= COMPUTE.peers_ratio else []


def _slower_ranks(job: Job, times: WorkTimes, *, is_over: bool) -> list[Finding]:
    watches = times.beside if len(times.own) >= 3 else times.own
    alarmed = [
        rank
        for rank, watch in watches.items()
        if (change := watch.change) is not None
        and change.is_over == is_over
        # if all others become faster, none is at fault
        and times.own[rank].excess_in(change.since_round, change.seen_round) >= math.log(CUSUM.min_ratio) / 2
    ]
    found = []
    on: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(alarmed):
        on[job.host_of[rank]].append(rank)
    for host, ranks in on.items():
        all_ranks = [rank for rank, name in job.host_of.items() if name == host]
        change = watches[ranks[0]].change
        assert change is not None
        longer = [
            times.own[rank].excess_in(change.since_round, change.seen_round) for rank in all_ranks if rank in watches
        ]
        is_host = len(longer) == len(all_ranks) > 1 and min(longer) >= 0.6 * max(longer)
        for group in [all_ranks] if is_host else [[rank] for rank in ranks]:
            place = Place(kind="host", hosts=(host,)) if is_host else Place(kind="rank", ranks=tuple(group))
            found.append(_slow_work(job, times, watches, group, place))
    relevant = [finding for finding in found if _is_relevant(finding, times)]
    if len(times.own) >= COMPUTE.min_peers or len({job.host_of[rank] for rank in times.own}) > 1:
        return relevant
    return [finding for finding in relevant if _exceeds_shared_load(finding, times)]


def _exceeds_shared_load(finding: Finding, times: WorkTimes) -> bool:
    """Return whether ranks of a host became slower than other load on its cores explains."""
    # for a job of one host with too few ranks for a median of peers. Ranks that share cores become slow together; a
    # rank that is slow alone is compared with the others in the same rounds
    slow = set(finding.places[0].ranks)
    last = finding.seen_round + COMPUTE.look_steps
    others = [own.excess_in(finding.since_round, last) for rank, own in times.own.items() if slow and rank not in slow]
    shared = max(0.0, median(others)) if others else 0.0
    return (finding.times_longer or 0.0) >= COMPUTE.peers_ratio * math.exp(shared)


def _is_relevant(finding: Finding, times: WorkTimes) -> bool:
    """Return whether compute grew by more than what a busy machine takes at a turn, and by a known number."""
    longer_s = finding.evidence["now_s"] - finding.evidence["usual_s"]
    return (finding.times_longer or 0.0) >= CUSUM.min_ratio and bool(longer_s >= times.least_longer_s)


def _slow_work(
    job: Job, times: WorkTimes, watches: Mapping[int, ChangePointDetector], ranks: Sequence[int], place: Place
) -> Finding:
    changes = [change for rank in ranks if (change := watches[rank].change) is not None]
    first = min(changes, key=lambda change: change.seen_round)
    since = first.since_round
    excess = median([times.own[rank].excess_in(since, first.last_round(COMPUTE.look_steps)) for rank in ranks])
    usual_s = median([times.own[rank].usual_s for rank in ranks])
    is_growing = place.kind != "job" and all(_is_growing(times.own[rank], since) for rank in ranks)
    kind: Kind = "slowing compute" if is_growing else "non-communication slow"
    waits = _waits(job, first.since_s)
    least = min(waits, key=lambda rank: waits[rank], default=None)
    more = "ever more" if is_growing else f"{math.exp(excess):.1f} times as long as it did"
    return Finding(
        kind=kind,
        places=(place,),
        since_s=first.since_s, since_round=since, seen_round=first.seen_round, until_s=first.until_s,
        evidence=Evidence(
            "slow_compute", times_longer=round(math.exp(excess), 2), usual_s=round(usual_s, 6),
            now_s=round(usual_s * math.exp(excess), 6),
            waited_least="unknown" if least is None else f"rank {least}, {waits[least]:.4g} s",
        ),
        text=f"The work of {place} between exchanges takes {more}.",
        confidence=(0.95 if least is None or least in ranks else 0.85) * job.trust,
        remedy="look for other load, thermal limits, memory that runs full or data that comes late on this host",
    )  # fmt: skip


def _waits(job: Job, since_s: float) -> dict[int, float]:
    """Return the median wait of each rank in operations, by its own clock: the last rank waits least."""
    # chosen by time, since round numbers are no step numbers
    waits: dict[int, list[float]] = defaultdict(list)
    for own in job.operations.values():
        for rank, operation in own.items():
            if operation.posted_s >= since_s and operation.done_s is not None:
                waits[rank].append(operation.done_s - operation.posted_s)
    return {rank: median(values) for rank, values in waits.items()}


def _is_growing(watch: ChangePointDetector, since: int) -> bool:
    """Return whether compute keeps growing: each third of the time since the change is slower than the one before."""
    values = [excess for number, _, excess in watch.excess if number >= since]
    third = len(values) // 3
    if third < 4:
        return False
    parts = [median(values[:third]), median(values[third : 2 * third]), median(values[-third:])]
    step = math.log(CUSUM.min_ratio) / 2
    return parts[1] - parts[0] >= step and parts[2] - parts[1] >= step


def _slower_than_peers(job: Job, times: WorkTimes) -> list[Finding]:
    """Return ranks that were slow from the start: below three quarters of the speed of the fastest like rank."""
    # each rank's work is taken in times the median of all ranks in the same step, so that uneven batches do not matter.
    # If most ranks are slower than the fastest one, that one is the exception, and they are compared with their median
    usual = {rank: watch.usual for rank, watch in times.beside.items() if watch.usual.count >= COMPUTE.peers_steps}
    if len(usual) < COMPUTE.min_peers:
        return []
    is_shared = len({job.host_of[rank] for rank in usual}) == 1
    limit = math.log(COMPUTE.peers_ratio if is_shared else 1 / COMPUTE.best_share)
    # of a median of so many values that scatter
    error = {rank: 1.2533 * base.scale / math.sqrt(base.count) for rank, base in usual.items()}
    best = min(usual, key=lambda rank: usual[rank].middle)
    reference, name = usual[best].middle, f"rank {best}, the fastest"
    slow = _beyond(usual, error, reference, limit)
    if 2 * len(slow) > len(usual):
        reference, name = median([base.middle for base in usual.values()]), "the median of all ranks"
        slow = _beyond(usual, error, reference, limit)
    found = []
    for rank in slow:
        ratio, time_s = math.exp(usual[rank].middle - reference), times.own[rank].usual_s
        if time_s * (1 - 1 / ratio) >= times.least_longer_s:
            found.append(Finding(
                kind="non-communication slow",
                places=(Place(kind="rank", ranks=(rank,)),),
                since_s=times.own[rank].history()[0][1], since_round=0, seen_round=-1,
                evidence=Evidence("compute_peers", times_longer_than_peers=round(ratio, 2), usual_s=round(time_s, 6)),
                text=f"Rank {rank} has worked {ratio:.1f} times as long between exchanges as {name}, since the records "
                "begin; it may be a slower machine.",
                confidence=0.5 * job.trust,
                remedy="look for other load, thermal limits and a slower machine; give it less work, or let it take "
                "fewer inner steps",
            ))  # fmt: skip
    return found


def _beyond(usual: Mapping[int, Baseline], error: Mapping[int, float], reference: float, limit: float) -> list[int]:
    """Return the ranks that are surely slower than a reference by more than a limit."""
    return [
        rank
        for rank, base in sorted(usual.items())
        if base.middle - reference - limit >= COMPUTE.peers_scores * math.hypot(error[rank], min(error.values()))
    ]


def find_stalls(job: Job, times: WorkTimes) -> list[Finding]:
    """Return ranks that stall at regular times, as garbage collection, checkpoints or data loading do."""
    regular = {rank: stall for rank, watch in times.own.items() if (stall := regular_stalls(watch)) is not None}
    cycles = _cycles(job) if regular else {}
    # a step in which rounds are decoded takes longer by nature on few cores
    longer_s = {rank: times.own[rank].usual_s * math.expm1(stall[2]) for rank, stall in regular.items()}
    stalls = {rank: stall for rank, stall in regular.items()
              if cycles.get(rank, 1) % stall[1] and longer_s[rank] >= times.least_longer_s}  # fmt: skip
    alike: dict[tuple[int, int], dict[int, tuple[int, int, float, int]]] = defaultdict(dict)
    for rank, stall in stalls.items():
        alike[stall[1], stall[0] % stall[1]][rank] = stall
    return [_stalling(job, times, own) for _, own in sorted(alike.items())]


def _stalling(job: Job, times: WorkTimes, stalls: Mapping[int, tuple[int, int, float, int]]) -> Finding:
    """Return that some ranks stall at the same steps."""
    ranks = tuple(sorted(stalls))
    first = min(stalls.values(), key=lambda stall: stall[0])
    period = median([stall[1] for stall in stalls.values()])
    longer = math.exp(median([stall[2] for stall in stalls.values()]))
    at_s = min(at_s for rank in ranks for number, at_s, _ in times.own[rank].excess if number >= stalls[rank][0])
    place = Place(kind="job") if len(ranks) == len(times.own) > 1 else Place(kind="rank", ranks=ranks)
    return Finding(
        kind="periodic stall",
        places=(place,),
        since_s=at_s, since_round=first[0], seen_round=max(stall[3] for stall in stalls.values()),
        evidence=Evidence("stall", every_rounds=period, times_longer=round(longer, 2)),
        text=f"The work of {place} takes {longer:.1f} times as long in every {period:.0f}th round.",
        confidence=0.9 * job.trust,
        remedy="collect garbage at the same step on all ranks (gc.disable and gc.collect), and move checkpoints and "
        "data loading to the background",
    )  # fmt: skip


def _cycles(job: Job) -> dict[int, int]:
    """Return the period of each rank's rounds in steps: the median gap between rounds of one size."""
    steps: dict[int, list[Work]] = defaultdict(list)
    for span in job.spans:
        steps[span.rank].append(Work(step=span.step, at_s=span.started_s, time_s=0.0))
    posted: dict[tuple[int, int], list[float]] = defaultdict(list)
    for own in job.operations.values():
        for rank, operation in own.items():
            posted[rank, operation.count].append(operation.posted_s)
    found: dict[int, int] = {}
    for (rank, _), times in posted.items():
        works = steps[rank]
        starts = [work.at_s for work in works]
        at = [works[max(0, bisect_right(starts, time_s) - 1)].step for time_s in sorted(times) if works]
        gaps = [float(late - early) for early, late in pairwise(at)]
        # several fragments may be of one size: the rarest size shows the whole schedule
        found[rank] = max(found.get(rank, 1), round(median(gaps)) if gaps else 1)
    return found


def _beside_neighbours(values: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return values less the median around them, if that is above usual: a slow time is no spike."""
    found = []
    for index, (number, excess) in enumerate(values):
        begin = max(0, min(index - COMPUTE.around // 2, len(values) - COMPUTE.around))
        around = median([value for _, value in values[begin : begin + COMPUTE.around]])
        found.append((number, excess - max(0.0, around)))
    return found


def regular_stalls(watch: ChangePointDetector) -> tuple[int, int, float, int] | None:
    """Return first round, period, log ratio and round of proof of regular spikes; None without any.

    Spikes that fall on a grid of rounds are no chance where so many points of the grid have one that spikes as
    frequent as those off the grid would do it once in a million.
    """
    if not watch.is_often_long(of=len(watch.excess) + 1):
        return None
    values = _beside_neighbours([(number, excess) for number, _, excess in watch.excess])
    spikes = [number for number, excess in values if excess >= COMPUTE.spike]
    if len(spikes) < COMPUTE.min_spikes:
        return None
    excess_of = dict(values)
    for period in sorted({late - early for early, late in pairwise(spikes)}):
        for begin in spikes[: len(spikes) - COMPUTE.min_spikes + 1]:
            grid = [number for number in range(begin, values[-1][0] + 1, period) if number in excess_of]
            hits = [number for number in grid if excess_of[number] >= COMPUTE.spike]
            # spikes in every second round are a slow rank
            if period < 3 or len(hits) < max(COMPUTE.min_spikes, 0.8 * len(grid)):
                continue
            if 3 * (len(spikes) - len(hits)) > len(values) - len(grid):
                continue  # a slow rank with a few faster rounds
            off = (len(spikes) - len(hits) + 1) / (len(values) - len(grid) + 2)
            if at_least(len(hits), len(grid), off) * len(spikes) <= COMPUTE.chance:
                return begin, period, median([excess_of[number] for number in hits]), hits[COMPUTE.min_spikes - 1]
    return None
