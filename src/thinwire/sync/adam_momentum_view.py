"""Views on the state of an inner Adam or AdamW, for methods that send its momentum or step in its place.

The steps here are torch's own formulas (its implementation for single tensors), so that a step in Adam's place has the
same bits as Adam's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from thinwire.codecs.base import ordered_sum
from thinwire.sync.schedule import Round
from thinwire.sync.views import BoundGradient, GlobalParameters, Gradient, parts_like
from thinwire.tagged_state import same
from thinwire.transport.shards import real_shard

_REFUSED = {
    "amsgrad": "divides by a maximum that is not the variance",
    "maximize": "turns the gradients' signs",
    "differentiable": "keeps the graph of its steps",
}


def check_adam(inner: torch.optim.Optimizer | None) -> torch.optim.Adam | torch.optim.AdamW:
    """Return the inner optimizer if it is an Adam that a method can step in place of.

    Raises:
        ValueError: It is another optimizer, or has an option that this does not go with.
    """
    if not isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
        found = "nothing" if inner is None else type(inner).__name__
        raise ValueError(
            f"this method sends Adam's momentum and steps with its variance, but the inner optimizer is {found}; give "
            f"torch.optim.AdamW or torch.optim.Adam"
        )
    for group in inner.param_groups:
        for option, reason in _REFUSED.items():
            if group.get(option):
                raise ValueError(f"this method steps in Adam's place, but {option}=True {reason}; leave {option} out")
    return inner


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One parameter with its options and moments, this rank's shards.

    Attributes:
        parameter: The parameter.
        group: Its options as they are now; None where the inner optimizer does not hold it.
        state: The inner optimizer's state of it; empty before its first gradient.
        is_adamw: Whether the optimizer's class decouples weight decay from the gradient.
    """

    parameter: torch.Tensor
    group: dict[str, Any] | None
    state: dict[str, Any]
    is_adamw: bool

    @property
    def has_moments(self) -> bool:
        """Whether the parameter has had a gradient, on any replica."""
        return self.group is not None and "exp_avg" in self.state

    @property
    def value(self) -> torch.Tensor:
        return real_shard(self.parameter)

    @property
    def first(self) -> torch.Tensor:
        """m: the momentum, to read and to write."""
        return real_shard(self.state["exp_avg"])

    @property
    def second(self) -> torch.Tensor:
        """v: the variance, to read and to write."""
        return real_shard(self.state["exp_avg_sq"])

    @property
    def lr(self) -> float:
        return float(self.option("lr"))

    @property
    def eps(self) -> float:
        return float(self.option("eps"))

    @property
    def betas(self) -> tuple[float, float]:
        first, second = self.option("betas")
        return float(first), float(second)

    @property
    def decoupled_decay(self) -> float:
        """Weight decay that shrinks the parameter (AdamW)."""
        return float(self.option("weight_decay")) if self._is_decoupled else 0.0

    def option(self, name: str) -> Any:
        assert self.group is not None
        return self.group[name]

    def own_gradient(self) -> torch.Tensor | None:
        """Return the replica's own gradient, None where it has none."""
        return None if self.parameter.grad is None else real_shard(self.parameter.grad)

    def gradient(self) -> torch.Tensor:
        """Return the replica's own gradient, zeros where it has none, with the decay that belongs to it (Adam)."""
        found = self.own_gradient()
        return self.with_decay(torch.zeros_like(self.value) if found is None else found)

    def with_decay(self, gradient: torch.Tensor) -> torch.Tensor:
        """Add weight decay to a gradient where it belongs there (Adam), not where it is decoupled (AdamW)."""
        decay = float(self.option("weight_decay"))
        if self._is_decoupled or decay == 0:
            return gradient
        decayed: torch.Tensor = gradient.add(self.value, alpha=decay)
        return decayed

    def is_dead(self) -> torch.Tensor:
        """Return which elements have never had a gradient, so that their variance is 0: one bit has no code for 0."""
        return self.second == 0

    def begin(self) -> None:
        if self.state:
            return
        on_device = bool(self.option("capturable") or self.option("fused"))
        device = self.parameter.device if on_device else torch.device("cpu")
        self.state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        self.state["exp_avg"] = torch.zeros_like(self.parameter)
        self.state["exp_avg_sq"] = torch.zeros_like(self.parameter)

    def count_step(self) -> None:
        self.state["step"].add_(1)

    def denominator(self, *, updates: int) -> torch.Tensor:
        """Return `sqrt(v / (1 - beta2^updates)) + eps`."""
        correction = (1 - self.betas[1] ** updates) ** 0.5
        root: torch.Tensor = self.second.sqrt() / correction
        return root.add_(self.eps)

    def descend(self, *, steps: int, updates: int) -> None:
        """Step the parameter along the momentum, with decoupled decay.

        Args:
            steps: Gradients that the momentum has accumulated.
            updates: How many the variance has.
        """
        lr = self.lr
        if self.decoupled_decay != 0:
            self.value.mul_(1 - lr * self.decoupled_decay)
        step_size = lr / (1 - self.betas[0] ** steps)
        self.value.addcdiv_(self.first, self.denominator(updates=updates), value=-step_size)

    @property
    def _is_decoupled(self) -> bool:
        assert self.group is not None
        return bool(self.group.get("decoupled_weight_decay", self.is_adamw))


