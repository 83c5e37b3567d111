"""Views: the vectors that are exchanged, gradients before the inner step or pseudo-gradients after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from thinwire.sync.fragments import Pattern, find_blocks, parameters_by_name
from thinwire.sync.global_parameters import GlobalParameters, checksum
from thinwire.sync.schedule import Round
from thinwire.sync.weight_copies import copies_of
from thinwire.transport.shards import flatten, gradient_shard, real_shard


class BoundView(Protocol):
    """A view on one replica's model."""

    @property
    def parameters(self) -> GlobalParameters:
        """The fragments with their global values."""
        ...

    def shapes(self, *, fragment: int, channel: int) -> tuple[torch.Size, ...]:
        """Return the shapes of the tensors that `read` gives, one behind the other."""
        ...

    def read(self, round: Round) -> torch.Tensor:
        """Return what is sent in a round: float32, one-dimensional, a new tensor on the model's device."""
        ...

    def read_last(self, fragment: int) -> torch.Tensor:
        """Return what is sent of a fragment in the final exchange; see `read`."""
        ...

    def reference_hash(self, round: Round) -> int:
        """Return a hash of the global value that `read` refers to, 0 where none is sent in this round."""
        ...


class View(Protocol):
    """The choice of what is exchanged, as a value; `bind` attaches it to a model."""

    def bind(self, model: nn.Module, *, inner: torch.optim.Optimizer | None = None) -> BoundView:
        """Find the fragments in a model and return the view on it.

        Args:
            model: The replica's model.
            inner: Its optimizer, for views on what that remembers.

        Raises:
            ValueError: The model or the optimizer does not fit.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PseudoGradient:
    """Global minus local parameters, by fragment. One sign, everywhere.

    Args:
        fragments: How the model is cut.
    """

    fragments: Pattern = field(default_factory=Pattern)

    def bind(self, model: nn.Module, *, inner: torch.optim.Optimizer | None = None) -> BoundPseudoGradient:
        return BoundPseudoGradient(self, self.cut(model, inner))

    def read(self, parameters: GlobalParameters, round: Round) -> torch.Tensor:
        """Return what is sent in a round; see `BoundView.read`."""
        return parameters.pseudo_gradient(round.fragment)

    def read_last(self, parameters: GlobalParameters, fragment: int) -> torch.Tensor:
        """Return what is sent in the final exchange; see `BoundView.read_last`."""
        return parameters.pseudo_gradient(fragment)

    def reference_hash(self, parameters: GlobalParameters, round: Round) -> int:
        """Return the hash of the value that `read` refers to; see `BoundView.reference_hash`."""
        return parameters.reference_hash(round.fragment)

    def cut(self, model: nn.Module, inner: torch.optim.Optimizer | None) -> GlobalParameters:
        """Return the model's fragments with their global values.

        Raises:
            ValueError: The inner optimizer would undo what rounds write into the model.
        """
        copies = copies_of(inner)
        copies.check()
        return GlobalParameters(model, self.fragments.partition(find_blocks(model)), copies=copies)


class BoundPseudoGradient:
    """A `PseudoGradient` of some kind on a model.

    Attributes:
        spec: The kind.
        parameters: The fragments with their global values.
    """

    def __init__(self, spec: PseudoGradient, parameters: GlobalParameters) -> None:
        self.spec = spec
        self.parameters = parameters

    def shapes(self, *, fragment: int, channel: int) -> tuple[torch.Size, ...]:
        return self.parameters.shapes(fragment)

    def read(self, round: Round) -> torch.Tensor:
        return self.spec.read(self.parameters, round)

    def read_last(self, fragment: int) -> torch.Tensor:
        return self.spec.read_last(self.parameters, fragment)

    def reference_hash(self, round: Round) -> int:
        return self.spec.reference_hash(self.parameters, round)


def kind_of_view(view: BoundView) -> type[PseudoGradient] | None:
    """Return the kind of pseudo-gradient that a view reads, None where it reads something else."""
    return type(view.spec) if isinstance(view, BoundPseudoGradient) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPseudoGradient(PseudoGradient):
    """The pseudo-gradient against a global value that is the replica's own; see `PseudoGradient`.

    The final exchange is about the local parameters themselves: their mean is the same on all replicas, while a mean
    of differences to values that differ would not be.
    """

    def cut(self, model: nn.Module, inner: torch.optim.Optimizer | None) -> GlobalParameters:
        parameters = PseudoGradient.cut(self, model, inner)
        parameters.need_float32("this method's last exchange sends the parameters themselves")
        return parameters

    def read_last(self, parameters: GlobalParameters, fragment: int) -> torch.Tensor:
        """Return the local parameters."""
        return parameters.read(fragment)

    def reference_hash(self, parameters: GlobalParameters, round: Round) -> int:
        """Return 0: replicas hold different values, and that is meant."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The gradients of all trainable parameters, as one fragment.

    A replica whose batch left a parameter without gradient counts as zero in the mean; a parameter that got none on any
    replica keeps none. One flag a parameter travels with the gradients to mark that.

    Args:
        hash_interval: Every how many steps the parameters are hashed to prove that replicas agree; 0 for never.
        is_split: Whether matrices (tensors of two dimensions and more) travel in channel 0, and the rest with the flags
            in channel 1: codes that drop most of a matrix would hurt biases and norms for few bytes.
    """

    hash_interval: int = 50
    is_split: bool = False

    def bind(self, model: nn.Module, *, inner: torch.optim.Optimizer | None = None) -> BoundGradient:
        names = Pattern(num_fragments=1).partition(find_blocks(model))[0]
        return BoundGradient(self, model, names)


class BoundGradient:
    """See `Gradient`."""

    def __init__(self, spec: Gradient, model: nn.Module, names: tuple[str, ...]) -> None:
        by_name = parameters_by_name(model)
        tensors = [by_name[name] for name in names]
        self._channels = [tensors]
        if spec.is_split:
            self._channels = [[t for t in tensors if t.dim() >= 2], [t for t in tensors if t.dim() < 2]]
        self._tensors = [tensor for channel in self._channels for tensor in channel]
        self._sparse = {id(m.weight) for m in model.modules() if getattr(m, "sparse", False) and hasattr(m, "weight")}
        self._hash_interval = spec.hash_interval
        self._arrived: list[torch.Tensor] = []
        # every replica holds the global values in its own parameters already: no second copy
        self.parameters = GlobalParameters(model, [names], has_values=False)

    def shapes(self, *, fragment: int, channel: int) -> tuple[torch.Size, ...]:
        shapes = [real_shard(tensor).shape for tensor in self._channels[channel]]
        if self._is_last(channel):
            shapes.append(torch.Size([len(self._tensors)]))
        return tuple(shapes)

    def read(self, round: Round) -> torch.Tensor:
        """Return a channel's gradients; behind the last, one flag a parameter: 1 where it has a gradient."""
        tensors = self._channels[round.channel]
        found = [gradient_shard(tensor) for tensor in tensors]
        self._sparse |= {id(t) for t in tensors if t.grad is not None and t.grad.layout == torch.sparse_coo}
        if self._is_last(round.channel):
            found.append(torch.tensor([0.0 if t.grad is None else 1.0 for t in self._tensors]))
        return flatten(found, device=real_shard(self._tensors[0]).device)

    def read_last(self, fragment: int) -> torch.Tensor:
        """There is no final exchange of gradients."""
        raise NotImplementedError("gradients are exchanged at every step; nothing is left for a final exchange")

    def write(self, round: Round, mean: torch.Tensor) -> None:
        """Put mean gradients into the parameters' `.grad`, once the last channel's have come with the flags."""
        self._arrived.append(mean)
        if not self._is_last(round.channel):
            return
        flags = mean[mean.numel() - len(self._tensors) :].tolist()
        parts = [
            part for channel, flat in zip(self._channels, self._arrived, strict=True) for part in _cut(flat, channel)
        ]
        self._arrived = []
        for parameter, part, flag in zip(self._tensors, parts, flags, strict=True):
            if flag == 0:  # this replica's own may be there where it and others sent nothing
                parameter.grad = None
                continue
            if parameter.grad is None or parameter.grad.layout != torch.strided:
                parameter.grad = torch.zeros_like(parameter)
            real_shard(parameter.grad).copy_(part)
            if id(parameter) in self._sparse:  # its optimizer takes rows alone
                parameter.grad = parameter.grad.to_sparse(1)

    def reference_hash(self, round: Round) -> int:
        """Hash the parameters at every `hash_interval`-th step."""
        if not self._hash_interval or round.launch_step % self._hash_interval or round.channel:
            return 0
        return checksum(flatten(self.parameters.locals(0)).cpu())

    def _is_last(self, channel: int) -> bool:
        return channel == len(self._channels) - 1


def _cut(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    start = 0
    for tensor in tensors:
        shape = real_shard(tensor).shape
        yield flat[start : start + shape.numel()].view(shape)
        start += shape.numel()
