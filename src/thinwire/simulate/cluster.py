"""Simulated clusters: hosts and the links between them, as star, ring, leaf-spine fabric or joined sites.

Every host has links of its own out of and into its site, and sites are joined by ways over links that they share. A
star is one site, and a ring is as many sites as hosts. A way may spread its bits evenly over parallel links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from thinwire.simulate.fluid_network import Loads, SimLink

IsWorking = Callable[[int], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimCluster:
    """Hosts with their routes over links; made by `star`, `ring`, `leaf_spine` and `joined_sites`.

    Raises:
        ValueError: The hosts' lists differ in length, or a way is missing.
    """

    links: tuple[SimLink, ...]  # all links, numbered in this order
    site_of: tuple[int, ...]  # the site of each host
    ways_out: tuple[Loads, ...]  # for each host, the links on its way out, with the part of its bits that each carries
    ways_in: tuple[Loads, ...]  # the same for the way in
    # the way from one site to another while all links work
    between: Mapping[tuple[int, int], Loads] = field(default_factory=dict)
    # the single paths of which that way is made, where there are several: while some are dead, bits spread evenly over
    # the others
    paths: Mapping[tuple[int, int], tuple[Loads, ...]] = field(default_factory=dict)
    link_names: tuple[str, ...] = ()  # a name of each link

    def __post_init__(self) -> None:
        if not len(self.site_of) == len(self.ways_out) == len(self.ways_in):
            raise ValueError(
                f"site_of, ways_out and ways_in must name as many hosts, got {len(self.site_of)}, "
                f"{len(self.ways_out)} and {len(self.ways_in)}"
            )
        sites = sorted(set(self.site_of))
        missing = [(a, b) for a in sites for b in sites if a != b and (a, b) not in self.between]
        if missing:
            raise ValueError(f"between must have a way for each two sites, but lacks {missing[:3]}; add a wire")

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return len(self.site_of)

    def route(self, source: int, to: int, *, is_working: IsWorking | None = None) -> Loads:
        """Return the links from one host to another, those that work, with the part of the bits that each carries.

        Example:
            >>> star([SimLink(bandwidth_bits_per_s=1e9)] * 3).route(0, 2)
            ((0, 1.0), (5, 1.0))
        """
        if source == to:
            return ()
        sites = self.site_of[source], self.site_of[to]
        middle = self._middle(sites, is_working) if sites[0] != sites[1] else ()
        return (*self.ways_out[source], *middle, *self.ways_in[to])

    def latency_s(self, loads: Loads) -> float:
        """Return how long a bit is on a way; over parallel links, on average."""
        return sum(part * self.links[link].latency_s for link, part in loads)

    def name_of(self, link: int) -> str:
        """Return the name of a link, or its number where it has none."""
        return self.link_names[link] if link < len(self.link_names) else f"link {link}"

    def spread(
        self, senders: Sequence[int], receivers: Sequence[int], *, is_working: IsWorking | None = None
    ) -> tuple[Loads, float]:
        """Return what the links carry when every sender sends one bit to every receiver but itself.

        Returns:
            The loads, and the longest latency of all pairs.

        Example:
            >>> link = SimLink(bandwidth_bits_per_s=1e9, latency_s=0.01)
            >>> loads, latency_s = star([link] * 3).spread([0, 1], [0, 1, 2])
            >>> loads, latency_s
            (((0, 2.0), (1, 2.0), (3, 1.0), (4, 1.0), (5, 2.0)), 0.02)
        """
        loads: dict[int, float] = {}
        among_senders, among_receivers = set(senders), set(receivers)
        for sender in senders:
            self._add(loads, self.ways_out[sender], len(receivers) - (sender in among_receivers))
        for receiver in receivers:
            self._add(loads, self.ways_in[receiver], len(senders) - (receiver in among_senders))
        sending = Counter(self.site_of[sender] for sender in senders)
        receiving = Counter(self.site_of[receiver] for receiver in receivers)
        for a, num_senders in sending.items():
            for b, num_receivers in receiving.items():
                if a != b:
                    self._add(loads, self._middle((a, b), is_working), num_senders * num_receivers)
        return tuple(sorted(loads.items())), self._longest_s(senders, receivers)

    def through_store(
        self, senders: Sequence[int], receivers: Sequence[int], *, is_upload: bool
    ) -> tuple[Loads, float]:
        """Return what the accesses carry when senders upload one bit each, or receivers read the others' bits.

        The store's own links have no limit, and it is as distant as the most distant pair.

        Example:
            >>> link = SimLink(bandwidth_bits_per_s=1e9, latency_s=0.01)
            >>> [star([link] * 3).through_store((0, 1, 2), (0, 1, 2), is_upload=up)[0] for up in (True, False)]
            [((0, 1.0), (1, 1.0), (2, 1.0)), ((3, 2.0), (4, 2.0), (5, 2.0))]
        """
        loads: dict[int, float] = {}
        among = set(senders)
        for host in senders if is_upload else receivers:
            way = self.ways_out[host] if is_upload else self.ways_in[host]
            self._add(loads, way, 1 if is_upload else len(senders) - (host in among))
        return tuple(sorted(loads.items())), self._longest_s(senders, receivers)

    def _middle(self, sites: tuple[int, int], is_working: IsWorking | None) -> Loads:
        paths = self.paths.get(sites, ())
        healthy = [path for path in paths if is_working is None or all(is_working(link) for link, _ in path)]
        if not healthy or len(healthy) == len(paths):
            return self.between[sites]
        return tuple((link, part / len(healthy)) for path in healthy for link, part in path)

    @staticmethod
    def _add(loads: dict[int, float], way: Loads, bits: float) -> None:
        if bits:
            for link, part in way:
                loads[link] = loads.get(link, 0.0) + part * bits

    def _longest_s(self, senders: Iterable[int], receivers: Iterable[int]) -> float:
        """Return the longest latency of any sender to any other receiver, without a look at every pair."""
        out = self._slowest_two(senders, self.ways_out)
        into = self._slowest_two(receivers, self.ways_in)
        longest = 0.0
        for a, sending in out.items():
            for b, receiving in into.items():
                middle = self.latency_s(self.between[a, b]) if a != b else 0.0
                for out_s, sender in sending:
                    for in_s, receiver in receiving:
                        if sender != receiver:
                            longest = max(longest, out_s + middle + in_s)
        return longest

    def _slowest_two(self, hosts: Iterable[int], ways: Sequence[Loads]) -> dict[int, list[tuple[float, int]]]:
        """Return each site's two hosts of the longest ways: the second one counts where the first is the other end."""
        slowest: dict[int, list[tuple[float, int]]] = {}
        for host in hosts:
            found = slowest.setdefault(self.site_of[host], [])
            found.append((self.latency_s(ways[host]), host))
            found.sort(reverse=True)
            del found[2:]
        return slowest


