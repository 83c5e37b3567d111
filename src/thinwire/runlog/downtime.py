"""Time that faults cost a run, in the rows of C4's table: post-checkpoint, detection, diagnosis, re-initialisation.

Times are seconds since 1970, so that what several processes wrote goes together.

Reference:
    arXiv 2406.04594 (C4) counts a job's downtime so. There a fault stops the whole job; here a fault may stop one
    replica of several, so each row is weighted by the part of the replicas that it stopped: one of three replicas that
    is gone for nine seconds costs three.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

ROWS = ("post_checkpoint_s", "detection_s", "diagnosis_s", "reinitialisation_s")
ROW_LABELS = ("post-checkpoint", "detection", "diagnosis", "re-initialisation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One fault that stopped replicas.

    Attributes:
        since_s: The last sign of work before it.
        found_s: When it was found: a finding was new, or a replica was let go.
        acted_s: When something was done about it; none where nothing was, or had to be.
        back_s: When as many replicas worked again; none where the run went on with fewer, or ended.
        lost_work_s: Seconds of work that had to be done again, since the state that was gone back to was older.
        share: The part of the replicas that stood still, in (0, 1].
    """

    since_s: float
    found_s: float
    acted_s: float | None = None
    back_s: float | None = None
    lost_work_s: float = 0.0
    share: float = 1.0
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Downtime:
    """Seconds that a run lost, of all that it took.

    Attributes:
        post_checkpoint_s: Work done again.
        detection_s: From a fault to its finding.
        diagnosis_s: From the finding to what was done about it.
        reinitialisation_s: From that until the replicas worked again.
    """

    post_checkpoint_s: float = 0.0
    detection_s: float = 0.0
    diagnosis_s: float = 0.0
    reinitialisation_s: float = 0.0
    run_s: float = 0.0
    num_incidents: int = 0

    @property
    def total_s(self) -> float:
        return math.fsum(getattr(self, row) for row in ROWS)

    def to_json(self) -> dict[str, Any]:
        rows = {row: round(getattr(self, row), 3) for row in ROWS}
        return {
            **rows, "total_s": round(self.total_s, 3), "run_s": round(self.run_s, 3),
            "num_incidents": self.num_incidents,
        }  # fmt: skip

    def __str__(self) -> str:
        if not self.num_incidents:
            return f"downtime: 0 s of {self.run_s:.0f} s (only restarts count)"
        share = self.total_s / self.run_s if self.run_s > 0 else 0.0
        rows = ", ".join(f"{label} {getattr(self, row):.1f} s" for label, row in zip(ROW_LABELS, ROWS, strict=True))
        faults = "fault" if self.num_incidents == 1 else "faults"
        return (
            f"downtime: {self.total_s:.1f} s of {self.run_s:.0f} s ({share:.1%}), {self.num_incidents} {faults}: {rows}"
        )


def account(incidents: Iterable[Incident], *, run_s: float, end_s: float = math.inf) -> Downtime:
    """Add up the cost of faults.

    Contradicting times count as no time, never as a gain. Overlapping faults count separately: they stop different
    replicas.

    Times after `end_s`, when the run ended, are taken as that one.

    Example:
        >>> fault = Incident(since_s=10.0, found_s=12.0, acted_s=12.5, back_s=20.0, share=0.5)
        >>> account([fault], run_s=100.0).to_json()["reinitialisation_s"]
        3.75
    """
    rows: Mapping[str, list[float]] = {row: [] for row in ROWS}
    count = 0
    for one in incidents:
        count += 1
        times = [one.since_s, one.found_s, one.acted_s, one.back_s]
        latest = min(one.since_s, end_s)
        spans = []
        for time_s in times[1:]:
            # a step that is missing takes no time; the next span begins at the end of the last one
            at_s = latest if time_s is None else max(latest, min(time_s, end_s))
            spans.append(at_s - latest)
            latest = at_s
        for row, seconds in zip(ROWS, (max(0.0, one.lost_work_s), *spans), strict=True):
            rows[row].append(one.share * seconds)
    return Downtime(**{row: math.fsum(values) for row, values in rows.items()}, run_s=run_s, num_incidents=count)
