"""Ideal packet spraying: every flow goes over all spines at once, evenly.

Theorem: with cables of one rate, every uplink of leaf i carries (sum_j n_ij)/s and every downlink of leaf j
(sum_i n_ij)/s. No choice of paths has a lower maximum than C* = max(row sums, column sums)/s, because the s uplinks
of a leaf carry all that it sends, and the s downlinks all that it receives.

With cables that have failed or differ in rate, a spine's share follows the slower of its two cables; where that is not
near the least maximum, shares are those of `fractional`, within a few percent of it. Spraying needs receivers that take
packets out of order; the plan serves as the yardstick.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction

from thinwire.traffic.fabric import LeafFlow, Parts, SpinePaths
from thinwire.traffic.fractional import Demand, split_demands


def sprayed_paths(flows: Sequence[LeafFlow], paths: SpinePaths) -> list[Parts]:
    """Return all healthy spines for each flow, with their shares."""
    known = spine_shares(flows, paths)
    return [known[flow.source_leaf, flow.destination_leaf] for flow in flows]


def spine_shares(flows: Sequence[LeafFlow], paths: SpinePaths) -> dict[tuple[int, int], Parts]:
    """Return the spines between each pair of leaves with the share of its bytes that each carries."""
    sizes: defaultdict[tuple[int, int], Fraction] = defaultdict(Fraction)
    for flow in flows:
        sizes[flow.source_leaf, flow.destination_leaf] += flow.size
    found: dict[tuple[int, int], Parts] = {}
    for source, destination in sizes:
        spines = paths.healthy(source, destination)
        rates = [min(paths.rate(source, spine), paths.rate(destination, spine)) for spine in spines]
        total = sum(rates)
        found[source, destination] = [(s, rate / total) for s, rate in zip(spines, rates, strict=True)]
    if not sizes or paths.are_alike:
        return found
    split = split_demands([Demand(size, (ends,)) for ends, size in sizes.items()], paths)
    return found if split.is_proportional else {ends: parts[0] for ends, parts in zip(sizes, split.shares, strict=True)}
