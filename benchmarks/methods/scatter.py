"""A figure of labelled points, drawn with the parts of thinwire's own charts: no two labels overlap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.charts import Axis, Scale, escape, frame, image_file, scale, svg, text

WIDTH, HEIGHT = 680.0, 520.0
_TOP, _BOTTOM, _RIGHT = 46.0, 46.0, 14.0
_LINE = 15.0  # a line's height at the style's font size
# Widths of characters in the widest font that the style names, at its size; 8 for those that are not here.
_WIDTHS = {"m": 12.7, "w": 10.7, "M": 11.2, "W": 12.9, "A": 8.9, "S": 8.3, "G": 10.1, "D": 10.0} | dict.fromkeys(
    "ijlt fr-,()", 5.0
)
_DOT = 3.5
# How far from its point a label may stand, and in how many directions it is tried there.
_DISTANCES, _DIRECTIONS = (6.0, 10.0, 16.0, 24.0, 34.0, 46.0, 60.0, 80.0, 105.0, 135.0), 16
_LEADER = 10.0  # a label that stands farther off is joined to its point by a line
_ROUNDS = 4
# What it costs, in units of distance, that a line crosses a label or another line, that a label stands on a range, and
# that it stands as near to another point as to its own.
_CROSSED, _ON_RANGE, _MISTAKEN = 25.0, 12.0, 10.0

Place = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A point with its name, the range of its y, and the number of its group."""

    name: str
    x: float
    y: float
    low: float
    high: float
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle in the picture."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """Tell whether two rectangles have a point in common."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom

    def nearest(self, point: Place) -> Place:
        """Return the place in the rectangle that is nearest to a point."""
        return min(max(point[0], self.left), self.right), min(max(point[1], self.top), self.bottom)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A drawn point: its place, and the upper and lower end of its range."""

    at: Place
    top: float
    bottom: float


def scatter(dots: Sequence[Dot], *, title: str, x: Axis, y: Axis, groups: Sequence[str]) -> str:
    """Return the figure as an image file.

    Args:
        dots: At least one.
        title: What the figure shows, for those who cannot see it.
        x: Axis of the points' x.
        y: Axis of their y.
        groups: What the groups are, by number; each has a colour.
    """
    across, up = _scales(dots, x, y)
    marks = [Mark(at=(across(dot.x), up(dot.y)), top=up(dot.high), bottom=up(dot.low)) for dot in dots]
    area = Box(left=across.start + 3, top=_TOP - 8, right=WIDTH, bottom=HEIGHT - _BOTTOM - 3)
    boxes = place_labels(marks, [dot.name for dot in dots], area=area)
    parts = frame(across, up, bottom=HEIGHT - _BOTTOM) + _legend(groups, start=across.start)
    for mark, box in zip(marks, boxes, strict=True):
        parts += _leader(mark.at, box)
    for dot, mark, box in zip(dots, marks, boxes, strict=True):
        left, height = mark.at
        ends = f'x1="{left:.1f}" x2="{left:.1f}" y1="{mark.top:.1f}" y2="{mark.bottom:.1f}"'
        words = escape(f"{dot.name}: {y.write(dot.y)} at {x.write(dot.x)}")
        circle = f'<circle class="f{dot.group}" cx="{left:.1f}" cy="{height:.1f}" r="{_DOT}">'
        parts += [f'<line class="line faint s{dot.group}" {ends}/>', f"{circle}<title>{words}</title></circle>"]
        parts.append(_label(dot.name, mark.at, box))
    return image_file(svg(title, HEIGHT, parts, width=WIDTH))


def place_labels(marks: Sequence[Mark], names: Sequence[str], *, area: Box) -> list[Box]:
    """Return a rectangle for each point's name, near it: apart from the others, from all points, and inside.

    Those with the most neighbours choose first, the cheapest of the free places; then each chooses again, knowing the
    others.

    Raises:
        ValueError: A name finds no place.
    """
    points = [mark.at for mark in marks]
    obstacles = [_around(point, _DOT + 1) for point in points]
    crowded = sorted(range(len(points)), key=lambda i: -sum(1 / (30 + math.dist(points[i], p)) for p in points))
    # what no other label changes is sorted out once
    candidates = [
        [
            (cost, box)
            for cost, box in sorted(_candidates(point, name), key=lambda found: found[0])
            if _is_inside(box, area) and not any(box.meets(other) for other in obstacles)
        ]
        for point, name in zip(points, names, strict=True)
    ]
    chosen: dict[int, Box] = {}
    for i in crowded * _ROUNDS:
        chosen.pop(i, None)
        best: tuple[float, Box] | None = None
        for cost, box in candidates[i]:
            if best is not None and cost >= best[0]:
                break  # all that follow are farther off: they cost more though they stand on nothing
            if not any(box.meets(other) for other in chosen.values()):
                total = cost + _disturbance(i, box, marks, chosen)
                if best is None or total < best[0]:
                    best = total, box
        if best is None:
            raise ValueError(f"there is no room for the label {names[i]!r}; make the figure larger")
        chosen[i] = best[1]
    return [chosen[i] for i in range(len(points))]


def width_of(words: str) -> float:
    """Return the width of a text at the style's font size, rather too much than too little."""
    return sum(_WIDTHS.get(character, 8.0) for character in words)


