"""Heartbeat detector: ranks that are silent while others write on, and the usual delays of heartbeats.

An elastic run goes on without missing ranks, so that nothing stands still if one stops; only its heartbeats end. A rank
whose messages still arrive works: its records have ended, as on a full disk.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import nlargest

from thinwire.monitor.detect.partition import partitioned
from thinwire.monitor.detect.thread_activity import silent_activity
from thinwire.monitor.detect.timeline import Job
from thinwire.monitor.findings import Evidence, Finding, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatConfig:
    """Constants of missing and late heartbeats."""

    in_flight_s: float = 1.75  # after a rank's last record, in which messages that it had sent may still arrive
    kept: int = 64  # delays that are kept of each rank
    times: int = 3  # of the kept delays that make a delay usual: one alone was a fault
    remote_s: float = 1.75  # delay of records from another host, beside what the ranks themselves send
    lately_s: float = 0.5  # age of a record that needs no limit


HEARTBEATS = HeartbeatConfig()


def find_silent(job: Job) -> list[Finding]:
    """Return one finding for each rank whose recorder has stopped, without a goodbye, while others write on."""
    found = []
    for rank, period_s in sorted(job.beat_s.items()):
        last_s = job.last_seen_s.get(rank)
        if last_s is None or rank in job.unsteady or rank in job.goodbyes:
            continue
        silent_s, limit_s = job.now_s - last_s, job.silence_s(rank)
        if silent_s <= limit_s:
            continue
        place = Place(kind="rank", ranks=(rank,))
        if _works_on(job, rank):
            heard_s = job.heard_s[rank]
            found.append(Finding(
                kind="no records", places=(place,), since_s=last_s,
                evidence=Evidence("no_records", last_record_s=round(last_s, 3), last_heard_s=round(heard_s, 3)),
                text=f"Rank {rank} has written no records for {silent_s:.1f} s, and others received from it "
                f"{max(0.0, job.now_s - heard_s):.1f} s ago: it works, and its disk is full or its recorder has ended.",
                confidence=0.9 * job.trust,
                remedy="look for its warning in its log and make room on its disk; until its next start faults there "
                "are seen from its peers only",
            ))  # fmt: skip
            continue
        activity = silent_activity(job, rank, since_s=last_s)
        found.append(partitioned(job, Finding(
            kind="non-communication hang", places=(place,), since_s=last_s,
            evidence=Evidence(
                "silent_rank", last_sign_s=round(last_s, 3), silent_s=round(silent_s, 3), longer_than_s=round(limit_s,
                3), usual_between_s=round(period_s, 3),
            ),
            text=f"Rank {rank} has given no sign of life for {silent_s:.1f} s, while others write on"
            + (_other(job, rank) if activity is None else f". It {activity.text}."),
            confidence=0.9 * job.trust,
            remedy="restart it or go on without it; its own log ends where it stopped" if activity is None
            else activity.remedy,
        )))  # fmt: skip
    return found


def _other(job: Job, rank: int) -> str:
    """Return the other possible cause if no rank of the same host is heard: records come over a link."""
    host = job.host_of.get(rank, "")
    others = [other for other in job.host_of if other != rank]
    if not host or not others or any(job.host_of[other] == host for other in others):
        return "."
    return f"; it has stopped, or nothing comes through from its host {host}."


def unrecorded(job: Job) -> frozenset[int]:
    """Return the ranks that work and write no records."""
    return frozenset(
        rank for rank in job.beat_s
        if rank not in job.goodbyes and rank not in job.unsteady and _works_on(job, rank)
    )  # fmt: skip


def _works_on(job: Job, rank: int) -> bool:
    # messages in flight arrive after their sender has stopped
    flows_s = max(HEARTBEATS.in_flight_s, job.silence_s(rank) / 2)
    return job.heard_s.get(rank, -math.inf) > job.last_seen_s.get(rank, math.inf) + flows_s


class HeartbeatDelays:
    """Usual delays of each rank's latest record, learnt at each update.

    A delay that occurred three times among the latest 64 is usual for this rank, its disk or its link. One that
    occurred once was a fault, and must not hide the next one.

    Args:
        own_host: Host of this detector; records from other hosts may be later. Empty if all are near.
    """

    def __init__(self, own_host: str = "") -> None:
        self._own_host = own_host
        self._ages: dict[int, tuple[float, float]] = {}
        self._late: dict[int, deque[float]] = {}

    def take(self, job: Job) -> dict[int, float]:
        """Take the ages of the latest records in, and return the usual delay in seconds of each rank that is late."""
        found = {}
        for rank, seen_s in job.last_seen_s.items():
            if rank in job.unsteady:
                continue
            age_s, before = job.now_s - seen_s, self._ages.get(rank)
            if before is not None and seen_s > before[0]:
                self._late.setdefault(rank, deque(maxlen=HEARTBEATS.kept)).append(before[1])
            self._ages[rank] = seen_s, age_s
            if age_s > HEARTBEATS.lately_s:
                is_far = bool(self._own_host) and job.host_of.get(rank) != self._own_host
                late = nlargest(HEARTBEATS.times, self._late.get(rank, ()))
                again_s = late[-1] if len(late) == HEARTBEATS.times else 0.0
                found[rank] = max(HEARTBEATS.remote_s if is_far else 0.0, again_s)
        return found
