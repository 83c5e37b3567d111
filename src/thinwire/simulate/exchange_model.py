"""Model of an exchange on simulated links: its message pattern, groups, quorum, pace and what a message costs.

The pattern and the topology are those of the exchange itself (`thinwire.averaging`). All messages of a stage become one
flow that loads many links at once, however many replicas there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

from thinwire.averaging.message_pattern import AllGatherMessages, MessagePattern, MessageStage
from thinwire.averaging.topology import AllReplicas, Topology
from thinwire.simulate.cluster import IsWorking, SimCluster
from thinwire.simulate.fluid_network import FluidFlow, Loads


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStage:
    """Load of one stage's messages on the links."""

    loads: Loads  # pairs of a link and its bits for one bit of a replica's payload
    latency_s: float  # latency of all messages in a row that the stage is made of
    num_messages: int = 1  # number of messages in a row
    part: float = 1.0  # a message's part of a replica's payload

    @staticmethod
    def of(stage: MessageStage, cluster: SimCluster, *, is_working: IsWorking | None = None) -> LinkStage:
        """Put a stage's messages on a cluster's links, those that work.

        Example:
            >>> from thinwire.simulate import SimLink, star
            >>> cluster, everyone = star([SimLink(bandwidth_bits_per_s=1e9)] * 3), (0, 1, 2)
            >>> LinkStage.of(MessageStage(senders=everyone, receivers=everyone), cluster).loads
            ((0, 2.0), (1, 2.0), (2, 2.0), (3, 2.0), (4, 2.0), (5, 2.0))
        """
        part = 1 / stage.num_shards
        if stage.is_ring:
            # messages follow each other without a gap, so the ring is one stage, as fast as its slowest link
            around = zip(stage.senders, (*stage.receivers[1:], stage.receivers[0]), strict=True)
            ways = [cluster.route(*message, is_working=is_working) for message in around]
            loads = tuple((link, bits * stage.num_in_row / stage.num_shards) for way in ways for link, bits in way)
            latency_s = stage.num_in_row * max(cluster.latency_s(way) for way in ways)
            return LinkStage(loads=loads, latency_s=latency_s, num_messages=stage.num_in_row, part=part)
        if stage.way != "direct":
            loads, latency_s = cluster.through_store(stage.senders, stage.receivers, is_upload=stage.way == "upload")
            loads = tuple((link, bits * stage.num_in_row / stage.num_shards) for link, bits in loads)
            return LinkStage(loads=loads, latency_s=latency_s, part=part)
        loads, latency_s = cluster.spread(stage.senders, stage.receivers, is_working=is_working)
        loads = tuple((link, bits / stage.num_shards) for link, bits in loads)
        return LinkStage(loads=loads, latency_s=latency_s, part=part)


class GroupTopology(Protocol):
    """Topology that returns all groups of a round at once, such as `thinwire.averaging.mixing.RandomPairs`."""

    def groups(self, *, round_id: int, alive: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return all groups of a round."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeModel:
    """Model of how a round crosses the links.

    Raises:
        ValueError: A number is out of its range.
    """

    pattern: MessagePattern = field(default_factory=AllGatherMessages)  # messages that the members of a group exchange
    # groups of each round; peers must form groups unless `is_direct`
    topology: Topology | GroupTopology = field(default_factory=AllReplicas)
    # the peers form no groups: each replica sends its payload to its peers as soon as it launches, and waits for
    # theirs. One flow a replica: slow to simulate for many replicas on shared links
    is_direct: bool = False
    # a round starts when so many replicas have launched it. A later one sends nothing and still receives the mean. None
    # waits for all
    quorum: int | None = None
    pace_bits_per_s: float = inf  # limit of one round's rate on each replica's most loaded link
    message_s: float = 0.0  # cost of every message beside its bits and the links' latency
    # latencies until a message has arrived: 1 where it is sent at once, 2 where its receiver grants room first
    num_trips: int = 1
    opening_bytes: float = inf  # a longer message takes two trips more, because its rest is requested after its opening
    # stages of every round, where the members never change; None computes them from the pattern
    fixed_stages: tuple[LinkStage, ...] | None = None

    def __post_init__(self) -> None:
        if self.quorum is not None and (self.quorum < 1 or self.is_direct):
            raise ValueError(f"quorum must be at least 1, and None for a direct exchange, got {self.quorum}")
        if not self.pace_bits_per_s > 0 or not 0 <= self.message_s < inf:
            raise ValueError(
                f"pace_bits_per_s must be above 0 and message_s at least 0 and finite, got {self.pace_bits_per_s} and "
                f"{self.message_s}"
            )
        if self.is_direct and not hasattr(self.topology, "peers"):
            raise ValueError(f"a direct exchange needs a topology of peers, got {self.topology}")

    def stages(
        self, cluster: SimCluster, *, senders: Sequence[int], members: Sequence[int],
        is_working: IsWorking | None = None,
    ) -> tuple[LinkStage, ...]:  # fmt: skip
        """Return the stages of one round on the links, those that work.

        Raises:
            ValueError: The pattern needs a payload from every member, and one sends none.
        """
        if self.fixed_stages is not None:
            return self.fixed_stages
        stages = self.pattern.stages(senders=senders, members=members)
        return tuple(LinkStage.of(stage, cluster, is_working=is_working) for stage in stages)

    def flow(self, stage: LinkStage, *, payload_bits: float) -> FluidFlow:
        """Return the flow of one stage."""
        limit = self.pace_bits_per_s
        if limit < inf:
            limit /= max((weight for _, weight in stage.loads), default=1.0)
        has_rest = payload_bits * stage.part > 8 * self.opening_bytes
        trips = self.num_trips + (2 if has_rest else 0)
        latency_s = trips * stage.latency_s + stage.num_messages * self.message_s
        return FluidFlow(size_bits=payload_bits, loads=stage.loads, latency_s=latency_s, limit_bits_per_s=limit)

    def parts(self, round_id: int, *, alive: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return members and senders of each group of a round; in a direct exchange of each replica, itself first.

        Raises:
            ValueError: The members of a topology form no groups.
        """
        if not self.is_direct and hasattr(self.topology, "groups"):
            return [(tuple(group), tuple(group)) for group in self.topology.groups(round_id=round_id, alive=alive)]
        assert hasattr(self.topology, "peers")
        parts = []
        seen: set[int] = set()
        for me in alive:
            if me in seen:
                continue
            peers = self.topology.peers(round_id=round_id, me=me, alive=alive)
            senders = peers.senders
            if self.is_direct:
                parts.append(((me, *(member for member in peers.members if member != me)), senders))
                continue
            if seen.intersection(peers.members):
                raise ValueError(
                    f"members of round {round_id} form no groups: {sorted(seen.intersection(peers.members))} are in "
                    f"two; give is_direct=True"
                )
            seen.update(peers.members)
            parts.append((peers.members, senders))
        return parts


class RoundTimes(NamedTuple):
    """Times of one round of one group."""

    id: int  # the round's number
    members: tuple[int, ...]  # replicas that took part in the end
    launched_s: float  # time of the first member's launch
    started_s: float  # start of its transfer; the last start, if it was restarted without a replica that died
    finished_s: float  # time at which all members had the mean; infinity if that never happened
