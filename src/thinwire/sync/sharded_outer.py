"""The outer momentum in shards: a replica keeps that of the part of the model whose mean it makes (CO2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from thinwire.errors import CheckpointError
from thinwire.sync.outer import OuterOptimizer


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


class BoundShardedMomentum:
    """See `ShardedMomentum`."""

    def __init__(self, optimizer: OuterOptimizer, numel: int) -> None:
        self._optimizer = optimizer
        self._momentum = torch.zeros(numel)

    def before(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outer step, by which the value shall decrease; see `BoundMemory.before`."""
        self._momentum = self._momentum.to(x.device)
        moved = torch.zeros_like(x)
        self._optimizer.step(moved, x.clone(), self._momentum)
        return moved.neg_()

    def after(self, sent: torch.Tensor) -> None:
        """See `BoundMemory.after`: what the code drops is not remembered."""

    def received(self, mean: torch.Tensor) -> torch.Tensor:
        """See `BoundMemory.received`."""
        return mean

    @property
    def shared(self) -> torch.Tensor | None:
        """See `BoundMemory.shared`: nobody else has it."""
        return None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the shard's momentum."""
        return {"outer momentum": self._momentum}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """See `BoundMemory.load_state_dict`."""
        found = state.get("outer momentum")
        if found is None or found.shape != self._momentum.shape:
            raise CheckpointError(
                f"the checkpoint holds no outer momentum of {self._momentum.numel()} elements for this shard; resume "
                f"with as many replicas, or by adopt_state_dict"
            )
        self._momentum = found.to(torch.float32).clone()
