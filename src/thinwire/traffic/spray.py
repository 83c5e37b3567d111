"""Ideal packet spraying: every flow goes over all spines at once, evenly.

Theorem: with cables of one rate, every uplink of leaf i carries (sum_j n_ij)/s and every downlink of leaf j
(sum_i n_ij)/s. No choice of paths has a lower maximum than C* = max(row sums, column sums)/s, because the s uplinks
of a leaf carry all that it sends, and the s downlinks all that it receives.

With cables of different rates a spine's share follows the slower of its two cables. Spraying needs receivers that
take packets out of order; the plan serves as the yardstick.
"""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.traffic.fabric import LeafFlow, Parts, SpinePaths


def sprayed_paths(flows: Sequence[LeafFlow], paths: SpinePaths) -> list[Parts]:
    """Return all healthy spines for each flow, with their shares."""
    known: dict[tuple[int, int], Parts] = {}
    for flow in flows:
        ends = flow.source_leaf, flow.destination_leaf
        if ends not in known:
            rates = {
                spine: min(paths.rate(ends[0], spine), paths.rate(ends[1], spine)) for spine in paths.healthy(*ends)
            }
            known[ends] = [(spine, rate / sum(rates.values())) for spine, rate in rates.items()]
    return [known[flow.source_leaf, flow.destination_leaf] for flow in flows]
