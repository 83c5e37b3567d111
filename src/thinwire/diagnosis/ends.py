"""Watches of all wires of an end together: what a slow sender, receiver or host does to each of its wires alike.

Where one message says little, because a busy machine makes it take twice or half as long, the mean of all that a rank
sends or receives in a round says more. What all other wires show in the same round is taken off: a machine that has
something else to do is no fault of an end.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.diagnosis.changes import Watch
from thinwire.diagnosis.delay_matrix import Cell

_LEAST_CELLS = 2
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
    rounds: dict[int, _Round] = defaultdict(dict)
    for cell, watch in watches.items():
        for number, at_s, excess in watch.history():
            rounds[number][cell] = at_s, excess
    rows, columns = defaultdict[int, set[Cell]](set), defaultdict[int, set[Cell]](set)
    for cell in watches:
        rows[cell[0]].add(cell)
        columns[cell[1]].add(cell)
    ordered = [(number, own, sorted(excess for _, excess in own.values())) for number, own in sorted(rounds.items())]
    found = []
    for rank in sorted({rank for cell in watches for rank in cell}):
        for cells in map(frozenset, (rows[rank], columns[rank], rows[rank] | columns[rank])):
            if len(cells) >= _LEAST_CELLS:
                found.append(End(rank=rank, cells=cells, watch=_watch(cells, ordered, classes)))
    return found


def _watch(cells: frozenset[Cell], rounds: _Ordered, classes: Mapping[int, int]) -> Watch:
    watch = Watch(most_usual=_MOST_USUAL)
    for number, own, ordered in rounds:
        ours = [own[cell] for cell in cells if cell in own]
        if len(ours) < _LEAST_CELLS:
            continue
        common = max(0.0, _median_without(ordered, [excess for _, excess in ours]))
        mean = math.fsum(excess for _, excess in ours) / len(ours)
        at_s = max(at_s for at_s, _ in ours)
        watch.add(number, at_s, math.exp(mean - common), size_class=2 * classes.get(number, 0))
    return watch


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
