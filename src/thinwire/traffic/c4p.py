"""C4P's static plan (arXiv 2406.04594): the connections of each port spread over all healthy spines, jobs together.

Theorem: if all destinations of a port are reached over the same h spines of one rate, then any two of those spines
carry numbers of its connections that differ by at most one. With cables of different rates, a spine's number follows
the slower of its two cables. For the fabric as a whole the plan is greedy: among the spines that a port has used least,
a connection takes the one whose busier cable is least loaded, over all jobs. Nothing bounds its maximum by the optimum;
`colouring` and `ethereal` have such a bound.

The paper's third rule, that a left port sends to left ports only, is applied before a spine is chosen: see `planner`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction

from thinwire.traffic.fabric import LeafFlow, Parts, SpinePaths


def spread_paths(flows: Sequence[LeafFlow], paths: SpinePaths) -> list[Parts]:
    """Return the spine of each connection, chosen one after another in the order of the flows."""
    used: defaultdict[tuple[str, int], Counter[int]] = defaultdict(Counter)
    up: defaultdict[tuple[int, int], float] = defaultdict(float)
    down: defaultdict[tuple[int, int], float] = defaultdict(float)
    chosen: list[Parts] = []
    for flow in flows:
        source, destination = flow.source_leaf, flow.destination_leaf
        of_port = used[flow.source_port]

        def cost(
            spine: int, *, a: int = source, b: int = destination, own: Counter[int] = of_port,
            size: float = float(flow.size),
        ) -> tuple[float, ...]:  # fmt: skip
            # seconds that each cable is busy with this connection; plain numbers, since only their order matters
            rates = float(paths.rate(a, spine)), float(paths.rate(b, spine))
            busy = (up[a, spine] + size) / rates[0], (down[spine, b] + size) / rates[1]
            return (own[spine] + 1) / min(rates), max(busy), sum(busy), spine

        spine = min(paths.healthy(source, destination), key=cost)
        of_port[spine] += 1
        up[source, spine] += float(flow.size)
        down[spine, destination] += float(flow.size)
        chosen.append([(spine, Fraction(1))])
    return chosen
