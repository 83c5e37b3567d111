"""Routing of a round's parts: sites, detours around slow links, and the replica to ask first for each part.

Each replica reports how fast its answers reach the others; the coordinator finds sites and detours in all rates and
reports them to everyone. A *site* is a group of replicas with fast links among them: one of them, the relay, fetches a
part from elsewhere once over the thin link, and the others get it from the relay. A *detour* avoids a link that became
much slower than the path over a third replica. Every replica derives the same choice from the same messages. Where
messages are late, a part arrives later and nothing hangs: parts are the same bytes from any source, and an origin is
asked itself when the replica asked in its place does not deliver in time.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from thinwire.errors import PayloadError

# Ratio of the slowest link inside a site to the fastest link out of it, at least.
FASTER = 4.0
# Bytes; smaller answers measure latency, not rate.
LEAST_BYTES = 1 << 14
_SEEN = 8
# Number of latest answers that reveal a link that became slow, and the rounds within which they must lie: a rate from
# an hour of other traffic says nothing beside one of now. Far links of a site of 8 are used once in 8 rounds each.
LATEST, RECENT_ROUNDS = 3, 32
_LEAST_S = 1e-4
_MOST_RATE = 1 << 53

Sites = tuple[tuple[int, ...], ...]
_NO_WAYS: Mapping[tuple[int, int], float] = {}
_NO_PROBES: Mapping[int, tuple[int, float]] = {}


class LinkRates:
    """Rates at which this replica's answers reached the others, bytes a second.

    The highest of the latest few counts: other traffic can slow a transfer, but nothing can exceed the link. One thread
    may observe while another one reads. `count_round` dates the answers.

    Example:
        >>> rates = LinkRates()
        >>> rates.observe(3, num_bytes=100_000, seconds=0.5)
        >>> rates.observe(3, num_bytes=100_000, seconds=0.25)
        >>> rates.observe(3, num_bytes=10, seconds=0.25)  # too small to measure a rate
        >>> rates.report()
        {'3': 400000}
    """

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[int, float]]] = {}  # the round of each answer, and its rate
        self._num_answers: Counter[int] = Counter()
        self._num_rounds = 0

    def count_round(self) -> None:
        """Note that another round has been decided."""
        self._num_rounds += 1

    def observe(self, peer: int, *, num_bytes: int, seconds: float) -> None:
        """Record an answer that reached a replica."""
        if num_bytes >= LEAST_BYTES:
            rate = min(_MOST_RATE, num_bytes / max(_LEAST_S, seconds))
            self._seen.setdefault(peer, deque(maxlen=_SEEN)).append((self._num_rounds, rate))
            self._num_answers[peer] += 1

    def forget(self, peer: int) -> None:
        """Forget the measurements of the link to a replica."""
        self._seen.pop(peer, None)

    def retain(self, peers: Collection[int]) -> None:
        """Forget all but these replicas."""
        for peer in set(self._seen.copy()) - set(peers):
            self._seen.pop(peer, None)

    def report(self, *, latest: int = _SEEN) -> dict[str, int]:
        """Return the rates for the coordinator: the highest of the latest answers.

        Args:
            latest: Number of answers; peers with fewer in the latest `RECENT_ROUNDS` are left out, except with the
                default.
        """
        kept = {peer: list(rates.copy()) for peer, rates in sorted(self._seen.copy().items())}
        if latest < _SEEN:
            oldest = self._num_rounds - RECENT_ROUNDS
            kept = {peer: [one for one in rates if one[0] > oldest] for peer, rates in kept.items()}
            kept = {peer: rates for peer, rates in kept.items() if len(rates) >= latest}
        return {str(peer): round(max(rate for _, rate in rates[-latest:])) for peer, rates in kept.items()}

    def newest(self, peers: Collection[int]) -> dict[str, tuple[int, int]]:
        """Return the number of answers over the links to some replicas, and the rate of the newest one."""
        kept = {peer: list(rates.copy()) for peer, rates in self._seen.copy().items() if peer in peers}
        return {str(peer): (self._num_answers[peer], round(rates[-1][1])) for peer, rates in sorted(kept.items())}


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
    """Return the groups connected by pairs of at least a rate."""
    groups: dict[int, set[int]] = {}
    for (one, other), rate in pairs.items():
        if rate >= least:
            joined = groups.get(one, {one}) | groups.get(other, {other})
            groups.update(dict.fromkeys(joined, joined))
    return tuple(sorted({tuple(sorted(group)) for group in groups.values()}))


class SiteTable:
    """Rates that replicas reported, and the sites found in them.

    Attributes:
        sites: Sites of the latest update.
        num_changes: Number of changes so far.
    """

    def __init__(self) -> None:
        self.sites: Sites = ()
        self.num_changes = 0
        self._rates: dict[int, Mapping[int, float]] = {}

    def add_rates(self, replica: int, rates: Mapping[int, float]) -> None:
        """Record the rates that a replica reported."""
        self._rates[replica] = rates

    def forget(self, replica: int) -> None:
        """Forget a replica."""
        self._rates.pop(replica, None)

    def update(self, active: Collection[int], *, ways: Mapping[tuple[int, int], float] = _NO_WAYS) -> bool:
        """Find the sites again; return whether they changed.

        Args:
            active: The replicas that take part.
            ways: Rates of detours, which replace those of their links, so that one bad link splits no site.
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
    """Return the replicas of a replica's site, itself among them."""
    return next((site for site in sites if replica in site), (replica,))


