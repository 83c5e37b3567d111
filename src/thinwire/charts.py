"""SVG charts: style sheets, axes with round ticks, line charts and lanes."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

# Okabe and Ito's palette, told apart with every kind of colour vision; the yellow, too pale on paper, is a violet here.
_LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7a5fb0", "#6b7280")
_DARK = ("#4ba6e0", "#ff8a3d", "#2fc79b", "#e59bc4", "#8fd0f7", "#f5bd45", "#ab94e0", "#a3adba")
COLOURS = len(_LIGHT)


def _variables(colours: tuple[str, ...]) -> str:
    return ";".join(f"--s{n}:{colour}" for n, colour in enumerate(colours))


CHART = (
    f"""
.chart{{--ink:#1c2430;--dim:#5b6573;--grid:#e3e7ec;{_variables(_LIGHT)};
display:block;width:100%;height:auto;overflow:visible}}
@media screen and (prefers-color-scheme:dark){{.chart{{--ink:#e8ecf1;--dim:#9aa6b5;--grid:#2c3542;
{_variables(_DARK)}}}}}
"""
    + """
.chart text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:var(--dim);
font-variant-numeric:tabular-nums}
.chart .label{fill:var(--ink)}
.chart .grid{stroke:var(--grid);stroke-width:1}
.chart .marker{stroke:var(--dim);stroke-dasharray:4 3}
.chart .leader{stroke:var(--dim);stroke-width:.6;fill:none;opacity:.6}
.chart .line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.chart .faint{stroke-width:1.2;opacity:.5}
.chart .thin{stroke-width:1.3}
.chart .main{stroke:var(--ink);stroke-width:2.2}
.chart .main-dot{fill:var(--ink)}
.chart .again{stroke-dasharray:6 3}
.chart .area{stroke:none;opacity:.85}
.chart .hover{fill:transparent;stroke:none}
.chart .hover:hover{fill:var(--ink)}
"""
    + "\n".join(f".chart .s{n}{{stroke:var(--s{n})}}.chart .f{n}{{fill:var(--s{n})}}" for n in range(COLOURS))
)

# Lengths of text in a figure are in the units of its view box: the wider a figure is shown, the smaller they must be to
# stay at the size of the text around it.
PAGE = """
:root{color-scheme:light dark;--paper:#f6f7f9;--card:#fff;--edge:#dfe4ea;--text:#1c2430;
--quiet:#5b6573;--strong:#0b63a5}
@media screen and (prefers-color-scheme:dark){:root{--paper:#12171e;--card:#1a212b;--edge:#2c3542;--text:#e8ecf1;
--quiet:#9aa6b5;--strong:#6cb8f0}}
*{box-sizing:border-box}
:focus-visible{outline:3px solid var(--strong);outline-offset:2px}
body{margin:0;background:var(--paper);color:var(--text);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"DejaVu Sans",sans-serif}
main{max-width:1220px;margin:0 auto;padding:32px 24px 48px}
h1{font-size:15px;font-weight:600;color:var(--quiet);margin:0 0 6px;overflow-wrap:anywhere}
h2{font-size:18px;margin:40px 0 12px}
h3{font-size:15px;margin:0 0 10px}
.headline{font-size:clamp(20px,2.4vw,28px);line-height:1.3;font-weight:600;margin:0 0 24px;
max-width:36em;text-wrap:balance}
.whole{white-space:nowrap}
summary{font-size:18px;font-weight:700;margin:40px 0 12px;cursor:pointer}
.headline b{color:var(--strong);white-space:nowrap;font-weight:700}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:20px}
.card{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:18px 20px;margin:0;min-width:0}
figure{container-type:inline-size}
figcaption{color:var(--quiet);font-size:14px;margin-top:8px}
@container (min-width:440px){.chart text{font-size:12.5px}}
@container (min-width:520px){.chart text{font-size:11.5px}}
@container (min-width:620px){.chart text{font-size:10px}}
@container (min-width:760px){.chart text{font-size:8px}}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:7px 12px 7px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--edge)}
tr:last-child th,tr:last-child td{border-bottom:0}
tbody th{font-weight:400;color:var(--quiet)}
.facts{width:auto}.facts th{padding-right:32px}
td{font-weight:600;overflow-wrap:anywhere}
.settings td,.settings th{font-size:14px;padding-top:4px;padding-bottom:4px}
.many th,.many td{white-space:nowrap;overflow-wrap:normal;padding-right:12px;font-size:14px}
.many .number{text-align:right}
.many thead th{color:var(--quiet);font-size:13px;font-weight:600}
.many tr>:first-child{position:sticky;left:0;background:var(--card)}
.many tbody th{color:var(--text);font-weight:600}.many td{font-weight:400}
pre span{white-space:pre}
h4{font-size:14px;margin:0 0 6px;color:var(--quiet);font-weight:600}
.sample{margin-bottom:16px}.sample h3{overflow-wrap:anywhere}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));gap:18px}
.pair>div{min-width:0}.pair pre{overflow-wrap:anywhere}
a{color:var(--strong)}
.note{border-left:3px solid var(--strong);padding:2px 0 2px 12px;margin:0 0 12px;overflow-wrap:anywhere}
pre{margin:0;white-space:pre-wrap;overflow-x:auto;
font:14px/1.6 ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace}
footer{color:var(--quiet);font-size:14px;margin-top:40px}
@media (max-width:560px){main{padding:20px 12px 32px}.card{padding:14px 10px}.facts th{padding-right:12px}}
@media print{:root{--paper:#fff;--card:#fff}body{font-size:11pt}main{max-width:none;padding:0}
.card{break-inside:avoid;border-color:#ccc}.cards{grid-template-columns:1fr 1fr}h2{break-after:avoid}
.hover{display:none}}
"""


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


WIDTH, HEIGHT = 440.0, 285.0
_LABEL, _LINE = 7.0, 15.0  # a character's width and a line's height at the largest font size of the style
_TOP, _BOTTOM = 24.0, 46.0
_MOST_POINTS, _MOST_TOOLTIPS, _LONGEST_LABEL = 400, 60, 16
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSeries:
    """One line; points that are not finite break it. Faint and thin lines are drawn first; the main one is in ink."""

    name: str
    points: tuple[Point, ...]
    colour: int = 0
    label: str = ""
    is_faint: bool = False
    is_thin: bool = False
    is_main: bool = False
    has_dots: bool = False

    def line_style(self) -> str:
        colour = "main" if self.is_main else f"s{self.colour % COLOURS}"
        more = "faint" if self.is_faint else "again" if self.colour >= COLOURS else "thin" if self.is_thin else ""
        return f"line {colour} {more}".rstrip()

    def dot_style(self) -> str:
        return "main-dot" if self.is_main else f"f{self.colour % COLOURS}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines on two axes; `marker` is a value of x and the label of its dashed line, `empty` the text for no data."""

    title: str
    x: Axis
    y: Axis
    series: tuple[ChartSeries, ...]
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
        >>> line = ChartSeries(name="loss", points=((0.0, 2.0), (1.0, 1.0)))
        >>> svg = line_chart(Chart(title="loss", x=Axis(label="step"), y=Axis(label="loss"), series=(line,)))
        >>> svg.startswith("<svg") and "polyline" in svg
        True
    """
    series = [(one, drawable(one, chart)) for one in chart.series]
    points = [point for _, kept in series for point in kept if point is not None]
    if not points:
        return empty_chart(chart.title, chart.empty)
    labels = [one.label for one, kept in series if one.label and any(kept)]
    right = 14 + _LABEL * max((len(_short(label)) for label in labels), default=0) + 16 * bool(labels)
    y = scale(chart.y, [p[1] for p in points], start=HEIGHT - _BOTTOM, stop=_TOP, most_ticks=6)
    left = 12 + _LABEL * max(len(chart.y.write(tick)) for tick in y.ticks)
    marked = [chart.marker[0]] if chart.marker else []
    x = scale(chart.x, [p[0] for p in points] + marked, start=left, stop=WIDTH - right, most_ticks=5)
    parts = frame(x, y)
    if chart.marker:
        place = x(chart.marker[0])
        at, anchor = (place - 6, "end") if place > (x.start + x.stop) / 2 else (place + 6, "start")
        ends_y = f'y1="{_TOP:.1f}" y2="{HEIGHT - _BOTTOM:.1f}"'
        parts.append(f'<line class="marker" x1="{place:.1f}" x2="{place:.1f}" {ends_y}/>')
        words = enumerate(chart.marker[1].split("\n"))
        parts += [text(at, _TOP + 12 + _LINE * n, part, anchor=anchor) for n, part in words]
    for one, kept in sorted(series, key=lambda pair: not (pair[0].is_faint or pair[0].is_thin)):
        parts += _line(one, kept, x, y)
    ends = [(one, [p for p in kept if p is not None][-1]) for one, kept in series if one.label and any(kept)]
    return svg(chart.title, HEIGHT, parts + _labels(ends, x, y))


def drawable(series: ChartSeries, chart: Chart) -> list[Point | None]:
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


def _line(one: ChartSeries, kept: list[Point | None], x: Scale, y: Scale) -> list[str]:
    parts = []
    runs: list[list[Point]] = [[]]
    for point in kept:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(point)
    for run in runs:
        if len(run) > 1:
            places = " ".join(f"{x(px):.1f},{y(py):.1f}" for px, py in run)
            parts.append(f'<polyline class="{one.line_style()}" points="{places}"/>')
        elif run:
            parts.append(f'<circle class="{one.dot_style()}" cx="{x(run[0][0]):.1f}" cy="{y(run[0][1]):.1f}" r="3"/>')
    drawn = [point for run in runs for point in run]
    every = math.ceil(len(drawn) / _MOST_TOOLTIPS) or 1
    for px, py in () if one.is_faint else drawn[::-1][::every]:
        words = f"{one.name}: {y.axis.write(py)} at {x.axis.write(px)}"
        dot = f'class="hover" cx="{x(px):.1f}" cy="{y(py):.1f}" r="4"'
        if one.has_dots and every == 1:
            parts.append(f'<circle class="{one.dot_style()}" cx="{x(px):.1f}" cy="{y(py):.1f}" r="2.6"/>')
        parts.append(f"<circle {dot}><title>{escape(words)}</title></circle>")
    return parts


def _labels(ends: Sequence[tuple[ChartSeries, Point]], x: Scale, y: Scale) -> list[str]:
    places = [y(point[1]) for _, point in ends]
    parts = []
    for (one, point), place in zip(ends, spread(places, gap=_LINE, low=_TOP, high=HEIGHT - _BOTTOM), strict=True):
        px, py, at = x(point[0]), y(point[1]), x.stop + 6
        if x.stop - px < 12 and 2 < abs(place - py) < 2 * _LINE:
            parts.append(f'<polyline class="leader" points="{px + 2:.1f},{py:.1f} {at - 2:.1f},{place:.1f}"/>')
        swatch = f'x1="{at:.1f}" x2="{at + 10:.1f}" y1="{place:.1f}" y2="{place:.1f}"'
        parts.append(f'<line class="{one.line_style().replace(" faint", "")}" {swatch}/>')
        parts.append(text(at + 14, place + 4, _short(one.label), style="label"))
    return parts


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


def empty_chart(title: str, words: str) -> str:
    """Say why there is nothing to draw."""
    return svg(title, 120, [text(WIDTH / 2, 60, words, anchor="middle")])


_LEFT, _RIGHT, _BINS = 82.0, 122.0, 240
_HIGHEST, _LOWEST, _ALL = 90.0, 20.0, 200.0
_TALL = 2 * _LINE + 4  # a lane with room for its name above its note, and for a scale of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One strip: windows as (start, value), and the note at its right end."""

    name: str
    points: tuple[Point, ...]
    note: str
    colour: int = 0


def lane_chart(
    title: str, lanes: Sequence[Lane], *, x: Axis, y: Axis, width: float, until: float, empty: str
) -> str:  # fmt: skip
    """Draw lanes, the strips from the top, over one axis x; windows are `width` long, x reaches at least to `until`.

    The axis of each lane goes from 0 to a round value above the highest of all. `title` is read by screen readers;
    `empty` stands there when no lane has a value above 0.
    """
    top = max((value for lane in lanes for _, value in lane.points), default=0.0)
    if top <= 0:
        return empty_chart(title, empty)
    height = min(_HIGHEST, max(_LOWEST, _ALL / len(lanes)))
    ends = [place + width for lane in lanes for place, _ in lane.points]
    across = scale(x, [until, *ends], start=_LEFT, stop=WIDTH - _RIGHT, most_ticks=5)
    is_tall = height >= _TALL
    ups = [
        scale(y, [0.0, top], start=base, stop=base - height + (16 if is_tall else 6), most_ticks=2)
        for base in (_TOP + (index + 1) * height for index in range(len(lanes)))
    ]
    parts = [text(0, 12, y.label if is_tall else f"{y.label}: a lane is {y.write(ups[0].high)} high")]
    for lane, up in zip(lanes, ups, strict=True):
        parts += _lane(lane, across, up, width=width, is_tall=is_tall)
    bottom = _TOP + len(lanes) * height + 6
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


def _lane(lane: Lane, x: Scale, y: Scale, *, width: float, is_tall: bool) -> list[str]:
    bins = max(1, min(_BINS, round((x.high - x.low) / width)))
    base = y(0.0)
    places = [f"{x.start:.1f},{base:.1f}"]
    middles = [(place + width / 2, value) for place, value in lane.points]
    for index, value in enumerate(highest(middles, low=x.low, high=x.high, bins=bins)):
        left, right = (x.start + (index + side) / bins * (x.stop - x.start) for side in (0, 1))
        places += [f"{left:.1f},{y(value):.1f}", f"{right:.1f},{y(value):.1f}"]
    places.append(f"{x.stop:.1f},{base:.1f}")
    shape = f'<polygon class="area f{lane.colour % COLOURS}" points="{" ".join(places)}">'
    parts = []
    for tick in (y.ticks[0], y.ticks[-1]) if is_tall else (y.ticks[0],):
        parts.append(f'<line class="grid" x1="{x.start:.1f}" x2="{x.stop:.1f}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        if is_tall:
            parts.append(text(x.start - 6, y(tick) + 4, y.axis.write(tick), anchor="end"))
    parts.append(f"{shape}<title>{escape(lane.name)}: {escape(lane.note)}</title></polygon>")
    if is_tall:
        parts.append(text(x.stop + 8, base - 2 - _LINE, lane.name, style="label"))
    else:
        parts.append(text(x.start - 8, base - 2, lane.name, anchor="end", style="label"))
    return [*parts, text(x.stop + 8, base - 2, lane.note)]