def _candidates(point: Place, name: str) -> list[tuple[float, Box]]:
    width, height = width_of(name), _LINE
    found = []
    for distance, number in itertools.product(_DISTANCES, range(_DIRECTIONS)):
        angle = 2 * math.pi * number / _DIRECTIONS
        toward = math.cos(angle), math.sin(angle)
        # the rectangle touches the circle of this distance with the side that faces the point
        middle = (
            point[0] + toward[0] * distance + _sign(toward[0]) * width / 2,
            point[1] + toward[1] * distance + _sign(toward[1]) * height / 2,
        )
        box = Box(
            left=middle[0] - width / 2, right=middle[0] + width / 2,
            top=middle[1] - height / 2, bottom=middle[1] + height / 2,
        )  # fmt: skip
        found.append((distance + 2 * abs(toward[1]), box))  # beside the point is easier to read than above or below it
    return found


def _disturbance(i: int, box: Box, marks: Sequence[Mark], chosen: Mapping[int, Box]) -> float:
    """Return what a label costs by what it and its leader stand on."""
    start, end = marks[i].at, box.nearest(marks[i].at)
    lines = [(marks[j].at, other.nearest(marks[j].at)) for j, other in chosen.items()]
    points = [_around(mark.at, _DOT) for j, mark in enumerate(marks) if j != i]
    crossed = sum(_cross(start, end, *line) + _meets_box(*line, box) for line in lines)
    crossed += sum(_meets_box(start, end, block) for block in [*points, *chosen.values()])
    ranges = sum(_meets_box((mark.at[0], mark.top), (mark.at[0], mark.bottom), box) for mark in marks)
    nearer = math.dist(start, end) + 3
    mistaken = sum(math.dist(m.at, box.nearest(m.at)) < nearer for j, m in enumerate(marks) if j != i)
    return _CROSSED * crossed + _ON_RANGE * ranges + _MISTAKEN * mistaken


def _meets_box(start: Place, end: Place, box: Box) -> bool:
    across = min(start[0], end[0]) <= box.right and box.left <= max(start[0], end[0])
    if not across or min(start[1], end[1]) > box.bottom or box.top > max(start[1], end[1]):
        return False
    corners = [(box.left, box.top), (box.right, box.top), (box.right, box.bottom), (box.left, box.bottom)]
    inside = box.left < end[0] < box.right and box.top < end[1] < box.bottom
    return inside or any(_cross(start, end, a, b) for a, b in zip(corners, corners[1:] + corners[:1], strict=True))


def _cross(a: Place, b: Place, c: Place, d: Place) -> bool:
    def side(p: Place, q: Place, r: Place) -> float:
        return (q[0] - p[0]) * (r[1] - p[1]) - (q[1] - p[1]) * (r[0] - p[0])

    return side(a, b, c) * side(a, b, d) < 0 and side(c, d, a) * side(c, d, b) < 0


def _sign(value: float) -> int:
    return 0 if abs(value) < 1e-9 else 1 if value > 0 else -1


def _around(point: Place, reach: float) -> Box:
    return Box(left=point[0] - reach, right=point[0] + reach, top=point[1] - reach, bottom=point[1] + reach)


def _is_inside(box: Box, area: Box) -> bool:
    across = area.left <= box.left and box.right <= area.right
    return across and area.top <= box.top and box.bottom <= area.bottom


def _scales(dots: Sequence[Dot], x: Axis, y: Axis) -> tuple[Scale, Scale]:
    heights = [value for dot in dots for value in (dot.low, dot.high)]
    up = scale(y, heights, start=HEIGHT - _BOTTOM, stop=_TOP, most_ticks=6)
    left = 12 + max(width_of(y.write(tick)) for tick in up.ticks)
    return scale(x, [dot.x for dot in dots], start=left, stop=WIDTH - _RIGHT, most_ticks=6), up


def _label(name: str, point: Place, box: Box) -> str:
    # a font may be narrower than was reckoned with: the end that faces the point stays where it is
    if box.left >= point[0]:
        return text(box.left, box.bottom - 4, name, style="label")
    if box.right <= point[0]:
        return text(box.right, box.bottom - 4, name, anchor="end", style="label")
    return text((box.left + box.right) / 2, box.bottom - 4, name, anchor="middle", style="label")


def _leader(point: Place, box: Box) -> list[str]:
    end = box.nearest(point)
    if math.dist(point, end) < _LEADER:
        return []
    return [f'<polyline class="leader" points="{point[0]:.1f},{point[1]:.1f} {end[0]:.1f},{end[1]:.1f}"/>']


def _legend(groups: Sequence[str], *, start: float) -> list[str]:
    parts, left = [], start
    for number, words in enumerate(groups):
        parts.append(f'<circle class="f{number}" cx="{left + _DOT:.1f}" cy="26" r="{_DOT}"/>')
        parts.append(text(left + 12, 30, words))
        left += 12 + width_of(words) + 24
    return parts
