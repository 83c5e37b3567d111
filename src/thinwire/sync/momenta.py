"""Views on what an inner Adam remembers: gradients in the warm-up, momenta after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from thinwire.errors import CheckpointError
from thinwire.sync.adam_momentum_view import AdamState, Slot, check_adam, equaliser
from thinwire.sync.global_parameters import GlobalParameters
from thinwire.sync.schedule import Round
from thinwire.sync.views import BoundGradient, Gradient
from thinwire.transport.shards import local_shard

Fill = Callable[[int, Slot, torch.Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Momentum:
    """Gradients in channel 0, and in channel 1 what Adam's momentum would be after the replica's own gradient.

    `m_i = beta1 m + (1 - beta1) g_i`, where m is the same on all replicas. Elements whose variance is zero have never
    had a gradient and go as zeros. Each tensor is multiplied by a power of two, fixed at the first such round, that
    brings the tensors to like magnitudes, since they share scales on the wire; `write` of the update divides by it.

    Args:
        hash_interval: Every how many steps the parameters are hashed to prove that replicas agree.
    """

    hash_interval: int = 50

    @property
    def moment(self) -> Literal["before_inner_step", "after_inner_step"]:
        """Before the inner step."""
        return "before_inner_step"

    def bind(self, model: nn.Module, *, inner: torch.optim.Optimizer | None = None) -> BoundMomentum:
        """See `View.bind`."""
        gradients = Gradient(hash_interval=self.hash_interval).bind(model)
        return BoundMomentum(gradients, AdamState(check_adam(inner), gradients.parameters.parameters[0]))


class BoundMomentum:
    """See `Momentum`.

    Attributes:
        parameters: The fragments, of which there is one.
        gradients: The view on the gradients, for channel 0.
        adam: The inner optimizer's state.
    """

    def __init__(self, gradients: BoundGradient, adam: AdamState) -> None:
        self.parameters: GlobalParameters = gradients.parameters
        self.gradients = gradients
        self.adam = adam
        self._equalisers: list[float] = []

    def shapes(self, *, fragment: int, channel: int) -> tuple[torch.Size, ...]:
        """See `BoundView.shapes`."""
        if channel == 0:
            return self.gradients.shapes(fragment=fragment, channel=0)
        return tuple(local_shard(parameter).shape for parameter in self.adam.parameters)

    def read(self, round: Round) -> torch.Tensor:
        """See `BoundView.read`."""
        return self.gradients.read(round) if round.channel == 0 else self._filled(_advanced_momentum)

    def read_last(self, fragment: int) -> torch.Tensor:
        """There is no final exchange."""
        raise NotImplementedError("momenta are exchanged at every step; nothing is left for a final exchange")

    def reference_hash(self, round: Round) -> int:
        """Hash the parameters at every `hash_interval`-th step."""
        return self.gradients.reference_hash(replace(round, channel=0))

    def received(self, mean: torch.Tensor) -> Iterator[tuple[int, Slot, torch.Tensor]]:
        """Take a mean of what `read` gave apart.

        Args:
            mean: float32, `(numel,)`; is overwritten.

        Yields:
            A parameter's index, its slot and its part of the mean, for those that have moments; dead elements are 0.
        """
        for index, (slot, part) in enumerate(zip(self.adam.slots(), self.parts(mean), strict=True)):
            if slot.has_moments:
                part.div_(self.equalisers()[index]).masked_fill_(slot.is_dead(), 0)
                yield index, slot, part

    def parts(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield each parameter's part of a vector of their size, in its shape."""
        start = 0
        for parameter in self.adam.parameters:
            shape = local_shard(parameter).shape
            yield flat[start : start + shape.numel()].view(shape)
            start += shape.numel()

    def equalisers(self) -> list[float]:
        """Return each tensor's factor, the same on all replicas, fixed once it has moments; 0 before."""
        found = self._equalisers or [0.0 for _ in self.adam.parameters]
        if not all(found):
            slots = self.adam.slots()
            found = [
                f or (equaliser(self._magnitude(s)) if s.has_moments else 0.0)
                for f, s in zip(found, slots, strict=True)
            ]
        self._equalisers = found
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return what the view remembers, for the update's state."""
        return {"equalisers": torch.tensor(self._equalisers, dtype=torch.float64)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back.

        Raises:
            CheckpointError: It is of another number of parameters.
        """
        found = state["equalisers"].tolist()
        if len(found) not in (0, len(self.adam.parameters)):
            raise CheckpointError(
                f"the checkpoint has factors for {len(found)} parameters, this run has {len(self.adam.parameters)}"
            )
        self._equalisers = found

    def _magnitude(self, slot: Slot) -> torch.Tensor:
        return slot.first

    def _filled(self, fill: Fill) -> torch.Tensor:
        """Return a new vector of all parameters' size, filled part by part, equalised, zero where nothing lives."""
        slots = self.adam.slots()
        flat = torch.zeros(self.parameters.numel(0), device=slots[0].value.device)
        for index, (slot, part) in enumerate(zip(slots, self.parts(flat), strict=True)):
            if slot.has_moments:
                fill(index, slot, part)
                part.masked_fill_(slot.is_dead(), 0).mul_(self.equalisers()[index])
        return flat


def _advanced_momentum(index: int, slot: Slot, into: torch.Tensor) -> None:
    into.copy_(slot.first).lerp_(slot.gradient().to(torch.float32), 1 - slot.betas[0])
