"""Line charts as SVG text: values in, one `<svg>` out, no network, no script, no dependency.

Colours are classes of `style.CHART` (`s0`, `s1`, ...), so that one chart follows the reader's colour scheme. Lengths
are in the units of the view box; the page scales it.
Why this is our own and no plotting library: docs/decisions/0002-figures.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.monitor.report.axes import Axis, Scale, apart, scale
from thinwire.monitor.report.style import CHART, COLOURS

WIDTH, HEIGHT = 440.0, 285.0
_LABEL, _LINE = 7.0, 15.0  # a character's width and a line's height at the largest font size of the style
_TOP, _BOTTOM = 24.0, 46.0
_MOST_POINTS, _MOST_TOOLTIPS, _LONGEST_LABEL = 400, 60, 16
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line; points that are not finite break it. A faint line stands behind the others."""

    name: str
    points: tuple[Point, ...]
    colour: int = 0
    label: str = ""
    is_faint: bool = False
    has_dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines on two axes; `marker` is a value of x with the words at its dashed line, `empty` stands for no data."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    marker: tuple[float, str] | None = None
    empty: str = "no data"


def escape(text: object) -> str:
    """Make any text safe inside HTML and SVG, as content and as an attribute's value.

    Example:
        >>> escape('<b a="1">')
        '&lt;b a=&quot;1&quot;&gt;'
    """
    clean = _NOT_XML.sub("\ufffd", str(text))
    for char, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;"), ("'", "&#39;")):
        clean = clean.replace(char, safe)
    return clean


def line_chart(chart: Chart) -> str:
    """Draw a chart.

    Example:
        >>> line = Series(name="loss", points=((0.0, 2.0), (1.0, 1.0)))
        >>> svg = line_chart(Chart(title="loss", x=Axis(label="step"), y=Axis(label="loss"), series=(line,)))
        >>> svg.startswith("<svg") and "polyline" in svg
        True
    """
    series = [(one, drawable(one, chart)) for one in chart.series]
    points = [point for _, kept in series for point in kept if point is not None]
    if not points:
        return empty(chart.title, chart.empty)
    labels = [one.label for one, kept in series if one.label and any(kept)]
    right = 14 + _LABEL * max((len(_short(label)) for label in labels), default=0) + 16 * bool(labels)
    y = scale(chart.y, [p[1] for p in points], start=HEIGHT - _BOTTOM, stop=_TOP, most_ticks=6)
    left = 12 + _LABEL * max(len(chart.y.write(tick)) for tick in y.ticks)
    marked = [chart.marker[0]] if chart.marker else []
    x = scale(chart.x, [p[0] for p in points] + marked, start=left, stop=WIDTH - right, most_ticks=5)
    parts = frame(x, y)
    if chart.marker:
        parts += _marker(chart.marker, x)
    for one, kept in sorted(series, key=lambda pair: not pair[0].is_faint):
        parts += _line(one, kept, x, y)
    ends = [(one, [p for p in kept if p is not None][-1]) for one, kept in series if one.label and any(kept)]
    return svg(chart.title, HEIGHT, parts + _labels(ends, x, y))


def drawable(series: Series, chart: Chart) -> list[Point | None]:
    """Return the points of a series, thinned, with None where the line must break."""
    kept: list[Point | None] = []
    every = math.ceil(len(series.points) / _MOST_POINTS)
    last = len(series.points) - 1
    for index, (x, y) in enumerate(series.points):
        shown = all(math.isfinite(v) and (v > 0 or axis.scale != "log") for v, axis in ((x, chart.x), (y, chart.y)))
        if not shown:
            kept.append(None)
        elif every <= 1 or index % every == 0 or index == last:
            kept.append((x, y))
    return kept


def frame(x: Scale, y: Scale | None, *, bottom: float = HEIGHT - _BOTTOM) -> list[str]:
    """Draw the grid, the ticks' values and the axes' labels; without `y`, those of x alone."""
    parts = []
    for tick in y.ticks if y else ():
        parts.append(f'<line class="grid" x1="{x.start:.1f}" x2="{x.stop:.1f}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')  # type: ignore[misc]
        parts.append(text(x.start - 6, y(tick) + 4, y.axis.write(tick), anchor="end"))  # type: ignore[misc,union-attr]
    if y:
        parts.append(text(0, 12, y.axis.label))
    parts.append(f'<line class="grid" x1="{x.start:.1f}" x2="{x.stop:.1f}" y1="{bottom:.1f}" y2="{bottom:.1f}"/>')
    for tick in apart(x, character=_LABEL):
        parts.append(
            f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{bottom:.1f}" y2="{bottom + 4:.1f}"/>'
        )
        parts.append(text(x(tick), bottom + 18, x.axis.write(tick), anchor="middle"))
    parts.append(text((x.start + x.stop) / 2, bottom + 38, x.axis.label, anchor="middle"))
    return parts


