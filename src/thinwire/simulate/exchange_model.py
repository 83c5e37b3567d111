"""How rounds cross the links: the pattern, who exchanges with whom, quorum and pace; and what came of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

from thinwire.simulate.fluid_network import FluidFlow
from thinwire.simulate.patterns import AllGather, LinkStage, Pattern


class Peers(Protocol):
    """Who takes part in a round, as `thinwire.averaging.topology.Peers` says it."""

    @property
    def members(self) -> tuple[int, ...]:
        """All members, ascending."""
        ...

    @property
    def absent(self) -> tuple[int, ...]:
        """Members that send nothing."""
        ...


class Topology(Protocol):
    """A choice of peers, as `thinwire.averaging.topology.Topology`."""

    def peers(self, *, round_id: int, me: int, alive: Sequence[int]) -> Peers:
        """Return who takes part in a round with a replica."""
        ...


class Groups(Protocol):
    """A partition of the replicas for every round, as `thinwire.averaging.mixing.RandomPairs`."""

    def groups(self, *, round_id: int, alive: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return all groups of a round."""
        ...


@dataclass(frozen=True, slots=True)
class Everyone:
    """All replicas that are alive are one group."""

    def groups(self, *, round_id: int, alive: Sequence[int]) -> Sequence[Sequence[int]]:
        """See `Groups.groups`."""
        return (tuple(alive),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeModel:
    """How a round crosses the links.

    Attributes:
        pattern: What the members of a group send each other.
        topology: The groups, or a topology of peers whose members form groups.
        is_direct: The topology's members form no groups: each sends its payload to its peers as soon as it launches,
            and waits for theirs. One flow a replica: slow to simulate for many replicas on shared links.
        quorum: A round starts when so many have launched it. Whoever comes later sends nothing and gets the mean
            still. None waits for all.
        pace_bits_per_s: No replica's most loaded link carries more for one round.
        message_s: What every message costs beside its bits and the links' latency.
        num_trips: Latencies until a message is there: 1 where it is sent at once, 2 where its receiver says first that
            it has room.
        opening_bytes: A longer message takes two trips more: its rest is asked for when its opening is there.

    Raises:
        ValueError: A number is out of its range.
    """

    pattern: Pattern = field(default_factory=AllGather)
    topology: Topology | Groups = field(default_factory=Everyone)
    is_direct: bool = False
    quorum: int | None = None
    pace_bits_per_s: float = inf
    message_s: float = 0.0
    num_trips: int = 1
    opening_bytes: float = inf

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
            senders = tuple(member for member in peers.members if member not in peers.absent)
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
    """What came of a round of one group.

    Attributes:
        id: The round's number.
        members: Who took part in the end.
        launched_s: When the first of them launched it.
        started_s: When its bits began to move: the last time, where it was begun anew without a replica that died.
        finished_s: When all had the mean; infinity where that never came to be.
    """

    id: int
    members: tuple[int, ...]
    launched_s: float
    started_s: float
    finished_s: float