def star(links: Sequence[SimLink], *, downs: Sequence[SimLink] | None = None) -> SimCluster:
    """Return hosts around a switch that never fills: each has a link up and a link down.

    Args:
        links: The link up of each host, and where `downs` is None, the same values for its link down.
        downs: The links down.

    Raises:
        ValueError: There are more of one than of the other.
    """
    downs = links if downs is None else downs
    num_hosts = len(links)
    if len(downs) != num_hosts:
        raise ValueError(f"downs must have a link for each of the {num_hosts} hosts, got {len(downs)}")
    return SimCluster(
        links=(*links, *downs), site_of=(0,) * num_hosts,
        ways_out=tuple(((host, 1.0),) for host in range(num_hosts)),
        ways_in=tuple(((num_hosts + host, 1.0),) for host in range(num_hosts)), link_names=_access_names(num_hosts),
    )  # fmt: skip


def ring(links: Sequence[SimLink], *, backwards: Sequence[SimLink] | None = None) -> SimCluster:
    """Return hosts in a circle; bits go the shorter way round, forwards where both are as long.

    Args:
        links: From each host to the next one.
        backwards: From the next one to each host; None gives the same values.

    Raises:
        ValueError: There are more of one than of the other.

    Example:
        >>> circle = ring([SimLink(bandwidth_bits_per_s=1e9)] * 5)
        >>> circle.route(4, 1), circle.route(0, 3)
        (((4, 1.0), (0, 1.0)), ((9, 1.0), (8, 1.0)))
    """
    num_hosts = len(links)
    backwards = links if backwards is None else backwards
    if len(backwards) != num_hosts:
        raise ValueError(f"backwards must have a link for each of the {num_hosts} hosts, got {len(backwards)}")

    def way(source: int, to: int) -> Loads:
        ahead = (to - source) % num_hosts
        if ahead <= num_hosts - ahead:
            return tuple(((source + hop) % num_hosts, 1.0) for hop in range(ahead))
        return tuple((num_hosts + (source - 1 - hop) % num_hosts, 1.0) for hop in range(num_hosts - ahead))

    hosts = range(num_hosts)
    return SimCluster(
        links=(*links, *backwards), site_of=tuple(hosts), ways_out=((),) * num_hosts, ways_in=((),) * num_hosts,
        between={(a, b): way(a, b) for a in hosts for b in hosts if a != b},
    )  # fmt: skip


