"""Fractional routing: bytes of any split over the spines, near the least maximum load, and a proof of how near.

The least maximum load is a linear programme. It is approached by exponentiated gradients on a soft maximum of the
cables' loads, and bounded from below by its dual: for any weights of the cables, every byte costs at least the cheapest
path's weight, so no split has a lower maximum than

    sum(bytes * cheapest path) / sum(weight * rate).

The weights are those of the soft maximum, averaged over the steps. The bound is evaluated in whole numbers, so rounding
never lifts it above the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import exp, inf

from thinwire.traffic.fabric import SpinePaths

# The search ends within this share of its own bound, or after so many steps.
NEAR = 0.03
_MOST_STEPS = 600
# Sharpness of the soft maximum and length of a step, at the start and every so many steps; share of the average weights
# that a step keeps.
_SHARPNESS, _SHARPER, _SHARPEST = 20.0, 1.2, 300.0
_LENGTH, _SHORTER, _SHORTEST, _STEPS = 0.1, 0.85, 0.02, 25
_KEPT = 0.98
# Weights of the dual and shares of a split are whole parts of these; a smaller share is no piece of its own.
_WEIGHT_PARTS, _SHARE_PARTS = 1 << 40, 4096
_NOTHING = 1e-9


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes that may take any of some pairs of leaves, and any spine between them."""

    size: Fraction  # bytes; exact
    ends: tuple[tuple[int, int], ...]  # source and destination leaf of each choice


@dataclass(frozen=True, slots=True)
class FractionalSplit:
    """Shares of the demands, and what no split goes below."""

    # for each demand and each of its pairs of leaves, the spines and their shares; all of a demand are 1
    shares: list[list[list[tuple[int, Fraction]]]]
    bound_s: Fraction  # seconds for which the fullest cable is busy at least, times 8: bytes over bits a second; exact
    is_proportional: bool  # whether shares in proportion to the slower cable of each path are as good


def split_demands(demands: Sequence[Demand], paths: SpinePaths) -> FractionalSplit:
    """Split demands over the spines so that the fullest cable is nearly as little loaded as it can be.

    Args:
        demands: At least one, each with a path.
        paths: The fabric without its failed cables.
    """
    search = _Search(demands, paths)
    is_proportional = search.run()
    return FractionalSplit(
        shares=search.shares(), bound_s=max(cut_bound_s(demands, paths), search.bound_s()),
        is_proportional=is_proportional,
    )  # fmt: skip


def cut_bound_s(demands: Sequence[Demand], paths: SpinePaths) -> Fraction:
    """Return the bound by cuts: what must leave some leaves crosses their uplinks, what must enter them the downlinks.

    The sets of leaves are those that some demand may choose from. On cables of one rate, with one pair of leaves a
    demand, this is C* = max(row sums, column sums)/s, which is reached.
    """
    best = Fraction()
    for side in (0, 1):
        sums: dict[frozenset[int], Fraction] = {}
        for demand in demands:
            leaves = frozenset(pair[side] for pair in demand.ends)
            sums[leaves] = sums.get(leaves, Fraction()) + demand.size
        for leaves in sums:
            size = sum((own for others, own in sums.items() if others <= leaves), Fraction())
            rate = sum(paths.rate(leaf, spine) for leaf in leaves for spine in range(paths.fabric.spines))
            best = max(best, size / rate)
    between: dict[tuple[int, int], Fraction] = {}
    for demand in demands:
        if len(demand.ends) == 1:
            between[demand.ends[0]] = between.get(demand.ends[0], Fraction()) + demand.size
    for (source, destination), size in between.items():
        rates = (min(paths.rate(source, s), paths.rate(destination, s)) for s in paths.healthy(source, destination))
        best = max(best, size / sum(rates))
    return best


@dataclass(slots=True)
class _Row:
    """Shares of a demand between one pair of leaves, over the spines that join it."""

    demand: int
    source: int
    destination: int
    spines: tuple[int, ...]
    shares: list[float]


# Numbers of the cables: upwards and downwards, a list of spines for each leaf.
_Cables = tuple[list[list[float]], list[list[float]]]


