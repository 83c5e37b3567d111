"""Lanes as SVG text: one filled strip a replica, all on one scale, for bursts that would hide each other as lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.monitor.report.axes import Axis, Scale, scale
from thinwire.monitor.report.chart import WIDTH, Point, escape, frame, svg, text
from thinwire.monitor.report.chart import empty as nothing
from thinwire.monitor.report.style import COLOURS

_LEFT, _RIGHT, _BINS = 74.0, 88.0, 240
_HIGHEST, _LOWEST, _ALL = 90.0, 20.0, 200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One strip: windows as (start, value), and the note at its right end."""

    name: str
    points: tuple[Point, ...]
    note: str
    colour: int = 0


def lane_chart(title: str, lanes: Sequence[Lane], *, x: Axis, width: float, until: float, empty: str) -> str:
    """Draw lanes below each other.

    Args:
        title: What a screen reader says.
        lanes: The strips, from the top.
        x: The axis that all share.
        width: Length of a window, in the unit of x.
        until: The axis reaches at least to here.
        empty: What stands there when no lane has a value above 0.
    """
    top = max((value for lane in lanes for _, value in lane.points), default=0.0)
    if top <= 0:
        return nothing(title, empty)
    height = min(_HIGHEST, max(_LOWEST, _ALL / len(lanes)))
    ends = [place + width for lane in lanes for place, _ in lane.points]
    across = scale(x, [until, *ends], start=_LEFT, stop=WIDTH - _RIGHT, most_ticks=5)
    parts = []
    for index, lane in enumerate(lanes):
        parts += _lane(lane, across, width=width, top=top, base=(index + 1) * height, height=height - 6)
    bottom = len(lanes) * height + 6
    return svg(title, bottom + 46, parts + frame(across, None, bottom=bottom))


def highest(points: Sequence[Point], *, low: float, high: float, bins: int) -> list[float]:
    """Return the highest value in each of `bins` equal parts of [low, high], 0 where there is none: peaks stay.

    Example:
        >>> highest([(0.0, 1.0), (0.1, 5.0), (0.9, 2.0)], low=0, high=1, bins=2)
        [5.0, 2.0]
    """
    found = [0.0] * bins
    for place, value in points:
        index = min(bins - 1, max(0, math.floor((place - low) / (high - low) * bins)))
        found[index] = max(found[index], value)
    return found


def _lane(lane: Lane, x: Scale, *, width: float, top: float, base: float, height: float) -> list[str]:
    bins = max(1, min(_BINS, round((x.high - x.low) / width)))
    places = [f"{x.start:.1f},{base:.1f}"]
    middles = [(place + width / 2, value) for place, value in lane.points]
    for index, value in enumerate(highest(middles, low=x.low, high=x.high, bins=bins)):
        level = base - value / top * height
        left, right = (x.start + (index + side) / bins * (x.stop - x.start) for side in (0, 1))
        places += [f"{left:.1f},{level:.1f}", f"{right:.1f},{level:.1f}"]
    places.append(f"{x.stop:.1f},{base:.1f}")
    shape = f'<polygon class="area f{lane.colour % COLOURS}" points="{" ".join(places)}">'
    return [
        f'<line class="grid" x1="{x.start:.1f}" x2="{x.stop:.1f}" y1="{base:.1f}" y2="{base:.1f}"/>',
        f"{shape}<title>{escape(lane.name)}: peak {escape(lane.note)}</title></polygon>",
        text(x.start - 8, base - 2, lane.name, anchor="end", style="label"),
        text(x.stop + 8, base - 2, lane.note),
    ]