def spread(places: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """Move coordinates apart, in their order, so that labels there do not overlap; within the ends if they fit.

    Example:
        >>> spread([10.0, 11.0, 40.0], gap=10, low=0, high=100)
        [10.0, 20.0, 40.0]
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    before = -math.inf
    for i in order:
        moved[i] = before = max(places[i], before + gap, low)
    after = max(high, low + gap * (len(places) - 1)) + gap
    for i in reversed(order):
        moved[i] = after = min(moved[i], after - gap)
    return moved


def _line(one: Series, kept: list[Point | None], x: Scale, y: Scale) -> list[str]:
    colour, parts = one.colour % COLOURS, []
    style = "faint" if one.is_faint else "again" if one.colour >= COLOURS else ""
    runs: list[list[Point]] = [[]]
    for point in kept:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(point)
    for run in runs:
        if len(run) > 1:
            places = " ".join(f"{x(px):.1f},{y(py):.1f}" for px, py in run)
            parts.append(f'<polyline class="line s{colour} {style}" points="{places}"/>')
        elif run:
            parts.append(f'<circle class="f{colour}" cx="{x(run[0][0]):.1f}" cy="{y(run[0][1]):.1f}" r="3"/>')
    drawn = [point for run in runs for point in run]
    every = math.ceil(len(drawn) / _MOST_TOOLTIPS) or 1
    for px, py in () if one.is_faint else drawn[::-1][::every]:
        words = f"{one.name}: {y.axis.write(py)} at {x.axis.write(px)}"
        dot = f'class="hover" cx="{x(px):.1f}" cy="{y(py):.1f}" r="4"'
        if one.has_dots and every == 1:
            parts.append(f'<circle class="f{colour}" cx="{x(px):.1f}" cy="{y(py):.1f}" r="2.6"/>')
        parts.append(f"<circle {dot}><title>{escape(words)}</title></circle>")
    return parts


def _labels(ends: Sequence[tuple[Series, Point]], x: Scale, y: Scale) -> list[str]:
    places = [y(point[1]) for _, point in ends]
    parts = []
    for (one, point), place in zip(ends, spread(places, gap=_LINE, low=_TOP, high=HEIGHT - _BOTTOM), strict=True):
        px, py, at = x(point[0]), y(point[1]), x.stop + 6
        if x.stop - px < 12 and 2 < abs(place - py) < 2 * _LINE:
            parts.append(f'<polyline class="leader" points="{px + 2:.1f},{py:.1f} {at - 2:.1f},{place:.1f}"/>')
        again = " again" if one.colour >= COLOURS and not one.is_faint else ""
        swatch = f'x1="{at:.1f}" x2="{at + 10:.1f}" y1="{place:.1f}" y2="{place:.1f}"'
        parts.append(f'<line class="line s{one.colour % COLOURS}{again}" {swatch}/>')
        parts.append(text(at + 14, place + 4, _short(one.label), style="label"))
    return parts


def _marker(marker: tuple[float, str], x: Scale) -> list[str]:
    place = x(marker[0])
    left = place > (x.start + x.stop) / 2
    line = f'<line class="marker" x1="{place:.1f}" x2="{place:.1f}" y1="{_TOP:.1f}" y2="{HEIGHT - _BOTTOM:.1f}"/>'
    words = marker[1].split("\n")
    at, anchor = (place - 6, "end") if left else (place + 6, "start")
    return [line, *(text(at, _TOP + 12 + _LINE * n, part, anchor=anchor) for n, part in enumerate(words))]


def text(x: float, y: float, words: str, *, anchor: str = "start", style: str = "") -> str:
    """Write words at a place."""
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'


def _short(label: str) -> str:
    return label if len(label) <= _LONGEST_LABEL else label[: _LONGEST_LABEL - 1] + "…"


def svg(title: str, height: float, parts: Sequence[str], *, width: float = WIDTH) -> str:
    """Put parts into one picture, by default of the charts' width."""
    head = f'<svg class="chart" viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, *parts, "</svg>"])


def image_file(picture: str) -> str:
    """Turn a picture of a page into an image file that stands alone: with style sheet, namespace and width."""
    head, _, rest = picture.partition(">")
    width = head.partition('viewBox="0 0 ')[2].split(" ")[0]
    return f'{head} xmlns="http://www.w3.org/2000/svg" width="{width}"><style>{CHART}</style>{rest}\n'


def empty(title: str, words: str) -> str:
    """Say why there is nothing to draw."""
    return svg(title, 120, [text(WIDTH / 2, 60, words, anchor="middle")])
