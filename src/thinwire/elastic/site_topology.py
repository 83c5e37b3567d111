"""Sites: replicas that reach each other much faster than all others.

Each replica measures how fast its answers reach the others, and tells the coordinator. That finds the sites in all
rates and tells everyone. A part from elsewhere is then fetched over the thin wire once a site, by one replica of it,
the relay; the others get it from there (`asking`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from itertools import combinations, pairwise

# Inside a site each rate is at least so many times as large as any between it and others.
FASTER = 4.0
# A smaller answer tells of the latency, not of the rate.
LEAST_BYTES = 1 << 14
_SEEN = 8
# A wire that has become slow is seen after so many answers.
LATEST = 3
_LEAST_S = 1e-4
_MOST_RATE = 1 << 53

Sites = tuple[tuple[int, ...], ...]
_NO_WAYS: Mapping[tuple[int, int], float] = {}


class LinkRates:
    """How fast this replica's answers reached the others, in bytes a second.

    The highest of the latest few counts: others may have shared the wire, but nobody is faster than it. One thread may
    observe while another one asks: both work on what is there at one moment.

    Example:
        >>> rates = LinkRates()
        >>> rates.observe(3, num_bytes=100_000, seconds=0.5)
        >>> rates.observe(3, num_bytes=100_000, seconds=0.25)
        >>> rates.observe(3, num_bytes=10, seconds=0.25)  # too small to tell
        >>> rates.report()
        {'3': 400000}
    """

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}

    def observe(self, peer: int, *, num_bytes: int, seconds: float) -> None:
        """Take in an answer that reached a replica."""
        if num_bytes >= LEAST_BYTES:
            self._seen.setdefault(peer, deque(maxlen=_SEEN)).append(num_bytes / max(_LEAST_S, seconds))

    def forget(self, peer: int) -> None:
        """Forget what was seen of the wire to a replica."""
        self._seen.pop(peer, None)

    def retain(self, peers: Collection[int]) -> None:
        """Forget all but these replicas."""
        for peer in set(self._seen.copy()) - set(peers):
            self._seen.pop(peer, None)

    def report(self, *, latest: int = _SEEN) -> dict[str, int]:
        """Return the rates as the coordinator is told them: of so many of the latest answers, the highest.

        Args:
            latest: Where there are fewer, nothing is told, but for the default.
        """
        kept = {peer: list(rates.copy()) for peer, rates in sorted(self._seen.copy().items())}
        least = 1 if latest == _SEEN else latest
        seen = {peer: max(rates[-latest:]) for peer, rates in kept.items() if len(rates) >= least}
        return {str(peer): min(_MOST_RATE, round(rate)) for peer, rate in seen.items()}


def find_sites(rates: Mapping[int, Mapping[int, float]], active: Collection[int]) -> Sites:
    """Return the sites among replicas: all in ascending order, single ones left out; none where none stands out.

    A pair's rate is the lower one of its two directions. The replicas are cut where the pairs' rates, from high to low,
    fall by the greatest factor, if that is at least `FASTER`, and if all pairs inside the groups that come out are
    faster than all others by as much.

    Args:
        rates: By replica and then by other replica, bytes a second from the one to the other.
        active: The replicas that take part.

    Example:
        >>> fast, thin = 1e8, 2e6
        >>> find_sites({0: {1: fast, 2: thin}, 2: {3: fast, 1: thin}}, (0, 1, 2, 3))
        ((0, 1), (2, 3))
        >>> find_sites({0: {1: fast, 2: fast / 2}, 1: {2: fast / 2}}, (0, 1, 2))
        ()
    """
    pairs = {}
    for one, other in combinations(sorted(active), 2):
        found = [rate for rate in (rates.get(one, {}).get(other), rates.get(other, {}).get(one)) if rate]
        if found:
            pairs[one, other] = min(found)
    ordered = sorted(pairs.values(), reverse=True)
    falls = [(high / low, high) for high, low in pairwise(ordered) if high >= FASTER * low]
    for _, least in sorted(falls, reverse=True):
        sites = _joined(pairs, least=least)
        inside = {pair for site in sites for pair in combinations(site, 2)}
        slowest = min((rate for pair, rate in pairs.items() if pair in inside), default=0.0)
        fastest = max((rate for pair, rate in pairs.items() if pair not in inside), default=math.inf)
        if slowest >= FASTER * fastest:
            return sites
    return ()


def _joined(pairs: Mapping[tuple[int, int], float], *, least: float) -> Sites:
    """Return the groups that pairs of at least a rate join."""
    groups: dict[int, set[int]] = {}
    for (one, other), rate in pairs.items():
        if rate >= least:
            joined = groups.get(one, {one}) | groups.get(other, {other})
            groups.update(dict.fromkeys(joined, joined))
    return tuple(sorted({tuple(sorted(group)) for group in groups.values()}))


class SiteTable:
    """The rates that replicas told, and the sites that are found in them.

    Attributes:
        sites: As they were found last.
        num_changes: How often they were others than before.
    """

    def __init__(self) -> None:
        self.sites: Sites = ()
        self.num_changes = 0
        self._rates: dict[int, Mapping[int, float]] = {}

    def add_rates(self, replica: int, rates: Mapping[int, float]) -> None:
        """Take in how fast a replica's answers reach the others."""
        self._rates[replica] = rates

    def forget(self, replica: int) -> None:
        """Let a replica go."""
        self._rates.pop(replica, None)

    def update(self, active: Collection[int], *, ways: Mapping[tuple[int, int], float] = _NO_WAYS) -> bool:
        """Find the sites anew; tell whether they are others than before.

        Args:
            active: The replicas that take part.
            ways: The rates of detours, which count in place of their wires' own: one bad wire breaks no site up.
        """
        rates = self._rates
        if ways:
            rates = {one: {**found, **{to: max(rate, found.get(to, 0.0)) for (source, to), rate in ways.items()
                                       if source == one}} for one, found in rates.items()}  # fmt: skip
        found, before = find_sites(rates, active), self.sites
        self.sites = found
        self.num_changes += found != before
        return found != before


def site_of(replica: int, sites: Sites) -> tuple[int, ...]:
    """Return the replicas of one's site, itself among them."""
    return next((site for site in sites if replica in site), (replica,))
