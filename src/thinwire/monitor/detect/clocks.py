"""Clocks of several hosts, brought to one: offset and drift from messages both ways, with the error that remains.

A message cannot arrive before it was sent. So a message from clock a to clock b bounds b's offset from above, one
from b to a from below, and a path over a third clock bounds it too: difference constraints, whose tightest bounds are
shortest paths. The estimate is the mean of both bounds; half their distance is its error. A link that is slow in one
direction for all of the records cannot be distinguished from an offset.

Reference:
    D. L. Mills, "Internet time synchronization: the network time protocol", 1991, for the bounds of one pair.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from thinwire.monitor.detect.change_points import median


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockConfig:
    """Constants of the clock alignment."""

    segments: int = 8  # stretches of the records that are bounded each: enough to see a drift
    # seconds a second; quartz drifts by tens of millionths, so a clock that drifts more was set
    max_drift: float = 500e-6
    usual_drift: float = 100e-6  # seconds a second that bounds of one stretch may differ by
    play_s: float = 1e-6  # resolution of recorded times
    max_sightings: int = 32  # sightings that are kept of each way between two clocks: four for each segment


CLOCKS = ClockConfig()


class Sighting(NamedTuple):
    """A message that was posted by one clock and done by another, in seconds of each."""

    sender: str
    receiver: str
    posted_s: float
    done_s: float


class SightingBook:
    """Store of the messages that bound clocks best, a bounded number for each way between two clocks.

    It keeps the message with the least delay of each stretch of rounds; stretches grow with the job.
    """

    def __init__(self) -> None:
        self._ways: dict[tuple[str, str], dict[int, Sighting]] = defaultdict(dict)
        self._places: set[int] = set()
        self._width = 1

    def take(self, found: Iterable[tuple[int, Sighting]], *, of: Iterable[str]) -> list[Sighting]:
        """Take messages in with their rounds, known ones too, and return the stored ones between some clocks."""
        for number, seen in found:
            self._put(self._ways[seen.sender, seen.receiver], number // self._width, seen)
        while len(self._places) > CLOCKS.max_sightings:
            self._width *= 2
            self._places = {place // 2 for place in self._places}
            for way, own in self._ways.items():
                self._ways[way] = {}
                for place, seen in own.items():
                    self._put(self._ways[way], place // 2, seen)
        names = set(of)
        kept = [own.values() for way, own in self._ways.items() if names.issuperset(way)]
        return sorted((seen for own in kept for seen in own), key=lambda seen: seen.posted_s)

    def _put(self, own: dict[int, Sighting], place: int, seen: Sighting) -> None:
        known = own.get(place)
        if known is None:
            self._places.add(place)
        if known is None or seen.done_s - seen.posted_s < known.done_s - known.posted_s:
            own[place] = seen


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockFit:
    """Linear fit of a clock: it shows `offset_s + drift * (t - origin_s)` more than the reference."""

    offset_s: float  # seconds more than the reference at the reference's `origin_s`
    drift: float  # seconds gained per second
    error_s: float  # largest error of the offset; infinite without messages both ways
    origin_s: float  # time at which the offset holds
    is_steady: bool = True  # whether one line fits all records; if not, the clock was set while they were written
    jumped_s: float = math.nan  # time by this clock at which it was set first

    def to_reference(self, time_s: float) -> float:
        """Return a time of this clock in reference seconds."""
        since_s = time_s - self.offset_s - self.origin_s
        return self.origin_s + since_s / (1 + self.drift)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """All clocks against one."""

    reference: str  # clock that the others are compared with
    fits: Mapping[str, ClockFit]  # each clock's

    @property
    def error_s(self) -> float:
        """The largest error of a clock that is joined to the reference by messages."""
        return max((fit.error_s for fit in self.fits.values() if fit.error_s < math.inf), default=0.0)


def align(clocks: Iterable[str], sightings: Iterable[Sighting]) -> Alignment:
    """Bring clocks together.

    Example:
        >>> there = [Sighting("a", "b", t, t + 5.001) for t in range(9)]
        >>> back = [Sighting("b", "a", t + 5.5, t + 0.501) for t in range(9)]
        >>> fit = align(["a", "b"], there + back).fits["b"]
        >>> round(fit.offset_s, 3), round(fit.error_s, 3), fit.is_steady
        (5.0, 0.001, True)
    """
    names = sorted(set(clocks))
    found = list(sightings)
    if not names:
        return Alignment(reference="", fits={})
    counts = Counter(clock for seen in found for clock in (seen.sender, seen.receiver))
    reference = max(names, key=lambda name: counts[name])  # the others are nearest to it
    still = ClockFit(offset_s=0.0, drift=0.0, error_s=0.0, origin_s=0.0)
    if len(names) == 1 or not found:
        alone = ClockFit(offset_s=0.0, drift=0.0, error_s=math.inf, origin_s=0.0)
        return Alignment(reference=reference, fits={n: still if n == reference else alone for n in names})
    segments = _segments(found, reference)
    bounds: dict[str, list[_Bound]] = defaultdict(list)
    for at_s, delays in segments:
        back: Delays = defaultdict(dict)
        for sender, others in delays.items():
            for receiver, delay in others.items():
                back[receiver][sender] = delay
        # offset(b) - offset(a) <= apparent delay a -> b: the tightest upper bound is a shortest path, the lower one of
        # the reversed graph. A cycle of negative length contradicts itself: the lengths are then those of at most as
        # many messages as clocks
        upper, lower = _shortest(delays, reference), _shortest(back, reference)
        for name in upper.keys() & lower.keys() - {reference}:
            bounds[name].append(_Bound(at_s, -lower[name], upper[name]))
    origin_s = segments[0][0]
    # bounds of one stretch come from different moments, between which clocks drift
    play_s = CLOCKS.play_s + CLOCKS.usual_drift * abs(segments[-1][0] - origin_s) / max(1, len(segments) - 1)
    fits = {name: _fit(bounds.get(name, []), origin_s, play_s) for name in names if name != reference}
    moved = [name for name, fit in fits.items() if not fit.is_steady]
    if len(fits) > 1 and 2 * len(moved) > len(fits):
        # if most others jumped at once, the reference jumped
        first_s = min(fits[name].jumped_s - fits[name].offset_s for name in moved)
        still = ClockFit(offset_s=0.0, drift=0.0, error_s=0.0, origin_s=origin_s, is_steady=False, jumped_s=first_s)
    return Alignment(reference=reference, fits={**fits, reference: still})


class _Bound(NamedTuple):
    at_s: float
    lower: float
    upper: float


Delays = dict[str, dict[str, float]]


def _segments(sightings: list[Sighting], reference: str) -> list[tuple[float, Delays]]:
    """Cut the records into stretches and keep the least apparent delay of each pair of clocks in each."""
    # clocks that show different times cannot be cut by time; each clock's messages are cut by their order
    pairs: dict[tuple[str, str], list[Sighting]] = defaultdict(list)
    for seen in sightings:
        pairs[seen.sender, seen.receiver].append(seen)
    most = max(map(len, pairs.values()))
    count = max(1, min(CLOCKS.segments, most // 4))
    segments: list[Delays] = [defaultdict(dict) for _ in range(count)]
    times: list[list[float]] = [[] for _ in range(count)]
    for (sender, receiver), all_seen in pairs.items():
        for index, seen in enumerate(all_seen):
            place = index * count // len(all_seen)
            delay = seen.done_s - seen.posted_s
            known = segments[place][sender].get(receiver, math.inf)
            segments[place][sender][receiver] = min(known, delay)
            if reference in (sender, receiver):
                times[place].append(seen.posted_s if sender == reference else seen.done_s)
    return [
        (sum(own) / len(own) if own else float(place), delays)
        for place, (own, delays) in enumerate(zip(times, segments, strict=True))
    ]


def _shortest(delays: Delays, source: str) -> dict[str, float]:
    # Bellman-Ford: apparent delays are negative where the receiver's clock is behind
    best = {source: 0.0}
    changed = {source}
    for _ in range(len(delays) + 1):
        later: set[str] = set()
        for sender in changed:
            for receiver, delay in delays.get(sender, {}).items():
                if receiver != source and best[sender] + delay < best.get(receiver, math.inf) - CLOCKS.play_s:
                    best[receiver] = best[sender] + delay
                    later.add(receiver)
        changed = later
        if not changed:
            break
    return best


def _fit(bounds: list[_Bound], origin_s: float, play_s: float) -> ClockFit:
    """Return a fit within all bounds, or that of the first segment if there is none."""
    if not bounds:
        return ClockFit(offset_s=0.0, drift=0.0, error_s=math.inf, origin_s=origin_s)
    drift = _drift(bounds, play_s)
    if drift is not None:
        shown = [(b.lower - drift * (b.at_s - origin_s), b.upper - drift * (b.at_s - origin_s)) for b in bounds]
        lower, upper = max(low for low, _ in shown), min(high for _, high in shown)
        if lower <= upper + 2 * play_s:
            error_s = max(0.0, upper - lower) / 2 + play_s
            return ClockFit(offset_s=(lower + upper) / 2, drift=drift, error_s=error_s, origin_s=origin_s)
    first = bounds[0]
    offset_s, error_s = (first.lower + first.upper) / 2, abs(first.upper - first.lower) / 2
    far = [b for b in bounds if b.lower > min(first.upper, b.upper) + 2 * play_s or b.upper < first.lower - 2 * play_s]
    jumped_s = (far[0] if far else bounds[-1]).at_s + offset_s
    return ClockFit(
        offset_s=offset_s, drift=0.0, error_s=error_s, origin_s=origin_s, is_steady=False, jumped_s=jumped_s
    )


def _drift(bounds: list[_Bound], play_s: float) -> float | None:
    """Return the drift that both bounds show within what all stretches allow; None if they contradict each other."""
    # a drifting clock moves both bounds; a link that becomes slow in one direction moves one
    least, most = -CLOCKS.max_drift, CLOCKS.max_drift
    if any(bound.lower > bound.upper + 2 * play_s for bound in bounds):
        return None
    for index, early in enumerate(bounds):
        for late in bounds[index + 1 :]:
            if (apart_s := late.at_s - early.at_s) > 0:
                most = min(most, (late.upper - early.lower + 2 * play_s) / apart_s)
                least = max(least, (late.lower - early.upper - 2 * play_s) / apart_s)
    if least > most + 1e-9:
        return None
    slopes = [_slope([(b.at_s, b.lower) for b in bounds]), _slope([(b.at_s, b.upper) for b in bounds])]
    # slopes of different signs are noise; of equal ones the smaller is common to both directions
    both = 0.0 if slopes[0] * slopes[1] <= 0 else min(slopes, key=abs)
    return min(max(both, least), max(least, most))


def _slope(points: list[tuple[float, float]]) -> float:
    """Return the median slope between all pairs of points (Theil-Sen estimator)."""
    slopes = [
        (late[1] - early[1]) / (late[0] - early[0])
        for index, early in enumerate(points)
        for late in points[index + 1 :]
        if late[0] > early[0]
    ]
    return median(slopes) if slopes else 0.0
