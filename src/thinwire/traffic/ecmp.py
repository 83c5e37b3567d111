"""Equal-cost multipath: a hash of addresses and ports picks each connection's spine (ECMP).

Theorem: n connections that hash independently over s spines use s (1 - (1 - 1/s)^n) of them on average. With n = s = 4
that is 2.73 spines, so a third of the fabric idles while some uplink carries two connections or more. More connections
(k-ECMP splits each flow into k) narrow the gap, but never close it: the fullest of s uplinks exceeds its share n/s by
about sqrt(2 (n/s) ln s).

A hash is modelled as a uniform choice among the spines that both leaves reach: routing takes failed cables out.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from random import Random

from thinwire.traffic.fabric import LeafFlow, Parts, SpinePaths


def hashed_paths(flows: Sequence[LeafFlow], paths: SpinePaths, *, random: Random) -> list[Parts]:
    """Return a random healthy spine for each connection."""
    return [[(random.choice(paths.healthy(flow.source_leaf, flow.destination_leaf)), Fraction(1))] for flow in flows]
