"""Outer steps for late results: delayed by a round, or without this replica's part, which then counts later."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LateOuterStep:
    """An outer optimizer moves the global value; the local one is blended with it, or moves by the same step.

    A replica whose part is in the mean blends: `local = alpha * local + (1 - alpha) * global`. One whose part came too
    late moves along: `local = (local - old global) + new global`, so that its distance from the global value stays what
    it was. That distance is its next pseudo-gradient: all that no round has counted yet, once, and what it trains until
    then.

    Args:
        optimizer: Moves the global parameters.
        blend: alpha, in [0, 1).

    Raises:
        ValueError: `blend` is out of its range.
    """

    optimizer: OuterOptimizer
    blend: float = 0.0

    def __post_init__(self) -> None:
        """Check the range."""
        OuterStep(optimizer=self.optimizer, blend=self.blend)

    def bind(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> BoundLateOuterStep:
        """See `Update.bind`."""
        check_pseudo_gradients(view, name="LateOuterStep")
        if view.parameters.is_sharded:
            raise ValueError(
                "the model is sharded, and each rank would find out for itself whether its shard came too late; with a "
                "quorum a replica is one rank: take streaming_diloco() for replicas of several"
            )
        return BoundLateOuterStep(OuterStep(optimizer=self.optimizer, blend=self.blend), view)


class BoundLateOuterStep(BoundDelayedOuterStep):
    """See `LateOuterStep`."""

    def apply(self, round: Round, average: Average) -> None:
        """See `BoundUpdate.apply`."""
        if average.is_counted:
            BoundOuterStep.apply(self, round, average)
        else:
            super().apply(round, average)
