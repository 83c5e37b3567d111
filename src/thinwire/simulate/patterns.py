"""What an exchange puts on the links: all-gather, two-phase, ring all-reduce, star; one flow a stage, whatever M is.

A stage is everything that may be sent at the same time; the next one starts when it has arrived. Its loads are the bits
that each link carries for one bit of a replica's payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from thinwire.simulate.cluster import SimCluster
from thinwire.simulate.fluid_network import Loads


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStage:
    """What is sent at the same time.

    Attributes:
        loads: Pairs of a link and its bits for one bit of a replica's payload.
        latency_s: Of all messages in a row that the stage is made of.
        num_messages: How many messages come in a row.
        part: A message's part of a replica's payload.
    """

    loads: Loads
    latency_s: float
    num_messages: int = 1
    part: float = 1.0


class Pattern(Protocol):
    """How members of a round exchange."""

    def stages(self, cluster: SimCluster, *, senders: Sequence[int], members: Sequence[int]) -> tuple[LinkStage, ...]:
        """Return the stages of one exchange, one after another.

        Args:
            cluster: Where it happens.
            senders: Who sends a payload.
            members: Who gets the mean, the senders among them.

        Raises:
            ValueError: The pattern needs a payload from everyone, and someone sends none.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGather:
    """Everyone sends its whole payload to everyone: `M - 1` payloads out and in, one message in a row.

    Example:
        >>> from thinwire.simulate import SimLink, star
        >>> cluster, everyone = star([SimLink(bandwidth_bits_per_s=1e9)] * 3), [0, 1, 2]
        >>> AllGather().stages(cluster, senders=everyone, members=everyone)[0].loads
        ((0, 2.0), (1, 2.0), (2, 2.0), (3, 2.0), (4, 2.0), (5, 2.0))
    """

    def stages(self, cluster: SimCluster, *, senders: Sequence[int], members: Sequence[int]) -> tuple[LinkStage, ...]:
        """See `Pattern.stages`."""
        loads, latency_s = cluster.spread(senders, members)
        return (LinkStage(loads=loads, latency_s=latency_s),)


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoPhase:
    """Everyone gets a part of everyone's payload, sums it, and sends the sum to all.

    `2 (M - 1) / M` payloads go out and in, in two messages in a row.
    """

    def stages(self, cluster: SimCluster, *, senders: Sequence[int], members: Sequence[int]) -> tuple[LinkStage, ...]:
        """See `Pattern.stages`."""
        _need_everyone(self, senders, members)
        loads, latency_s = cluster.spread(members, members)
        part = tuple((link, bits / len(members)) for link, bits in loads)
        return (LinkStage(loads=part, latency_s=latency_s, part=1 / len(members)),) * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RingAllReduce:
    """Everyone sends parts to the next member: `2 (M - 1) / M` payloads out and in, `2 (M - 1)` messages in a row.

    The ring is as fast as its slowest link, and is one stage: its messages follow each other without a gap.
    """

    def stages(self, cluster: SimCluster, *, senders: Sequence[int], members: Sequence[int]) -> tuple[LinkStage, ...]:
        """See `Pattern.stages`."""
        _need_everyone(self, senders, members)
        num_members = len(members)
        num_messages = 2 * (num_members - 1)
        ways = [cluster.route(member, members[(place + 1) % num_members]) for place, member in enumerate(members)]
        loads = tuple((link, part * num_messages / num_members) for way in ways for link, part in way)
        slowest_s = max(cluster.latency_s(way) for way in ways)
        stage = LinkStage(
            loads=loads, latency_s=num_messages * slowest_s, num_messages=num_messages, part=1 / num_members
        )
        return (stage,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Star:
    """Everyone sends its payload to a hub, which sends the mean back: the hub's links carry M payloads in and M out.

    Two messages in a row. The hub may be a host that does not train; a hub that is a member sends itself nothing.

    Attributes:
        hub: The hub's number among the cluster's hosts.
    """

    hub: int

    def stages(self, cluster: SimCluster, *, senders: Sequence[int], members: Sequence[int]) -> tuple[LinkStage, ...]:
        """See `Pattern.stages`."""
        up, up_s = cluster.spread(senders, [self.hub])
        down, down_s = cluster.spread([self.hub], members)
        return (LinkStage(loads=up, latency_s=up_s), LinkStage(loads=down, latency_s=down_s))


def _need_everyone(pattern: Pattern, senders: Sequence[int], members: Sequence[int]) -> None:
    if len(senders) != len(members):
        raise ValueError(
            f"{type(pattern).__name__}() needs a payload from each of the {len(members)} members, got {len(senders)}; "
            f"take AllGather() or Star() where some send nothing"
        )
