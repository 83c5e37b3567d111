"""Axes: from values to coordinates, with ticks at round values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis: its label, how a value is written, how values are spread, and what must be in sight."""

    label: str
    write: Callable[[float], str] = "{:g}".format
    scale: Literal["linear", "log", "time"] = "linear"
    include: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """From values to coordinates, with ticks at round values."""

    axis: Axis
    low: float
    high: float
    start: float
    stop: float
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        low, high = (math.log10(self.low), math.log10(self.high)) if self.axis.scale == "log" else (self.low, self.high)
        place = math.log10(value) if self.axis.scale == "log" else value
        return self.start + (place - low) / (high - low) * (self.stop - self.start)


def scale(axis: Axis, values: Sequence[float], *, start: float, stop: float, most_ticks: int) -> Scale:
    """Fit an axis to values: its ends are ticks on y; on x the values fill it and the ticks stand where they fall."""
    low, high = min([*values, *axis.include]), max([*values, *axis.include])
    if axis.scale == "log":
        low, high = (low / 2, high * 2) if high / low < 4 else (low / 1.15, high * 1.15)
        return Scale(
            axis=axis, low=low, high=high, start=start, stop=stop, ticks=tuple(_log_ticks(low, high, most_ticks))
        )
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        low, high = (low - max(1.0, abs(low) / 10), high + max(1.0, abs(high) / 10)) if low else (0.0, 1.0)
    step = _nice_step((high - low) / most_ticks, is_time=axis.scale == "time")
    if stop < start:  # y: whole steps, so that the highest point stays below the top line
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = tuple(n * step for n in range(first, last + 1))
    return Scale(axis=axis, low=low, high=high, start=start, stop=stop, ticks=ticks)


def apart(x: Scale, *, character: float) -> tuple[float, ...]:
    """Return every k-th tick, so that no value, each of its characters so wide, runs into the next one."""
    widths = [character * len(x.axis.write(tick)) for tick in x.ticks]
    for every in range(1, len(x.ticks)):
        shown = range(0, len(x.ticks), every)
        pairs = itertools.pairwise(shown)
        if all(x(x.ticks[b]) - x(x.ticks[a]) >= (widths[a] + widths[b]) / 2 + 8 for a, b in pairs):
            return x.ticks[::every]
    return x.ticks[:1]


def _nice_step(rough: float, *, is_time: bool) -> float:
    """Return the smallest round step that is not below `rough`."""
    if is_time and 1 <= rough <= _TIME_STEPS[-1]:
        return next(float(step) for step in _TIME_STEPS if step >= rough)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= rough * (1 - 1e-9))


def _log_ticks(low: float, high: float, most_ticks: int) -> list[float]:
    """Return powers of ten between the ends, every k-th if there are many, or 1-2-5 steps if there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / most_ticks))
    ticks = [10.0**n for n in range(first, last + 1) if n % every == 0 and low <= 10.0**n <= high]
    if len(ticks) >= 3:
        return ticks
    finer = [factor * 10.0**n for n in range(first, last + 1) for factor in (1, 2, 5)]
    return [tick for tick in finer if low <= tick <= high] or [low, high]
