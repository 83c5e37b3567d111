"""What is exchanged: gradients before the inner step, or pseudo-gradients after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import nn

from thinwire.sync.blocks import find_blocks
from thinwire.sync.fragments import Pattern
from thinwire.sync.global_parameters import GlobalParameters, checksum
from thinwire.transport.shards import flatten, local_shard


class BoundView(Protocol):
    """A view on one replica's model."""

    @property
    def parameters(self) -> GlobalParameters:
        """The fragments with their global values."""
        ...

    def numel(self, fragment: int) -> int:
        """Return how many elements `read` gives."""
        ...

    def read(self, fragment: int) -> torch.Tensor:
        """Return what is sent of a fragment: float32, `(numel(fragment),)`, a new tensor on the model's device."""
        ...

    def reference_hash(self, fragment: int, *, step: int) -> int:
        """Return a hash of the global value that `read` refers to, 0 where none is told at this step."""
        ...


class View(Protocol):
    """What is exchanged, as a value; `bind` attaches it to a model."""

    @property
    def moment(self) -> Literal["before_inner_step", "after_inner_step"]:
        """When rounds are launched and applied, seen from the inner optimizer's step."""
        ...

    def bind(self, model: nn.Module) -> BoundView:
        """Find the fragments in a model and return the view on it.

        Raises:
            ValueError: The model does not fit.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PseudoGradient:
    """Global minus local parameters, by fragment. One sign, everywhere.

    Args:
        fragments: How the model is cut.
    """

    fragments: Pattern = field(default_factory=Pattern)

    @property
    def moment(self) -> Literal["before_inner_step", "after_inner_step"]:
        """After the inner step."""
        return "after_inner_step"

    def bind(self, model: nn.Module) -> BoundPseudoGradient:
        """See `View.bind`."""
        return BoundPseudoGradient(GlobalParameters(model, self.fragments.partition(find_blocks(model))))


class BoundPseudoGradient:
    """See `PseudoGradient`."""

    def __init__(self, parameters: GlobalParameters) -> None:
        self.parameters = parameters

    def numel(self, fragment: int) -> int:
        """See `BoundView.numel`."""
        return self.parameters.numel(fragment)

    def read(self, fragment: int) -> torch.Tensor:
        """See `BoundView.read`."""
        return self.parameters.pseudo_gradient(fragment)

    def reference_hash(self, fragment: int, *, step: int) -> int:
        """See `BoundView.reference_hash`."""
        return self.parameters.reference_hash(fragment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The gradients of all trainable parameters, as one fragment.

    A replica whose batch left a parameter without gradient counts as zero in the mean; a parameter that got none on any
    replica keeps none. One flag a parameter travels with the gradients to tell.

    Args:
        hash_interval: Every how many steps the parameters are hashed to prove that replicas agree.
    """

    hash_interval: int = 50

    @property
    def moment(self) -> Literal["before_inner_step", "after_inner_step"]:
        """Before the inner step."""
        return "before_inner_step"

    def bind(self, model: nn.Module) -> BoundGradient:
        """See `View.bind`."""
        names = Pattern(num_fragments=1).partition(find_blocks(model))[0]
        return BoundGradient(model, names, hash_interval=self.hash_interval)


class BoundGradient:
    """See `Gradient`."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], *, hash_interval: int) -> None:
        by_name = dict(model.named_parameters())
        self._tensors = [by_name[name] for name in names]
        self._hash_interval = hash_interval
        # every replica holds the global values in its own parameters already: no second copy
        self.parameters = GlobalParameters(model, [names], has_values=False)

    def numel(self, fragment: int) -> int:
        """See `BoundView.numel`."""
        return self.parameters.numel(0) + len(self._tensors)

    def read(self, fragment: int) -> torch.Tensor:
        """Return all gradients and, behind them, one flag a parameter: 1 where it has a gradient."""
        locals_ = self.parameters.locals(0)
        gradients = [
            torch.zeros_like(local) if parameter.grad is None else local_shard(parameter.grad)
            for parameter, local in zip(self._tensors, locals_, strict=True)
        ]
        flags = torch.tensor([0.0 if p.grad is None else 1.0 for p in self._tensors])
        return flatten([*gradients, flags], device=locals_[0].device)

    def write(self, mean: torch.Tensor) -> None:
        """Put mean gradients into the parameters' `.grad`."""
        start = 0
        flags = mean[mean.numel() - len(self._tensors) :].tolist()
        for parameter, local, flag in zip(self._tensors, self.parameters.locals(0), flags, strict=True):
            part = mean[start : start + local.numel()].view(local.shape)
            start += local.numel()
            if flag == 0:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local_shard(parameter.grad).copy_(part)

    def reference_hash(self, fragment: int, *, step: int) -> int:
        """Hash the parameters at every `hash_interval`-th step."""
        if step % self._hash_interval:
            return 0
        return checksum(flatten(self.parameters.locals(0)).cpu())
