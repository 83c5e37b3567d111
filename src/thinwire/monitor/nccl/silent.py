"""Ranks that the Inspector's files tell nothing of, or nothing any more, while others' go on."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from thinwire.monitor.detect.change_points import median
from thinwire.monitor.findings import Finding, Place
from thinwire.monitor.nccl.series import Series
from thinwire.monitor.nccl.values import Numbers, Timing

# What may be lost at the end of a file: what one dump holds. So long others must have gone on, at least.
_LEAST_LEFT, _LEAST_LEFT_S = 8, 10.0
_DUMPS = 3.0
_MOST_NAMED = 64


def find_gaps(all_series: Sequence[Series], numbers: Numbers, *, trust: float) -> list[Finding]:
    """Return ranks whose records end long before the others', and those that wrote none where most have.

    Neither says that a rank did not come: what it had not come to cannot end, and so is in nobody's file.
    """
    found = {finding.places: finding for series in all_series for finding in _ended(series, numbers, trust)}
    absent = [series for series in all_series if series.unrecorded and 2 * len(series.seats) >= series.num_ranks]
    if absent:
        series = max(absent, key=lambda one: (one.num_ranks, one.communicator))
        found.setdefault((), _absent(series, numbers, trust))
    return list(found.values())


def _ended(series: Series, numbers: Numbers, trust: float) -> list[Finding]:
    own: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for sequence, timings in series.operations:
        for rank, one in timings.items():
            own[rank].append((sequence, one.at_s))
    newest = series.operations[-1][0]
    early = [rank for rank, rows in own.items() if newest - rows[-1][0] >= _LEAST_LEFT]
    ended = {rank: left_s for rank in early if (left_s := _left_s(rank, own)) is not None}
    found = []
    for place, ranks in _places(series, sorted(ended), numbers):
        last = min(own[rank][-1] for rank in ranks)
        left_s = max(ended[rank] for rank in ranks)
        found.append(Finding(
            kind="no records", places=(place,), since_s=last[1], since_round=last[0],
            evidence={"communicator": series.communicator, "last_operation": last[0],
                      "ranks": [numbers.of(series.communicator, rank) for rank in ranks][:_MOST_NAMED],
                      "others_last": max(rows[-1][0] for rows in own.values()), "others_went_on_s": round(left_s, 3),
                      "seats": [": process ".join(map(str, series.seats[rank])) for rank in ranks][:16]},
            text=f"The file of {place} ends with {series.kind} {last[0]} of communicator {series.communicator}, and "
            f"others have written for {left_s:.0f} s more. They could not have ended these without it, so it took "
            "part: its disk is full, the Inspector's thread has ended, or its file was copied sooner.",
            confidence=0.5 * trust,
            remedy="copy all files anew; look for room on its disk and for its process",
        ))  # fmt: skip
    return found


def _left_s(rank: int, own: Mapping[int, Sequence[tuple[int, float]]]) -> float | None:
    """Return for how long others went on after a rank's last operation, each by its own clock; none for no time."""
    rows = own[rank]
    after = [one[bisect_left(one, (rows[-1][0], -math.inf)) :] for other, one in own.items() if other != rank]
    went_on = [one[-1][1] - one[0][1] if one else 0.0 for one in after]
    dumps_s = max((late_s - early_s for (_, early_s), (_, late_s) in pairwise(rows)), default=0.0)
    long_s, num_more = median(went_on), median([float(len(one)) for one in after])
    is_over = num_more > _LEAST_LEFT and long_s >= max(_LEAST_LEFT_S, _DUMPS * dumps_s)
    return long_s if is_over else None


def _places(series: Series, ranks: Sequence[int], numbers: Numbers) -> Iterable[tuple[Place, list[int]]]:
    """Yield whole hosts, and single ranks else."""
    on: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        on[series.seats[rank][0]].append(rank)
    for host, gone in sorted(on.items()):
        everyone = [rank for rank, seat in series.seats.items() if seat[0] == host]
        if len(everyone) == len(gone) > 1:
            yield Place(kind="host", hosts=(host,)), gone
        else:
            yield from ((Place(kind="rank", ranks=(numbers.of(series.communicator, rank),)), [rank]) for rank in gone)


def _absent(series: Series, numbers: Numbers, trust: float) -> Finding:
    gone = [rank for rank in range(series.num_ranks) if rank not in series.seats][:_MOST_NAMED]
    first: Timing = next(iter(series.operations[0][1].values()))
    place = Place(kind="rank", ranks=tuple(numbers.of(series.communicator, rank) for rank in gone))
    return Finding(
        kind="no records", places=(place,), since_s=first.at_s, since_round=series.operations[0][0],
        evidence={
            "communicator": series.communicator, "ranks": list(place.ranks), "num_ranks": series.num_ranks,
            "with_files": len(series.seats),
        },
        text=f"Of {series.num_ranks} ranks of communicator {series.communicator} {series.unrecorded} wrote nothing "
        f"that was read ({place}): their files were not given, or the Inspector is not on there.",
        confidence=0.3 * trust,
        remedy="read the files of all ranks: without them none of these can be named as the late one",
    )  # fmt: skip
