"""Adapter from a method, a model and a cluster to the simulator's links, payloads and exchange. Nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import torch
from torch import nn

from thinwire import simulate
from thinwire.averaging.cost import most_members
from thinwire.averaging.exchange import DescribesTraffic, Exchange, Shapes, numel_of
from thinwire.averaging.message_pattern import (
    AllGatherMessages,
    RoundTraffic,
    StoreMessages,
    TwoPhaseMessages,
    sent_payloads,
)
from thinwire.averaging.mixing import Neighbours
from thinwire.averaging.topology import AllReplicas
from thinwire.planning.cluster import Cluster
from thinwire.sync.method import Method
from thinwire.sync.outer_optimizer import NeedsMatrices
from thinwire.sync.updates import OuterStep
from thinwire.sync.views import BoundView
from thinwire.transport.message import HEADER_BYTES
from thinwire.transport.process_group import OPENING_BYTES

# From so many replicas on, a pair that has nearly all that its accesses leave gets no link of its own: as soon as
# several are sent to, the accesses bound it, and thousands of links would take the simulator's time for nothing.
_MANY, _NEARLY = 9, 0.9
# How the process group's messages begin: the receiver says that it has room, and asks for what is behind an opening.
_TRIPS = 2


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Traffic of a method."""

    # what a replica sends of each fragment, of each channel: `payload_bytes[fragment][channel]`. The exchange's pattern
    # says how often. A header of 56 bytes a message is in it
    payload_bytes: tuple[tuple[float, ...], ...]
    times_sent: float  # how often the busiest replica sends its payload in a round
    # elements that a replica encodes and decodes in a round, in multiples of 2 (one of each), by fragment and channel;
    # 0 where payloads are whole numbers of bytes an element
    coded: tuple[tuple[float, ...], ...]
    exchange: simulate.ExchangeModel  # how rounds cross the links
    # float64 operations of all fragments' outer steps, once each; see `thinwire.sync.outer_optimizer.NeedsMatrices`
    outer_operations: float = 0.0

    @property
    def num_fragments(self) -> int:
        """Number of fragments."""
        return len(self.payload_bytes)

    @cached_property
    def last_channel(self) -> int:
        """The last channel that sends anything: what is sent after all warm-ups."""
        sent = [sum(sizes) for sizes in zip(*self.payload_bytes, strict=True)]
        return max((channel for channel, size in enumerate(sent) if size), default=0)

    @cached_property
    def coded_elements(self) -> float:
        """The elements that a replica encodes and decodes in an interval after all warm-ups, as `coded` counts them."""
        return sum(channels[self.last_channel] for channels in self.coded)


def simulated_cluster(cluster: Cluster, *, names: Sequence[str] | None = None) -> simulate.SimCluster:
    """Return the links of some replicas: each one's accesses, and what bounds or delays single pairs.

    Latencies of pairs are rounded up to two digits, so that pairs alike share a link without a limit.

    Args:
        cluster: All there are.
        names: Those that take part, in the replicas' order; None for all.

    Raises:
        ValueError: There is no replica of a name.

    Example:
        >>> from thinwire.planning.cluster import Machine
        >>> home = Machine(name="home", up_bits_per_s=20e6, down_bits_per_s=100e6, latency_s=0.01)
        >>> lab = Machine(name="lab", up_bits_per_s=1e9, down_bits_per_s=1e9)
        >>> links = simulated_cluster(Cluster(machines=(home, lab)))
        >>> way = links.route(0, 1)
        >>> [links.links[link].bandwidth_bits_per_s for link, _ in way], links.latency_s(way)
        ([20000000.0, inf, 1000000000.0], 0.01)
    """
    machines = [cluster.machine(name) for name in names] if names is not None else list(cluster.machines)
    own = {(wire.source, wire.destination): wire for wire in cluster.wires}
    links: list[simulate.SimLink] = []
    delays: dict[float, int] = {}

    def link(rate: float, latency_s: float = 0.0) -> int:
        links.append(simulate.SimLink(bandwidth_bits_per_s=rate, latency_s=latency_s))
        return len(links) - 1

    outs = [() if m.up_bits_per_s is None else ((link(m.up_bits_per_s), 1.0),) for m in machines]
    ins = [() if m.down_bits_per_s is None else ((link(m.down_bits_per_s), 1.0),) for m in machines]
    between: dict[tuple[int, int], tuple[tuple[int, float], ...]] = {}
    for a, source in enumerate(machines):
        for b, to in enumerate(machines):
            if a == b:
                continue
            wire = own.get((source.name, to.name))
            latency_s = _rounded_up(source.latency_s + to.latency_s if wire is None else wire.latency_s)
            way = []
            if latency_s:
                if latency_s not in delays:
                    delays[latency_s] = link(inf, latency_s)
                way.append((delays[latency_s], 1.0))
            accesses = min(source.up_bits_per_s or inf, to.down_bits_per_s or inf)
            bound = accesses if len(machines) < _MANY else _NEARLY * accesses
            if wire is not None and wire.bandwidth_bits_per_s < bound:
                way.append((link(wire.bandwidth_bits_per_s), 1.0))
            between[a, b] = tuple(way)
    return simulate.SimCluster(
        links=tuple(links), site_of=tuple(range(len(machines))), ways_out=tuple(outs), ways_in=tuple(ins),
        between=between,
    )  # fmt: skip


