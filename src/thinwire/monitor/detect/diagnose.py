"""From records to findings, in one call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import nlargest

from thinwire.monitor.detect.change_points import is_at_once
from thinwire.monitor.detect.collectives import OWN, find_slow_operations
from thinwire.monitor.detect.connections import find_slow_flows
from thinwire.monitor.detect.desync import find_desync, find_losses
from thinwire.monitor.detect.hangs import find_hangs
from thinwire.monitor.detect.heartbeats import find_silent
from thinwire.monitor.detect.intermittent import find_flapping
from thinwire.monitor.detect.link_history import LinkHistory, LinkTimes, link_times
from thinwire.monitor.detect.slow_compute import WorkHistory, WorkTimes, find_slow_work, find_stalls, work_times
from thinwire.monitor.detect.slow_links import find_slow_links
from thinwire.monitor.detect.timeline import Job, Message, build
from thinwire.monitor.findings import Finding, Place
from thinwire.monitor.nccl.inspector_detectors import (
    find_gaps,
    find_late,
    find_slow_collectives,
    find_slow_messages,
    numbers_of,
    series_of,
)
from thinwire.monitor.nccl.ras_detectors import find_in_snapshots, short_hash
from thinwire.monitor.nccl.values import NcclRecords
from thinwire.monitor.runlog.reader import Records

# Rounds and steps whose numbers are so far behind are those of a job that began anew.
_AGAIN = 64
_LATEST = 32
# Jobs with fewer records or rounds are judged from nothing: clocks are known the better the more messages there are.
_LEAST_RECORDS, _LEAST_ROUNDS = 2000, 8
# With so many records they are not.
_MOST_RECORDS = 10_000


class History:
    """Remembers what was recorded of a job's links and work.

    Jobs whose messages or work cannot be numbered throughout (several communicators with messages; no spans of work,
    as with plain calls of torch) are judged by what is kept of their records alone, and so are those that have just
    begun.
    """

    def __init__(self) -> None:
        self._links, self._work = LinkHistory(), WorkHistory()
        self._is_remembered = False
        self._since_s = -math.inf

    def take(self, job: Job) -> tuple[LinkTimes, WorkTimes]:
        """Take in what is new, and return all that is known of who takes part.

        Args:
            job: What was recorded lately.
        """
        job = self._of_now(job)
        anew_s = self._anew_s(job) if self._is_remembered else None
        if anew_s is not None:
            self._links, self._work, self._is_remembered = LinkHistory(), WorkHistory(), False
            self._since_s = anew_s
            job = self._of_now(job)
        self._is_remembered = self._is_remembered or _is_worth_it(job)
        if not self._is_remembered:
            return link_times(job), work_times(job)
        is_one = len({message.communicator for message in job.messages}) == 1
        has_spans = any(span.kind == "compute" for span in job.spans)
        return (
            self._links.take(job, settled_s=settled_s(job)) if is_one else link_times(job),
            self._work.take(job, is_all=False) if has_spans else work_times(job),
        )

    def _of_now(self, job: Job) -> Job:
        """Return a job without what was recorded before it began anew."""
        if self._since_s == -math.inf:
            return job
        messages = [message for message in job.messages if _done_s(message) >= self._since_s]
        return replace(job, messages=messages, spans=[span for span in job.spans if span.done_s >= self._since_s])

    def _anew_s(self, job: Job) -> float | None:
        """Return since when all is far behind what was seen before, if it is."""
        rounds = ((one.received_done_s, one.operation) for one in job.messages if one.received_done_s is not None)
        steps = ((span.done_s, span.step) for span in job.spans if span.kind == "compute")
        for done, newest in ((rounds, self._links.newest), (steps, self._work.newest)):
            latest = nlargest(_LATEST, done)
            if latest and max(number for _, number in latest) < newest - _AGAIN:
                return latest[-1][0]
        return None


def _is_worth_it(job: Job) -> bool:
    count = len(job.messages) + len(job.spans)
    if count < _LEAST_RECORDS:
        return False
    return count >= _MOST_RECORDS or len({message.operation for message in job.messages}) >= _LEAST_ROUNDS


def settled_s(job: Job) -> float:
    """Return until when all ranks have written that are not silent."""
    seen = [
        seen_s
        for rank, seen_s in job.last_seen_s.items()
        if rank not in job.unsteady and job.now_s - seen_s <= job.silence_s(rank)
    ]
    return min(seen, default=job.now_s)


def _done_s(message: Message) -> float:
    return math.inf if message.received_done_s is None else message.received_done_s


def find_in_nccl(records: NcclRecords, *, trust: float = 1.0) -> list[Finding]:
    """Return what NCCL's own tools show to be wrong.

    Args:
        records: Of all ranks and of all times there are any of.
        trust: Part of the lines that could be used, in [0, 1].

    Example:
        >>> find_in_nccl(NcclRecords())
        []
    """
    states = find_in_snapshots(records.snapshots, trust=trust)
    if not records.timings:
        return states
    timings = records.timings
    series, numbers = series_of(timings), numbers_of(timings)
    gone = {rank for one in states for rank in one.evidence.get("ranks", ())}
    # whose process RAS cannot reach, or who hangs, writes no file any more: that is told already
    gaps = [one for one in find_gaps(series, numbers, trust=trust) if not _ranks_of(one) or not _ranks_of(one) <= gone]
    return [
        *_with_hosts(states, records),
        *find_slow_messages(timings, numbers, trust=trust),
        *find_slow_collectives(series, numbers, trust=trust),
        *find_late(series, numbers, trust=trust),
        *gaps,
    ]


def _ranks_of(finding: Finding) -> set[int]:
    return set(finding.evidence.get("ranks", ()))


def _with_hosts(findings: list[Finding], records: NcclRecords) -> Iterator[Finding]:
    """Yield findings of RAS, which knows addresses only, with the hosts' names that the Inspector writes."""
    name_of = {(one.communicator, one.rank): one.host for one in records.timings}
    pairs = {
        (member.host, name_of[short_hash(one.communicator), rank])
        for snapshot in records.snapshots
        for one in snapshot.communicators
        for rank, member in one.members.items()
        if member.host and (short_hash(one.communicator), rank) in name_of
    }
    for finding in findings:
        said = f"{finding.where} {finding.evidence}"
        named = [f"{address} is {name}" for address, name in sorted(pairs) if address in said]
        yield replace(finding, evidence={**finding.evidence, "hosts": named[:16]}) if named else finding