Pair = tuple[int, int]

# Ratio of path rate to link rate from which a detour begins. All links of a replica share its access: with three or
# four replicas, a link of a tenth of the access looks three to six times as slow as others.
BEGINS = 3.0
# Ratio below which it ends. A recovered link shares its ends with all others in a probe, and looks up to half as fast.
STAYS = 2.5
# Noise of busy hosts makes equal links look that unequal for a round or two. So a detour begins after this many
# consecutive rounds, or at once where the path is `CLEARLY` times as fast.
STEADY_ROUNDS, CLEARLY = 6, 8.0
# Rounds for which it is held at least, and rounds below `STAYS` after which it ends.
HELD_ROUNDS, LEFT_ROUNDS = 8, 2
# Between two probes nothing is known of an avoided link, and the path may become slower with all others. So a detour
# ends only by a probe, which is compared with the path's rate of the same time.
# The first answers over a link share the machines with imports and compilers. A detour that begins within so many
# rounds of them is no finding before a probe has found the link slow again.
_START_ROUNDS = 16
# A detour that ended within this many probes was useless: the next one on that link needs twice as many rounds, and
# never begins at once. The doubling ends at `STEADY_ROUNDS` times two to the power of the last number.
_FRUITLESS_TRIES, _MOST_DOUBLINGS = 3, 6
# Ratio that a path must keep when its load for other replicas is shared out.
_WORTH = 2.0
# Probes of slow links, as a share of the parts that their ends carry anyway.
_TRIED_SHARE = 1 / 32
_MOST_EVERY = 1 << 16
# Bounds on detours and on replicas per detour, so that the message sent each second stays small.
_MOST_DETOURS, _MOST_WAYS = 256, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Detour:
    """Replicas that one replica asks first for another one's parts."""

    source: int  # origin of the parts
    replica: int  # replica that asks
    over: tuple[int, ...]  # replicas that it asks, one per part, in ascending order
    every: int  # one round in this many also probes the link from `source`

    @classmethod
    def from_list(cls, values: Sequence[int]) -> Detour:
        """Decode and check a detour from the coordinator.

        Raises:
            PayloadError: It is malformed.

        Example:
            >>> Detour.from_list([0, 2, 16, 1])
            Detour(source=0, replica=2, over=(1,), every=16)
        """
        ends, every, over = values[:2], values[2:3], tuple(values[3:])
        if not 1 <= len(over) <= _MOST_WAYS or len({*ends, *over}) < 2 + len(over):
            raise PayloadError(
                f"a detour must be two replicas, a number of rounds and 1 to {_MOST_WAYS} other replicas, got "
                f"{str(list(values))[:80]}"
            )
        if not 1 <= every[0] <= _MOST_EVERY:
            raise PayloadError(f"a detour's wire is tried every 1 to {_MOST_EVERY} rounds, got {every[0]}")
        return cls(source=ends[0], replica=ends[1], over=over, every=every[0])

    def to_list(self) -> list[int]:
        """Encode it as a list of numbers."""
        return [self.source, self.replica, self.every, *self.over]


