"""Outer optimizers: from the mean pseudo-gradient to new global parameters, in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class OuterOptimizer(Protocol):
    """A step on one fragment's global value. It keeps at most one tensor, the momentum."""

    @property
    def has_momentum(self) -> bool:
        """Whether `step` needs a momentum tensor."""
        ...

    def step(self, value: torch.Tensor, pseudo_gradient: torch.Tensor, momentum: torch.Tensor | None) -> None:
        """Update `value` and `momentum` in place.

        Args:
            value: float32, `(numel,)`: the fragment's global parameters.
            pseudo_gradient: float32, `(numel,)`: mean of global minus local; may be overwritten.
            momentum: float32, `(numel,)`, zeros before the first step; None where `has_momentum` is False.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSGD:
    """`value -= lr * pseudo_gradient`; with `lr=1` the global value becomes the mean of the local ones (FedAvg)."""

    lr: float = 1.0

    def __post_init__(self) -> None:
        """Check the range."""
        _check(self.lr, momentum=0.0)

    @property
    def has_momentum(self) -> bool:
        """No momentum."""
        return False

    def step(self, value: torch.Tensor, pseudo_gradient: torch.Tensor, momentum: torch.Tensor | None) -> None:
        """See `OuterOptimizer.step`."""
        value.add_(pseudo_gradient, alpha=-self.lr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nesterov:
    """`torch.optim.SGD(nesterov=True)`, the same bits: `m = mu m + d; value -= lr (d + mu m)`.

    Source: arXiv 2311.08105, section 3 (the choice of the outer optimizer); the form of Nesterov's momentum is torch's.
    """

    lr: float
    momentum: float = 0.9

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check(self.lr, momentum=self.momentum)

    @property
    def has_momentum(self) -> bool:
        """Keeps the momentum."""
        return True

    def step(self, value: torch.Tensor, pseudo_gradient: torch.Tensor, momentum: torch.Tensor | None) -> None:
        """See `OuterOptimizer.step`."""
        assert momentum is not None
        momentum.mul_(self.momentum).add_(pseudo_gradient)
        value.add_(pseudo_gradient.add_(momentum, alpha=self.momentum), alpha=-self.lr)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeavyBall:
    """`torch.optim.SGD(momentum=mu)`: `m = mu m + d; value -= lr m`."""

    lr: float
    momentum: float = 0.9

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check(self.lr, momentum=self.momentum)

    @property
    def has_momentum(self) -> bool:
        """Keeps the momentum."""
        return True

    def step(self, value: torch.Tensor, pseudo_gradient: torch.Tensor, momentum: torch.Tensor | None) -> None:
        """See `OuterOptimizer.step`."""
        assert momentum is not None
        momentum.mul_(self.momentum).add_(pseudo_gradient)
        value.add_(momentum, alpha=-self.lr)


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleHeavyBall:
    """Heavy ball for pseudo-gradients that come a round late (CO2, arXiv 2401.16265).

    `m = mu m + d / gap`, each element of m cut to [-clip, clip], `value -= lr m`, with

        gap = 1 + |lr m_before| / |d|

    `lr m_before` is the step that the value has taken since the point that d was measured from, so the gap tells how
    many rounds' worth of movement lie between the two. It is 1 before the first step, and where d is zero.

    Args:
        lr: The outer learning rate.
        momentum: mu.
        has_gap_penalty: Whether d is divided by the gap; False for 1.
        clip: Largest magnitude of an element of the momentum; None cuts nothing.

    Raises:
        ValueError: A number is out of its range.
    """

    lr: float
    momentum: float = 0.5
    has_gap_penalty: bool = True
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check(self.lr, momentum=self.momentum)
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"the outer clip must be positive, got {self.clip}; None cuts nothing")

    @property
    def has_momentum(self) -> bool:
        """Keeps the momentum."""
        return True

    def step(self, value: torch.Tensor, pseudo_gradient: torch.Tensor, momentum: torch.Tensor | None) -> None:
        """See `OuterOptimizer.step`."""
        assert momentum is not None
        gap = self.gap(pseudo_gradient, momentum) if self.has_gap_penalty else 1.0
        momentum.mul_(self.momentum).add_(pseudo_gradient.div_(gap))
        if self.clip is not None:
            momentum.clamp_(-self.clip, self.clip)
        value.add_(momentum, alpha=-self.lr)

    def gap(self, pseudo_gradient: torch.Tensor, momentum: torch.Tensor) -> float:
        """Return the staleness gap, at least 1.

        A sum's last bits depend on the machine, and all replicas must divide by the same number: so it is summed in
        float64 and rounded to 2**-10, which leaves no room for them short of a tie.
        """
        moved = self.lr * float(torch.linalg.vector_norm(momentum, dtype=torch.float64))
        measured = float(torch.linalg.vector_norm(pseudo_gradient, dtype=torch.float64))
        return 1.0 + round(1024 * moved / measured) / 1024 if measured > 0 else 1.0


def _check(lr: float, *, momentum: float) -> None:
    if not 0 < lr <= 10:
        raise ValueError(f"the outer lr must be in (0, 10], got {lr}; 0.4 to 0.8 is usual with Nesterov")
    if not 0 <= momentum < 1:
        raise ValueError(f"the outer momentum must be in [0, 1), got {momentum}")
