"""Traffic plans: the port and the spine of every flow, their congestion, completion time and lower bound.

Ports (rails) come first. Hashing methods pick the sending and the receiving port at random, as bonded ports do. The
others keep left with left and right with right (C4P's rule) and balance the connections of each host over its ports.
The spines come from the method, whose module in this package has its theorem.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, partial
from random import Random
from typing import Any

from thinwire.errors import refusal, unknown_name
from thinwire.simulate import FluidFlow, FluidNetwork, SimLink, VirtualClock
from thinwire.traffic.colouring import coloured_paths
from thinwire.traffic.ethereal import split_paths
from thinwire.traffic.fabric import Fabric, FabricFlow, LeafFlow, Parts, SpinePaths, check_hosts
from thinwire.traffic.fractional import Demand, cut_bound_s, split_demands
from thinwire.traffic.single_paths import dealt_paths, hashed_paths, spread_paths
from thinwire.traffic.spray import sprayed_paths

METHODS = ("ecmp", "k-ecmp", "round-robin", "c4p", "ethereal", "colour", "spray")
HASHED = ("ecmp", "k-ecmp")
DEFAULT_K = 4

# The kind of a link, its owner, and its place: ("out" or "in", host, rail), or ("up" or "down", leaf, spine).
FabricLink = tuple[str, str | int, int]

_PLANNED: Mapping[str, Callable[[Sequence[LeafFlow], SpinePaths], list[Parts]]] = {
    "round-robin": dealt_paths, "c4p": spread_paths, "ethereal": split_paths, "colour": coloured_paths,
    "spray": sprayed_paths,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPiece:
    """A part of a flow and its path."""

    share: Fraction  # part of the flow's bytes, exact; the pieces of a flow add up to 1
    rail: int  # port of the sending host
    destination_rail: int  # port of the receiving host
    spine: int | None  # the spine; None between ports of one leaf
    source_ports: tuple[int, ...] = ()  # source ports that take this path, the best first; empty if not probed
    destination_port: int | None = None  # port for which this holds


@dataclass(frozen=True, kw_only=True)
class TrafficPlan:
    """Paths of all flows by one method."""

    method: str
    paths: SpinePaths  # the fabric without its failed cables
    flows: Sequence[FabricFlow]
    pieces: Sequence[Sequence[PathPiece]] = field(repr=False)  # the pieces of each flow

    @property
    def num_pieces(self) -> int:
        """Number of pieces; each is a connection of its own."""
        return sum(map(len, self.pieces))

    @cached_property
    def link_bytes(self) -> dict[FabricLink, Fraction]:
        """Bytes on each link that carries any; exact."""
        load: defaultdict[FabricLink, Fraction] = defaultdict(Fraction)
        for flow, pieces in zip(self.flows, self.pieces, strict=True):
            for piece in pieces:
                for link in self.links_of(flow, piece):
                    load[link] += piece.share * flow.num_bytes
        return dict(load)

    @cached_property
    def max_congestion(self) -> Fraction:
        """The highest load of a cable, in flows of the largest size at the uplink's rate; exact."""
        loads = (
            size / self.paths.rate(int(leaf), spine)
            for (kind, leaf, spine), size in self.link_bytes.items()
            if kind in ("up", "down")
        )
        return max(loads, default=Fraction()) / _unit(self.paths, self.flows)

    @cached_property
    def bound(self) -> Fraction:
        """Lower bound of the maximum congestion of any method, whichever ports and spines it takes; exact."""
        return congestion_bound(self.paths, self.flows)

    @cached_property
    def completion_s(self) -> dict[str, float]:
        """Seconds until the last byte of each job, if all flows start at once and share links max-min fairly."""
        found = dict.fromkeys((flow.job for flow in self.flows), 0.0)
        for flow, ends in zip(self.flows, self.piece_completion_s, strict=True):
            found[flow.job] = max(found[flow.job], *ends)
        return found

    @cached_property
    def piece_completion_s(self) -> list[list[float]]:
        """Seconds until the last byte of each piece of each flow; sprayed pieces of a flow end together."""
        clock = VirtualClock()
        rates = _link_rates(self.paths)
        number_of = {link: number for number, link in enumerate(rates)}
        network = FluidNetwork([SimLink(bandwidth_bits_per_s=rate) for rate in rates.values()], clock=clock)
        found = [[0.0] * len(pieces) for pieces in self.pieces]

        def note(ends: list[float], places: Sequence[int]) -> None:
            for place in places:
                ends[place] = clock.now_s

        for flow, pieces, ends in zip(self.flows, self.pieces, found, strict=True):
            # sprayed packets move together, pieces on paths of their own do not
            together = [range(len(pieces))] if self.method == "spray" else [range(n, n + 1) for n in range(len(pieces))]
            for places in together:
                total = sum(pieces[place].share for place in places)
                loads = tuple(
                    (number_of[link], float(pieces[place].share / total))
                    for place in places
                    for link in self.links_of(flow, pieces[place])
                )
                size_bits = 8 * float(total * flow.num_bytes)
                network.start(FluidFlow(size_bits=size_bits, loads=loads), partial(note, ends, places))
        clock.run()
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the plan as one JSON object."""
        return {
            "format": "thinwire-traffic-plan", "version": 1, "method": self.method,
            "max_congestion": float(self.max_congestion), "bound": float(self.bound),
            "completion_s": max(self.completion_s.values()), "pieces": self.num_pieces,
            "jobs": self.completion_s, "hosts": list(self.paths.fabric.hosts),
            "failed": [f"leaf-{leaf}/spine-{spine}" for leaf, spine in sorted(self.paths.failed)],
            "assignment": [
                {
                    "flow": number, "source": flow.source, "destination": flow.destination, "job": flow.job,
                    "pieces": [
                        {"share": float(piece.share), "spine": piece.spine, "rail": piece.rail,
                         "destination_rail": piece.destination_rail,
                         "source_port": next(iter(piece.source_ports), None),
                         "spare_source_ports": list(piece.source_ports[1:]),
                         "destination_port": piece.destination_port}
                        for piece in pieces
                    ],
                }
                for number, (flow, pieces) in enumerate(zip(self.flows, self.pieces, strict=True))
            ],
            "settings": settings(self),
        }  # fmt: skip

    def links_of(self, flow: FabricFlow, piece: PathPiece) -> list[FabricLink]:
        """Return the links on the path of a piece, from the sending port to the receiving one."""
        hosts = self.paths.fabric.hosts
        out: FabricLink = ("out", flow.source, piece.rail)
        into: FabricLink = ("in", flow.destination, piece.destination_rail)
        if piece.spine is None:
            return [out, into]
        source, destination = hosts[flow.source][piece.rail], hosts[flow.destination][piece.destination_rail]
        return [out, ("up", source, piece.spine), ("down", destination, piece.spine), into]


def plan_traffic(
    fabric: Fabric, flows: Sequence[FabricFlow], *, method: str, failed: Sequence[str] = (), k: int = DEFAULT_K,
    seed: int = 0,
) -> TrafficPlan:  # fmt: skip
    """Choose the paths of all flows.

    Args:
        fabric: The fabric.
        flows: What is sent at once.
        method: One of `METHODS`.
        failed: Names of cables that carry nothing.
        k: Connections into which `k-ecmp` splits each connection.
        seed: Of the hashes of `ecmp` and `k-ecmp`.

    Raises:
        ValueError: A host, cable or method is unknown, or two leaves have no path.

    Example:
        >>> fabric = Fabric(spines=4, uplink_bits_per_s=1e7, port_bits_per_s=1e8, hosts={"a": (0,), "b": (1,)})
        >>> flows = [FabricFlow(source="a", destination="b", num_bytes=10**6)] * 6
        >>> plan = plan_traffic(fabric, flows, method="ethereal")
        >>> plan.max_congestion, plan.bound, plan.num_pieces
        (Fraction(3, 2), Fraction(3, 2), 8)
    """
    if method not in METHODS:
        raise unknown_name("--method", method, METHODS)
    if k < 1:
        raise refusal("k is too small", got=k, allowed="1 or more", remedy=f"k={DEFAULT_K}")
    check_hosts(fabric, flows)
    paths = SpinePaths(fabric, fabric.cables(failed))
    random = Random(seed)
    times = k if method == "k-ecmp" else 1
    # one entry a connection: its flow, its ports, its share of the flow
    connections = _connections(fabric, flows, method=method, times=times, random=random)
    crossing, leaf_flows = [], []
    for index, (number, (rail, destination_rail), share) in enumerate(connections):
        flow = flows[number]
        source, destination = fabric.hosts[flow.source][rail], fabric.hosts[flow.destination][destination_rail]
        if source != destination:
            crossing.append(index)
            leaf_flows.append(LeafFlow(source, destination, share * flow.num_bytes, (flow.source, rail)))
    parts = hashed_paths(leaf_flows, paths, random=random) if method in HASHED else _PLANNED[method](leaf_flows, paths)
    chosen = dict(zip(crossing, parts, strict=True))
    pieces: list[list[PathPiece]] = [[] for _ in flows]
    for index, (number, (rail, destination_rail), share) in enumerate(connections):
        for spine, part in chosen.get(index, [(None, Fraction(1))]):
            pieces[number].append(
                PathPiece(share=share * part, rail=rail, destination_rail=destination_rail, spine=spine)
            )
    return TrafficPlan(method=method, paths=paths, flows=flows, pieces=pieces)


def congestion_bound(paths: SpinePaths, flows: Sequence[FabricFlow]) -> Fraction:
    """Return a lower bound of the maximum congestion, in flows of the largest size at the uplink's rate.

    No choice of ports and spines, and no split, goes below it. With one port a host and cables of one rate it is C* =
    max(row sums, column sums)/s, which is reached. Else it is the dual bound of a linear programme, within a few
    percent of the optimum: see `fractional`.
    """
    sizes: defaultdict[tuple[tuple[int, int], ...], Fraction] = defaultdict(Fraction)
    hosts = paths.fabric.hosts
    for flow in flows:
        ends = tuple(sorted({(a, b) for a in hosts[flow.source] for b in hosts[flow.destination]}))
        if all(a != b for a, b in ends):  # else two ports share a leaf
            reached = tuple(pair for pair in ends if paths.reaches(*pair))
            sizes[reached or (ends[0],)] += flow.num_bytes  # one that has no path is refused by its name
    demands = [Demand(size, ends) for ends, size in sizes.items()]
    if not demands:
        return Fraction()
    is_reached = paths.are_alike and all(len(demand.ends) == 1 for demand in demands)
    seconds = cut_bound_s(demands, paths) if is_reached else split_demands(demands, paths).bound_s
    return seconds / _unit(paths, flows)


def settings(plan: TrafficPlan) -> dict[str, Any]:
    """Return settings of other programs that follow a plan as far as they can; those of NCCL have not been tried."""
    num_rails = max(map(len, plan.paths.fabric.hosts.values()))
    per_pair: defaultdict[tuple[str, str], int] = defaultdict(int)
    for flow, pieces in zip(plan.flows, plan.pieces, strict=True):
        per_pair[flow.source, flow.destination] += len(pieces)
    most = max(per_pair.values(), default=1)
    rails = ",".join(f"eth{rail}" for rail in range(num_rails))
    return {
        "gloo": {"GLOO_SOCKET_IFNAME": rails},
        "nccl": {
            "NCCL_SOCKET_IFNAME": f"={rails}", "NCCL_IB_QPS_PER_CONNECTION": str(min(most, 128)),
            "NCCL_IB_SPLIT_DATA_ON_QPS": "1", "NCCL_SOCKET_NTHREADS": "1", "NCCL_NSOCKS_PERTHREAD": str(min(most, 16)),
        },
        "nccl_is_tried": False,
    }  # fmt: skip


def _unit(paths: SpinePaths, flows: Sequence[FabricFlow]) -> Fraction:
    """Return the unit of congestion: bytes over rate of the largest flow on an uplink."""
    return Fraction(max(flow.num_bytes for flow in flows)) / Fraction(paths.fabric.uplink_bits_per_s)


def _connections(
    fabric: Fabric, flows: Sequence[FabricFlow], *, method: str, times: int, random: Random
) -> list[tuple[int, tuple[int, int], Fraction]]:
    """Return each connection's flow, its sending and receiving rail, and its share of the flow."""
    found: list[tuple[int, tuple[int, int], Fraction]] = []
    sent: defaultdict[tuple[str, int], Fraction] = defaultdict(Fraction)
    received: defaultdict[tuple[str, int], Fraction] = defaultdict(Fraction)
    for number, flow in enumerate(flows):
        out, into = len(fabric.hosts[flow.source]), len(fabric.hosts[flow.destination])
        if method == "spray":
            rails = min(out, into)
            found += [(number, (rail, rail), Fraction(1, rails)) for rail in range(rails)]
            continue
        count = flow.connections * times
        for _ in range(count):
            if method in HASHED:
                found.append((number, (random.randrange(out), random.randrange(into)), Fraction(1, count)))
                continue
            rail = min(
                range(min(out, into)),
                key=lambda one: (sent[flow.source, one] + received[flow.destination, one], one),
            )
            sent[flow.source, rail] += Fraction(flow.num_bytes, count)
            received[flow.destination, rail] += Fraction(flow.num_bytes, count)
            found.append((number, (rail, rail), Fraction(1, count)))
    return found


def _link_rates(paths: SpinePaths) -> dict[FabricLink, float]:
    """Return every link's bits a second."""
    fabric = paths.fabric
    rates: dict[FabricLink, float] = {}
    for host, leaves in fabric.hosts.items():
        for rail in range(len(leaves)):
            rates["out", host, rail] = rates["in", host, rail] = fabric.port_bits_per_s
    for leaf in range(fabric.num_leaves):
        for spine in range(fabric.spines):
            rates["up", leaf, spine] = rates["down", leaf, spine] = float(paths.rate(leaf, spine))
    return rates