_SMALL_SHARE = 0.2
# Replicas of a run that is stopped end one after the other, the last of them after so many seconds.
_ENDS_WITHIN_S = 15.0
# Work that is less than so many times as slow must have lasted for so long.
_LITTLE, _LITTLE_S = 2.0, 5.0


def diagnose(records: Records) -> list[Finding]:
    """Return what is wrong with a job, the worst first; nothing where nothing is.

    Replicas that were removed from an elastic run are left out: the run went on without them.

    Args:
        records: Of all ranks that there are records of.

    Example:
        >>> diagnose(Records())
        []
    """
    return findings_of_whole(build(records.of_members()))


def findings_of_whole(job: Job) -> list[Finding]:
    """Return the findings of all records of a job: those of `findings_of`, and ranks that fell silent for good.

    Args:
        job: All records of the ranks that are to be judged.
    """
    found = findings_of(job)
    named = set().union(*(_ranks_of_diagnose(one, job) for one in found if one.until_s is None and "hang" in one.kind))
    silent = [one for one in find_silent(job) if one.evidence.get("silent_s", 0.0) >= _ENDS_WITHIN_S]
    return [*found, *(one for one in silent if not named & _ranks_of_diagnose(one, job))]


def findings_of(job: Job, history: History | None = None) -> list[Finding]:
    """Return the findings of a job that is on one clock already.

    Args:
        job: All records, or the latest ones.
        history: What the earlier ones showed, and takes in what is new; none where the job holds all records.
    """
    desyncs = find_desync(job)
    out_of_step = {finding.evidence["communicator"] for finding in desyncs}
    # who waits because of a desync waits for nothing else
    hangs = [finding for finding in find_hangs(job) if finding.evidence.get("communicator") not in out_of_step]
    links, work = (link_times(job), work_times(job)) if history is None else history.take(job)
    flapping = find_flapping(job, links)
    slow = [finding for finding in find_slow_links(job, links) if not _touches(finding, flapping, job)]
    stalls = find_stalls(job, work)
    slow_work = [finding for finding in find_slow_work(job, work) if not _touches(finding, stalls, job)]
    slow = [finding for finding in slow if not _follows(finding, slow_work, job)]
    hangs = [hang for hang in hangs if not _is_told(hang, [*slow, *slow_work], flapping, job)]
    slow_calls = [finding for finding in find_slow_operations(job) if not _is_beside(finding, slow_work)]
    flows = find_slow_flows(job)
    if job.messages:  # which tell more, of whatever is slow
        told = [*slow, *slow_work, *flapping, *stalls]
        flows = [one for one in flows if not any(is_at_once(one, other) for other in told)]
    slow_calls = _with_flows(slow_calls, flows, is_open=bool(hangs))
    slow_work, slow_calls = _without_passing(slow_work, job), _without_passing(slow_calls, job)
    found = [*desyncs, *hangs, *find_losses(job), *slow, *slow_calls, *slow_work, *flapping, *stalls]
    return [*find_in_nccl(job.nccl, trust=job.trust), *found, *find_set_clocks(job)]


