"""Round robin: each leaf deals its connections to its spines in turn, the faster ones more often.

Theorem: with all cables healthy and of one rate, the uplinks of a leaf with n connections carry floor(n/s) or ceil(n/s)
of them. The downlinks have no such bound: connections of different leaves to one leaf may all take the same spine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from thinwire.traffic.fabric import LeafFlow, Parts, SpinePaths


def dealt_paths(flows: Sequence[LeafFlow], paths: SpinePaths) -> list[Parts]:
    """Return the next spine in turn for each connection.

    That is the one with the fewest connections of its leaf over the rate of the path, then the next number. One that
    does not reach the destination is passed over.
    """
    following: Counter[int] = Counter()
    dealt: Counter[tuple[int, int]] = Counter()
    chosen: list[Parts] = []
    for flow in flows:
        source, destination = flow.source_leaf, flow.destination_leaf
        healthy = paths.healthy(source, destination)

        def turn(spine: int, *, a: int = source, b: int = destination) -> tuple[Fraction, int]:
            filled = (dealt[a, spine] + 1) / min(paths.rate(a, spine), paths.rate(b, spine))
            return filled, (spine - following[a]) % paths.fabric.spines

        spine = min(healthy, key=turn)
        following[source] = spine + 1
        dealt[source, spine] += 1
        chosen.append([(spine, Fraction(1))])
    return chosen
