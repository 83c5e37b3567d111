"""Directed graphs of arXiv 2110.13363, which exchanges by gossip refuse: columns of their weights sum to 1 too."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from thinwire.averaging.mixing import MixingGraph


class _Circulant(MixingGraph):
    """Base of circulant graphs, which look alike from every replica: equal weights, column sums equal row sums."""

    __slots__ = ()

    @abstractmethod
    def distances(self, *, num_replicas: int, round_id: int) -> tuple[int, ...]:
        """Return the offsets of the receivers, modulo the number of replicas."""

    def neighbours(self, *, num_replicas: int, me: int, round_id: int = 0) -> tuple[int, ...]:
        steps = self.distances(num_replicas=num_replicas, round_id=round_id)
        return tuple(sorted((me - step) % num_replicas for step in steps))

    def receivers(self, *, num_replicas: int, me: int, round_id: int = 0) -> tuple[int, ...]:
        steps = self.distances(num_replicas=num_replicas, round_id=round_id)
        return tuple(sorted((me + step) % num_replicas for step in steps))

    def weights(self, *, num_replicas: int, me: int, round_id: int = 0) -> dict[int, float]:
        """Return `1 / (1 + number of neighbours)` for each neighbour and for `me`."""
        members = (me, *self.neighbours(num_replicas=num_replicas, me=me, round_id=round_id))
        return dict.fromkeys(sorted(members), 1 / len(members))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential(_Circulant):
    """The static exponential graph: everyone sends to those 1, 2, 4, 8, ... ahead (arXiv 2110.13363).

    It is directed. About `log2(num_replicas)` messages a round, and few rounds to agree.
    """

    def distances(self, *, num_replicas: int, round_id: int) -> tuple[int, ...]:
        """Return all powers of two below the number of replicas.

        Example:
            >>> Exponential().distances(num_replicas=6, round_id=0)
            (1, 2, 4)
            >>> Exponential().receivers(num_replicas=6, me=5), Exponential().neighbours(num_replicas=6, me=5)
            ((0, 1, 3), (1, 3, 4))
        """
        return _powers_of_two_below(num_replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePeerExponential(_Circulant):
    """The exponential graph one edge at a time: in round t everyone sends to the one `2^(t mod log2 n)` ahead.

    One message a round. For a power of two, `log2(num_replicas)` rounds in a row bring all replicas exactly to the
    mean, from whichever round they start; for other numbers the mean is only approached (arXiv 2110.13363).
    """

    def distances(self, *, num_replicas: int, round_id: int) -> tuple[int, ...]:
        """Return the one power of two whose turn it is, or nothing for a single replica.

        Example:
            >>> [OnePeerExponential().distances(num_replicas=6, round_id=t) for t in range(4)]
            [(1,), (2,), (4,), (1,)]
        """
        powers = _powers_of_two_below(num_replicas)
        return (powers[round_id % len(powers)],) if powers else ()


def _powers_of_two_below(limit: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range((limit - 1).bit_length()))
