"""Jitter of each rank's heartbeats: a busy core, disk or wire is not a missing heartbeat."""

from __future__ import annotations

from collections import deque
from heapq import nlargest

from thinwire.monitor.detect.timeline import Job

_KEPT, _TIMES = 64, 3
# Records of another host come over a wire, beside what the ranks themselves send.
_BY_WIRE_S = 1.75
# Of who has written so lately nobody asks how long it may be silent.
_LATELY_S = 0.5


class Lateness:
    """Learns, look by look, how long each rank's latest record is past before another one comes.

    What was that late three times of the latest 64 is how this rank, its disk or its wire is; what was so once was a
    fault, and must not hide the next one.

    Args:
        own_host: Where the judge is; records of ranks on other hosts may be later. All are near where it is empty.
    """

    def __init__(self, own_host: str = "") -> None:
        self._own_host = own_host
        self._ages: dict[int, tuple[float, float]] = {}
        self._late: dict[int, deque[float]] = {}

    def take(self, job: Job) -> dict[int, float]:
        """Take in what a look shows.

        Returns:
            By rank, how many seconds its signs of life are late again and again; only of those that are late now.
        """
        found = {}
        for rank, seen_s in job.last_seen_s.items():
            if rank in job.unsteady:
                continue
            age_s, before = job.now_s - seen_s, self._ages.get(rank)
            if before is not None and seen_s > before[0]:
                self._late.setdefault(rank, deque(maxlen=_KEPT)).append(before[1])
            self._ages[rank] = seen_s, age_s
            if age_s > _LATELY_S:
                found[rank] = max(self._floor_s(job, rank), self._again_s(rank))
        return found

    def _floor_s(self, job: Job, rank: int) -> float:
        return _BY_WIRE_S if self._own_host and job.host_of.get(rank) != self._own_host else 0.0

    def _again_s(self, rank: int) -> float:
        latest = nlargest(_TIMES, self._late.get(rank, ()))
        return latest[-1] if len(latest) == _TIMES else 0.0