def leaf_spine(leaves: Sequence[Sequence[SimLink]], *, trunks: Sequence[Sequence[SimLink]]) -> SimCluster:
    """Return leaves of hosts whose bits to other leaves spread evenly over all spines.

    Args:
        leaves: For each leaf, the link of each of its hosts, up and down alike.
        trunks: For each leaf, its link to each spine, up and down alike.

    Raises:
        ValueError: Leaves differ in the number of their spines, or have none.

    Example:
        >>> link = SimLink(bandwidth_bits_per_s=1e9)
        >>> fabric = leaf_spine([[link]] * 2, trunks=[[link, link]] * 2)
        >>> fabric.route(0, 1)
        ((0, 1.0), (4, 0.5), (5, 0.5), (10, 0.5), (11, 0.5), (3, 1.0))
    """
    num_spines = {len(spines) for spines in trunks}
    if len(trunks) != len(leaves) or len(num_spines) != 1 or 0 in num_spines:
        raise ValueError(
            f"trunks must have a link to each spine for each of the {len(leaves)} leaves, got "
            f"{[len(spines) for spines in trunks]}"
        )
    links, site_of, outs, ins = _accesses(leaves)
    ups, downs = [], []
    for spines in trunks:
        ups.append(tuple((len(links) + spine, 1 / len(spines)) for spine in range(len(spines))))
        links += spines
    for spines in trunks:
        downs.append(tuple((len(links) + spine, 1 / len(spines)) for spine in range(len(spines))))
        links += spines
    numbers = range(len(leaves))
    pairs = [(a, b) for a in numbers for b in numbers if a != b]
    cables = [f"leaf-{leaf}/spine-{spine}" for leaf, spines in enumerate(trunks) for spine in range(len(spines))]
    names = [f"{cable} {way}" for way in ("up", "down") for cable in cables]
    return SimCluster(
        links=tuple(links), site_of=site_of, ways_out=outs, ways_in=ins,
        between={(a, b): (*ups[a], *downs[b]) for a, b in pairs},
        paths={
            (a, b): tuple(((up, 1.0), (down, 1.0)) for (up, _), (down, _) in zip(ups[a], downs[b], strict=True))
            for a, b in pairs
        },
        link_names=(*_access_names(len(site_of)), *names),
    )  # fmt: skip


def joined_sites(sites: Sequence[Sequence[SimLink]], *, wires: Mapping[tuple[int, int], SimLink]) -> SimCluster:
    """Return sites of hosts that are joined by wires.

    Bits between two sites without a wire pass as few others as can be.

    Args:
        sites: For each site, the link of each of its hosts, up and down alike.
        wires: From one site to another; where only one direction is named, the other one is alike.

    Raises:
        ValueError: The wires do not join all sites.

    Example:
        >>> slow, fast = SimLink(bandwidth_bits_per_s=1e8, latency_s=0.04), SimLink(bandwidth_bits_per_s=1e10)
        >>> cluster = joined_sites([[fast] * 2, [fast]], wires={(0, 1): slow})
        >>> cluster.route(0, 1), cluster.route(0, 2)
        (((0, 1.0), (4, 1.0)), ((0, 1.0), (6, 1.0), (5, 1.0)))
    """
    links, site_of, outs, ins = _accesses(sites)
    numbered: dict[tuple[int, int], int] = {}
    both = {**wires, **{(b, a): wire for (a, b), wire in wires.items() if (b, a) not in wires}}
    for (a, b), wire in both.items():
        numbered[a, b] = len(links)
        links.append(wire)
    between = {}
    for start in range(len(sites)):
        for end, way in _fewest_links(start, sorted(numbered)).items():
            if end != start:
                between[start, end] = tuple((numbered[hop], 1.0) for hop in way)
    return SimCluster(links=tuple(links), site_of=site_of, ways_out=outs, ways_in=ins, between=between)


def _access_names(num_hosts: int) -> tuple[str, ...]:
    return tuple(f"host-{host} {way}" for way in ("up", "down") for host in range(num_hosts))


def _accesses(
    sites: Sequence[Sequence[SimLink]],
) -> tuple[list[SimLink], tuple[int, ...], tuple[Loads, ...], tuple[Loads, ...]]:
    """Return all links up and then all links down, and who uses them."""
    flat = [link for hosts in sites for link in hosts]
    site_of = tuple(site for site, hosts in enumerate(sites) for _ in hosts)
    outs: tuple[Loads, ...] = tuple(((host, 1.0),) for host in range(len(flat)))
    ins: tuple[Loads, ...] = tuple(((len(flat) + host, 1.0),) for host in range(len(flat)))
    return [*flat, *flat], site_of, outs, ins


def _fewest_links(start: int, edges: Sequence[tuple[int, int]]) -> dict[int, list[tuple[int, int]]]:
    ways: dict[int, list[tuple[int, int]]] = {start: []}
    fresh = [start]
    while fresh:
        found = []
        for at in fresh:
            for a, b in edges:
                if a == at and b not in ways:
                    ways[b] = [*ways[a], (a, b)]
                    found.append(b)
        fresh = found
    return ways
