"""Watches of all wires of an end together: what a slow sender, receiver or host does to each of its wires alike.

Where one message says little, because a busy machine makes it take twice or half as long, the mean of all that a rank
sends or receives in a round says more. What all other wires show in the same round is taken off: a machine that has
something else to do is no fault of an end.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.diagnosis.changes import Watch, median
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


_Rounds = dict[int, dict[Cell, tuple[float, float]]]  # seconds of the clock and logarithm of the ratio


def watch_ends(watches: Mapping[Cell, Watch], classes: Mapping[int, int]) -> list[End]:
    """Watch what each rank sends, what it receives, and both.

    Args:
        watches: Of what each wire's messages would have taken alone.
        classes: The size class of each round: small messages scatter more, and say nothing of how large ones do.
    """
    rounds: _Rounds = defaultdict(dict)
    for cell, watch in watches.items():
        for number, at_s, excess in watch.history():
            rounds[number][cell] = at_s, excess
    found = []
    for rank in sorted({rank for cell in watches for rank in cell}):
        rows = frozenset(cell for cell in watches if cell[0] == rank)
        columns = frozenset(cell for cell in watches if cell[1] == rank)
        for cells in (rows, columns, rows | columns):
            if len(cells) >= _LEAST_CELLS:
                found.append(End(rank=rank, cells=cells, watch=_watch(cells, rounds, classes)))
    return found


def _watch(cells: frozenset[Cell], rounds: _Rounds, classes: Mapping[int, int]) -> Watch:
    watch = Watch(most_usual=_MOST_USUAL)
    for number, own in sorted(rounds.items()):
        ours = [seen for cell, seen in own.items() if cell in cells]
        if len(ours) < _LEAST_CELLS:
            continue
        others = [excess for cell, (_, excess) in own.items() if cell not in cells]
        common = max(0.0, median(others)) if others else 0.0
        mean = math.fsum(excess for _, excess in ours) / len(ours)
        at_s = max(at_s for at_s, _ in ours)
        watch.add(number, at_s, math.exp(mean - common), size_class=2 * classes.get(number, 0))
    return watch
