"""How the mean is applied: as the gradient of the inner step, or by an outer step with a blend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from thinwire.errors import CheckpointError
from thinwire.sync.global_parameters import load_vectors
from thinwire.sync.outer import OuterOptimizer
from thinwire.sync.views import BoundGradient, BoundView


class BoundUpdate(Protocol):
    """An update with its state (momenta) on one replica."""

    def apply(self, fragment: int, mean: torch.Tensor) -> None:
        """Apply a round's mean.

        Args:
            fragment: The fragment.
            mean: float32, `(numel,)`, on the model's device; may be overwritten.
        """
        ...

    def merge(self, fragment: int, mean: torch.Tensor) -> None:
        """Take a mean in as it is, without the memory of earlier rounds: the last word of a run; see `apply`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything the update remembers."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back.

        Raises:
            CheckpointError: It does not fit.
        """
        ...


class Update(Protocol):
    """How a mean is applied, as a value; `bind` attaches it to a view."""

    def bind(self, view: BoundView) -> BoundUpdate:
        """Return the update on a view.

        Raises:
            ValueError: The update does not go with the view.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerStep:
    """The mean becomes the gradient that the inner optimizer steps with."""

    def bind(self, view: BoundView) -> BoundInnerStep:
        """See `Update.bind`."""
        if not isinstance(view, BoundGradient):
            raise ValueError(
                "InnerStep() applies mean gradients, but the view reads pseudo-gradients; use Gradient() as the view, "
                "or OuterStep() as the update"
            )
        return BoundInnerStep(view)


class BoundInnerStep:
    """See `InnerStep`."""

    def __init__(self, view: BoundGradient) -> None:
        self._view = view

    def apply(self, fragment: int, mean: torch.Tensor) -> None:
        """See `BoundUpdate.apply`."""
        self._view.write(mean)

    def merge(self, fragment: int, mean: torch.Tensor) -> None:
        """See `BoundUpdate.merge`; gradients have no memory."""
        self._view.write(mean)

    def state_dict(self) -> dict[str, Any]:
        """Nothing is remembered."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `BoundUpdate.load_state_dict`."""
        if state:
            raise CheckpointError(
                "the checkpoint holds outer momenta, but this method has none; resume with its method"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStep:
    """An outer optimizer moves the global value, and the local one is blended with it.

    Args:
        optimizer: Moves the global parameters.
        blend: alpha, the weight of the local value: `local = alpha * local + (1 - alpha) * global`, in [0, 1).

    Raises:
        ValueError: `blend` is out of its range.
    """

    optimizer: OuterOptimizer
    blend: float = 0.0

    def __post_init__(self) -> None:
        """Check the range."""
        if not 0 <= self.blend < 1:
            raise ValueError(f"blend must be in [0, 1), got {self.blend}; 1 would never take the global value in")

    def bind(self, view: BoundView) -> BoundOuterStep:
        """See `Update.bind`."""
        if isinstance(view, BoundGradient):
            raise ValueError(
                "OuterStep() applies mean pseudo-gradients, but the view reads gradients; use PseudoGradient() as the "
                "view, or InnerStep() as the update"
            )
        return BoundOuterStep(self, view)


class BoundOuterStep:
    """See `OuterStep`. Momenta rest in host memory and visit the device with their fragment."""

    def __init__(self, spec: OuterStep, view: BoundView) -> None:
        self._spec = spec
        self._parameters = view.parameters
        values = self._parameters.values
        self._momenta = [torch.zeros_like(value) for value in values] if spec.optimizer.has_momentum else []

    def apply(self, fragment: int, mean: torch.Tensor) -> None:
        """See `BoundUpdate.apply`."""
        value = self._parameters.values[fragment]
        momentum = self._momenta[fragment] if self._momenta else None
        if mean.device == value.device:
            self._spec.optimizer.step(value, mean, momentum)
        else:
            on_device = value.to(mean.device)
            momentum_there = None if momentum is None else momentum.to(mean.device)
            self._spec.optimizer.step(on_device, mean, momentum_there)
            value.copy_(on_device)
            if momentum is not None and momentum_there is not None:
                momentum.copy_(momentum_there)
        self._parameters.blend_into_locals(fragment, blend=self._spec.blend)

    def merge(self, fragment: int, mean: torch.Tensor) -> None:
        """Set the global value to the mean of the local ones; see `BoundUpdate.merge`.

        An outer step would let the momentum move the value once more, also where nothing has happened since its last
        round.
        """
        self._parameters.values[fragment].sub_(mean.cpu())
        self._parameters.blend_into_locals(fragment, blend=0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the momenta by fragment."""
        return {str(fragment): momentum for fragment, momentum in enumerate(self._momenta)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `BoundUpdate.load_state_dict`."""
        load_vectors(state, self._momenta, what="outer momentum")
