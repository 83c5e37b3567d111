"""Outer optimizers: from the mean pseudo-gradient to new global parameters, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch

from thinwire.sync.views import MatrixSpan


class OuterOptimizer(Protocol):
    """A step on one fragment's global value. It keeps at most one tensor, the momentum."""

    @property
    def has_momentum(self) -> bool:
        """Whether `step` needs a momentum tensor."""

    def step(self, value: torch.Tensor, pseudo_gradient: torch.Tensor, momentum: torch.Tensor | None) -> None:
        """Update `value` and `momentum` in place.

        Args:
            value: float32, `(numel,)`: the fragment's global parameters.
            pseudo_gradient: float32, `(numel,)`: mean of global minus local; may be overwritten.
            momentum: float32, `(numel,)`, zeros before the first step; None where `has_momentum` is False.
        """


@runtime_checkable
class NeedsMatrices(Protocol):
    """An outer optimizer that treats hidden matrices as such."""

    def with_matrices(self, matrices: Sequence[MatrixSpan]) -> OuterOptimizer:
        """Return the optimizer of one fragment, which holds these matrices."""

    def matrix_operations(self, matrices: Sequence[MatrixSpan]) -> float:
        """Return the float64 operations of the matrix products of a step on these matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSGD:
    """`value -= lr * pseudo_gradient`; with `lr=1` the global value becomes the mean of the local ones (FedAvg)."""

    has_momentum: ClassVar[bool] = False

    lr: float = 1.0

    def __post_init__(self) -> None:
        check_rates(self.lr, momentum=0.0)

    def step(self, value: torch.Tensor, pseudo_gradient: torch.Tensor, momentum: torch.Tensor | None) -> None:
        value.add_(pseudo_gradient, alpha=-self.lr)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeavyBall:
    """`torch.optim.SGD(momentum=mu)`: `m = mu m + d; value -= lr m`."""

    has_momentum: ClassVar[bool] = True

    lr: float
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_rates(self.lr, momentum=self.momentum)

    def step(self, value: torch.Tensor, pseudo_gradient: torch.Tensor, momentum: torch.Tensor | None) -> None:
        assert momentum is not None
        momentum.mul_(self.momentum).add_(pseudo_gradient)
        value.add_(momentum, alpha=-self.lr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nesterov(HeavyBall):
    """`torch.optim.SGD(nesterov=True)`, the same bits: `m = mu m + d; value -= lr (d + mu m)`.

    Source: arXiv 2311.08105, section 3 (the choice of the outer optimizer); the form of Nesterov's momentum is torch's.
    """

    def step(self, value: torch.Tensor, pseudo_gradient: torch.Tensor, momentum: torch.Tensor | None) -> None:
        assert momentum is not None
        momentum.mul_(self.momentum).add_(pseudo_gradient)
        value.add_(pseudo_gradient.add_(momentum, alpha=self.momentum), alpha=-self.lr)


def check_rates(lr: float, *, momentum: float) -> None:
    """Refuse an outer learning rate or momentum out of its range.

    Raises:
        ValueError: Names the value and the usual ones.
    """
    if not 0 < lr <= 10:
        raise ValueError(f"the outer lr must be in (0, 10], got {lr}; 0.4 to 0.8 is usual with Nesterov")
    if not 0 <= momentum < 1:
        raise ValueError(f"the outer momentum must be in [0, 1), got {momentum}")
