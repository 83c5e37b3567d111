"""Adam with a variance that is frozen after a warm-up: the update of 1-bit Adam."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from thinwire.averaging.round_context import Average
from thinwire.errors import CheckpointError
from thinwire.sync.adam_momentum_view import check_adam
from thinwire.sync.momenta import BoundMomentum
from thinwire.sync.schedule import Round
from thinwire.sync.views import BoundView


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenAdam:
    """Adam's own step in channel 0; in channel 1 a step along the mean momentum, with the variance as it is.

    The mean momentum replaces the inner optimizer's. The variance keeps the bias correction that it had at the last
    step of the warm-up; the momentum's goes on with the steps, as Adam's does.

    Args:
        warmup_steps: How many steps the warm-up has.
    """

    warmup_steps: int

    def bind(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> BoundFrozenAdam:
        """See `Update.bind`."""
        if not isinstance(view, BoundMomentum):
            raise ValueError("FrozenAdam() applies mean momenta, but the view reads others; use Momentum() as the view")
        return BoundFrozenAdam(self, view, check_adam(inner))


class BoundFrozenAdam:
    """See `FrozenAdam`."""

    def __init__(self, spec: FrozenAdam, view: BoundMomentum, inner: torch.optim.Optimizer) -> None:
        self._warmup_steps = spec.warmup_steps
        self._view = view
        self._inner = inner
        self._frozen_at: list[int] = []

    @property
    def replaces_inner_step(self) -> bool:
        """Always."""
        return True

    def apply(self, round: Round, average: Average) -> None:
        """See `BoundUpdate.apply`."""
        with torch.no_grad():
            if round.channel == 0:
                self._view.gradients.write(round, average.mean)
                self._inner.step()
            else:
                self._step(average.mean, since=round.launch_step - self._warmup_steps)

    def merge(self, fragment: int, mean: torch.Tensor) -> None:
        """There is no final exchange."""
        raise NotImplementedError("momenta are exchanged at every step; nothing is left for a final exchange")

    def state_dict(self) -> dict[str, Any]:
        """Return the view's factors; the rest is the inner optimizer's, or follows from the step."""
        return self._view.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `BoundUpdate.load_state_dict`."""
        if set(state) != set(self.state_dict()):
            raise CheckpointError("the checkpoint is of another update than 1-bit Adam's; resume with its method")
        self._view.load_state_dict(state)
        self._frozen_at = []

    def _step(self, mean: torch.Tensor, *, since: int) -> None:
        if not self._frozen_at:  # reading steps may wait for the device, so once is enough
            self._frozen_at = [steps - (since - 1) for steps in self._view.adam.steps()]
        for index, slot, part in self._view.received(mean):
            slot.first.copy_(part)
            slot.count_step()
            slot.descend(steps=self._frozen_at[index] + since, updates=self._frozen_at[index])
