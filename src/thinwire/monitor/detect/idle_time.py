"""Idle time by cause: how long ranks waited in their operations, and for which late rank at which call.

A fault that is over leaves no finding: an evaluation on one rank only is no fault at all. Its cost is the time of the
others, which is summed up here by the rank that came last and by the call that it came late to.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.monitor.detect.call_alignment import Call, call_of
from thinwire.monitor.detect.timeline import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleConfig:
    """Constants of the summary."""

    min_s: float = 1.0  # of a cause that is shown
    min_share: float = 0.02  # of the recorded time
    late_share: float = 0.1  # of the cause's longest wait: shorter ones are not counted as late
    shown: int = 5  # causes


IDLE = IdleConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleCause:
    """Waits of other ranks for one rank at one call."""

    rank: int  # the rank that came last
    call: Call  # what it came late to
    group: str  # the call's communicator, by its ranks
    times: int  # how often it was late
    waited_s: float  # seconds that the other ranks waited, on average over them
    most_s: float  # the longest of these waits
    waiting: tuple[int, ...]  # the ranks that waited

    def __str__(self) -> str:
        late = f"rank {self.rank} was late at {self.call} of {self.group}"
        times = "once" if self.times == 1 else f"{self.times} times, at most {self.most_s:.1f} s"
        return f"{self.waited_s:.1f} s of the others: {late}, {times}"

    def to_json(self) -> dict[str, Any]:
        """Return the cause for JSON."""
        return {
            "rank": self.rank, "call": str(self.call), "group": self.group, "times": self.times,
            "waited_s": round(self.waited_s, 3), "most_s": round(self.most_s, 3), "waiting": list(self.waiting),
        }  # fmt: skip


def idle_causes(job: Job) -> list[IdleCause]:
    """Return what ranks waited for in their operations, the longest first.

    A rank that makes its next call before an operation has ended did not wait in it. Operations of rounds are left
    out: they go on beside training.
    """
    posts: dict[int, list[float]] = defaultdict(list)
    for own in job.operations.values():
        for rank, operation in own.items():
            posts[rank].append(operation.posted_s)
    for times in posts.values():
        times.sort()
    waits: dict[tuple[int, Call, str], list[tuple[float, tuple[int, ...]]]] = defaultdict(list)
    for (communicator, _), own in job.operations.items():
        steady = {rank: op for rank, op in own.items() if rank not in job.unsteady and op.round < 0}
        if len(steady) < 2:
            continue
        last = max(steady, key=lambda rank: (steady[rank].posted_s, rank))
        last_s = steady[last].posted_s
        # a rank that makes its next call before the last one has come did not wait
        nexts = {rank: bisect_right(posts[rank], op.posted_s) for rank, op in steady.items()}
        late_s = {
            rank: last_s - op.posted_s for rank, op in steady.items()
            if rank != last and not (nexts[rank] < len(posts[rank]) and posts[rank][nexts[rank]] < last_s)
        }  # fmt: skip
        if late_s:
            mean_s = math.fsum(late_s.values()) / len(late_s)
            waits[last, call_of(steady[last]), communicator].append((mean_s, tuple(sorted(late_s))))
    causes = []
    for (rank, call, communicator), found in waits.items():
        most_s = max(waited_s for waited_s, _ in found)
        causes.append(IdleCause(
            rank=rank, call=call, group=job.group_name(communicator),
            times=sum(waited_s >= IDLE.late_share * most_s for waited_s, _ in found),
            waited_s=math.fsum(waited_s for waited_s, _ in found), most_s=most_s,
            waiting=tuple(sorted({other for _, ranks in found for other in ranks})),
        ))  # fmt: skip
    return sorted(causes, key=lambda one: one.waited_s, reverse=True)


def shown_causes(job: Job, causes: Sequence[IdleCause]) -> list[IdleCause]:
    """Return the causes that cost a share of the recorded time that matters."""
    posted = [op.posted_s for own in job.operations.values() for op in own.values()]
    least_s = max(IDLE.min_s, IDLE.min_share * (job.now_s - min(posted, default=job.now_s)))
    return [one for one in causes if one.waited_s >= least_s][: IDLE.shown]
