"""Ranks that have fallen silent while others write on: stopped, killed or cut off, whoever waits for them.

In a run that goes on without those who do not come, nothing stands still where one has stopped; its beats end.
"""

from __future__ import annotations

from thinwire.diagnosis.findings import Finding, Place
from thinwire.diagnosis.timeline import Job


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
        found.append(Finding(
            kind="non-communication hang", places=(Place(kind="rank", ranks=(rank,)),), since_s=last_s,
            evidence={
                "last_sign_s": round(last_s, 3), "silent_s": round(silent_s, 3), "longer_than_s": round(limit_s, 3),
                "usual_between_s": round(period_s, 3),
            },
            text=f"Rank {rank} has given no sign of life for {silent_s:.1f} s, while others write on"
            + _other(job, rank),
            confidence=0.9 * job.trust,
            remedy="restart it or go on without it; its own log ends where it stopped",
        ))  # fmt: skip
    return found


def _other(job: Job, rank: int) -> str:
    """Say what else it may be where nothing else of a rank's host is heard of: its records come over a wire."""
    host = job.host_of.get(rank, "")
    others = [other for other in job.host_of if other != rank]
    if not host or not others or any(job.host_of[other] == host for other in others):
        return "."
    return f"; it has stopped, or nothing comes through from its host {host}."
