"""Choosers of one spine for each connection: by hash, in turn, and by the load so far.

Equal-cost multipath (ECMP) hashes addresses and ports. Theorem: n connections that hash independently over s spines use
s (1 - (1 - 1/s)^n) of them on average. With n = s = 4 that is 2.73 spines, so a third of the fabric idles while some
uplink carries two connections or more. More connections (k-ECMP splits each flow into k) narrow the gap, but never
close it: the fullest of s uplinks exceeds its share n/s by about sqrt(2 (n/s) ln s). A hash is modelled as a uniform
choice among the spines that both leaves reach: routing takes failed cables out.

Round robin deals a leaf's connections to its spines in turn, the faster ones more often. Theorem: with all cables
healthy and of one rate, the uplinks of a leaf with n connections carry floor(n/s) or ceil(n/s) of them. The downlinks
have no such bound: connections of different leaves to one leaf may all take the same spine.

C4P's static plan (arXiv 2406.04594) spreads the connections of each port over all healthy spines, jobs together.
Theorem: if all destinations of a port are reached over the same h spines of one rate, then any two of those spines
carry numbers of its connections that differ by at most one. With cables of different rates, a spine's number follows
the slower of its two cables. For the fabric as a whole the plan is greedy: among the spines that a port has used least,
a connection takes the one whose busier cable is least loaded, over all jobs. Nothing bounds its maximum by the optimum;
`colouring` and `ethereal` have such a bound. The paper's third rule, that a left port sends to left ports only, is
applied before a spine is chosen: see `planner`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from random import Random
from typing import Any

from thinwire.traffic.fabric import LeafFlow, Parts, SpinePaths


def hashed_paths(flows: Sequence[LeafFlow], paths: SpinePaths, *, random: Random) -> list[Parts]:
    """Return a random healthy spine for each connection (ECMP)."""
    return [[(random.choice(paths.healthy(flow.source_leaf, flow.destination_leaf)), Fraction(1))] for flow in flows]


def dealt_paths(flows: Sequence[LeafFlow], paths: SpinePaths) -> list[Parts]:
    """Return the next spine in turn for each connection (round robin).

    That is the one with the fewest connections of its leaf over the rate of the path, then the next number. One that
    does not reach the destination is passed over.
    """
    following: Counter[int] = Counter()
    dealt: Counter[tuple[int, int]] = Counter()

    def turn(flow: LeafFlow, spine: int) -> tuple[Fraction, int]:
        leaf = flow.source_leaf
        filled = (dealt[leaf, spine] + 1) / min(paths.rate(leaf, spine), paths.rate(flow.destination_leaf, spine))
        return filled, (spine - following[leaf]) % paths.fabric.spines

    def take(flow: LeafFlow, spine: int) -> None:
        following[flow.source_leaf] = spine + 1
        dealt[flow.source_leaf, spine] += 1

    return _one_by_one(flows, paths, turn, take)


def spread_paths(flows: Sequence[LeafFlow], paths: SpinePaths) -> list[Parts]:
    """Return the spine of each connection by C4P's plan, chosen one after another in the order of the flows."""
    used: Counter[tuple[tuple[str, int], int]] = Counter()
    up: defaultdict[tuple[int, int], float] = defaultdict(float)
    down: defaultdict[tuple[int, int], float] = defaultdict(float)

    def cost(flow: LeafFlow, spine: int) -> tuple[float, ...]:
        # seconds that each cable is busy with this connection; plain numbers, since only their order matters
        a, b, size = flow.source_leaf, flow.destination_leaf, float(flow.size)
        rates = float(paths.rate(a, spine)), float(paths.rate(b, spine))
        busy = (up[a, spine] + size) / rates[0], (down[b, spine] + size) / rates[1]
        return (used[flow.source_port, spine] + 1) / min(rates), max(busy), sum(busy), spine

    def take(flow: LeafFlow, spine: int) -> None:
        used[flow.source_port, spine] += 1
        up[flow.source_leaf, spine] += float(flow.size)
        down[flow.destination_leaf, spine] += float(flow.size)

    return _one_by_one(flows, paths, cost, take)


def _one_by_one(
    flows: Sequence[LeafFlow], paths: SpinePaths, cost: Callable[[LeafFlow, int], Any],
    take: Callable[[LeafFlow, int], None],
) -> list[Parts]:  # fmt: skip
    """Give each connection the healthy spine of least cost at its turn, and note it with `take`."""
    chosen: list[Parts] = []
    for flow in flows:
        spine = min(paths.healthy(flow.source_leaf, flow.destination_leaf), key=partial(cost, flow))
        take(flow, spine)
        chosen.append([(spine, Fraction(1))])
    return chosen