def find_detours(
    rates: Mapping[int, Mapping[int, float]], active: Collection[int], *, current: Collection[Pair] = ()
) -> dict[Pair, dict[int, float]]:
    """Return the detours to take: by source and destination, then by relay, bytes a second.

    A way is as fast as the slower one of its two wires, and taken where that is `BEGINS` times as fast as the wire. It
    must be twice as fast even if all that may go over its replica does so in one round: n - 1 answers leave a replica
    in a round, and each detour adds one. What is gone around already stays so from `STAYS` times on, and its load is in
    the rates. Of several ways those count that are at least half as fast as the best. The replica between fetches the
    part itself: no two detours make a chain.

    Args:
        rates: By replica and then by other replica, bytes a second from the one to the other.
        active: The replicas that take part.
        current: What is gone around now.

    Example:
        >>> rates = {0: {1: 5e6, 2: 4e5}, 1: {0: 5e6, 2: 4e6}, 2: {0: 5e6, 1: 5e6}}
        >>> find_detours(rates, (0, 1, 2))
        {(0, 2): {1: 4000000.0}}
    """
    there = set(active)
    known = {(one, to): rate for one in there for to, rate in rates.get(one, {}).items() if rate > 0 and to in there}
    found: dict[Pair, dict[int, float]] = {}
    between: set[Pair] = set()  # from whom a replica fetches for others, and so itself
    load: Counter[int] = Counter()
    for source, to in _slow(known, current):
        is_current = (source, to) in current
        if (source, to) in between:
            continue
        ways, rate = {}, known[source, to]
        for middle in sorted(there):
            if middle in (source, to) or (source, middle) in found:
                continue
            first, second = known.get((source, middle), 0.0), known.get((middle, to), 0.0)
            shared = second * (len(there) - 1) / (len(there) + load[middle])
            if min(first, second) >= _least(is_current) * rate and (is_current or shared >= _WORTH * rate):
                ways[middle] = min(first, second)
        best = sorted(ways, key=lambda middle: -ways[middle])[:_MOST_WAYS]
        kept = {middle: ways[middle] for middle in sorted(best) if 2 * ways[middle] >= ways[best[0]]}
        if kept:
            found[source, to] = kept
            between |= {(source, middle) for middle in kept}
            load.update(() if is_current else [*kept])
    return found


def _least(is_current: bool) -> float:
    return STAYS if is_current else BEGINS


def _slow(known: Mapping[Pair, float], current: Collection[Pair]) -> list[Pair]:
    """Return the links that may be avoided: current detours first, then from the slowest on."""
    best_from: dict[int, float] = {}
    best_to: dict[int, float] = {}
    for (one, to), rate in known.items():
        best_from[one] = max(rate, best_from.get(one, 0.0))
        best_to[to] = max(rate, best_to.get(to, 0.0))
    slow = [
        pair for pair, rate in known.items()
        if min(best_from[pair[0]], best_to[pair[1]]) >= _least(pair in current) * rate
    ]  # fmt: skip
    return sorted(slow, key=lambda pair: (pair not in current, known[pair], pair))[:_MOST_DETOURS]


@dataclass(slots=True, kw_only=True)
class _AvoidedLink:
    """Measurements of a link that a detour avoids."""

    rate: float  # of its newest probe, or that at which the detour began
    num_answers: int | None = None  # over it so far, None before the first report
    is_slow: bool = False  # a probe has found it slow again
    is_well: bool = False  # the newest probe has found it about as fast as the path

    def take_probe(self, num_answers: int, rate: float) -> bool:
        """Take in a report of its answers; return whether there is a new one."""
        is_new = self.num_answers is not None and num_answers != self.num_answers
        self.num_answers = num_answers
        if is_new:
            self.rate = rate
        return is_new


