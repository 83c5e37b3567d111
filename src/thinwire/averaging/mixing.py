"""Mixing graphs for decentralised averaging: neighbours and weights of each replica, and random groups.

A graph defines for every round whose models a replica averages with its own (`neighbours`), to whom it sends its own
(`receivers`), and the weights (`weights`): one row of a doubly stochastic matrix. Doubly stochastic means that the mean
over all replicas stays where it is, and repeated mixing brings every replica to it. The graphs count replicas from 0;
`mixing_row` maps them to those that are alive. Nothing here imports torch.

Sources: arXiv 2404.08079 (DIMAT: complete graph and ring), arXiv 2506.10911 (NoLoCo: random groups). The shipped code
of DIMAT divides each row of the ring by 3 also for two replicas, where the rows then sum to 2/3; here the weights
follow from the degrees.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import Protocol

from thinwire.averaging.topology import Peers
from thinwire.shared_random import derive_seed


class MixingGraph(Protocol):
    """A graph of replicas for every round, computed alike on all replicas without communication.

    A subclass that says the neighbours alone is an undirected graph, whose weights follow from the degrees.
    """

    __slots__ = ()

    def neighbours(self, *, num_replicas: int, me: int, round_id: int = 0) -> tuple[int, ...]:
        """Return whose models replica `me` averages with its own in round `round_id`, ascending, without `me`."""
        ...

    def receivers(self, *, num_replicas: int, me: int, round_id: int = 0) -> tuple[int, ...]:
        """Return the replicas that count `me` among their neighbours, ascending: to them `me` sends its model."""
        return self.neighbours(num_replicas=num_replicas, me=me, round_id=round_id)

    def weights(self, *, num_replicas: int, me: int, round_id: int = 0) -> dict[int, float]:
        """Return the weight of each neighbour and of `me` itself, ascending by replica; they sum to 1.

        By default those of Metropolis and Hastings: `1 / (1 + max(degree_i, degree_j))` for an edge, the rest for
        itself. That matrix is symmetric, so its columns sum to 1 as its rows do, whatever the degrees.

        Args:
            num_replicas: How many replicas there are; they are numbered from 0.
            me: The replica whose row this is.
            round_id: The round's number; only graphs that change with the round use it.

        Raises:
            ValueError: `me` is not one of the replicas, or the graph does not exist for so many.
        """

        def adjacent(replica: int) -> tuple[int, ...]:
            return self.neighbours(num_replicas=num_replicas, me=replica, round_id=round_id)

        mine = adjacent(me)
        row = {other: 1 / (1 + max(len(mine), len(adjacent(other)))) for other in mine}
        return dict(sorted({**row, me: 1 - sum(row.values())}.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete(MixingGraph):
    """Everyone averages with everyone; one round brings all replicas to the mean."""

    def neighbours(self, *, num_replicas: int, me: int, round_id: int = 0) -> tuple[int, ...]:
        """Return everyone else.

        Example:
            >>> Complete().neighbours(num_replicas=4, me=1)
            (0, 2, 3)
        """
        _check(num_replicas, me)
        return tuple(other for other in range(num_replicas) if other != me)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring(MixingGraph):
    """Everyone averages with the one before and the one after."""

    def neighbours(self, *, num_replicas: int, me: int, round_id: int = 0) -> tuple[int, ...]:
        """Return the two beside `me`; with two replicas they are one, with one replica there is none.

        Example:
            >>> Ring().neighbours(num_replicas=5, me=0)
            (1, 4)
            >>> Ring().weights(num_replicas=2, me=0)
            {0: 0.5, 1: 0.5}
        """
        _check(num_replicas, me)
        beside = {(me - 1) % num_replicas, (me + 1) % num_replicas}
        return tuple(sorted(beside - {me}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Torus(MixingGraph):
    """Rows and columns of replicas, each closed to a ring; everyone averages with the four beside it.

    The number of rows is the largest divisor of the number of replicas that is not above its square root.
    """

    def neighbours(self, *, num_replicas: int, me: int, round_id: int = 0) -> tuple[int, ...]:
        """Return those above, below, left and right of `me`; where two of them are one replica, it counts once.

        Raises:
            ValueError: The number of replicas is a prime above 3, so that there is only one row.

        Example:
            >>> Torus().neighbours(num_replicas=12, me=0)  # 3 rows of 4
            (1, 3, 4, 8)
        """
        _check(num_replicas, me)
        rows, columns = self.shape(num_replicas)
        row, column = divmod(me, columns)
        beside = {((row + step) % rows) * columns + column for step in (-1, 1)}
        beside |= {row * columns + (column + step) % columns for step in (-1, 1)}
        return tuple(sorted(beside - {me}))

    @staticmethod
    def shape(num_replicas: int) -> tuple[int, int]:
        """Return `(rows, columns)`, as near to a square as the number of replicas allows.

        Example:
            >>> Torus.shape(12), Torus.shape(10)
            ((3, 4), (2, 5))
        """
        rows = next(rows for rows in range(isqrt(num_replicas), 0, -1) if num_replicas % rows == 0)
        if rows == 1 and num_replicas > 3:
            raise ValueError(
                f"num_replicas of a torus must not be a prime above 3, got {num_replicas}: its only rectangle is one "
                f"row; take Ring(), or {num_replicas - 1} or {num_replicas + 1} replicas"
            )
        return rows, num_replicas // rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges(MixingGraph):
    """A graph of your own: the pairs of replicas that have a wire between them, in either order.

    Attributes:
        edges: Pairs of replicas. Together they must join all replicas, or the parts would never agree.
    """

    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        loop = next((edge for edge in self.edges if edge[0] == edge[1]), None)
        if loop is not None:
            raise ValueError(
                f"edges must join two different replicas, got {loop}; leave it out: everyone counts itself anyway"
            )

    def neighbours(self, *, num_replicas: int, me: int, round_id: int = 0) -> tuple[int, ...]:
        """Return who has a wire to `me`.

        Raises:
            ValueError: An edge names a replica that does not exist, or some replica cannot be reached from replica 0.

        Example:
            >>> star = Edges(edges=((0, 1), (0, 2), (0, 3)))
            >>> star.weights(num_replicas=4, me=1)
            {0: 0.25, 1: 0.75}
        """
        _check(num_replicas, me)
        return _adjacency(self.edges, num_replicas)[me]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPairs:
    """Each replica averages with one random other replica, or a few, drawn again in every round (arXiv 2506.10911).

    It is a `Topology`: every replica derives all groups of a round from the seed, the round's number and who is alive.
    Where the number of replicas is no multiple of `group_size`, the rest forms a smaller group of its own, and a rest
    of one joins the last group instead, so that no replica idles for a round. Only the single replica of a run
    forms a group of one, and its exchange sends nothing.

    Attributes:
        seed: The run's own seed, the same on all replicas.
        group_size: Replicas in a group, at least 2.
        num_rounds: So many rounds in a row have the same groups: those of one outer step.
    """

    seed: int
    group_size: int = 2
    num_rounds: int = 1

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(
                f"group_size must be at least 2, got {self.group_size}: a group of one exchanges nothing; 2 is usual"
            )

    def peers(self, *, round_id: int, me: int, alive: Sequence[int]) -> Peers:
        """Return the group of `me`.

        Raises:
            ValueError: `me` is not alive.

        Example:
            >>> RandomPairs(seed=17).peers(round_id=0, me=4, alive=[0, 2, 4, 7]).members
            (2, 4)
        """
        for group in self.groups(round_id=round_id, alive=alive):
            if me in group:
                return Peers(me=me, members=group)
        raise ValueError(f"me must be one of the replicas that are alive, {sorted(alive)}, got {me}")

    def groups(self, *, round_id: int, alive: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """Return all groups of a round; each holds its members in ascending order.

        Example:
            >>> [len(group) for group in RandomPairs(seed=17).groups(round_id=3, alive=range(7))]
            [2, 2, 3]
        """

        def draw(replica: int) -> tuple[int, int]:
            # one draw for each replica: a replica that leaves does not change the order of the others
            return derive_seed(self.seed, "groups", round_id // self.num_rounds, replica), replica

        order = sorted(set(alive), key=draw)
        cuts = list(range(0, len(order), self.group_size))
        if len(cuts) > 1 and len(order) % self.group_size == 1:
            del cuts[-1]
        ends = [*cuts[1:], len(order)]
        return tuple(tuple(sorted(order[start:end])) for start, end in zip(cuts, ends, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """Everyone exchanges with its neighbours in a graph: a `Topology` whose members differ from replica to replica.

    Neighbours must be mutual: an exchange sends to every replica that it receives from. So directed graphs are refused,
    but for so few replicas that they are not directed.

    Attributes:
        graph: Over the replicas that are alive.
    """

    graph: MixingGraph

    def peers(self, *, round_id: int, me: int, alive: Sequence[int]) -> Peers:
        """Return `me` with its neighbours.

        Raises:
            ValueError: `me` is not alive, the graph is directed, or it does not exist for so many replicas.

        Example:
            >>> Neighbours(graph=Ring()).peers(round_id=0, me=7, alive=[0, 2, 4, 7]).members
            (0, 4, 7)
        """
        row = mixing_row(self.graph, round_id=round_id, me=me, alive=alive)
        self.check(num_replicas=len(alive), round_id=round_id)
        return Peers(me=me, members=tuple(row))

    def check(self, *, num_replicas: int, round_id: int = 0) -> None:
        """Refuse a graph that is directed in a round, or does not exist for so many replicas.

        Raises:
            ValueError: It is or does not; names alternatives.
        """
        for me in range(num_replicas):
            where = {"num_replicas": num_replicas, "me": me, "round_id": round_id}
            if self.graph.neighbours(**where) != self.graph.receivers(**where):
                raise ValueError(
                    f"graph must be undirected, got {self.graph} for {num_replicas} replicas: whoever sends a model "
                    f"gets the other's back; take Ring(), Torus(), Complete() or Edges()"
                )


def mixing_row(graph: MixingGraph, *, round_id: int, me: int, alive: Iterable[int]) -> dict[int, float]:
    """Return the weights of `me` and its neighbours in the graph over those who are alive.

    The replicas that are alive take the graph's places in ascending order, so the graph closes over missing replicas.

    Raises:
        ValueError: `me` is not alive, or the graph does not exist for so many replicas.

    Example:
        >>> mixing_row(Ring(), round_id=0, me=9, alive=[2, 4, 7, 9])
        {2: 0.3333333333333333, 7: 0.3333333333333333, 9: 0.33333333333333337}
    """
    members = sorted(set(alive))
    if me not in members:
        raise ValueError(f"me must be one of the replicas that are alive, {members}, got {me}")
    row = graph.weights(num_replicas=len(members), me=members.index(me), round_id=round_id)
    return {members[place]: weight for place, weight in row.items()}


@lru_cache(maxsize=64)
def _adjacency(edges: tuple[tuple[int, int], ...], num_replicas: int) -> tuple[tuple[int, ...], ...]:
    """Return the neighbours of every replica, after checking that the graph is connected."""
    beside: list[set[int]] = [set() for _ in range(num_replicas)]
    for edge in edges:
        if not all(0 <= end < num_replicas for end in edge):
            raise ValueError(f"edges must join replicas 0 to {num_replicas - 1}, got {edge}; remove or renumber it")
        beside[edge[0]].add(edge[1])
        beside[edge[1]].add(edge[0])
    reached, fresh = {0}, {0}
    while fresh:
        fresh = {other for replica in fresh for other in beside[replica]} - reached
        reached |= fresh
    if len(reached) < num_replicas:
        apart = sorted(set(range(num_replicas)) - reached)
        raise ValueError(f"edges must join all replicas, but {apart} cannot be reached from 0; add an edge to them")
    return tuple(tuple(sorted(others)) for others in beside)


def _check(num_replicas: int, me: int) -> None:
    if num_replicas < 1:
        raise ValueError(f"num_replicas must be at least 1, got {num_replicas}")
    if not 0 <= me < num_replicas:
        raise ValueError(f"me must be in 0 to {num_replicas - 1}, got {me}; replicas of a graph are numbered from 0")
