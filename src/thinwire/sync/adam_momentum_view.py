"""What an inner torch.optim.Adam or AdamW remembers, for methods that send it or step in its place.

The steps here are torch's own formulas (its implementation for single tensors), so that a step in Adam's place has the
same bits as Adam's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.codecs.ordered_sum import ordered_sum
from thinwire.transport.shards import local_shard

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
        state: What the inner optimizer remembers of it; empty before its first gradient.
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
        """The parameter itself, to read and to write."""
        return local_shard(self.parameter)

    @property
    def first(self) -> torch.Tensor:
        """m: the momentum, to read and to write."""
        return local_shard(self.state["exp_avg"])

    @property
    def second(self) -> torch.Tensor:
        """v: the variance, to read and to write."""
        return local_shard(self.state["exp_avg_sq"])

    @property
    def lr(self) -> float:
        """The learning rate as a scheduler has left it."""
        return float(self.option("lr"))

    @property
    def eps(self) -> float:
        """What is added to the root of the variance."""
        return float(self.option("eps"))

    @property
    def betas(self) -> tuple[float, float]:
        """The decays of momentum and variance."""
        first, second = self.option("betas")
        return float(first), float(second)

    @property
    def decoupled_decay(self) -> float:
        """Weight decay that shrinks the parameter (AdamW)."""
        return float(self.option("weight_decay")) if self._is_decoupled else 0.0

    def option(self, name: str) -> Any:
        """Return an option of the parameter's group."""
        assert self.group is not None
        return self.group[name]

    def own_gradient(self) -> torch.Tensor | None:
        """Return the replica's own gradient, None where it has none."""
        return None if self.parameter.grad is None else local_shard(self.parameter.grad)

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
        """Return which elements have never had a gradient, so that their variance is 0: one bit cannot say 0."""
        return self.second == 0

    def begin(self) -> None:
        """Make the moments as torch does, where there are none."""
        if self.state:
            return
        on_device = bool(self.option("capturable") or self.option("fused"))
        device = self.parameter.device if on_device else torch.device("cpu")
        self.state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        self.state["exp_avg"] = torch.zeros_like(self.parameter)
        self.state["exp_avg_sq"] = torch.zeros_like(self.parameter)

    def count_step(self) -> None:
        """Count one more step where torch does."""
        self.state["step"].add_(1)

    def denominator(self, *, updates: int) -> torch.Tensor:
        """Return `sqrt(v / (1 - beta2^updates)) + eps`."""
        correction = (1 - self.betas[1] ** updates) ** 0.5
        root: torch.Tensor = self.second.sqrt() / correction
        return root.add_(self.eps)

    def descend(self, *, steps: int, updates: int) -> None:
        """Step the parameter along the momentum, with decoupled decay.

        Args:
            steps: How many gradients the momentum has taken in.
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


class AdamState:
    """The slots of a list of parameters.

    Args:
        inner: As `check_adam` returned it.
        parameters: In the order of what is sent.
    """

    def __init__(self, inner: torch.optim.Adam | torch.optim.AdamW, parameters: Sequence[torch.Tensor]) -> None:
        self._inner = inner
        self._parameters = list(parameters)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters."""
        return self._parameters

    def slots(self) -> list[Slot]:
        """Return one slot a parameter, as options and state are now: loading a state replaces both."""
        groups = {id(p): group for group in self._inner.param_groups for p in group["params"]}
        is_adamw = isinstance(self._inner, torch.optim.AdamW)
        return [
            Slot(
                parameter=p,
                group=groups.get(id(p)),
                is_adamw=is_adamw,
                state=self._state_of(p, is_held=id(p) in groups),
            )
            for p in self._parameters
        ]

    def steps(self) -> list[int]:
        """Return how many steps each parameter has had; 0 without moments."""
        return [int(slot.state["step"]) if slot.has_moments else 0 for slot in self.slots()]

    def _state_of(self, parameter: torch.Tensor, *, is_held: bool) -> dict[str, Any]:
        # a look at a defaultdict would make an entry for parameters that the optimizer does not hold
        found: dict[str, Any] = self._inner.state[parameter] if is_held else {}
        return found


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