class DetourTable:
    """Latest rates that replicas reported, and the current detours.

    Attributes:
        detours: Detours of the latest update.
        num_changes: Number of detours begun or ended so far.
    """

    def __init__(self) -> None:
        self.detours: tuple[Detour, ...] = ()
        self.num_changes = 0
        self._rates: dict[int, Mapping[int, float]] = {}
        self._probes: dict[int, Mapping[int, tuple[int, float]]] = {}
        self._ways: dict[Pair, dict[int, float]] = {}
        self._links: dict[Pair, _AvoidedLink] = {}
        self._every: dict[Pair, int] = {}
        self._begun: Counter[Pair] = Counter()
        self._fruitless: Counter[Pair] = Counter()
        # by link, the round at which it was first found slow, avoided, or found recovered
        self._known_since: dict[Pair, int] = {}  # at which its rate was first known
        self._unsaid: set[Pair] = set()  # begun at a start, and not probed since
        self._doubted: set[Pair] = set()  # whose path is no better than the last probe, at the latest rates
        self._slow_since: dict[Pair, int] = {}
        self._around_since: dict[Pair, int] = {}
        self._well_since: dict[Pair, int] = {}

    def add_rates(
        self, replica: int, rates: Mapping[int, float], *, probes: Mapping[int, tuple[int, float]] = _NO_PROBES
    ) -> None:
        """Record the latest rates that a replica reported.

        Args:
            replica: The replica.
            rates: By other replica, bytes a second, all measured in the latest rounds.
            probes: By other replica over the link to which a detour leads: the number of answers over the link, and the
                rate of the newest one.
        """
        self._rates[replica], self._probes[replica] = rates, probes

    def forget(self, replica: int) -> None:
        """Forget a replica."""
        self._rates.pop(replica, None)
        self._probes.pop(replica, None)
        for counted in (self._begun, self._fruitless, self._known_since):
            for pair in [pair for pair in counted if replica in pair]:
                del counted[pair]

    def ways(self) -> dict[Pair, float]:
        """Return the rate of the best path of each detour, bytes a second."""
        return {pair: max(ways.values()) for pair, ways in self._ways.items()}

    def update(self, active: Collection[int], *, num_rounds: int) -> list[str]:
        """Find the detours again; return a text for each that began or ended.

        Args:
            active: The replicas that take part.
            num_rounds: How many rounds have been decided so far.
        """
        before, said = self._ways, set(self._ways) - self._unsaid
        for pair in [(one, to) for one in active for to in self._rates.get(one, {}) if to in active]:
            self._known_since.setdefault(pair, num_rounds)
        found = self._steady(self._compare(active), active, num_rounds=num_rounds)
        news = [self._ended(pair, active) for pair in sorted(said - set(found))]
        for pair in set(before) - set(found):
            del self._links[pair]
            num_tries = (num_rounds - self._around_since.pop(pair)) / self._every[pair]
            if set(pair) <= set(active):
                self._fruitless[pair] = 0 if num_tries > _FRUITLESS_TRIES else self._fruitless[pair] + 1
        for pair in sorted(set(found) - set(before)):
            self._around_since[pair] = num_rounds
            self._begun[pair] += 1
            self._links[pair] = _AvoidedLink(rate=self._rate_of(*pair))
            self._every[pair] = self._tried_every(pair, found, num_active=len(active))
        self._ways = found
        self._every = {pair: self._every[pair] for pair in found}
        self.detours = tuple(
            Detour(source=pair[0], replica=pair[1], over=tuple(found[pair]), every=self._probed_every(pair))
            for pair in sorted(found)
        )
        self._unsaid = {pair for pair in found if pair not in said and self._is_at_start(pair)}
        news += [self.text(*pair) for pair in sorted(set(found) - said - self._unsaid)]
        self.num_changes += len(news)
        return news

    def _compare(self, active: Collection[int]) -> dict[Pair, dict[int, float]]:
        """Return the detours by the latest rates, and note what new probes say about the links of the current ones."""
        rates = {one: dict(found) for one, found in self._rates.items()}
        new = set()
        for (source, to), link in self._links.items():
            probe = self._probes.get(source, {}).get(to)
            if probe is not None and link.take_probe(*probe):
                new.add((source, to))
            rates.setdefault(source, {})[to] = link.rate
        found = find_detours(rates, active, current=self._ways)
        for pair, link in self._links.items():
            link.is_slow |= pair in new and pair in found
            link.is_well = pair not in found and (link.is_well or pair in new)
        self._doubted = set(self._links) - set(found)
        return found

    def _probed_every(self, pair: Pair) -> int:
        """Return the number of rounds per probe: without the doublings where the path has become slower since."""
        doublings = min(10, self._begun[pair] - 1) if pair in self._doubted else 0
        return max(1, self._every[pair] >> doublings)

    def _steady(
        self, found: dict[Pair, dict[int, float]], active: Collection[int], *, num_rounds: int
    ) -> dict[Pair, dict[int, float]]:
        """Drop detours found for too few rounds, and keep those missed for too few."""
        begun = set(found) - set(self._ways)
        self._slow_since = {pair: self._slow_since.get(pair, num_rounds) for pair in begun}
        for pair in begun:
            doublings = min(_MOST_DOUBLINGS, self._fruitless[pair])
            is_clear = not doublings and min(found[pair].values()) >= CLEARLY * self._rate_of(*pair)
            if not is_clear and num_rounds - self._slow_since[pair] < STEADY_ROUNDS << doublings:
                del found[pair]
        ended = set(self._ways) - set(found)
        well = {pair for pair in ended if self._links[pair].is_well}
        self._well_since = {pair: self._well_since.get(pair, num_rounds) for pair in well}
        for pair in ended:
            ways = {middle: rate for middle, rate in self._ways[pair].items() if middle in active}
            is_held = num_rounds - self._around_since[pair] < HELD_ROUNDS
            is_left = pair in well and num_rounds - self._well_since[pair] >= LEFT_ROUNDS
            if ways and set(pair) <= set(active) and (is_held or not is_left):
                found[pair] = ways
        return found

    def _is_at_start(self, pair: Pair) -> bool:
        """Return whether a detour rests on a link's first answers alone."""
        is_early = self._around_since[pair] - self._known_since.get(pair, 0) < _START_ROUNDS
        return is_early and not self._links[pair].is_slow

    def describe(self) -> list[dict[str, Any]]:
        """Return the detours for the status output."""
        return [
            {
                "source": one.source, "replica": one.replica, "over": list(one.over), "every": one.every,
                "wire_bytes_per_s": round(self._rate_of(one.source, one.replica)),
                "way_bytes_per_s": round(max(self._ways[one.source, one.replica].values())),
                "text": self.text(one.source, one.replica),
            }
            for one in self.detours
        ]  # fmt: skip

    def text(self, source: int, replica: int) -> str:
        """Return the description of a detour."""
        ways = self._ways[source, replica]
        named = " or ".join(map(str, ways))
        return (
            f"replica {replica} fetches replica {source}'s parts from replica {named}: the wire {source} -> {replica} "
            f"carries {_rate(self._rate_of(source, replica))}, the way over {named} {_rate(max(ways.values()))}"
        )

    def _ended(self, pair: Pair, active: Collection[int]) -> str:
        source, replica = pair
        gone = [one for one in pair if one not in active]
        if gone:
            return f"no detour of replica {source}'s parts to replica {replica} any more: replica {gone[0]} has gone"
        rate = _rate(self._rate_of(source, replica))
        return (
            f"replica {replica} fetches replica {source}'s parts itself again: the wire {source} -> {replica} carries "
            f"{rate}, and no way is {STAYS:g} times as fast"
        )

    def _rate_of(self, source: int, replica: int) -> float:
        link = self._links.get((source, replica))
        return self._rates.get(source, {}).get(replica, 0.0) if link is None else link.rate

    def _tried_every(self, pair: Pair, found: Mapping[Pair, Mapping[int, float]], *, num_active: int) -> int:
        """Return the number of rounds per probe of a link.

        A try carries one part more from and to its ends, which carry n - 1 each way in a round, and others with the
        same end are tried too. It is over before the next one: a round lasts at least as long as a part takes on the
        way. A wire that was gone around before is tried half as often each time, so that one that recovers for a moment
        only costs ever less.
        """
        alike = sum(pair[0] == source or pair[1] == to for source, to in found)
        by_load = alike / (_TRIED_SHARE * (num_active - 1))
        by_time = max(found[pair].values()) / self._rate_of(*pair)
        return min(_MOST_EVERY, math.ceil(max(by_load, by_time)) << min(10, self._begun[pair] - 1))


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.2g} MB/s"


