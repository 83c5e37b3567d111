"""Ranks that have fallen silent while others write on: stopped, killed or cut off, whoever waits for them.

In a run that goes on without those who do not come, nothing stands still where one has stopped; its beats end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from thinwire.diagnosis.changes import median
from thinwire.diagnosis.findings import Finding, Place
from thinwire.diagnosis.records import Beat
from thinwire.diagnosis.timeline import Job

# Where so many beats are missing, a rank has fallen silent; one or two are late where cores are shared.
MISSED_BEATS = 3.5
LEAST_PERIOD_S, _MOST_PERIOD_S = 1.0, 10.0
_MOST_GAPS = 32


class Periods:
    """How often each rank gives a sign of life.

    Example:
        >>> periods = Periods()
        >>> for second in range(5):
        ...     periods.add(Beat(rank=0, at_s=2.0 * second))
        >>> periods.usual_s(0), periods.usual_s(1)
        (2.0, 1.0)
    """

    def __init__(self) -> None:
        self._last_s: dict[int, float] = {}
        self._gaps_s: dict[int, deque[float]] = {}

    def add(self, beat: Beat) -> None:
        """Take a sign of life in."""
        last_s = self._last_s.get(beat.rank)
        if last_s is not None and beat.at_s > last_s:
            self._gaps_s.setdefault(beat.rank, deque(maxlen=_MOST_GAPS)).append(beat.at_s - last_s)
        self._last_s[beat.rank] = beat.at_s

    def usual_s(self, rank: int) -> float:
        """Return the usual seconds between two of a rank."""
        found = median(list(self._gaps_s.get(rank, ()))) if rank in self._gaps_s else LEAST_PERIOD_S
        return min(_MOST_PERIOD_S, max(LEAST_PERIOD_S, found))


def find_silent(job: Job, periods: Mapping[int, float], *, said_goodbye: Collection[int]) -> list[Finding]:
    """Return one finding for each rank whose recorder has stopped while others write on.

    Args:
        job: What is known.
        periods: Usual seconds between two beats, for each rank that gives any.
        said_goodbye: Ranks that ended, and said so.
    """
    found = []
    for rank, period_s in sorted(periods.items()):
        last_s = job.last_seen_s.get(rank)
        if last_s is None or rank in job.unsteady or rank in said_goodbye:
            continue
        # a clock that nobody has compared with another one tells nothing of now
        silent_s, limit_s = job.now_s - last_s, MISSED_BEATS * period_s + job.error_s.get(rank, 0.0)
        if silent_s <= limit_s:
            continue
        found.append(Finding(
            kind="non-communication hang", places=(Place(kind="rank", ranks=(rank,)),), since_s=last_s,
            evidence={
                "last_sign_s": round(last_s, 3), "silent_s": round(silent_s, 3), "longer_than_s": round(limit_s, 3),
                "usual_between_s": round(period_s, 3),
            },
            text=f"Rank {rank} has given no sign of life for {silent_s:.1f} s, while others write on.",
            confidence=0.9 * job.trust,
            remedy="restart it or go on without it; its own log ends where it stopped",
        ))  # fmt: skip
    return found
