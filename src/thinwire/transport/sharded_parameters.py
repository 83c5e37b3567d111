"""Parameters whose shards lie on all ranks of a replica: brought whole to the one that leads, and dealt out again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from thinwire.transport.shards import drop_gathered, flatten, local_shard, unflatten_into

if TYPE_CHECKING:
    from thinwire.transport.replica_group import InnerGroup  # imports FSDP, which takes a second


class ShardedParameters:
    """A rank's shards, and what all ranks of its replica do with theirs at the same time.

    Every method is called by all ranks of the replica, in the same order and with the same names. Values travel as
    float32, which holds every number of the narrower dtypes.

    Args:
        group: The replica's ranks.
        model: Sharded by `group.shard`: along the first dimension, in the order of the ranks; a shard may be empty.

    Attributes:
        names: Of all parameters, as `model.named_parameters()` gives them.
    """

    def __init__(self, group: InnerGroup, model: nn.Module) -> None:
        self._group = group
        self._model = model
        self._tensors = dict(model.named_parameters())
        self.names = tuple(self._tensors)
        sizes = group.tell_all([local_shard(tensor).numel() for tensor in self._tensors.values()])
        self._sizes = {name: [of_rank[index] for of_rank in sizes] for index, name in enumerate(self.names)}
        self._kept: list[torch.Tensor] = []

    def gather(self, names: Sequence[str]) -> torch.Tensor:
        """Bring tensors to the rank that leads, bit for bit.

        Returns:
            The whole tensors, one behind the other: float32, `(numel,)`, on the group's device; elsewhere nothing.
        """
        own = flatten([local_shard(self._tensors[name]) for name in names], device=self._group.device)
        by_rank = self._group.gather(own, sizes=self._rank_sizes(names))
        starts = [0] * len(by_rank)
        pieces = []
        for name in names if by_rank else ():
            for rank, size in enumerate(self._sizes[name]):
                pieces.append(by_rank[rank][starts[rank] : starts[rank] + size])
                starts[rank] += size
        return torch.cat(pieces) if pieces else own.new_empty(0)

    def scatter(self, names: Sequence[str], values: torch.Tensor | None, *, blend: float = 0.0) -> None:
        """Set all ranks' shards to `blend * their own + (1 - blend) * values`.

        Args:
            names: Of the tensors.
            values: At the rank that leads as `gather` returns them, on any device; elsewhere None.
            blend: Weight of what is there.
        """
        own = [local_shard(self._tensors[name]) for name in names]
        parts = [] if values is None else self._cut(names, values.to(self._group.device))
        room = torch.empty(sum(t.numel() for t in own), dtype=torch.float32, device=self._group.device)
        target = self._group.deal(parts, own=room)
        if blend > 0:
            target = torch.lerp(flatten(own, device=self._group.device), target, 1 - blend)
        with torch.no_grad():
            unflatten_into(target, own)

    def keep(self) -> None:
        """Copy the shards aside."""
        drop_gathered(self._model)
        self._kept = [local_shard(tensor).clone() for tensor in self._tensors.values()]

    def restore(self) -> None:
        """Put back what `keep` copied, bit for bit."""
        drop_gathered(self._model)
        with torch.no_grad():
            for tensor, kept in zip(self._tensors.values(), self._kept, strict=True):
                local_shard(tensor).copy_(kept)
        self._kept = []

    def _cut(self, names: Sequence[str], values: torch.Tensor) -> list[torch.Tensor]:
        """Cut whole tensors, one behind the other, into what each rank holds of them."""
        pieces = torch.split(values, [size for name in names for size in self._sizes[name]])
        num_ranks = self._group.size
        return [torch.cat(pieces[rank::num_ranks]) for rank in range(num_ranks)]

    def _rank_sizes(self, names: Sequence[str]) -> list[int]:
        return [sum(self._sizes[name][rank] for name in names) for rank in range(self._group.size)]
