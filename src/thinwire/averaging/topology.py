"""Topologies: the peers of a round, as pure functions of the round and the live replicas; without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from thinwire.shared_random import toss


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The participants of one round.

    Attributes:
        me: This replica.
        members: All replicas of the round in ascending order, this one among them. Everyone decodes in this order.
        absent: Members that send nothing in this round. Nobody waits for them; they receive what the others send, and
            the mean is over all members still.
    """

    me: int
    members: tuple[int, ...]
    absent: tuple[int, ...] = ()

    @property
    def others(self) -> tuple[int, ...]:
        """The members without this replica."""
        return tuple(member for member in self.members if member != self.me)

    @property
    def senders(self) -> tuple[int, ...]:
        """The members that send something, in ascending order."""
        return tuple(member for member in self.members if member not in self.absent)


class Topology(Protocol):
    """A choice of peers for every round, computed alike on all replicas without communication."""

    def peers(self, *, round_id: int, me: int, alive: Sequence[int]) -> Peers:
        """Return who takes part in round `round_id` with replica `me`, out of those `alive`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReplicas:
    """Everyone exchanges with everyone."""

    def peers(self, *, round_id: int, me: int, alive: Sequence[int]) -> Peers:
        """Return all replicas that are alive.

        Example:
            >>> AllReplicas().peers(round_id=0, me=1, alive=[0, 1, 2]).others
            (0, 2)
        """
        return Peers(me=me, members=tuple(sorted(alive)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Participation:
    """Everyone exchanges with everyone, but each replica sends in some rounds only: by a coin that all can toss.

    The coins of different replicas and rounds are independent, and every replica knows all of them, so that no
    replica waits for one that sends nothing, and no message announces it.

    Args:
        probability: With which a replica sends in a round, in (0, 1].
        seed: Selects the coins; the same on all replicas.
        rounds_per_coin: So many rounds in a row share a coin: those of one step.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> half = Participation(probability=0.5, seed=3)
        >>> [half.peers(round_id=r, me=0, alive=[0, 1, 2]).senders for r in range(4)]
        [(0, 1, 2), (1, 2), (0, 1), ()]
    """

    probability: float
    seed: int = 0
    rounds_per_coin: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1:
            raise ValueError(f"probability must be in (0, 1], got {self.probability}; 1 means always")
        if self.rounds_per_coin < 1:
            raise ValueError(f"rounds_per_coin must be at least 1, got {self.rounds_per_coin}")

    def peers(self, *, round_id: int, me: int, alive: Sequence[int]) -> Peers:
        members = tuple(sorted(alive))
        number = round_id // self.rounds_per_coin
        absent = tuple(
            member for member in members if not toss(self.probability, self.seed, "participation", number, member)
        )
        return Peers(me=me, members=members, absent=absent)