_CHOICE = struct.Struct("<QII")


@functools.lru_cache(maxsize=64)
def relays(
    sites: Sites, *, replica: int, round_id: int, active: tuple[int, ...], detours: tuple[Detour, ...] = ()
) -> Mapping[int, int]:
    """Return the replica to ask first for each part that is not asked of its origin.

    For a far part that is the replica of the own site whose hash with the part is the highest (rendezvous hashing), so
    all of a site choose the same one without a word, and when one goes only its parts change hands. One that has a slow
    wire to the part's origin is chosen only where all have. For other parts over a slow wire it is one of those that
    the way leads over, chosen alike. Whoever is asked in an origin's place asks that origin itself, or a relay that
    does.

    Example:
        >>> found = relays(((0, 1), (2, 3)), replica=0, round_id=7, active=(0, 1, 2, 3))
        >>> other = relays(((0, 1), (2, 3)), replica=1, round_id=7, active=(0, 1, 2, 3))
        >>> sorted([*found, *other])  # each far part has one relay, which asks for it itself
        [2, 3]
        >>> slow = Detour(source=0, replica=2, over=(1,), every=16)
        >>> relays((), replica=2, round_id=7, active=(0, 1, 2), detours=(slow,))
        {0: 1}
    """
    here = [one for one in site_of(replica, sites) if one in active]
    slow = {(one.source, one.replica): one.over for one in detours}
    chosen = {}
    for member in active:
        if member == replica:
            continue
        relay = _fetcher(member, replica, sites=sites, slow=slow, round_id=round_id, active=active)
        if relay != replica:
            free = [relay]
            if (relay, replica) in slow:  # from another one of the site that has it from the relay
                free = [one for one in here if one not in (relay, replica)]
                free = [one for one in free if (relay, one) not in slow and (one, replica) not in slow]
        else:
            free = [
                one for one in slow.get((member, replica), ())
                if one in active and (member, one) not in slow
                and _fetcher(member, one, sites=sites, slow=slow, round_id=round_id, active=active) == one
            ]  # fmt: skip
        if free:
            chosen[member] = max(free, key=lambda one: _draw(round_id, member, one))
    return chosen


