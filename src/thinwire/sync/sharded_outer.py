"""The outer momentum in shards: a replica keeps that of the part of the model whose mean it makes (CO2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.codecs.error_feedback import Vectors
from thinwire.sync.outer_optimizer import OuterOptimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedMomentum:
    """The owner of a shard turns its mean into the outer step, and sends that in the mean's place.

    As `TwoPhase(owner_memory=...)`: the owner's momentum is the only one of its shard, so M replicas keep one copy
    together, and what travels has the same size. All replicas then apply what comes by `PlainSGD(lr=1)`. What an
    optimizer computes over a whole vector (CO2's staleness gap), it computes over the shard here.

    Args:
        optimizer: From the mean pseudo-gradient to the step.
    """

    optimizer: OuterOptimizer

    def bind(self, numel: int) -> BoundShardedMomentum:
        """See `Memory.bind`."""
        return BoundShardedMomentum(self.optimizer, numel)


class BoundShardedMomentum(Vectors):
    """See `ShardedMomentum`."""

    def __init__(self, optimizer: OuterOptimizer, numel: int) -> None:
        super().__init__(numel, "outer momentum")
        self._optimizer = optimizer

    def before(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outer step, by which the value shall decrease; see `BoundMemory.before`."""
        moved = torch.zeros_like(x)
        self._optimizer.step(moved, x.clone(), self.there("outer momentum", x))
        return moved.neg_()

    def after(self, sent: torch.Tensor) -> None:
        """See `BoundMemory.after`: what the code drops is not remembered."""

    def received(self, mean: torch.Tensor) -> torch.Tensor:
        """See `BoundMemory.received`."""
        return mean
