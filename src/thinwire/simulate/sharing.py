"""How flows share links: the max-min fair rates of flows that may each load several links, with different weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple


class FlowDemand(NamedTuple):
    """What one flow asks of the links.

    Attributes:
        loads: Pairs of a link and the bits that it carries for one bit of the flow, above 0; every link once.
        limit: The flow's own highest rate, in bits of the flow a second.
        share: How fast the flow's use of its most loaded link grows beside that of others.
    """

    loads: Sequence[tuple[int, float]]
    limit: float = inf
    share: float = 1.0


def max_min_rates(demands: Sequence[FlowDemand], capacities: Mapping[int, float]) -> list[float]:
    """Return the rate of every flow, in its own bits a second, by progressive filling.

    The use of its most loaded link grows alike for all flows (`share` times as fast for some) until a link is full or a
    flow is at its limit; those flows stay there, and the others go on. So no flow can get more without taking from one
    that has no more than it.

    Args:
        demands: One a flow.
        capacities: Bits a second of every link that is named, at least 0, infinite where it never fills.

    Example:
        >>> max_min_rates([FlowDemand(loads=[(0, 1.0)]), FlowDemand(loads=[(0, 1.0), (1, 1.0)])], {0: 10.0, 1: 2.0})
        [8.0, 2.0]
        >>> max_min_rates([FlowDemand(loads=[(0, 3.0)])], {0: 12.0})  # one bit of this flow is three on the link
        [4.0]
    """
    if len(demands) == 1:
        only = demands[0]
        return [min(only.limit, min((capacities[link] / weight for link, weight in only.loads), default=inf))]
    # bits of a flow a second at level 1
    slopes = [demand.share / max((weight for _, weight in demand.loads), default=1.0) for demand in demands]
    filling = _Filling(demands, slopes, capacities)
    while len(filling.levels) < len(demands):
        filling.stop_the_next()
    return [filling.levels[number] * slope for number, slope in enumerate(slopes)]


class _Filling:
    """One progressive filling: which flows have stopped, each at its level, and at which level each link is full."""

    def __init__(self, demands: Sequence[FlowDemand], slopes: Sequence[float], capacities: Mapping[int, float]) -> None:
        self.demands, self.slopes, self.capacities = demands, slopes, capacities
        self.levels: dict[int, float] = {}
        self.limits = {
            number: demand.limit / slopes[number] for number, demand in enumerate(demands) if demand.limit < inf
        }
        self.users: dict[int, list[tuple[int, float]]] = {}
        for number, demand in enumerate(demands):
            for link, weight in demand.loads:
                self.users.setdefault(link, []).append((number, weight * slopes[number]))
        self.full_at = {
            link: capacities[link] / sum(weight for _, weight in flows) for link, flows in self.users.items()
        }

    def stop_the_next(self) -> None:
        """Raise the level to where the next links are full or the next flows at their limits; those flows stop."""
        level = min(min(self.full_at.values(), default=inf), min(self.limits.values(), default=inf))
        full = [link for link, at in self.full_at.items() if at <= level]
        stopped = {number for link in full for number, _ in self.users[link] if number not in self.levels}
        stopped.update(number for number, at in self.limits.items() if at <= level)
        if level == inf:
            stopped.update(number for number in range(len(self.demands)) if number not in self.levels)
        for number in stopped:
            self.levels[number] = level
            self.limits.pop(number, None)
        for link in full:
            del self.full_at[link]
        for link in {link for number in stopped for link, _ in self.demands[number].loads} & self.full_at.keys():
            self._fill_again(link, level)

    def _fill_again(self, link: int, level: float) -> None:
        growth = taken = 0.0
        for number, weight in self.users[link]:
            if number in self.levels:
                taken += weight * self.levels[number]
            else:
                growth += weight
        if growth:
            self.full_at[link] = max(level, (self.capacities[link] - taken) / growth)
        else:
            del self.full_at[link]
