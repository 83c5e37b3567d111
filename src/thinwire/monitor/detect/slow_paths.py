"""Slow and dead paths of a link: one of several planned connections falls behind the others.

A rank's wire counts the bytes that arrive over each path, and the seconds in which some were under way. Other work on a
machine slows all paths of a link alike, so a path is named only if the others are as before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from thinwire.monitor.detect.change_points import median
from thinwire.monitor.detect.timeline import Job
from thinwire.monitor.findings import Evidence, Finding, Place
from thinwire.runlog.records import PathReading


@dataclass(frozen=True, slots=True, kw_only=True)
class PathConfig:
    """Constants of the detector of slow paths."""

    min_bytes: int = 1 << 17  # of a stretch: a few short frames measure the latency
    long_busy_s: float = 0.4  # busy seconds from which fewer bytes count too
    num_slow: int = 3  # latest stretches that must all be slow
    min_before: int = 3  # stretches before them
    usual_quantile: float = 0.75  # of the rates before: it holds until three quarters of what is kept are slow
    min_times: float = 3.0  # rates of 64 KiB frames vary by 2 on a busy machine
    others_times: float = 1.5  # up to which the others count as before
    min_busy_s: float = 0.3  # of the slow stretches together: a path that is hardly in use delays nothing
    dead_s: float = 1.5  # without a delivery, after the wire has passed the path over


PATHS = PathConfig()


class _Stretch(NamedTuple):
    done_s: float
    busy_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _PathRates:
    """Usual and latest rate of a path, in bytes a busy second."""

    last: PathReading
    usual: float
    latest: Sequence[_Stretch]
    down_since_s: float | None

    @property
    def times(self) -> float:
        """Time of a byte, in multiples of the time before."""
        return self.usual / max(median([one.bytes_per_s for one in self.latest]), 1.0)

    @property
    def is_slow(self) -> bool:
        rate = max(max(one.bytes_per_s for one in self.latest), 1.0)
        busy_s = math.fsum(one.busy_s for one in self.latest)
        return self.usual >= PATHS.min_times * rate and busy_s >= PATHS.min_busy_s


def find_slow_paths(job: Job) -> list[Finding]:
    """Return the paths that are slower than before, or dead, while the others of their link are as before."""
    found = []
    for link in sorted({way[:2] for way in job.paths}):
        known = {way[2]: rates for way, readings in job.paths.items() if way[:2] == link
                 and (rates := _rates(readings)) is not None}  # fmt: skip
        for path, own in sorted(known.items()):
            others = [other for number, other in known.items() if number != path and other.down_since_s is None]
            if not others:
                continue
            dead_s = 0.0 if own.down_since_s is None else job.now_s - own.down_since_s
            is_alone = median([other.times for other in others]) <= PATHS.others_times
            if dead_s >= PATHS.dead_s or (own.is_slow and is_alone):
                found.append(_finding(own, link, is_dead=dead_s >= PATHS.dead_s, trust=job.trust))
    return found


def _rates(readings: Sequence[tuple[float, PathReading]]) -> _PathRates | None:
    stretches = list(_stretches(readings))
    if len(stretches) < PATHS.min_before + PATHS.num_slow:
        return None
    before, latest = stretches[: -PATHS.num_slow], stretches[-PATHS.num_slow :]
    rates = sorted(one.bytes_per_s for one in before)
    down_since_s = None
    for at_s, reading in reversed(readings):
        if reading.is_up:
            break
        down_since_s = at_s
    return _PathRates(
        last=readings[-1][1], usual=rates[int(PATHS.usual_quantile * (len(rates) - 1))], latest=latest,
        down_since_s=down_since_s,
    )  # fmt: skip


def _stretches(readings: Sequence[tuple[float, PathReading]]) -> Iterator[_Stretch]:
    first = readings[0][1]
    for at_s, reading in readings[1:]:
        num_bytes, busy_s = reading.num_bytes - first.num_bytes, reading.busy_s - first.busy_s
        if num_bytes < 0 or busy_s < 0:  # another process counts from 0
            first = reading
        elif busy_s > 0 and (num_bytes >= PATHS.min_bytes or busy_s >= PATHS.long_busy_s):
            yield _Stretch(done_s=at_s, busy_s=busy_s, bytes_per_s=num_bytes / busy_s)
            first = reading


def _finding(own: _PathRates, link: tuple[int, ...], *, is_dead: bool, trust: float) -> Finding:
    usual, now = (8e-6 * rate for rate in (own.usual, median([one.bytes_per_s for one in own.latest])))
    place = Place(kind="path", ranks=link, path=own.last.path)
    state = "delivers nothing" if is_dead else f"carries {now:.3g} Mbit/s"
    since_s = own.down_since_s if is_dead and own.down_since_s is not None else own.latest[0].done_s
    return Finding(
        kind="communication slow", places=(place,), since_s=since_s,
        evidence=Evidence(
            "slow_path", times_longer=round(own.times, 3), source_port=own.last.source_port,
            usual_mbit_a_second=round(usual, 3), now_mbit_a_second=0.0 if is_dead else round(now, 3),
        ),
        text=f"{place.title} (source port {own.last.source_port}) {state}, {usual:.3g} Mbit/s before. The other paths "
             f"are as before.",
        confidence=0.85 * trust,
        remedy="look at the cables of this path, and plan without a bad one: thinwire traffic plan --failed",
    )  # fmt: skip