class _Search:
    def __init__(self, demands: Sequence[Demand], paths: SpinePaths) -> None:
        self._demands, self._paths = demands, paths
        self._leaves, self._spines = range(paths.fabric.num_leaves), range(paths.fabric.spines)
        rates = [[float(paths.rate(leaf, spine)) for spine in self._spines] for leaf in self._leaves]
        largest, fastest = float(max(demand.size for demand in demands)), max(map(max, rates))
        self._rates = [[rate / fastest for rate in row] for row in rates]
        self._sizes = [float(demand.size) / largest for demand in demands]
        self._unit_s = largest / fastest
        self._rows: list[_Row] = []
        for number, demand in enumerate(demands):
            for source, destination in demand.ends:
                spines = paths.healthy(source, destination)
                shares = [min(self._rates[source][s], self._rates[destination][s]) for s in spines]
                self._rows.append(_Row(number, source, destination, spines, shares))
        self._normalise()
        self._best = [row.shares for row in self._rows]
        self._weights = self._cables()

    def run(self) -> bool:
        """Search; return whether the start was near enough."""
        least = float(cut_bound_s(self._demands, self._paths)) / self._unit_s
        lowest = inf
        sharpness, length = _SHARPNESS, _LENGTH
        for step in range(_MOST_STEPS):
            busy = self._busy()
            most = max(max(map(max, side)) for side in busy)
            if most < lowest:
                lowest, self._best = most, [row.shares for row in self._rows]
            weights = self._soft(busy, most, sharpness)
            for side, own in zip(self._weights, weights, strict=True):
                for leaf, row in enumerate(own):
                    side[leaf] = [_KEPT * a + (1 - _KEPT) * b for a, b in zip(side[leaf], row, strict=True)]
            least = max(least, self._dual())
            if lowest <= least * (1 + NEAR):
                return step == 0
            self._move(weights, length)
            if step % _STEPS == _STEPS - 1:
                sharpness, length = min(sharpness * _SHARPER, _SHARPEST), max(length * _SHORTER, _SHORTEST)
        return False

    def bound_s(self) -> Fraction:
        """Return the dual bound of the average weights, exactly."""
        largest = max(max(map(max, side)) for side in self._weights)
        up, down = ([[round(w / largest * _WEIGHT_PARTS) for w in row] for row in side] for side in self._weights)
        cheapest = [4 * _WEIGHT_PARTS] * len(self._demands)  # more than any path costs
        for row in self._rows:
            cost = min(up[row.source][spine] + down[row.destination][spine] for spine in row.spines)
            cheapest[row.demand] = min(cheapest[row.demand], cost)
        paid = sum((demand.size * cost for demand, cost in zip(self._demands, cheapest, strict=True)), Fraction())
        room = sum(
            (up[leaf][spine] + down[leaf][spine]) * self._paths.rate(leaf, spine)
            for leaf in self._leaves for spine in self._spines
        )  # fmt: skip
        return paid / room

    def shares(self) -> list[list[list[tuple[int, Fraction]]]]:
        """Return the best split in whole parts."""
        parts = [[round(share * _SHARE_PARTS) for share in shares] for shares in self._best]
        totals = [0] * len(self._demands)
        for row, own in zip(self._rows, parts, strict=True):
            totals[row.demand] += sum(own)
        found: list[list[list[tuple[int, Fraction]]]] = [[] for _ in self._demands]
        for row, own in zip(self._rows, parts, strict=True):
            total = totals[row.demand]
            found[row.demand].append([(s, Fraction(n, total)) for s, n in zip(row.spines, own, strict=True) if n])
        return found

    def _cables(self) -> _Cables:
        return [[0.0] * len(self._spines) for _ in self._leaves], [[0.0] * len(self._spines) for _ in self._leaves]

    def _busy(self) -> _Cables:
        """Return the load of each cable over its rate."""
        busy = self._cables()
        for row in self._rows:
            up, down, size = busy[0][row.source], busy[1][row.destination], self._sizes[row.demand]
            for spine, share in zip(row.spines, row.shares, strict=True):
                up[spine] += size * share
                down[spine] += size * share
        for side in busy:
            for leaf, loads in enumerate(side):
                side[leaf] = [a / b if b else 0.0 for a, b in zip(loads, self._rates[leaf], strict=True)]
        return busy

    def _soft(self, busy: _Cables, most: float, sharpness: float) -> _Cables:
        """Return the weights of the soft maximum: its derivative by the load of each cable."""
        soft = [[[exp(sharpness * (one / most - 1)) for one in row] for row in side] for side in busy]
        total = sum(
            one for side in soft for row, rates in zip(side, self._rates, strict=True)
            for one, rate in zip(row, rates, strict=True) if rate
        )  # fmt: skip
        up, down = (
            [
                [one / rate / total if rate else 0.0 for one, rate in zip(row, rates, strict=True)]
                for row, rates in zip(side, self._rates, strict=True)
            ]
            for side in soft
        )
        return up, down

    def _dual(self) -> float:
        up, down = self._weights
        cheapest = [inf] * len(self._demands)
        for row in self._rows:
            ups, downs = up[row.source], down[row.destination]
            cheapest[row.demand] = min(cheapest[row.demand], min([ups[s] + downs[s] for s in row.spines]))
        room = sum(
            weight * rate for side in self._weights for row, rates in zip(side, self._rates, strict=True)
            for weight, rate in zip(row, rates, strict=True)
        )  # fmt: skip
        return sum(size * cost for size, cost in zip(self._sizes, cheapest, strict=True)) / room

    def _move(self, weights: _Cables, length: float) -> None:
        """Move shares from paths that cost more than the average of their demand to those that cost less."""
        up, down = weights
        means = [0.0] * len(self._demands)
        costs = []
        for row in self._rows:
            ups, downs = up[row.source], down[row.destination]
            own = [ups[s] + downs[s] for s in row.spines]
            costs.append(own)
            means[row.demand] += sum([a * b for a, b in zip(own, row.shares, strict=True)])
        for row, own in zip(self._rows, costs, strict=True):
            # a step of length / mean along the costs, to first order; none is longer than three lengths
            factor = length / max(means[row.demand], _NOTHING**2)
            row.shares = [
                max(share * (1 - min(factor * cost - length, 3 * length)), _NOTHING)
                for share, cost in zip(row.shares, own, strict=True)
            ]
        self._normalise()

    def _normalise(self) -> None:
        totals = [0.0] * len(self._demands)
        for row in self._rows:
            totals[row.demand] += sum(row.shares)
        for row in self._rows:
            total = totals[row.demand]
            row.shares = [share / total for share in row.shares]
