"""Diagnosis: from records to findings, in one call or incrementally."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest

from thinwire.monitor.detect.collectives import find_slow_operations
from thinwire.monitor.detect.connections import find_slow_flows
from thinwire.monitor.detect.desync import find_desync, find_losses
from thinwire.monitor.detect.hangs import find_hangs
from thinwire.monitor.detect.heartbeats import find_silent
from thinwire.monitor.detect.intermittent import find_flapping
from thinwire.monitor.detect.link_history import LinkHistory, LinkTimes, link_times
from thinwire.monitor.detect.resolver import resolve
from thinwire.monitor.detect.slow_compute import WorkHistory, WorkTimes, find_slow_work, find_stalls, work_times
from thinwire.monitor.detect.slow_links import find_slow_links
from thinwire.monitor.detect.slow_paths import find_slow_paths
from thinwire.monitor.detect.timeline import Job, build
from thinwire.monitor.findings import Evidence, Finding, Place
from thinwire.monitor.nccl.inspector_detectors import (
    find_gaps,
    find_late,
    find_slow_collectives,
    find_slow_messages,
    numbers_of,
    series_of,
)
from thinwire.monitor.nccl.ras_detectors import find_in_snapshots
from thinwire.runlog.nccl_values import HASH_LETTERS, NcclRecords
from thinwire.runlog.reader import Records


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorStateConfig:
    """Constants of the incremental state."""

    restart_rounds: int = 64  # numbers that lie this far behind are those of a restarted job
    restart_records: int = 32  # latest records that must lie behind
    # below this all is computed again: clocks are fitted the better, the more messages there are
    min_records: int = 2000
    min_rounds: int = 8  # rounds until the state is kept
    max_records: int = 10_000  # from this on the state is kept after fewer rounds too
    # between the first and the last rank of a run that is stopped (tests/multiprocess/test_post_mortem.py)
    stop_s: float = 15.0
    passing_ratio: float = 2.0  # ratio of other work on a machine: 1.7 for three seconds at load 13 (LOG 2026-11-24)
    passing_s: float = 5.0  # duration of other work on a machine


STATE = DetectorStateConfig()


class DetectorState:
    """Incremental state of the detectors for a running job: an update costs only the new records.

    A job whose messages or compute have no numbers throughout (several communicators with messages; no spans, as with
    plain calls of torch) is computed from the kept records each time, and so is a job that has just begun.
    """

    def __init__(self) -> None:
        self._links, self._work = LinkHistory(), WorkHistory()
        self._is_remembered = False
        self._since_s = -math.inf

    def update(self, job: Job) -> tuple[LinkTimes, WorkTimes]:
        """Take new records in, and return the history of all ranks that take part."""
        job = self._of_now(job)
        restart_s = self._restart_s(job) if self._is_remembered else None
        if restart_s is not None:
            self._links, self._work, self._is_remembered = LinkHistory(), WorkHistory(), False
            self._since_s = restart_s
            job = self._of_now(job)
        count, rounds = len(job.messages) + len(job.spans), {message.operation for message in job.messages}
        is_enough = count >= STATE.max_records or len(rounds) >= STATE.min_rounds
        self._is_remembered = self._is_remembered or (count >= STATE.min_records and is_enough)
        if not self._is_remembered:
            return link_times(job), work_times(job)
        is_one = len({message.communicator for message in job.messages}) == 1
        has_spans = any(span.kind == "compute" for span in job.spans)
        return (
            self._links.take(job, settled_s=settled_s(job)) if is_one else link_times(job),
            self._work.take(job, is_all=False) if has_spans else work_times(job),
        )

    def _of_now(self, job: Job) -> Job:
        """Return a job without the records before its restart."""
        if self._since_s == -math.inf:
            return job
        messages = [
            message for message in job.messages
            if message.received_done_s is None or message.received_done_s >= self._since_s
        ]  # fmt: skip
        return replace(job, messages=messages, spans=[span for span in job.spans if span.done_s >= self._since_s])

    def _restart_s(self, job: Job) -> float | None:
        """Return the time of a restart: all numbers lie far behind earlier ones since then."""
        rounds = ((one.received_done_s, one.operation) for one in job.messages if one.received_done_s is not None)
        steps = ((span.done_s, span.step) for span in job.spans if span.kind == "compute")
        for done, newest in ((rounds, self._links.newest), (steps, self._work.newest)):
            latest = nlargest(STATE.restart_records, done)
            if latest and max(number for _, number in latest) < newest - STATE.restart_rounds:
                return latest[-1][0]
        return None


def settled_s(job: Job) -> float:
    """Return the time up to which all ranks have written that are not silent."""
    seen = [
        seen_s
        for rank, seen_s in job.last_seen_s.items()
        if rank not in job.unsteady and job.now_s - seen_s <= job.silence_s(rank)
    ]
    return min(seen, default=job.now_s)


def diagnose(records: Records) -> list[Finding]:
    """Return the faults of a job, the worst first.

    Replicas that were removed from an elastic run are left out: the run went on without them.

    Example:
        >>> diagnose(Records())
        []
    """
    return findings_of_whole(build(records.of_members()))


def findings_of_whole(job: Job) -> list[Finding]:
    """Return the findings of a job that has ended: those of `findings_of`, and ranks that fell silent for good."""
    silent = [
        one
        for one in find_silent(job)
        if one.evidence.kind == "silent_rank" and one.evidence["silent_s"] >= STATE.stop_s
    ]
    return resolve([*findings_of(job), *silent], job)


def findings_of(job: Job, history: DetectorState | None = None) -> list[Finding]:
    """Return the findings of a job whose records are on one clock.

    Args:
        job: All records, or the latest ones.
        history: State from earlier records, which is updated; None if the job holds all records.
    """
    links, work = (link_times(job), work_times(job)) if history is None else history.update(job)
    found = [
        *find_in_nccl(job.nccl, trust=job.trust),
        *find_desync(job),
        *find_hangs(job),
        *find_losses(job),
        *find_slow_links(job, links),
        *find_slow_paths(job),
        *find_slow_operations(job),
        *find_slow_flows(job),
        *find_slow_work(job, work),
        *find_flapping(job, links),
        *find_stalls(job, work),
        *find_set_clocks(job),
    ]
    return [one for one in resolve(found, job) if not _is_passing(one, job)]


def find_in_nccl(records: NcclRecords, *, trust: float = 1.0) -> list[Finding]:
    """Return the findings from the records of NCCL's own tools.

    Example:
        >>> find_in_nccl(NcclRecords())
        []
    """
    states = find_in_snapshots(records.snapshots, trust=trust)
    if not records.timings:
        return states
    timings = records.timings
    series, numbers = series_of(timings), numbers_of(timings)
    return [
        *_with_hosts(states, records),
        *find_slow_messages(timings, numbers, trust=trust),
        *find_slow_collectives(series, numbers, trust=trust),
        *find_late(series, numbers, trust=trust),
        *find_gaps(series, numbers, trust=trust),
    ]


def _with_hosts(findings: Sequence[Finding], records: NcclRecords) -> Iterator[Finding]:
    """Yield findings of RAS, which knows addresses only, with the host names that the Inspector writes."""
    name_of = {(one.communicator, one.rank): one.host for one in records.timings}
    pairs = {  # the Inspector cuts a communicator's hash
        (member.host, name_of[one.communicator[:HASH_LETTERS], rank])
        for snapshot in records.snapshots
        for one in snapshot.communicators
        for rank, member in one.members.items()
        if member.host and (one.communicator[:HASH_LETTERS], rank) in name_of
    }
    for finding in findings:
        content = f"{finding.where} {finding.evidence}"
        named = [f"{address} is {name}" for address, name in sorted(pairs) if address in content]
        yield replace(finding, evidence=finding.evidence.with_values(hosts=named[:16])) if named else finding


def _is_passing(finding: Finding, job: Job) -> bool:
    """Return whether compute or operations are slower by little and for a short time, as by other work."""
    # links are compared with each other, so that load on a machine does not show there
    if finding.evidence.kind not in ("slow_compute", "slow_operation", "placed_operation", "slow_bytes"):
        return False
    lasted_s = (job.now_s if finding.until_s is None else finding.until_s) - finding.since_s
    return lasted_s < STATE.passing_s and (finding.times_longer or 0.0) < STATE.passing_ratio


def find_set_clocks(job: Job) -> list[Finding]:
    """Return hosts whose clock was set while they wrote, so that their times cannot be compared."""
    found = []
    for clock, fit in job.alignment.fits.items():
        if fit.is_steady:
            continue
        hosts = tuple(sorted({host for rank, host in job.host_of.items() if rank in job.unsteady and host == clock}))
        found.append(Finding(
            kind="clock",
            places=(Place(kind="host", hosts=hosts or (clock,)),),
            since_s=fit.to_reference(fit.jumped_s),
            evidence=Evidence("clock", clock=clock, offset_s=round(fit.offset_s, 6), error_s=round(fit.error_s, 6)),
            text=f"The clock of {clock} was set while it wrote, or its records are forged; its times are left out.",
            confidence=0.7 * job.trust,
            remedy="record with a clock that is never set (time.monotonic)",
        ))  # fmt: skip
    return found
