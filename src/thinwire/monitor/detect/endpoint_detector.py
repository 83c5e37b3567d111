"""Watches of all wires of an end together: what a slow sender, receiver or host does to each of its wires alike.

Where one message says little, because a busy machine makes it take twice or half as long, the mean of all that a rank
sends or receives in a round says more. What all other wires show in the same round is taken off: a machine that has
something else to do is no fault of an end.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from thinwire.monitor.detect.change_points import Watch
from thinwire.monitor.detect.delay_matrix import Cell

_LEAST_CELLS = 2
_MANY = 1000
# All wires of an end show faults that are too small to be told soon: these must not become what is usual meanwhile.
_MOST_USUAL = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """All wires of a rank that were seen, one way or both.

    Attributes:
        rank: The rank.
        cells: Its wires.
        watch: What a message over them takes beside its usual time.
    """

    rank: int
    cells: frozenset[Cell]
    watch: Watch


_Round = dict[Cell, tuple[float, float]]  # seconds of the clock and logarithm of the ratio
_Ordered = Sequence[tuple[int, _Round, list[float]]]  # in the order of their numbers, with the logarithms in order


def watch_ends(watches: Mapping[Cell, Watch], classes: Mapping[int, int]) -> list[End]:
    """Watch what each rank sends, what it receives, and both.

    Args:
        watches: Of what each wire's messages would have taken alone.
        classes: The size class of each round: small messages scatter more, and say nothing of how large ones do.
    """
    return EndHistory().take(watches, classes)


class EndHistory:
    """Remembers what the wires of each end showed together."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, frozenset[Cell]], End] = {}
        self._cells: frozenset[Cell] = frozenset()
        self._taken: dict[frozenset[Cell], int] = {}

    def take(self, watches: Mapping[Cell, Watch], classes: Mapping[int, int], *, until: int | None = None) -> list[End]:
        """Take in what is new, and return all ends.

        Args:
            watches: See `watch_ends`.
            classes: The same.
            until: The last round that all wires have shown; None where nothing more will come.
        """
        if len(watches) != len(self._cells):
            self._cells = frozenset(watches)
            named = _ends_of(self._cells)
            self._ends = {key: self._ends.get(key) or _end(*key) for key in named}
            self._taken = {cells: self._taken.get(cells, -1) for _, cells in named}
        since = min(self._taken.values(), default=-1)
        ordered = _rounds(watches, since=since, until=until)
        for (_, cells), end in self._ends.items():
            known = self._taken[cells]
            _feed(end, [one for one in ordered if one[0] > known] if known > since else ordered, classes)
        if ordered:
            self._taken = dict.fromkeys(self._taken, ordered[-1][0])
        return [*self._ends.values()]


def _end(rank: int, cells: frozenset[Cell]) -> End:
    return End(rank=rank, cells=cells, watch=Watch(most_usual=_MOST_USUAL))


def _ends_of(cells: Collection[Cell]) -> list[tuple[int, frozenset[Cell]]]:
    rows, columns = defaultdict[int, set[Cell]](set), defaultdict[int, set[Cell]](set)
    for cell in cells:
        rows[cell[0]].add(cell)
        columns[cell[1]].add(cell)
    return [
        (rank, own)
        for rank in sorted({rank for cell in cells for rank in cell})
        for own in map(frozenset, (rows[rank], columns[rank], rows[rank] | columns[rank]))
        if len(own) >= _LEAST_CELLS
    ]


def _rounds(watches: Mapping[Cell, Watch], *, since: int, until: int | None) -> _Ordered:
    """Return the rounds after one, up to another one."""
    rounds: dict[int, _Round] = defaultdict(dict)
    # a look at a running job must not take long: of very many wires, what came before all was usual is left out
    is_whole = since < 0 and (until is None or len(watches) <= _MANY)
    for cell, watch in watches.items():
        for number, at_s, excess in watch.history() if is_whole else watch.since(since + 1):
            if until is None or number <= until:
                rounds[number][cell] = at_s, excess
    return [(number, own, sorted(excess for _, excess in own.values())) for number, own in sorted(rounds.items())]


def _feed(end: End, rounds: _Ordered, classes: Mapping[int, int]) -> None:
    for number, own, ordered in rounds:
        ours = [own[cell] for cell in end.cells if cell in own]
        if len(ours) < _LEAST_CELLS:
            continue
        common = max(0.0, _median_without(ordered, [excess for _, excess in ours]))
        mean = math.fsum(excess for _, excess in ours) / len(ours)
        at_s = max(at_s for at_s, _ in ours)
        end.watch.add(number, at_s, math.exp(mean - common), size_class=2 * classes.get(number, 0))


def _median_without(ordered: list[float], some: list[float]) -> float:
    """Return the median of ordered values less some of them, 0 where none is left: of thousands, without a new list."""
    left = len(ordered) - len(some)
    if not left:
        return 0.0
    gone: list[int] = []
    for value in sorted(some):
        place = bisect_left(ordered, value)
        gone.append(max(place, gone[-1] + 1) if gone else place)  # of equal values one after the other

    def at(index: int) -> float:
        for place in gone:
            index += place <= index
        return ordered[index]

    return at(left // 2) if left % 2 else (at(left // 2 - 1) + at(left // 2)) / 2