def condensed(
    exchange: simulate.ExchangeModel, cluster: simulate.SimCluster, *, num_replicas: int
) -> simulate.ExchangeModel:
    """Return an exchange among all replicas with the two links that count, the same in virtual time.

    Where every flow loads all links in the same proportions, the link that is full first bounds all of them, and no
    other one matters: so an all-gather of thousands of links is one of two, that one and the one that carries most.
    Other exchanges are returned as they are. It holds while no replica dies.

    Example:
        >>> cluster = simulate.star([simulate.SimLink(bandwidth_bits_per_s=rate) for rate in (1e9, 1e6, 1e9)])
        >>> condensed(simulate.ExchangeModel(), cluster, num_replicas=3).fixed_stages[0].loads
        ((0, 2.0), (1, 2.0))
    """
    everyone = range(num_replicas)
    is_alike = all(stage.is_all_to_all for stage in exchange.pattern.stages(senders=everyone, members=everyone))
    if not is_alike or not isinstance(exchange.topology, AllReplicas) or exchange.quorum is not None:
        return exchange
    made = []
    for stage in stages_of(exchange, cluster, num_replicas=num_replicas):
        limited = [(link, bits) for link, bits in stage.loads if cluster.links[link].bandwidth_bits_per_s < inf]
        full = max(limited, key=lambda load: load[1] / cluster.links[load[0]].bandwidth_bits_per_s, default=None)
        most = max(limited, key=lambda load: load[1], default=None)
        made.append(replace(stage, loads=tuple(sorted({load for load in (full, most) if load is not None}))))
    return replace(exchange, fixed_stages=tuple(made))


def stages_of(
    exchange: simulate.ExchangeModel, cluster: simulate.SimCluster, *, num_replicas: int
) -> tuple[simulate.LinkStage, ...]:
    """Return the stages of a round of the largest group of the first round."""
    groups = [group for group, _ in exchange.parts(0, alive=tuple(range(num_replicas)))]
    most = max(groups, key=len)
    return exchange.stages(cluster, senders=most, members=most)


def faster(cluster: simulate.SimCluster, factor: float) -> simulate.SimCluster:
    """Return the same links with other rates.

    Example:
        >>> faster(simulate.star([simulate.SimLink(bandwidth_bits_per_s=1e6)] * 2), 5.0).links[0].bandwidth_bits_per_s
        5000000.0
    """
    links = tuple(replace(link, bandwidth_bits_per_s=factor * link.bandwidth_bits_per_s) for link in cluster.links)
    return replace(cluster, links=links)


