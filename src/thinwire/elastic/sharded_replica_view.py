"""View of a sharded replica: one rank gathers whole fragments from all ranks and exchanges them.

The rank that leads holds the global values whole, and alone speaks for its replica; the others hold shards of the local
parameters and nothing else of the exchange. So a part has the same bytes whatever number of ranks made it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from thinwire.sync.blocks import find_blocks
from thinwire.sync.global_parameters import GlobalParameters
from thinwire.sync.views import PseudoGradient


class ReplicaShards(Protocol):
    """A replica's local parameters on all of its ranks, seen from the rank that leads."""

    def gather(self, names: Sequence[str]) -> torch.Tensor:
        """Return tensors whole, one behind the other: float32, `(numel,)`, new, on the leading rank's device."""
        ...

    def scatter(self, names: Sequence[str], values: torch.Tensor, *, blend: float = 0.0) -> None:
        """Set tensors to `blend * their own + (1 - blend) * values`; `values` as `gather` returns them."""
        ...

    def keep(self) -> None:
        """Let every rank copy its shards aside."""
        ...

    def restore(self) -> None:
        """Let every rank put back what it copied aside, bit for bit."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedReplicaPseudoGradient(PseudoGradient):
    """See `PseudoGradient`; of a model whose other shards are on other ranks.

    Args:
        pieces: Reaches all shards.
    """

    pieces: ReplicaShards = field(compare=False, repr=False)

    def cut(self, model: nn.Module) -> GlobalParameters:
        """See `PseudoGradient.cut`."""
        return ShardedReplicaParameters(model, self.fragments.partition(find_blocks(model)), pieces=self.pieces)


class ShardedReplicaParameters(GlobalParameters):
    """See `GlobalParameters`; values are whole, and the local ones are gathered and scattered.

    Args:
        model: This rank's part of the model: DTensors, which know their whole shapes.
        fragments: The names of each fragment's parameters.
        pieces: Reaches all shards.
    """

    def __init__(self, model: nn.Module, fragments: Sequence[Sequence[str]], *, pieces: ReplicaShards) -> None:
        self._pieces = pieces
        super().__init__(model, fragments)

    def locals(self, fragment: int) -> list[torch.Tensor]:
        """There are no whole tensors to write into; see `read` and `write`."""
        raise NotImplementedError("the local parameters lie on several ranks; use read() and write()")

    def shapes(self, fragment: int) -> tuple[torch.Size, ...]:
        """See `GlobalParameters.shapes`: whole ones."""
        return tuple(parameter.shape for parameter in self.parameters[fragment])

    @property
    def is_sharded(self) -> bool:
        """Never: what is exchanged and applied here is whole."""
        return False

    def read(self, fragment: int) -> torch.Tensor:
        """See `GlobalParameters.read`."""
        return self._pieces.gather(self.fragments[fragment])

    def write(self, fragment: int, value: torch.Tensor) -> None:
        """See `GlobalParameters.write`."""
        self._pieces.scatter(self.fragments[fragment], value)

    def read_whole(self, name: str) -> torch.Tensor:
        """See `GlobalParameters.read_whole`."""
        tensor = self._by_name[name]
        return self._pieces.gather([name]).view(tensor.shape).to(tensor.dtype).cpu()

    def write_whole(self, name: str, value: torch.Tensor) -> None:
        """See `GlobalParameters.write_whole`."""
        self._pieces.scatter([name], value.reshape(-1).float())

    def blend_into_locals(self, fragment: int, *, blend: float) -> None:
        """See `GlobalParameters.blend_into_locals`; each rank blends its own shards."""
        self._pieces.scatter(self.fragments[fragment], self.values[fragment], blend=blend)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """See `GlobalParameters.in_model`."""
        self._pieces.keep()
        try:
            for fragment in range(self.num_fragments):
                self.blend_into_locals(fragment, blend=0.0)
            yield
        finally:
            self._pieces.restore()
