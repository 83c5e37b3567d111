"""Chart data of the dashboard: downsampled curves, delay matrix and timeline of rounds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from thinwire.monitor.detect.change_points import median
from thinwire.monitor.detect.connections import usual_and_now
from thinwire.monitor.detect.link_history import LinkTimes, link_times
from thinwire.monitor.detect.slow_compute import Work, work_of
from thinwire.monitor.detect.timeline import Job

MOST_POINTS = 400


class Curve:
    """Points in order of x; when they are too many, every second one goes and only every second new one is kept.

    The last point is always there. A point that is not beyond the last one takes the place of all that are not before
    it: a run that was resumed writes anew what it had written after its checkpoint.

    Example:
        >>> curve = Curve(most=4)
        >>> for x in range(9):
        ...     curve.add(float(x), x * 10.0)
        >>> curve.points()
        [(0.0, 0.0), (4.0, 40.0), (8.0, 80.0)]
    """

    def __init__(self, *, most: int = MOST_POINTS) -> None:
        self._most = most
        self._points: list[tuple[float, float]] = []
        self._last: tuple[float, float] | None = None
        self._stride = 1
        self._count = 0

    def add(self, x: float, y: float) -> None:
        """Take a point in."""
        if self._last is not None and x <= self._last[0]:
            while self._points and self._points[-1][0] >= x:
                self._points.pop()
            self._count = len(self._points) * self._stride
        self._last = (x, y)
        if self._count % self._stride == 0:
            self._points.append((x, y))
        self._count += 1
        if len(self._points) > self._most:
            self._points = self._points[::2]
            self._stride *= 2
            self._count = (len(self._points) - 1) * self._stride + 1

    def points(self) -> list[tuple[float, float]]:
        """Return the points, the last one among them."""
        is_there = self._last is None or (bool(self._points) and self._points[-1] == self._last)
        return list(self._points) if is_there or self._last is None else [*self._points, self._last]


MOST_RANKS = 24
_LATEST = 8
_MEGABYTE = 1_000_000
_ROUNDS_SHOWN = 12
_MOST_LANES = 16
_MOST_PIECES = 300
Cell = tuple[int, int]
_Piece = tuple[str, float, float, int]


def delay_matrix(job: Job, usual: dict[Cell, float]) -> dict[str, Any]:
    """Return each link's time now beside its usual one.

    Args:
        job: The latest records.
        usual: The shortest usual time of each link that was ever seen, in seconds; kept up. Without it a link that has
            been slow for as long as records are kept would look as usual.

    Returns:
        Ranks, cells, and how many ranks are left out; the worst are there. Where no messages were recorded, a link's
        time is that of a megabyte, by what kernels tell of its connections and by probes.
    """
    times = link_times(job)
    cells = [_cell(cell, times, usual) for cell in sorted({cell for cell, _ in times.times})]
    wires = {} if cells else usual_and_now(job, latest=_LATEST)
    for way, (usual_s, now_s) in wires.items():
        usual[way] = min(usual.get(way, math.inf), _MEGABYTE * usual_s)
        cells.append(_row(way, _MEGABYTE * now_s, usual, retries=0))
    ranks = {rank for cell in cells for rank in (cell["from"], cell["to"])}
    shown = set(ranks)
    if len(ranks) > MOST_RANKS:
        worst: dict[int, float] = defaultdict(float)
        for cell in cells:
            for rank in (cell["from"], cell["to"]):
                worst[rank] = max(worst[rank], cell["times_longer"] or 0.0)
        shown = set(sorted(ranks, key=lambda rank: (-worst[rank], rank))[:MOST_RANKS])
    return {
        "ranks": sorted(shown),
        "hosts": {str(rank): job.host_of.get(rank, "") for rank in sorted(shown)},
        "cells": [cell for cell in cells if cell["from"] in shown and cell["to"] in shown],
        "num_left_out": len(ranks) - len(shown),
        "clock_error_s": _number(job.alignment.error_s),
        "is_of_wires": bool(wires),
    }


def _cell(cell: Cell, times: LinkTimes, usual: dict[Cell, float]) -> dict[str, Any]:
    watch = times.watches.get(cell)
    latest = [excess for _, _, excess in list(watch.excess)[-_LATEST:]] if watch is not None else []
    if watch is not None and latest and watch.usual_s > 0:
        usual[cell] = min(usual.get(cell, math.inf), watch.usual_s)
        return _row(cell, watch.usual_s * math.exp(median(latest)), usual, retries=times.retries.get(cell, 0))
    now_s = median([value for (own, _), values in times.times.items() if own == cell for value in values])
    row = _row(cell, now_s, usual, retries=times.retries.get(cell, 0))
    return {**row, "times_longer": None}  # what is usual is of an earlier window, or unknown


def _row(cell: Cell, now_s: float, usual: dict[Cell, float], *, retries: int) -> dict[str, Any]:
    usual_s = usual.get(cell, math.nan)
    return {
        "from": cell[0], "to": cell[1], "now_s": _number(now_s), "usual_s": _number(usual_s),
        "times_longer": _number(now_s / usual_s) if usual_s > 0 else None, "retries": retries,
    }  # fmt: skip


def timeline(job: Job) -> dict[str, Any]:
    """Return the latest rounds as lanes: what each rank computed, when it waited, and what was in flight.

    Returns:
        The seconds that are shown, up to the latest record, and a lane a rank; all times are from there, so below 0.
        A lane holds `work` (pieces of computing and waiting), `flights` (rounds, open ones to the end) and the shares.
    """
    work = {rank: sorted(own, key=lambda piece: piece.at_s) for rank, own in work_of(job).items()}
    flights: dict[int, list[tuple[float, float | None, int]]] = defaultdict(list)
    for own in job.operations.values():
        for rank, operation in own.items():
            number = operation.round if operation.round >= 0 else operation.sequence
            flights[rank].append((operation.posted_s, operation.done_s, number))
    ranks = sorted(set(work) | set(flights))
    if not ranks:
        return {"lanes": [], "shown_s": 0.0, "num_left_out": 0}
    to_s = job.now_s
    from_s = _begin(flights, work, to_s)
    lanes = [_lane(rank, work.get(rank, []), flights.get(rank, []), from_s, to_s) for rank in ranks]
    if len(lanes) > _MOST_LANES:
        lanes = sorted(sorted(lanes, key=lambda lane: lane["waiting"])[:_MOST_LANES], key=lambda lane: lane["rank"])
    return {"lanes": lanes, "shown_s": round(to_s - from_s, 6), "num_left_out": len(ranks) - len(lanes)}


def _begin(
    flights: dict[int, list[tuple[float, float | None, int]]], work: dict[int, list[Work]], to_s: float
) -> float:
    """Return where the shown stretch begins: with the latest rounds, or the latest work where there are none."""
    begins: dict[int, float] = {}
    for own in flights.values():
        for posted_s, _, number in own:
            begins[number] = min(begins.get(number, math.inf), posted_s)
    numbers = sorted(begins, key=lambda number: begins[number])
    if len(numbers) > _ROUNDS_SHOWN:
        return begins[numbers[-_ROUNDS_SHOWN]]
    starts = [piece.at_s for own in work.values() for piece in own[-_MOST_PIECES:]]
    return min([*starts, *begins.values()], default=to_s)


def _lane(
    rank: int, work: list[Work], flights: Iterable[tuple[float, float | None, int]], from_s: float, to_s: float
) -> dict[str, Any]:
    pieces: list[_Piece] = []
    for one, other in pairwise(work):
        # what is neither work nor waiting, such as an evaluation, counts as computing
        done_s, gap_s = one.at_s + one.time_s, other.at_s - one.at_s - one.time_s
        waited_s = max(0.0, gap_s if one.stalled_s is None else min(gap_s, one.stalled_s))
        pieces += [("computing", one.at_s, done_s, one.step), ("waiting", done_s, done_s + waited_s, other.step),
                   ("computing", done_s + waited_s, other.at_s, one.step)]  # fmt: skip
    pieces += [("computing", piece.at_s, piece.at_s + piece.time_s, piece.step) for piece in work[-1:]]
    pieces = [piece for piece in pieces if piece[2] > piece[1]]
    rounds = sorted(
        (posted_s, done_s, number)
        for posted_s, done_s, number in flights
        if (to_s if done_s is None else done_s) >= from_s
    )
    open_s = min((posted_s for posted_s, done_s, _ in rounds if done_s is None), default=None)
    last_s = max((piece.at_s + piece.time_s for piece in work), default=from_s)
    if open_s is not None and to_s > max(last_s, open_s):
        pieces.append(("waiting", max(last_s, open_s), to_s, -1))
    whole_s = max(to_s - from_s, 1e-9)
    pieces = _without_slivers(sorted(pieces, key=lambda piece: piece[1]), least_s=whole_s / 1000)
    seen = [
        (kind, max(begin, from_s), min(end, to_s), number)
        for kind, begin, end, number in pieces
        if end > from_s and begin < to_s
    ]
    shares = {kind: sum(end - begin for own, begin, end, _ in seen if own == kind) for kind in ("computing", "waiting")}
    return {
        "rank": rank,
        "work": [[kind, round(begin - to_s, 6), round(end - to_s, 6), number]
                 for kind, begin, end, number in seen[-_MOST_PIECES:]],
        "flights": [
            [number, round(max(posted_s, from_s) - to_s, 6),
             round(min(to_s if done_s is None else done_s, to_s) - to_s, 6), done_s is None]
            for posted_s, done_s, number in rounds[-_MOST_PIECES:]
        ],
        "computing": _number(min(1.0, shares["computing"] / whole_s)),
        "waiting": _number(min(1.0, shares["waiting"] / whole_s)),
        "num_rounds": len(rounds),
        "num_open": sum(done_s is None for _, done_s, _ in rounds),
    }  # fmt: skip


def _without_slivers(pieces: list[_Piece], *, least_s: float) -> list[_Piece]:
    """Join computing that is parted by a wait too short to be seen."""
    found: list[_Piece] = []
    for piece in pieces:
        if piece[0] == "waiting" and piece[2] - piece[1] < least_s:
            continue
        if found and piece[0] == found[-1][0] == "computing" and piece[1] - found[-1][2] < least_s:
            found[-1] = ("computing", found[-1][1], piece[2], piece[3])
        else:
            found.append(piece)
    return found


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