def _fetcher(
    member: int, replica: int, *, sites: Sites, slow: Collection[tuple[int, int]], round_id: int,
    active: Collection[int],
) -> int:  # fmt: skip
    """Return the replica of the site that fetches a part from elsewhere; the asking one for parts of its site."""
    site = site_of(replica, sites)
    here = [one for one in site if one in active]
    if member in site or len(here) < 2:
        return replica
    free = [one for one in here if (member, one) not in slow] or here
    return max(free, key=lambda one: _draw(round_id, member, one))


def probed_sources(detours: Collection[Detour], *, replica: int, round_id: int) -> frozenset[int]:
    """Return the sources whose slow links are probed in a round by also requesting the part there.

    A hash picks one round out of `every`, so that fragments exchanged in turn are all probed.

    Example:
        >>> slow = Detour(source=0, replica=2, over=(1,), every=4)
        >>> sum(len(probed_sources([slow], replica=2, round_id=number)) for number in range(400))
        100
    """
    mine = [one for one in detours if one.replica == replica]
    return frozenset(one.source for one in mine if _is_tried(one, round_id))


def slow_sources(detours: Collection[Detour], *, replica: int) -> frozenset[int]:
    """Return the sources with a slow link to a replica."""
    return frozenset(one.source for one in detours if one.replica == replica)


def _is_tried(detour: Detour, round_id: int) -> bool:
    window, turn = divmod(round_id, detour.every)
    return int.from_bytes(_draw(window, detour.source, detour.replica), "little") % detour.every == turn


def _draw(round_id: int, member: int, relay: int) -> bytes:
    return hashlib.blake2b(_CHOICE.pack(round_id, member, relay), digest_size=8).digest()
