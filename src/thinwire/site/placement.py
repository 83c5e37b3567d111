"""Placement of a grid's blocks on a site's devices by simulated annealing, after Pipette (arXiv 2405.18093).

Pipette's moves are used: 2-opt (turn a stretch round), swap, insert, and insert a stretch, also reversed. A block is a
tensor-parallel group, which never leaves its node.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from thinwire.site.cost_model import StepCost
from thinwire.site.device_grid import SitePlacement

# Moves of one annealing; the temperature falls from the first to the second share of the starting cost. Orders of few
# items are annealed several times: there a local minimum is likely, and a move is cheap.
_MOVES, _HOT, _COLD = 2000, 0.3, 1e-4
# The cost of an order of blocks takes time in proportion to their number: of many, fewer moves are tried.
_MOST_VISITS = 4_000_000
_FEW_ITEMS, _RESTARTS = 12, 4
_SEED = 20260101


def anneal(
    start: Sequence[int], cost: Callable[[tuple[int, ...]], float], *, moves: int = _MOVES, seed: int = _SEED
) -> tuple[int, ...]:
    """Return a cheap order of some items, found by simulated annealing.

    Args:
        start: The order to begin with; it is returned if no other one is cheaper.
        cost: Of an order, above 0.
        moves: How many orders are tried.
        seed: Of the moves.

    Example:
        >>> anneal([3, 1, 2, 0], lambda order: 1 + sum(abs(a - b) for a, b in zip(order, range(4))))
        (0, 1, 2, 3)
    """
    draw = random.Random(seed)
    found = [_anneal_once(tuple(start), cost, moves=moves, draw=draw)
             for _ in range(_RESTARTS if len(start) <= _FEW_ITEMS else 1)]  # fmt: skip
    return min(found, key=lambda pair: pair[0])[1]


def _anneal_once(
    start: tuple[int, ...], cost: Callable[[tuple[int, ...]], float], *, moves: int, draw: random.Random
) -> tuple[float, tuple[int, ...]]:
    best = now = start
    best_cost = now_cost = cost(now)
    if len(now) < 2:
        return best_cost, now
    hot, cold = _HOT * best_cost, _COLD * best_cost
    for number in range(moves):
        temperature = hot * (cold / hot) ** (number / moves)
        tried = _moved(now, draw)
        tried_cost = cost(tried)
        if tried_cost <= now_cost or draw.random() < math.exp((now_cost - tried_cost) / temperature):
            now, now_cost = tried, tried_cost
        # rounding is no gain
        if now_cost < best_cost * (1 - 1e-9):
            best, best_cost = now, now_cost
    return best_cost, best


def place(step: StepCost, *, moves: int = _MOVES, seed: int = _SEED) -> StepCost:
    """Return the same layout on the placement that annealing finds cheapest, by Pipette's formula on the real links.

    Args:
        step: The layout and the placement to begin with.
        moves: How many placements are tried at most; fewer on thousands of blocks.
        seed: Of the moves.
    """
    known: dict[Hashable, float] = {}

    def cost(slots: tuple[int, ...]) -> float:
        placement = SitePlacement(site=step.placement.site, degrees=step.layout.degrees, slots=slots)
        # devices of one node are alike
        found = known.get(placement.nodes)
        if found is None:
            found = known[placement.nodes] = replace(step, placement=placement).pipette_s
        return found

    start = step.placement.slots
    slots = anneal(start, cost, moves=min(moves, _MOST_VISITS // len(start)), seed=seed)
    if slots == step.placement.slots:
        return step
    return replace(step, placement=replace(step.placement, slots=slots))


def _moved(order: tuple[int, ...], draw: random.Random) -> tuple[int, ...]:
    """Return a neighbour of an order by one random move."""
    one, other = sorted(draw.sample(range(len(order) + 1), 2))
    move = draw.randrange(4)
    if move == 0:
        return (*order[:one], *reversed(order[one:other]), *order[other:])
    items = list(order)
    if move == 1:
        first, second = draw.sample(range(len(order)), 2)
        items[first], items[second] = items[second], items[first]
        return tuple(items)
    if move == 2:
        item = items.pop(draw.randrange(len(items)))
        items.insert(draw.randrange(len(items) + 1), item)
        return tuple(items)
    stretch, rest = items[one:other], items[:one] + items[other:]
    if draw.random() < 0.5:
        stretch.reverse()
    at = draw.randrange(len(rest) + 1)
    return (*rest[:at], *stretch, *rest[at:])
