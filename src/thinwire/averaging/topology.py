"""With whom a replica exchanges: pure functions of the round and of who is alive. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Who takes part in one round.

    Attributes:
        me: This replica.
        members: All replicas of the round in ascending order, this one among them. Everyone decodes in this order.
    """

    me: int
    members: tuple[int, ...]

    @property
    def others(self) -> tuple[int, ...]:
        """The members without this replica."""
        return tuple(member for member in self.members if member != self.me)


class Topology(Protocol):
    """A choice of peers for every round, the same on all replicas without a word between them."""

    def peers(self, *, round_id: int, me: int, alive: Sequence[int]) -> Peers:
        """Return who takes part in round `round_id` with replica `me`, out of those `alive`."""
        ...


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
