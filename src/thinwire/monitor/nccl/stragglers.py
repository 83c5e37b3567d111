"""Ranks that come late to NCCL's operations, from how long each rank's kernel was in them (C4, arXiv 2406.04594).

Who waits least came last. A rank that is late again and again, by more than it was or than the operation itself
takes, keeps the others waiting: its own work is slow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from thinwire.monitor.detect.change_points import LEAST_HISTORY, Change, Watch, median
from thinwire.monitor.findings import Finding, Place
from thinwire.monitor.nccl.series import Series, class_of, late_s
from thinwire.monitor.nccl.values import Numbers

# Less than this, or than this part of the time from one operation to the next, is not worth a word.
_LEAST_LATE_S = 0.0005
_LEAST_SHARE = 0.02
_LOOK = 24
# Late from the start: in so many of all operations, by as much as the operation itself takes.
_OFTEN = 0.7
_ALIKE = 0.6
_FOLLOWS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Late:
    """One rank, or all ranks of a host, that came late to the operations of a series."""

    series: Series
    ranks: tuple[int, ...]
    host: str = ""
    change: Change | None
    late_s: float
    usual_s: float
    since: tuple[int, float]
    share_last: float


def find_late(all_series: Iterable[Series], numbers: Numbers, *, trust: float) -> list[Finding]:
    """Return one finding for each rank or host that others wait for; who is late because it waits for another is none.

    Args:
        all_series: Operations side by side.
        numbers: The job's own number of each rank.
        trust: Part of the lines that could be used, in [0, 1].
    """
    told: dict[tuple[str, tuple[int, ...]], list[_Late]] = defaultdict(list)
    for series in all_series:
        for late in _late_in(series):
            job_ranks = tuple(sorted(numbers.of(series.communicator, rank) for rank in late.ranks))
            told[late.host, job_ranks].append(late)
    findings = [_finding(lates, ranks, numbers, trust) for (_, ranks), lates in told.items()]
    return sorted(_roots(findings), key=lambda one: (one.until_s is not None, -one.evidence["late_s"]))


def _roots(findings: Sequence[Finding]) -> list[Finding]:
    """Leave out ranks that are late where they have waited elsewhere, for one that is later still."""
    left = []
    for one in findings:
        own = set(one.evidence["late"])
        causes = [
            other
            for other in findings
            if other is not one
            and own <= set(other.evidence["waiting"])
            and not set(other.evidence["late"]) <= set(one.evidence["waiting"])
            and other.evidence["late_s"] >= _FOLLOWS * one.evidence["late_s"]
        ]
        if not causes:
            left.append(one)
    return left


class _Lateness:
    """By how much each rank of a series came late, operation by operation."""

    def __init__(self, series: Series) -> None:
        self.series = series
        self.usual = series.usual_s()
        self.watches: dict[int, Watch] = defaultdict(Watch)
        self.rows: dict[int, list[tuple[int, float, bool]]] = defaultdict(list)
        for sequence, own in series.operations:
            classed = class_of(own)
            for rank, by_s in (late := late_s(own)).items():
                # beside what the operation takes: what is little beside that is no change
                time_s = self.usual[classed] + by_s
                self.watches[rank].add(sequence, own[rank].at_s, time_s, size_class=classed)
                self.rows[rank].append((sequence, by_s, by_s > 0 and by_s == max(late.values())))
        period_s = series.period_s
        self.least_s = max(_LEAST_LATE_S, _LEAST_SHARE * period_s if period_s > 0 else 0.0)

    def late(self, ranks: Sequence[int], change: Change | None, host: str = "") -> _Late:
        """Return how late ranks were since a change, or since the begin."""
        first = self.series.operations[0][0] if change is None else change.since_round
        last = None if change is None else change.until_round - 1 if change.is_over else change.seen_round + _LOOK
        rows = [
            row for rank in ranks for row in self.rows[rank] if first <= row[0] and (last is None or row[0] <= last)
        ]
        began_s = min(own[rank].at_s for _, own in self.series.operations[:1] for rank in own)
        return _Late(
            series=self.series, ranks=tuple(ranks), host=host, change=change, usual_s=median(list(self.usual.values())),
            late_s=median([by_s for _, by_s, _ in rows]) if rows else 0.0,
            since=(first, began_s if change is None else change.since_s),
            share_last=sum(is_last for _, _, is_last in rows) / max(1, len(rows)),
        )  # fmt: skip


def _late_in(series: Series) -> list[_Late]:
    """Return the late ranks of a series, or their hosts; those late from the start only where nothing has changed."""
    lateness = _Lateness(series)
    alarmed: dict[int, _Late] = {}
    for rank, watch in lateness.watches.items():
        if watch.change is not None:
            alarmed[rank] = lateness.late([rank], watch.change)
    alarmed = {rank: late for rank, late in alarmed.items() if late.late_s >= lateness.least_s}
    if not any(late.change is not None and not late.change.is_over for late in alarmed.values()):
        alarmed |= {rank: always for rank in lateness.rows if (always := _always(lateness, rank)) is not None}
    return _by_host(lateness, alarmed)


def _always(lateness: _Lateness, rank: int) -> _Late | None:
    rows = lateness.rows[rank]
    late = lateness.late([rank], None)
    often = sum(by_s >= 0.5 * late.usual_s for _, by_s, _ in rows) >= _OFTEN * len(rows)
    is_late = len(rows) >= LEAST_HISTORY and often and late.late_s >= max(lateness.least_s, late.usual_s)
    return late if is_late else None


def _by_host(lateness: _Lateness, alarmed: dict[int, _Late]) -> list[_Late]:
    """Return whole hosts where all of their ranks in this communicator are late alike, and single ranks else."""
    ranks_on: dict[str, list[int]] = defaultdict(list)
    for rank, (host, _) in lateness.series.seats.items():
        ranks_on[host].append(rank)
    found = []
    for host, ranks in sorted(ranks_on.items()):
        late = [alarmed[rank] for rank in ranks if rank in alarmed]
        alike = bool(late) and min(one.late_s for one in late) >= _ALIKE * max(one.late_s for one in late)
        if len(ranks) == len(late) > 1 and len(ranks_on) > 1 and alike:
            first = min(late, key=lambda one: one.since)
            found.append(lateness.late(sorted(ranks), first.change, host))
        else:
            found += late
    return found


def _finding(lates: Sequence[_Late], ranks: tuple[int, ...], numbers: Numbers, trust: float) -> Finding:
    late = max(lates, key=lambda one: one.late_s)
    series, change = late.series, late.change
    place = Place(kind="host", hosts=(late.host,)) if late.host else Place(kind="rank", ranks=ranks)
    others = sorted(
        {numbers.of(one.series.communicator, rank) for one in lates for rank in one.series.seats} - set(ranks)
    )
    sure = 0.5 if change is None else 0.85
    seats = [f"rank {rank} of {series.communicator}: {series.seats[rank][0]}, process {series.seats[rank][1]}"
             for rank in late.ranks]  # fmt: skip
    finding = Finding(
        kind="non-communication slow",
        places=(place,),
        since_s=late.since[1], since_round=late.since[0],
        evidence={
            "late_s": round(late.late_s, 6), "operation_takes_s": round(late.usual_s, 6),
            "came_last": round(late.share_last, 3), "late": list(ranks), "waiting": others[:64],
            "seats": seats[:16], "communicators": sorted({one.series.communicator for one in lates})[:16],
            "kinds": sorted({one.series.kind for one in lates}), "ranks_without_files": series.unrecorded,
        },
        text=f"{place.title} comes late to {series.kind} of communicator {series.communicator}: the "
        f"others' kernels wait {late.late_s * 1e3:.3g} ms for it, where the operation itself takes "
        f"{late.usual_s * 1e3:.3g} ms" + (", since the files begin." if change is None else "."),
        # a rank that wrote nothing may have been later still
        confidence=(sure if not series.unrecorded else 0.7 * sure) * trust,
        remedy="look at this rank's own work: other load, thermal limits, data that comes late, more work than others "
        "have" + (" from the start" if change is None else ""),
    )  # fmt: skip
    if change is None:
        return finding
    return replace(finding, seen_round=change.seen_round, until_s=change.until_s)
