"""Round robin: each leaf deals its connections to its spines in turn.

Theorem: with all cables healthy, the uplinks of a leaf with n connections carry floor(n/s) or ceil(n/s) of them. The
downlinks have no such bound: connections of different leaves to one leaf may all take the same spine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from thinwire.traffic.fabric import LeafFlow, Parts, SpinePaths


def dealt_paths(flows: Sequence[LeafFlow], paths: SpinePaths) -> list[Parts]:
    """Return the next spine in turn for each connection; one that does not reach its destination is passed over."""
    following: Counter[int] = Counter()
    chosen: list[Parts] = []
    for flow in flows:
        healthy = paths.healthy(flow.source_leaf, flow.destination_leaf)
        ahead = following[flow.source_leaf]
        spine = min(healthy, key=lambda one: (one - ahead) % paths.fabric.spines)
        following[flow.source_leaf] = spine + 1
        chosen.append([(spine, Fraction(1))])
    return chosen