def traffic_of(
    method: Method, model: nn.Module, *, num_replicas: int, inner: torch.optim.Optimizer | None = None,
    view: BoundView | None = None,
) -> Traffic:  # fmt: skip
    """Return what a method's rounds send of a model, from shapes alone: the model may be on the meta device.

    Where a method's channels travel in different patterns, all are given the first one's, with payloads that load a
    star's links as much as their own would.

    Args:
        method: What is to run.
        model: What is to be trained.
        num_replicas: On how many replicas, at least 2.
        inner: The inner optimizer, for methods that look into it; None makes an AdamW of the model.
        view: The method's view where it is bound already, which takes most of the time here.

    Raises:
        ValueError: The method does not fit the model or so many replicas.

    Example:
        >>> from thinwire.methods import streaming_diloco
        >>> model = nn.Sequential(*(nn.Linear(64, 64, bias=False, device="meta") for _ in range(6)))
        >>> traffic = traffic_of(streaming_diloco(), model, num_replicas=2)
        >>> traffic.payload_bytes, traffic.exchange.pattern
        (((6392.0,), (6392.0,)), AllGatherMessages())
    """
    if view is None:
        view = method.view.bind(model, inner=torch.optim.AdamW(model.parameters()) if inner is None else inner)
    num_fragments = len(view.parameters.fragments)
    method.schedule.check(num_fragments=num_fragments, num_replicas=num_replicas)
    members = most_members(method.topology, num_replicas=num_replicas)
    exchanges = method.exchanges(num_replicas)
    shapes = [
        [view.shapes(fragment=fragment, channel=channel) for channel in range(len(exchanges))]
        for fragment in range(num_fragments)
    ]
    rounds = [
        [_round_traffic(*channel, num_members=members) for channel in zip(exchanges, tensors, strict=True)]
        for tensors in shapes
    ]
    common = _exchange_model(method, rounds[0])
    times_sent = sent_payloads(common.pattern, num_members=members)
    update, outer_operations = method.update(num_replicas), 0.0
    if isinstance(update, OuterStep) and isinstance(update.optimizer, NeedsMatrices):
        matrices = map(view.parameters.hidden_matrices, range(num_fragments))
        outer_operations = sum(map(update.optimizer.matrix_operations, matrices))

    def payload_bytes(found: RoundTraffic) -> float:
        # a payload that is sent `times_sent` times loads the links as all messages with their headers do
        return (found.sent_bytes + HEADER_BYTES * found.num_messages) / times_sent if found.sent_bytes else 0.0

    def coded(found: RoundTraffic, tensors: Shapes) -> float:
        return numel_of(tensors) * found.coding_passes if found.sent_bytes else 0.0

    return Traffic(
        payload_bytes=tuple(tuple(map(payload_bytes, channels)) for channels in rounds),
        times_sent=times_sent,
        coded=tuple(tuple(map(coded, *pair)) for pair in zip(rounds, shapes, strict=True)),
        exchange=common,
        outer_operations=outer_operations,
    )


def through_store(traffic: Traffic, *, num_members: int) -> Traffic:
    """Return the same traffic through a store: what many read is uploaded once.

    Raises:
        ValueError: It travels by another pattern than all-gather or two-phase, or between neighbours.
    """
    pattern = traffic.exchange.pattern
    if traffic.exchange.is_direct or not isinstance(pattern, AllGatherMessages | TwoPhaseMessages):
        raise ValueError(f"no store carries payloads between neighbours or of the pattern {pattern.name}")
    by_store = StoreMessages(is_two_phase=isinstance(pattern, TwoPhaseMessages))
    # a request and its answer are one trip, and no receiver grants room
    exchange = replace(traffic.exchange, pattern=by_store, num_trips=1, opening_bytes=inf)
    return replace(traffic, exchange=exchange, times_sent=sent_payloads(by_store, num_members=num_members))


def _round_traffic(exchange: Exchange, shapes: Shapes, *, num_members: int) -> RoundTraffic:
    if not isinstance(exchange, DescribesTraffic):
        raise ValueError(
            f"nothing is known of how {type(exchange).__name__}() crosses the links; give it a method `traffic` (see "
            f"thinwire.averaging.exchange.DescribesTraffic), or simulate another method"
        )
    return exchange.traffic(shapes, num_members=num_members)


def _exchange_model(method: Method, channels: Sequence[RoundTraffic]) -> simulate.ExchangeModel:
    """Return the model of the first channel that sends anything."""
    sending = [channel for channel in channels if channel.pattern is not None]
    pattern, quorum = (sending[0].pattern, sending[0].quorum) if sending else (None, None)
    made = simulate.ExchangeModel(
        pattern=pattern or AllGatherMessages(), quorum=quorum, num_trips=_TRIPS, opening_bytes=OPENING_BYTES
    )
    if isinstance(method.topology, AllReplicas):
        return made
    is_direct = isinstance(method.topology, Neighbours)
    return replace(made, quorum=None, topology=method.topology, is_direct=is_direct)


def _rounded_up(latency_s: float) -> float:
    digits, exponent = f"{latency_s:.1e}".split("e")
    is_below = float(f"{digits}e{exponent}") < latency_s
    return float(f"{float(digits) + 0.1 * is_below:.1f}e{exponent}")
