"""Edge colouring: whole flows at the best integral maximum, ceil(C*).

Theorem: let n_ij flows of one size go from leaf i to leaf j over s healthy spines of one rate. Without splitting a
flow, the maximum number of flows on a cable can be ceil(C*), C* = max(row sums, column sums)/s, and no plan of whole
flows has less. Proof: cut each leaf into vertices of at most s flows each, a leaf with d flows into ceil(d/s). The
flows are the edges of a bipartite multigraph of degree at most s, which has an edge colouring in s colours (Koenig).
A colour is a spine: every vertex has at most one flow of a colour, so a cable has at most ceil(d/s).

The colouring is built edge by edge with alternating paths. Where cables have failed or differ in rate, the theorem
does not apply: flows on failed paths move one by one to the path whose busier cable is least loaded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction

from thinwire.traffic.fabric import LeafFlow, Parts, SpinePaths

_ROUNDS = 4  # of moving flows one by one; later rounds find nothing


def coloured_paths(flows: Sequence[LeafFlow], paths: SpinePaths) -> list[Parts]:
    """Return the spine of each flow."""
    order = sorted(range(len(flows)), key=lambda number: -flows[number].size)  # one size after another
    ends = [(flows[number].source_leaf, flows[number].destination_leaf) for number in order]
    reached = {paths.healthy(*pair) for pair in ends}
    # every pair over the same spines: these are the palette, as on a healthy fabric
    palette = next(iter(reached)) if len(reached) == 1 else tuple(range(paths.fabric.spines))
    colours = edge_colours(ends, num_colours=len(palette)) if flows else []
    spine_of = {number: palette[colour] for number, colour in zip(order, colours, strict=True)}
    chosen = [spine_of[number] for number in range(len(flows))]
    rates = {paths.rate(leaf, spine) for pair in set(ends) for leaf in pair for spine in paths.healthy(*pair)}
    if len(reached) > 1 or len(rates) > 1:
        chosen = _repaired(chosen, flows, paths)
    return [[(spine, Fraction(1))] for spine in chosen]


def edge_colours(edges: Sequence[tuple[int, int]], *, num_colours: int) -> list[int]:
    """Return a colour for each edge of a bipartite multigraph, spread so that a vertex has few edges of one colour.

    Args:
        edges: Pairs of a left and a right vertex.
        num_colours: Number of colours, at least 1.

    Returns:
        For a vertex with d edges, each colour at most ceil(d/num_colours) times.

    Example:
        >>> edge_colours([(0, 0), (0, 1), (1, 0), (1, 1)], num_colours=2)
        [0, 1, 1, 0]
    """
    degree: Counter[tuple[int, int]] = Counter()
    vertices: list[tuple[int, int]] = []
    number_of: dict[tuple[int, int, int], int] = {}
    for edge in edges:
        cut = []
        for side, vertex in enumerate(edge):
            part = degree[side, vertex] // num_colours
            degree[side, vertex] += 1
            cut.append(number_of.setdefault((side, vertex, part), len(number_of)))
        vertices.append((cut[0], cut[1]))
    colour = [-1] * len(edges)
    edge_at = [[-1] * num_colours for _ in number_of]
    free = [(1 << num_colours) - 1] * len(number_of)  # bit c: no edge of colour c here
    for number, (left, right) in enumerate(vertices):
        # a colour that is free at both ends, or one of each end
        shared = free[left] & free[right] or free[left]
        chosen = (shared & -shared).bit_length() - 1
        if not free[right] >> chosen & 1:
            other = (free[right] & -free[right]).bit_length() - 1
            # the path from `right` never ends at `left`: it would arrive there over an edge of the free colour
            _swap(right, (chosen, other), vertices, colour, edge_at, free)
        colour[number] = chosen
        for vertex in (left, right):
            edge_at[vertex][chosen] = number
            free[vertex] &= ~(1 << chosen)
    return colour


def _swap(
    start: int, colours: tuple[int, int], edges: Sequence[tuple[int, int]], colour: list[int],
    edge_at: list[list[int]], free: list[int],
) -> None:  # fmt: skip
    """Exchange two colours along the path that leaves `start` over an edge of the first one."""
    path: list[int] = []
    vertex = start
    while (number := edge_at[vertex][colours[len(path) % 2]]) >= 0:
        path.append(number)
        a, b = edges[number]
        vertex = b if vertex == a else a
    for number in path:
        for end in edges[number]:
            if edge_at[end][colour[number]] == number:
                edge_at[end][colour[number]] = -1
    for number in path:
        colour[number] = sum(colours) - colour[number]
        for end in edges[number]:
            edge_at[end][colour[number]] = number
    # at the path's two ends one colour is free in place of the other; between them both stay taken
    for end in {start, vertex}:
        for one in colours:
            bit = 1 << one
            free[end] = free[end] & ~bit if edge_at[end][one] >= 0 else free[end] | bit


def _repaired(chosen: list[int], flows: Sequence[LeafFlow], paths: SpinePaths) -> list[int]:
    """Move flows off failed paths, then off full cables while that lowers the busier cable of a flow."""
    loads = _CableLoads(flows, paths)
    is_cut_off = [spine not in loads.spines_of(number) for number, spine in enumerate(chosen)]
    order = sorted(range(len(flows)), key=lambda number: not is_cut_off[number])
    for number in reversed(order):  # those on working paths first: the others go around them
        if is_cut_off[number]:
            chosen[number] = loads.best_spine(number, now=-1)
        loads.put(number, chosen[number])
    for _ in range(_ROUNDS):
        has_moved = False
        for number in order:
            loads.put(number, chosen[number], sign=-1)
            best = loads.best_spine(number, now=chosen[number])
            has_moved |= best != chosen[number]
            chosen[number] = best
            loads.put(number, best)
        if not has_moved:
            break
    return chosen


class _CableLoads:
    """Bytes on every cable and direction while flows move."""

    def __init__(self, flows: Sequence[LeafFlow], paths: SpinePaths) -> None:
        self._flows, self._paths = flows, paths
        self._bytes: defaultdict[tuple[str, int, int], float] = defaultdict(float)

    def spines_of(self, number: int) -> tuple[int, ...]:
        return self._paths.healthy(self._flows[number].source_leaf, self._flows[number].destination_leaf)

    def put(self, number: int, spine: int, *, sign: int = 1) -> None:
        flow = self._flows[number]
        self._bytes["up", flow.source_leaf, spine] += sign * float(flow.size)
        self._bytes["down", flow.destination_leaf, spine] += sign * float(flow.size)

    def best_spine(self, number: int, *, now: int) -> int:
        """Return the spine whose busier cable would be least busy with this flow; `now` wins where it is as good."""
        flow = self._flows[number]
        ends = ("up", flow.source_leaf), ("down", flow.destination_leaf)

        def cost(spine: int) -> tuple[float, bool, int]:
            busy = (
                (self._bytes[side, leaf, spine] + float(flow.size)) / float(self._paths.rate(leaf, spine))
                for side, leaf in ends
            )
            return max(busy), spine != now, spine

        return min(self.spines_of(number), key=cost)