def equaliser(vector: torch.Tensor) -> float:
    """Return the power of two that brings a tensor's root mean square into [1/2, 1); 1 for zeros.

    Where tensors of different magnitudes share the scale of a 1-bit code, the small ones would drown (1-bit LAMB, arXiv
    2104.06069, multiplies momenta for that reason). A power of two multiplies and divides without rounding.

    Example:
        >>> equaliser(torch.tensor([0.1, -0.1])), equaliser(torch.zeros(3))
        (8.0, 1.0)
    """
    square = float(ordered_sum(vector.reshape(1, -1).to(torch.float64).square())) / max(1, vector.numel())
    if not (math.isfinite(square) and square > 0):
        return 1.0
    exponent = math.frexp(math.sqrt(square))[1]
    return math.ldexp(1.0, min(100, max(-100, -exponent)))


Fill = Callable[[int, Slot, torch.Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamMomentum:
    """Gradients in channel 0, and in channel 1 what Adam's momentum would be after the replica's own gradient.

    `m_i = beta1 m + (1 - beta1) g_i`, where m is the same on all replicas. Elements whose variance is zero have never
    had a gradient and go as zeros. Each tensor is multiplied by a power of two, fixed at the first such round, that
    brings the tensors to like magnitudes, since they share scales on the wire; `write` of the update divides by it.

    Args:
        hash_interval: Every how many steps the parameters are hashed to prove that replicas agree.
    """

    hash_interval: int = 50

    def bind(self, model: nn.Module, *, inner: torch.optim.Optimizer | None = None) -> BoundAdamMomentum:
        gradients = Gradient(hash_interval=self.hash_interval).bind(model)
        return BoundAdamMomentum(gradients, check_adam(inner))


@dataclass(slots=True)
class Factors:
    """Memory of an `AdamMomentum`; the state of its update holds it.

    Attributes:
        equalisers: By parameter, 0 where it is not known yet; empty before the first round.
    """

    equalisers: list[float] = same("factor of each parameter", default_factory=list)


class BoundAdamMomentum:
    """See `AdamMomentum`.

    Attributes:
        parameters: The fragments, of which there is one.
        gradients: The view on the gradients, for channel 0.
        inner: The inner optimizer.
        tensors: The model's parameters, in the order of what is sent.
        factors: What is remembered.
    """

    def __init__(self, gradients: BoundGradient, inner: torch.optim.Adam | torch.optim.AdamW) -> None:
        self.parameters: GlobalParameters = gradients.parameters
        self.gradients = gradients
        self.inner = inner
        self.tensors = gradients.parameters.parameters[0]
        self.factors = Factors()

    def slots(self) -> list[Slot]:
        """Return one slot a parameter, as options and state are now: loading a state replaces both."""
        groups = {id(p): group for group in self.inner.param_groups for p in group["params"]}
        is_adamw, state = isinstance(self.inner, torch.optim.AdamW), self.inner.state
        return [
            # reading a defaultdict would make an entry for parameters that the optimizer does not hold
            Slot(parameter=p, group=groups.get(id(p)), is_adamw=is_adamw, state=state[p] if id(p) in groups else {})
            for p in self.tensors
        ]

    def steps(self) -> list[int]:
        """Return how many steps each parameter has had; 0 without moments."""
        return [int(slot.state["step"]) if slot.has_moments else 0 for slot in self.slots()]

    def shapes(self, *, fragment: int, channel: int) -> tuple[torch.Size, ...]:
        if channel == 0:
            return self.gradients.shapes(fragment=fragment, channel=0)
        return tuple(real_shard(parameter).shape for parameter in self.tensors)

    def read(self, round: Round) -> torch.Tensor:
        return self.gradients.read(round) if round.channel == 0 else self._filled(_advanced_momentum)

    def read_last(self, fragment: int) -> torch.Tensor:
        raise NotImplementedError("momenta are exchanged at every step; nothing is left for a final exchange")

    def reference_hash(self, round: Round) -> int:
        return self.gradients.reference_hash(replace(round, channel=0))

    def received(self, mean: torch.Tensor) -> Iterator[tuple[int, Slot, torch.Tensor]]:
        """Split the mean of the vectors that `read` returned.

        Args:
            mean: float32, `(numel,)`; is overwritten.

        Yields:
            A parameter's index, its slot and its part of the mean, for those that have moments; dead elements are 0.
        """
        for index, (slot, part) in enumerate(zip(self.slots(), self.parts(mean), strict=True)):
            if slot.has_moments:
                part.div_(self.equalisers()[index]).masked_fill_(slot.is_dead(), 0)
                yield index, slot, part

    def parts(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield each parameter's part of a vector of all their sizes, in its shape."""
        return parts_like(flat, self.tensors)

    def equalisers(self) -> list[float]:
        """Return each tensor's factor, the same on all replicas, fixed once it has moments; 0 before."""
        found = self.factors.equalisers or [0.0 for _ in self.tensors]
        if not all(found):
            slots = self.slots()
            found = [
                f or (equaliser(self._magnitude(s)) if s.has_moments else 0.0)
                for f, s in zip(found, slots, strict=True)
            ]
        self.factors.equalisers = found
        return found

    def _magnitude(self, slot: Slot) -> torch.Tensor:
        return slot.first

    def _filled(self, fill: Fill) -> torch.Tensor:
        """Return a new vector of all parameters' size, filled part by part, equalised, zero where nothing lives."""
        slots = self.slots()
        flat = torch.zeros(self.parameters.numel(0), device=slots[0].value.device)
        for index, (slot, part) in enumerate(zip(slots, self.parts(flat), strict=True)):
            if slot.has_moments:
                fill(index, slot, part)
                part.masked_fill_(slot.is_dead(), 0).mul_(self.equalisers()[index])
        return flat


def _advanced_momentum(index: int, slot: Slot, into: torch.Tensor) -> None:
    into.copy_(slot.first).lerp_(slot.gradient().to(torch.float32), 1 - slot.betas[0])