def _is_told(hang: Finding, slow: Sequence[Finding], flapping: Sequence[Finding], job: Job) -> bool:
    """Return whether what stands still and moves is told by others: they have seen more of it."""
    if "hang" in hang.kind:
        return False
    lasting = [one for one in slow if one.kind == hang.kind and one.until_s is None]
    return _touches(hang, flapping, job) or any(set(hang.places) & set(one.places) for one in lasting)


def _without_passing(slow: Sequence[Finding], job: Job) -> list[Finding]:
    """Leave out what is slower by little and has not lasted: other work makes a machine so for seconds."""
    found = []
    for one in slow:
        lasted_s = (job.now_s if one.until_s is None else one.until_s) - one.since_s
        ratio = one.evidence.get("times_longer", math.inf)
        if lasted_s >= _LITTLE_S or not isinstance(ratio, float) or ratio >= _LITTLE:
            found.append(one)
    return found


def _with_flows(calls: Sequence[Finding], flows: Sequence[Finding], *, is_open: bool) -> list[Finding]:
    """Return slow calls and slow wires, each cause once.

    Wires that calls were placed by are told with these, and calls that wires explain are told by the wires.

    Args:
        calls: Operations that became slower.
        flows: Wires that did.
        is_open: Whether something stands still: who waits for it tells more then.
    """
    placed = [one for one in calls if one.places[0].kind != "communicator"]
    own = [
        one
        for one in flows
        if not (is_open and one.until_s is None) and not any(is_at_once(one, other) for other in placed)
    ]
    rest = [one for one in calls if one not in placed and not any(_explains(wire, one) for wire in own)]
    return [*placed, *rest, *own]


def _explains(wire: Finding, calls: Finding) -> bool:
    """Return whether a wire's slowness is enough for that of calls at the same time."""
    longer = math.log(wire.evidence["times_longer"]), math.log(calls.evidence["times_longer"])
    return is_at_once(wire, calls) and longer[0] >= OWN * longer[1]


def _is_beside(calls: Finding, slow_work: Sequence[Finding]) -> bool:
    """Return whether operations became slower by little beside what a rank's work did: who waits long wakes up late."""
    longer_s = _longer_s(calls)
    return any(_SMALL_SHARE * _longer_s(work) > longer_s for work in slow_work if is_at_once(calls, work))


def _longer_s(finding: Finding) -> float:
    """Return by how many seconds a time became longer, or 0 where the finding does not tell."""
    usual_s, ratio = finding.evidence.get("usual_s"), finding.evidence.get("times_longer")
    return usual_s * (ratio - 1) if isinstance(usual_s, float) and isinstance(ratio, float) else 0.0


def find_set_clocks(job: Job) -> list[Finding]:
    """Return hosts whose clock was set while they wrote: their times are compared with nobody's."""
    found = []
    for clock, fit in job.alignment.fits.items():
        if fit.is_steady:
            continue
        hosts = tuple(sorted({host for rank, host in job.host_of.items() if rank in job.unsteady and host == clock}))
        found.append(Finding(
            kind="clock",
            places=(Place(kind="host", hosts=hosts or (clock,)),),
            since_s=fit.to_reference(fit.jumped_s),
            evidence={"clock": clock, "offset_s": round(fit.offset_s, 6), "error_s": round(fit.error_s, 6)},
            text=f"The clock of {clock} was set while it wrote, or its records are forged; its times are left out.",
            confidence=0.7 * job.trust,
            remedy="record with a clock that is never set (time.monotonic)",
        ))  # fmt: skip
    return found


def _touches(finding: Finding, others: Sequence[Finding], job: Job) -> bool:
    """Return whether another finding names a place that this one names too, as ranks."""
    own = _ranks_of_diagnose(finding, job)
    return any(own & _ranks_of_diagnose(other, job) for other in others)


def _follows(finding: Finding, slow_work: Sequence[Finding], job: Job) -> bool:
    """Return whether the slow end of wires is a rank whose work is slow too: who lacks time takes long to answer."""
    if any("link" in place.kind for place in finding.places):
        return False
    own, longer = _ranks_of_diagnose(finding, job), finding.evidence.get("times_longer", 0.0)
    told = [
        other
        for other in slow_work
        # wires that are slowed more than the work have a fault of their own
        if other.since_round > 0
        and other.places[0].kind != "job"
        and 1.2 * other.evidence["times_longer"] >= longer
        and is_at_once(finding, other)
    ]
    return bool(own) and any(own <= _ranks_of_diagnose(other, job) for other in told)


def _ranks_of_diagnose(finding: Finding, job: Job) -> set[int]:
    found: set[int] = set()
    for place in finding.places:
        found |= set(place.ranks)
        found |= {rank for rank, host in job.host_of.items() if host in place.hosts}
        if place.kind == "job":
            found |= set(job.host_of)
    return found
