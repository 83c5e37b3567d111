"""What is exchanged and how it is applied where a round's result comes when the next round is launched already."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from thinwire.averaging.round_context import Average
from thinwire.sync.outer_optimizer import OuterOptimizer
from thinwire.sync.schedule import Round
from thinwire.sync.updates import BoundOuterStep, OuterStep, check_pseudo_gradients
from thinwire.sync.views import BoundPseudoGradient, BoundView, PseudoGradient


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenPseudoGradient(PseudoGradient):
    """Global minus local parameters, and reading takes it: the local value goes back to the global one.

    What a replica's inner steps have made is on the wire from then on, and comes back with the mean. See
    `PseudoGradient`.
    """

    def bind(self, model: nn.Module, *, inner: torch.optim.Optimizer | None = None) -> BoundTakenPseudoGradient:
        """See `View.bind`."""
        return BoundTakenPseudoGradient(self.cut(model))


class BoundTakenPseudoGradient(BoundPseudoGradient):
    """See `TakenPseudoGradient`."""

    def read(self, round: Round) -> torch.Tensor:
        """See `BoundView.read`."""
        taken = super().read(round)
        self.parameters.blend_into_locals(round.fragment, blend=0.0)
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedOuterStep:
    """An outer optimizer moves the global value, and the local one by the same step.

    So local parameters keep what they have been trained since the last launch: nothing right after one, where the view
    takes what it reads, and the last steps' work where a run ends between two.

    Args:
        optimizer: Moves the global parameters.
    """

    optimizer: OuterOptimizer

    def bind(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> BoundDelayedOuterStep:
        """See `Update.bind`."""
        check_pseudo_gradients(view, name="DelayedOuterStep")
        return BoundDelayedOuterStep(OuterStep(optimizer=self.optimizer), view)


class BoundDelayedOuterStep(BoundOuterStep):
    """See `DelayedOuterStep`."""

    def apply(self, round: Round, average: Average) -> None:
        """See `BoundUpdate.apply`."""
        trained = self._parameters.trained(round.fragment)
        super().apply(round, average)
        self._parameters.write(round.fragment, trained.add_(self._parameters.values[round.fragment].to(trained.device)))
