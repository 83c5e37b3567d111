"""Delay matrix: excess delay of each link, and the one place that explains the pattern best.

One cell is a link, a row a sender, a column a receiver, both of one host a host (C4D, arXiv 2406.04594). Every place
predicts a common excess for its cells and none for the others; the place that leaves the least unexplained is blamed.
Places that predict the same observed cells cannot be distinguished, and are all named.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from thinwire.monitor.detect.change_points import median
from thinwire.monitor.findings import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayMatrixConfig:
    """Constants of the placement by the delay matrix; logarithms of ratios unless a comment says otherwise."""

    heavy: float = math.log(4.0)  # a way this slow delays the acknowledgements of the other
    # of a way's excess; the way back shows at most this if it only waits for acknowledgements
    back_share: float = 0.75
    receiver_back_share: float = 0.85  # the same for a slow receiver: 0.78 at most in 19 faults (LOG 2026-11-23)
    sender_back_share: float = 0.4  # the same for a slow sender
    slow_in: float = math.log(2.0)  # excess from which a receiver is distinguished from its host
    min_link: float = 1.4  # ratio of a single link; less may be an access that is shared more than before
    # ratio of several links; all links of an endpoint showed 1.20 after other faults (LOG 2026-11-24)
    min_endpoint: float = 1.25
    min_peers: int = 4  # links that are compared with each other


DELAYS = DelayMatrixConfig()

Cell = tuple[int, int]
_Group = TypeVar("_Group", bound=tuple[int, ...])
WIRE_REMEDY = (
    "look at the interface, cable and other traffic there; until then send less over it: larger sync_interval, a "
    "smaller codec, other partners"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Place that explains a matrix best."""

    places: tuple[Place, ...]  # the place, or all that predict the same observed cells
    cells: frozenset[Cell]  # those cells
    excess: float  # the common excess of those cells, as the matrix gives it
    fit: float  # part of the matrix's excess that is explained, in (0, 1]
    lead: float  # excess that it explains beyond the next place, as a share of its own, in [0, 1]

    @property
    def is_wire_alone(self) -> bool:
        """Whether it is one wire, one way or both."""
        return len({frozenset(cell) for cell in self.cells}) == 1

    @property
    def sure(self) -> float:
        """Confidence in the place, in [0.5, 1], from its fit and its lead."""
        return 0.5 + 0.3 * self.fit + 0.2 * min(1.0, 2 * self.lead)

    @property
    def confidence(self) -> float:
        """Confidence of a finding that names the place, or all of them."""
        return min(0.97, self.sure) if len(self.places) == 1 else 0.5

    def following(self, excess: Mapping[Cell, float]) -> frozenset[Cell]:
        """Return the cells of the way back whose acknowledgements wait on the slow way there."""
        back = {(destination, source) for source, destination in self.cells} - self.cells
        return frozenset(
            cell for cell in back if 0.0 < excess.get(cell, 0.0) <= DELAYS.receiver_back_share * self.excess
        )


