"""Grid of the degrees of parallelism on the devices of a site, and the links that its groups share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

from thinwire.site.expert_costs import all_to_all_s
from thinwire.site.pipeline import StageLink
from thinwire.site.site_file import Site, SiteNode


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Degrees:
    """Degrees of parallelism; their product is the number of devices."""

    pp: int = 1  # pipeline stages
    dp_replicate: int = 1  # copies of the sharded states
    dp_shard: int = 1  # shards of the states among data-parallel devices
    cp: int = 1  # devices that share each sequence; they share the states' shards too
    tp: int = 1  # devices that share each layer
    ep: int = 1  # of the devices that share states, those that share experts; no factor of the product

    @property
    def num_devices(self) -> int:
        """Product of all."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def shards(self) -> int:
        """Devices that share optimizer states, gradients or weights."""
        return self.dp_shard * self.cp

    @property
    def num_blocks(self) -> int:
        """Tensor-parallel groups, which stay together in a node."""
        return self.num_devices // self.tp

    def block(self, stage: int, replica: int, shard: int, part: int) -> int:
        """Return the number of the block at a place of the grid."""
        return ((stage * self.dp_replicate + replica) * self.dp_shard + shard) * self.cp + part

    def describe(self) -> str:
        """Return all degrees in a line."""
        ep = f", ep {self.ep}" if self.ep > 1 else ""
        return (
            f"pp {self.pp}, dp_replicate {self.dp_replicate}, dp_shard {self.dp_shard}, cp {self.cp}, tp {self.tp}{ep}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RingLinks:
    """Slowest link and longest latency of the rings that run at once."""

    size: int = 1  # members of each ring
    bandwidth_bits_per_s: float = inf  # of the slowest link, shared by the rings that cross it
    latency_s: float = 0.0  # of the slowest link

    def scatter_s(self, bits: float) -> float:
        """Return the time of a reduce-scatter or all-gather of so many bits."""
        if self.size == 1:
            return 0.0
        return (self.size - 1) * (bits / self.size / self.bandwidth_bits_per_s + self.latency_s)

    def all_reduce_s(self, bits: float) -> float:
        """Return the time of an all-reduce of so many bits."""
        return 2 * self.scatter_s(bits)


@dataclass(frozen=True, kw_only=True)
class SitePlacement:
    """Grid of a layout on the devices of a site."""

    site: Site  # the devices and links
    degrees: Degrees  # of the grid
    # for each block of the grid the block of devices that runs it; block n holds devices n tp to (n + 1) tp
    slots: tuple[int, ...]

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """Node of each block of the grid."""
        node_of, tp = self.site.node_of, self.degrees.tp
        return tuple(node_of[slot * tp] for slot in self.slots)

    @property
    def rank_order(self) -> tuple[str, ...]:
        """Name of the device of each rank: pp outermost, then dp_replicate, dp_shard, cp and tp."""
        names, tp = self.site.device_names, self.degrees.tp
        return tuple(names[slot * tp + lane] for slot in self.slots for lane in range(tp))

    @cached_property
    def tensor_links(self) -> RingLinks:
        """Links of the tensor-parallel groups, each inside its node."""
        used = [self.site.nodes[number] for number in set(self.nodes)]
        return RingLinks(
            size=self.degrees.tp, bandwidth_bits_per_s=min(node.bandwidth_bits_per_s for node in used),
            latency_s=max(node.latency_s for node in used),
        )  # fmt: skip

    @cached_property
    def shard_links(self) -> RingLinks:
        """Links of the groups that share states."""
        d = self.degrees
        return self._rings([
            [d.block(stage, replica, shard, part) for shard in range(d.dp_shard) for part in range(d.cp)]
            for stage in range(d.pp) for replica in range(d.dp_replicate)
        ])  # fmt: skip

    @cached_property
    def replicate_links(self) -> RingLinks:
        """Links of the groups that hold copies of the same shard."""
        d = self.degrees
        return self._rings([
            [d.block(stage, replica, shard, part) for replica in range(d.dp_replicate)]
            for stage in range(d.pp) for shard in range(d.dp_shard) for part in range(d.cp)
        ])  # fmt: skip

    @cached_property
    def context_links(self) -> RingLinks:
        """Links of the groups that share a sequence."""
        d = self.degrees
        return self._rings([
            [d.block(stage, replica, shard, part) for part in range(d.cp)]
            for stage in range(d.pp) for replica in range(d.dp_replicate) for shard in range(d.dp_shard)
        ])  # fmt: skip

    @cached_property
    def _expert_groups(self) -> list[list[int]]:
        """Blocks of the groups that share experts: neighbours among those that share states."""
        d = self.degrees
        return [list(range(first, first + d.ep)) for first in range(0, d.num_blocks, d.ep)]

    @cached_property
    def expert_shard_links(self) -> RingLinks:
        """Links of the groups that share the states of the same experts."""
        d = self.degrees
        return self._rings([
            [first + number for first in range(start, start + d.shards, d.ep)]
            for start in range(0, d.num_blocks, d.shards) for number in range(d.ep)
        ])  # fmt: skip

    def experts_s(self, bits: float) -> tuple[float, float]:
        """Return the seconds and the latency of an all-to-all in which every device holds so many bits."""
        groups = [[self.nodes[block] for block in group] for group in self._expert_groups]
        return all_to_all_s(self.site, groups, bits=bits, lanes=self.degrees.tp)

    def stage_links(
        self, message_bits: float, coded_bits: tuple[float, float] | None = None, *, is_interleaved: bool = False
    ) -> tuple[tuple[StageLink, ...], ...]:
        """Return the links between the stages of each different pipeline.

        Args:
            message_bits: Of a message of each device.
            coded_bits: Of one between sites, forward and backward, if it is coded.
            is_interleaved: Whether the last rank sends to the first one while the others do.
        """
        d, nodes, site_of = self.degrees, self.nodes, self.site.site_of
        per_stage = d.num_blocks // d.pp
        pipelines: list[list[StageLink]] = [[] for _ in range(d.dp_replicate * d.dp_shard)]
        edges_of = [
            [(nodes[stage * per_stage + place], nodes[(stage + 1) % d.pp * per_stage + place])
             for place in range(per_stage)]
            for stage in range(d.pp)
        ]  # fmt: skip
        at_once = [edge for edges in edges_of[: d.pp - 1 + is_interleaved] for edge in edges]
        for stage, edges in enumerate(edges_of):
            # all boundaries between two sites share the sites' line, each with the messages back of the others
            ways = at_once if stage < d.pp - 1 or is_interleaved else edges
            lines = [*ways, *((b, a) for a, b in ways)] if self.site.has_border else ()
            shares = _CardShares(edges, self.degrees.tp, site_of, lines=lines)
            of_edge: dict[tuple[int, int], tuple[float, float, float]] = {}  # devices of a node have the same
            for edge in dict.fromkeys(edges):
                is_coded = coded_bits is not None and site_of[edge[0]] != site_of[edge[1]]
                bits = coded_bits if is_coded and coded_bits is not None else (message_bits, message_bits)
                share, link = shares(edge), self.site.link(*edge)
                rate = link.bandwidth_bits_per_s
                of_edge[edge] = bits[0] * share / rate, bits[1] * share / rate, link.latency_s
            for number, stage_links in enumerate(pipelines):
                own = {of_edge[edge] for edge in edges[number * d.cp : (number + 1) * d.cp]}
                slowest, back, latency_s = map(max, zip(*own, strict=True))
                stage_links.append(StageLink(message_s=slowest, latency_s=latency_s, less_back_s=slowest - back))
        return tuple(dict.fromkeys(map(tuple, pipelines)))

    @cached_property
    def stage_sites(self) -> tuple[int, ...]:
        """Number of the site of each pipeline rank; of its first block where it stands at several."""
        per_stage = self.degrees.num_blocks // self.degrees.pp
        return tuple(self.site.site_of[node] for node in self.nodes[::per_stage])

    @cached_property
    def num_borders(self) -> tuple[int, ...]:
        """Devices that send to another site: from each pipeline rank to the next, and from the last to the first.

        A message back crosses as often.
        """
        d, nodes, site_of = self.degrees, self.nodes, self.site.site_of
        per_stage = d.num_blocks // d.pp
        return tuple(
            d.tp * sum(
                site_of[nodes[stage * per_stage + place]] != site_of[nodes[(stage + 1) % d.pp * per_stage + place]]
                for place in range(per_stage)
            )
            for stage in range(d.pp)
        )  # fmt: skip

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """FLOP/s of the slowest device of each pipeline rank."""
        return tuple(min(node.flops_per_s for node in used) for used in self._rank_nodes)

    @cached_property
    def attention_speeds(self) -> tuple[float, ...]:
        """FLOP/s of the slowest device of each pipeline rank in attention."""
        return tuple(min(node.attention_flops_per_s or node.flops_per_s for node in used) for used in self._rank_nodes)

    @cached_property
    def _rank_nodes(self) -> list[list[SiteNode]]:
        per_stage = self.degrees.num_blocks // self.degrees.pp
        starts = range(0, self.degrees.num_blocks, per_stage)
        return [[self.site.nodes[number] for number in set(self.nodes[one : one + per_stage])] for one in starts]

    def _rings(self, groups: Sequence[Sequence[int]]) -> RingLinks:
        if len(groups[0]) == 1:
            return RingLinks()
        edges: list[tuple[int, int]] = []
        for group in groups:
            members = sorted(self.nodes[block] for block in group)
            edges += [*pairwise(members), (members[-1], members[0])]
        shares = _CardShares(edges, self.degrees.tp, self.site.site_of)
        links = {edge: self.site.link(*edge) for edge in edges}
        return RingLinks(
            size=len(groups[0]),
            bandwidth_bits_per_s=min(link.bandwidth_bits_per_s / shares(edge) for edge, link in links.items()),
            latency_s=max(link.latency_s for link in links.values()),
        )  # fmt: skip


class _CardShares:
    """Number of messages that share an edge between two nodes: the network card of its busier end, or the site's line.

    The nodes of a site share its line to the others.
    """

    def __init__(
        self, edges: Sequence[tuple[int, int]], lanes: int, site_of: Sequence[int],
        lines: Sequence[tuple[int, int]] | None = None,
    ) -> None:  # fmt: skip
        crossing = [edge for edge in edges if edge[0] != edge[1]]
        self.leaving, self.entering = Counter(a for a, _ in crossing), Counter(b for _, b in crossing)
        lines = crossing if lines is None else lines  # none where no edge crosses a border
        self.borders = Counter((site_of[a], site_of[b]) for a, b in lines if site_of[a] != site_of[b])
        self.lanes, self.site_of = lanes, site_of

    def __call__(self, edge: tuple[int, int]) -> int:
        if edge[0] == edge[1]:
            return 1
        border = self.borders[self.site_of[edge[0]], self.site_of[edge[1]]]
        return self.lanes * max(self.leaving[edge[0]], self.entering[edge[1]], border)
