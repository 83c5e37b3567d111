"""A curve of fixed size: however long a run is, its whole past is there, at ever coarser steps."""

from __future__ import annotations

MOST_POINTS = 400


class Curve:
    """Points in order of x; when they are too many, every second one goes and only every second new one is kept.

    The last point is always there. A point that is not beyond the last one takes the place of all that are not before
    it: a run that was resumed writes anew what it had written after its checkpoint.

    Args:
        most: How many points are kept at most.

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