class DelayMatrix:
    """Excess of each observed link.

    Args:
        excess: Log ratio of each cell (source, destination); 0 is usual, less counts as 0.
        host_of: The host of each rank.

    Example:
        >>> hosts = {0: "a", 1: "b", 2: "c"}
        >>> cells = {(i, j): 1.0 if i == 1 else 0.0 for i in hosts for j in hosts if i != j}
        >>> print(DelayMatrix(cells, hosts).explain().places[0])
        sender rank 1
    """

    def __init__(self, excess: Mapping[Cell, float], host_of: Mapping[int, str]) -> None:
        self._excess = {cell: max(0.0, value) for cell, value in excess.items()}
        self._host_of = host_of
        self._ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank in sorted(host_of):
            self._ranks_of[host_of[rank]].append(rank)
        self._rows: dict[int, set[Cell]] = defaultdict(set)
        self._columns: dict[int, set[Cell]] = defaultdict(set)
        self._between: dict[tuple[str, str], set[Cell]] = defaultdict(set)
        for cell in self._excess:
            self._rows[cell[0]].add(cell)
            self._columns[cell[1]].add(cell)
            self._between[host_of[cell[0]], host_of[cell[1]]].add(cell)

    def explain(self) -> Explanation | None:
        """Return the place that explains most; None without excess."""
        top = max(self._excess.values(), default=0.0)
        if top <= 0.0:
            return None
        total = sum(self._excess.values())
        by_cells: dict[frozenset[Cell], list[Place]] = defaultdict(list)
        hot = [cell for cell, value in self._excess.items() if value >= 0.4 * top]
        for place, cells in self._candidates(hot):
            if cells and place not in by_cells[cells]:
                by_cells[cells].append(place)
        gains = sorted(((self._gain(cells), cells) for cells in by_cells), key=lambda pair: pair[0], reverse=True)
        best, cells = gains[0]
        if best <= 0.0:
            return None
        cells = self._worse_way(by_cells, cells)
        following = max(0.0, gains[1][0]) if len(gains) > 1 else 0.0
        return Explanation(
            places=tuple(by_cells[cells]), cells=cells, excess=median([self._excess[cell] for cell in cells]),
            fit=best / total, lead=(best - following) / best,
        )  # fmt: skip

    def _worse_way(self, by_cells: Mapping[frozenset[Cell], list[Place]], cells: frozenset[Cell]) -> frozenset[Cell]:
        """Return the slow way of a place that has both ways, if only that one can be at fault."""
        # acknowledgements wait on a very slow way, so that the other way becomes slow too, and less so
        back = frozenset((destination, source) for source, destination in cells)
        values = {cell: self._excess[cell] for cell in cells}
        if back != cells:
            return cells
        for way, places in by_cells.items():
            other = cells - way
            if way < cells and other == frozenset((destination, source) for source, destination in way):
                slow, less = [values[cell] for cell in way], [values[cell] for cell in other]
                if _is_way_alone({place.kind for place in places}, slow, less):
                    return way
        return cells

    def _gain(self, cells: frozenset[Cell]) -> float:
        """Return the excess that these cells explain if all have their median."""
        values = [self._excess[cell] for cell in cells]
        common = median(values)
        return sum(value - abs(value - common) for value in values)

    def _candidates(self, hot: Iterable[Cell]) -> Iterator[tuple[Place, frozenset[Cell]]]:
        ranks: set[int] = set()
        links: set[tuple[str, str]] = set()
        for source, destination in hot:
            cell, back = (source, destination), (destination, source)
            yield Place(kind="link", ranks=cell), frozenset([cell])
            if back in self._excess:
                yield Place(kind="link both ways", ranks=(min(cell), max(cell))), frozenset([cell, back])
            between = (self._host_of[source], self._host_of[destination])
            if between not in links and between[0] != between[1]:
                links.add(between)
                yield from self._links_of_hosts(*between)
            ranks |= {source, destination}
        for rank in sorted(ranks):
            yield from self._places_of_rank(rank)
        for host in sorted({self._host_of[rank] for rank in ranks}):
            yield from self._places_of_host(host)

    def _links_of_hosts(self, one: str, other: str) -> Iterator[tuple[Place, frozenset[Cell]]]:
        if len(self._ranks_of[one]) == len(self._ranks_of[other]) == 1:
            return  # the link of the two ranks is that of the hosts
        there, back = self._between[one, other], self._between.get((other, one), set())
        yield Place(kind="host link", hosts=(one, other)), frozenset(there)
        if back:
            first, second = sorted((one, other))
            yield Place(kind="host link both ways", hosts=(first, second)), frozenset(there | back)

    def _places_of_rank(self, rank: int) -> Iterator[tuple[Place, frozenset[Cell]]]:
        rows, columns = frozenset(self._rows[rank]), frozenset(self._columns[rank])
        yield Place(kind="sender", ranks=(rank,)), rows
        yield Place(kind="receiver", ranks=(rank,)), columns
        host = self._host_of[rank]
        if len(self._ranks_of[host]) > 1:  # else the endpoint is the host
            yield Place(kind="endpoint", ranks=(rank,)), rows | columns
            away = frozenset(cell for cell in rows | columns if self._host_of[cell[0]] != self._host_of[cell[1]])
            yield Place(kind="endpoint", ranks=(rank,)), away
            yield Place(kind="sender", ranks=(rank,)), rows & away
            yield Place(kind="receiver", ranks=(rank,)), columns & away

    def _places_of_host(self, host: str) -> Iterator[tuple[Place, frozenset[Cell]]]:
        ranks = self._ranks_of[host]
        rows: set[Cell] = set().union(*(self._rows[rank] for rank in ranks))
        columns: set[Cell] = set().union(*(self._columns[rank] for rank in ranks))
        within = self._between.get((host, host), set())
        out, into = rows - within, columns - within
        yield Place(kind="host", hosts=(host,)), frozenset(out | into)
        if len(ranks) > 1:
            yield Place(kind="host sender", hosts=(host,)), frozenset(out)
            yield Place(kind="host receiver", hosts=(host,)), frozenset(into)


def slower_than_peers(
    groups: Mapping[_Group, Mapping[Cell, float]], host_of: Mapping[int, str], *, ratio: float
) -> Iterator[tuple[_Group, Explanation, float]]:
    """Yield the place of links that were slow from the start, and the median of all, for each group of like links."""
    for group, cells in sorted(groups.items()):
        middle_s = median(list(cells.values()))
        ratios = {cell: math.log(max(time_s, 1e-6) / max(middle_s, 1e-6)) for cell, time_s in cells.items()}
        bare = {cell: one if one >= math.log(ratio) / 2 else 0.0 for cell, one in ratios.items()}
        explained = DelayMatrix(bare, host_of).explain() if len(cells) >= DELAYS.min_peers else None
        if explained is not None and explained.excess >= math.log(ratio):
            yield group, explained, middle_s


def probe_for(places: Iterable[Place]) -> str:
    """Return the measurement that would distinguish places; empty for one place."""
    found = list(places)
    if len(found) < 2:
        return ""
    links = [place for place in found if place.kind in ("link", "link both ways", "host link", "host link both ways")]
    ends = [place for place in found if place not in links]
    if links and ends:
        named = links[0].ranks or links[0].hosts
        source, destination = named[0], named[-1]
        return (
            f"send the same bytes from {source} to another peer, and to {destination} from another one: "
            "slow from the first only, the sender; slow to the second only, the receiver; neither, the link"
        )
    return "let each of these exchange the same bytes with a peer outside of them, one at a time"


def _is_way_alone(kinds: set[str], slow: list[float], less: list[float]) -> bool:
    """Return whether one way alone may be at fault, from the excess of both."""
    ratio = median(less) / median(slow) if median(slow) > 0.0 else math.inf
    if kinds & {"receiver", "host receiver"}:
        return ratio <= DELAYS.receiver_back_share and median(slow) >= DELAYS.slow_in
    is_clear = max(slow) >= DELAYS.heavy and min(slow) > max(less)
    return is_clear and ratio <= (DELAYS.sender_back_share if kinds & {"sender", "host sender"} else DELAYS.back_share)
