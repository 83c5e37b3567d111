"""Ethereal's minimal splitting (arXiv 2407.00550): single paths that equal ideal packet spraying.

Theorem: let n flows of one size go from leaf i to leaf j over s spines, and r = n mod s, g = gcd(r, s). Put floor(n/s)
whole flows on each spine, and split each of the r others into s/g pieces of size g/s. Each spine then gets r/g pieces,
so it carries exactly n/s flows: as with spraying, every uplink of leaf i carries (sum_j n_ij)/s and every downlink of
leaf j (sum_i n_ij)/s, and the maximum is C* = max(row sums, column sums)/s. There are n - r + r s/g pieces.

Flows of different sizes are grouped by size, and the theorem holds for each group. Where a cable has failed, s is the
number of spines that both leaves reach; the sums then equal those of spraying over these spines. Where the shares of
spraying are unequal (see `spray`), those of the spines are the same here, and at most s - 1 flows more are split.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from math import floor, gcd

from thinwire.traffic.fabric import LeafFlow, Parts, SpinePaths
from thinwire.traffic.spray import spine_shares


def split_paths(flows: Sequence[LeafFlow], paths: SpinePaths) -> list[Parts]:
    """Return the spines of each flow with the share of its bytes that each carries."""
    groups: defaultdict[tuple[int, int, Fraction], list[int]] = defaultdict(list)
    for number, flow in enumerate(flows):
        groups[flow.source_leaf, flow.destination_leaf, flow.size].append(number)
    chosen: list[Parts] = [[] for _ in flows]
    shares = spine_shares(flows, paths)
    for (source, destination, _), numbers in groups.items():
        spines, rates = zip(*shares[source, destination], strict=True)
        fill = _equal_parts if len(set(rates)) == 1 else _weighted_parts
        for number, parts in zip(numbers, fill(len(numbers), rates), strict=True):
            chosen[number] = [(spines[place], share) for place, share in parts]
    return chosen


def _equal_parts(num_flows: int, rates: Sequence[Fraction]) -> list[Parts]:
    count = len(rates)
    rest = num_flows % count
    parts: list[Parts] = [[(number % count, Fraction(1))] for number in range(num_flows - rest)]
    divisor = gcd(rest, count)
    per_flow = count // divisor if rest else 0
    for number in range(rest):
        # consecutive spines: after `divisor` flows every spine has had one piece more
        places = ((number * per_flow + piece) % count for piece in range(per_flow))
        parts.append([(place, Fraction(divisor, count)) for place in places])
    return parts


def _weighted_parts(num_flows: int, rates: Sequence[Fraction]) -> list[Parts]:
    room = [num_flows * rate / sum(rates) for rate in rates]
    parts: list[Parts] = [[(place, Fraction(1))] for place, share in enumerate(room) for _ in range(floor(share))]
    room = [share - floor(share) for share in room]
    place = 0
    while len(parts) < num_flows:
        flow: Parts = []
        left = Fraction(1)
        while left:
            if take := min(left, room[place]):
                flow.append((place, take))
                room[place] -= take
                left -= take
            if not room[place]:
                place += 1
        parts.append(flow)
    return parts
