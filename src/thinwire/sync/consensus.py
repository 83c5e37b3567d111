"""Outer steps without a common global value: each replica has its own, and pulls it towards those of its group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from thinwire.averaging.round_context import Average
from thinwire.sync.global_parameters import load_waiting
from thinwire.sync.outer_optimizer import HeavyBall
from thinwire.sync.schedule import Round
from thinwire.sync.updates import BoundOuterStep, OuterStep
from thinwire.sync.views import BoundOwnPseudoGradient, BoundView, OwnPseudoGradient


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowWeightsAndPseudoGradient(OwnPseudoGradient):
    """The replica's own global value in channel 0, and its pseudo-gradient in channel 1; see `OwnPseudoGradient`."""

    def bind(self, model: nn.Module, *, inner: torch.optim.Optimizer | None = None) -> BoundSlowWeights:
        """See `View.bind`."""
        return BoundSlowWeights(self.cut(model))


class BoundSlowWeights(BoundOwnPseudoGradient):
    """See `SlowWeightsAndPseudoGradient`."""

    def read(self, round: Round) -> torch.Tensor:
        """See `BoundView.read`; slow weights stay in host memory, so that they rest there until they are needed."""
        if round.channel == 0:
            return self.parameters.values[round.fragment].clone()
        return super().read(round)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsensusStep:
    """Heavy-ball momentum on the group's mean pseudo-gradient, and on the distance to the group's mean value.

    With phi this replica's global value, d the pseudo-gradient, and means over the replica's group,

        m = alpha m + beta mean(d) + gamma (phi - mean(phi)),   phi -= m

    (arXiv 2506.10911, equation 2, with m = -delta). `phi - mean(phi)` sums to zero over a group, so the mean of all
    replicas moves by heavy ball on the mean of all pseudo-gradients, whatever the groups are.

    Args:
        lr: beta.
        momentum: alpha.
        pull: gamma.
        blend: The weight of the local value: see `OuterStep`.

    Raises:
        ValueError: A number is out of its range.
    """

    lr: float
    momentum: float
    pull: float
    blend: float = 0.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        OuterStep(optimizer=HeavyBall(lr=self.lr, momentum=self.momentum), blend=self.blend)
        if not self.pull > 0:
            raise ValueError(f"the pull must be positive, got {self.pull}; without it replicas drift apart")

    def bind(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> BoundConsensusStep:
        """See `Update.bind`."""
        if not isinstance(view, BoundSlowWeights):
            raise ValueError(
                "ConsensusStep() applies slow weights and pseudo-gradients, which only SlowWeightsAndPseudoGradient() "
                "reads; use that as the view"
            )
        outer = OuterStep(optimizer=HeavyBall(lr=1.0, momentum=self.momentum), blend=self.blend)
        return BoundConsensusStep(self, view, outer=outer.bind(view))


class BoundConsensusStep:
    """See `ConsensusStep`."""

    def __init__(self, spec: ConsensusStep, view: BoundView, *, outer: BoundOuterStep) -> None:
        self._spec = spec
        self._view = view
        self._outer = outer
        self._distances: dict[int, torch.Tensor] = {}

    @property
    def replaces_inner_step(self) -> bool:
        """Never: it comes after the inner steps."""
        return False

    def apply(self, round: Round, average: Average) -> None:
        """See `BoundUpdate.apply`: a group's mean value waits for its mean pseudo-gradient, which comes right after."""
        fragment = round.fragment
        if round.channel == 0:
            value = self._view.parameters.values[fragment]
            self._distances[fragment] = value - average.mean.to(value.device)
            return
        distance = self._distances.pop(fragment).to(average.mean.device)
        step = average.mean.mul_(self._spec.lr).add_(distance, alpha=self._spec.pull)
        self._outer.apply(round, replace(average, mean=step))

    def merge(self, fragment: int, mean: torch.Tensor) -> None:
        """Set the global value and the local one to the mean of all local ones; see `BoundUpdate.merge`."""
        self._view.parameters.values[fragment].copy_(mean)
        self._view.parameters.blend_into_locals(fragment, blend=0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the momenta by fragment, and distances that wait for the next step."""
        distances = {str(fragment): distance for fragment, distance in self._distances.items()}
        return {"momenta": self._outer.state_dict(), "distances": distances}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `BoundUpdate.load_state_dict`."""
        self._outer.load_state_dict(state["momenta"])
        self._distances = load_waiting(state["distances"], self._view.parameters, what="distance")
