"""Updates: a mean is applied as the gradient of the inner step, or by an outer step with a blend, also a late one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from thinwire.averaging.round_context import Average
from thinwire.errors import CheckpointError
from thinwire.sync.global_parameters import load_vectors
from thinwire.sync.outer_optimizer import NeedsMatrices, OuterOptimizer
from thinwire.sync.program import AveragedGradients, LocalSteps, Program
from thinwire.sync.schedule import Round
from thinwire.sync.views import BoundGradient, BoundPseudoGradient, BoundView, PseudoGradient


class BoundUpdate(Protocol):
    """An update with its state (momenta) on one replica."""

    def apply(self, round: Round, average: Average) -> None:
        """Apply a round's result.

        Args:
            round: The round.
            average: Its mean is float32, `(numel,)`, on the model's device, and may be overwritten.
        """
        ...

    def merge(self, fragment: int, mean: torch.Tensor) -> None:
        """Apply the mean of the final exchange as it is, without the momentum of earlier rounds.

        Args:
            fragment: The fragment.
            mean: Of what the view's `read_last` gave; float32, `(numel,)`, on the model's device; may be overwritten.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the update."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: It does not fit.
        """
        ...


class Update(Protocol):
    """A rule that applies means, as a value; `bind` attaches it to a view.

    Attributes:
        program: What happens in a step of a method with this update.
    """

    program: ClassVar[Program]

    def bind(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> BoundUpdate:
        """Return the update on a view.

        Args:
            view: What is exchanged.
            inner: The replica's optimizer.

        Raises:
            ValueError: The update does not go with the view or the optimizer.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerStep:
    """The mean becomes the gradient that the inner optimizer steps with.

    Args:
        has_momentum_already: Whether the mean is a momentum itself, so that the inner optimizer must have none.
        takes_sign: Whether the inner optimizer gets only the mean's signs.
    """

    program: ClassVar[Program] = AveragedGradients()

    has_momentum_already: bool = False
    takes_sign: bool = False

    def bind(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> BoundInnerStep:
        if self.has_momentum_already and inner is not None:
            check_momentum_free(inner)
        if not isinstance(view, BoundGradient):
            raise ValueError(
                "InnerStep() applies mean gradients, but the view reads pseudo-gradients; use Gradient() as the view, "
                "or OuterStep() as the update"
            )
        return BoundInnerStep(self, view)


class BoundInnerStep:
    """See `InnerStep`."""

    def __init__(self, spec: InnerStep, view: BoundGradient) -> None:
        self._takes_sign = spec.takes_sign
        self._view = view

    def apply(self, round: Round, average: Average) -> None:
        self._view.write(round, average.mean.sign_() if self._takes_sign else average.mean)

    def merge(self, fragment: int, mean: torch.Tensor) -> None:
        """There is no final exchange of gradients."""
        raise NotImplementedError("gradients are exchanged at every step; nothing is left for a final exchange")

    def state_dict(self) -> dict[str, Any]:
        """Nothing is remembered."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
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

    program: ClassVar[Program] = LocalSteps()

    optimizer: OuterOptimizer
    blend: float = 0.0

    def __post_init__(self) -> None:
        """Check the range."""
        if not 0 <= self.blend < 1:
            raise ValueError(f"blend must be in [0, 1), got {self.blend}; 1 would never take the global value in")

    def bind(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> BoundOuterStep:
        check_pseudo_gradients(view, name="OuterStep")
        return BoundOuterStep(self, view)


class BoundOuterStep:
    """See `OuterStep`. Momenta rest in host memory and visit the device with their fragment."""

    def __init__(self, spec: OuterStep, view: BoundView) -> None:
        self._spec = spec
        self._parameters = view.parameters
        values = self._parameters.values
        optimizer = spec.optimizer
        self._optimizers = [
            optimizer.with_matrices(self._parameters.hidden_matrices(fragment))
            if isinstance(optimizer, NeedsMatrices)
            else optimizer
            for fragment in range(len(values))
        ]
        self._momenta = [self._parameters.beside(value) for value in values] if spec.optimizer.has_momentum else []

    def apply(self, round: Round, average: Average) -> None:
        fragment = round.fragment
        value = self._parameters.values[fragment]
        mean = average.mean.to(value.dtype)
        momentum = self._momenta[fragment] if self._momenta else None
        optimizer = self._optimizers[fragment]
        if mean.device == value.device:
            optimizer.step(value, mean, momentum)
        else:
            on_device = value.to(mean.device, non_blocking=True)
            momentum_there = None if momentum is None else momentum.to(mean.device, non_blocking=True)
            optimizer.step(on_device, mean, momentum_there)
            value.copy_(on_device)
            if momentum is not None and momentum_there is not None:
                momentum.copy_(momentum_there)
            value = on_device
        self._parameters.blend_into_locals(fragment, blend=self._spec.blend, value=value)
        self._parameters.begin_checksum(fragment)

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
        load_vectors(state, self._momenta, what="outer momentum")


def check_pseudo_gradients(view: BoundView, *, name: str) -> None:
    """Refuse a view on gradients.

    Raises:
        ValueError: It is one; names the update and what to do.
    """
    if isinstance(view, BoundGradient):
        raise ValueError(
            f"{name}() applies mean pseudo-gradients, but the view reads gradients; use PseudoGradient() as the view, "
            f"or InnerStep() as the update"
        )


def check_momentum_free(inner: torch.optim.Optimizer) -> None:
    """Refuse an inner optimizer that would apply momentum a second time.

    Raises:
        ValueError: It has momentum, or an average of gradients; names the option.
    """
    for group in inner.param_groups:
        if group.get("momentum"):
            found = f"momentum={group['momentum']}"
        elif "betas" in group and group["betas"][0]:
            found = f"betas={tuple(group['betas'])}"
        else:
            continue
        raise ValueError(
            f"this method carries momentum in what it sends, and the inner {type(inner).__name__} has {found}, which "
            f"would apply it twice; give torch.optim.SGD(..., momentum=0) and the method's own momentum"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenPseudoGradient(PseudoGradient):
    """Global minus local parameters, and reading takes it: the local value goes back to the global one.

    What a replica's inner steps have made is on the wire from then on, and comes back with the mean. See
    `PseudoGradient`.
    """

    def bind(self, model: nn.Module, *, inner: torch.optim.Optimizer | None = None) -> BoundTakenPseudoGradient:
        return BoundTakenPseudoGradient(self.cut(model, inner))


class BoundTakenPseudoGradient(BoundPseudoGradient):
    """See `TakenPseudoGradient`."""

    def read(self, round: Round) -> torch.Tensor:
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

    program: ClassVar[Program] = LocalSteps()

    optimizer: OuterOptimizer

    def bind(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> BoundDelayedOuterStep:
        check_pseudo_gradients(view, name="DelayedOuterStep")
        return BoundDelayedOuterStep(OuterStep(optimizer=self.optimizer), view)


class BoundDelayedOuterStep(BoundOuterStep):
    """See `DelayedOuterStep`."""

    def apply(self, round: Round, average: Average) -> None:
        trained = self._parameters.trained(round.fragment)
        super().apply(round, average)
        self._parameters.write(round.fragment, trained.add_(self._parameters.values[round.fragment].to(trained.device)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LateOuterStep:
    """An outer optimizer moves the global value; the local one is blended with it, or moves by the same step.

    A replica whose part is in the mean blends: `local = alpha * local + (1 - alpha) * global`. One whose part came too
    late moves along: `local = (local - old global) + new global`, so that its distance from the global value stays what
    it was. That distance is its next pseudo-gradient: all that no round has counted yet, once, and what it trains until
    then. At alpha 0 a result that comes after its step would erase what was trained since, so that is added to it.

    Args:
        optimizer: Moves the global parameters.
        blend: alpha, in [0, 1).

    Raises:
        ValueError: `blend` is out of its range.
    """

    program: ClassVar[Program] = LocalSteps()

    optimizer: OuterOptimizer
    blend: float = 0.0

    def __post_init__(self) -> None:
        """Check the range."""
        OuterStep(optimizer=self.optimizer, blend=self.blend)

    def bind(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> BoundLateOuterStep:
        check_pseudo_gradients(view, name="LateOuterStep")
        if view.parameters.is_sharded:
            raise ValueError(
                "the model is sharded, and each rank would find out for itself whether its shard came too late; with a "
                "quorum a replica is one rank: take streaming_diloco() for replicas of several"
            )
        return BoundLateOuterStep(OuterStep(optimizer=self.optimizer, blend=self.blend), view)


class BoundLateOuterStep(BoundDelayedOuterStep):
    """See `LateOuterStep`."""

    def __init__(self, spec: OuterStep, view: BoundView) -> None:
        super().__init__(spec, view)
        self._at_due: dict[int, torch.Tensor] = {}  # by overdue round: the local values at the step that it was due

    def defer(self, round: Round) -> None:
        """Note that a round is due and its result is not here: training goes on, and `apply` comes later."""
        if self._spec.blend == 0:
            self._at_due[round.id] = self._parameters.read(round.fragment)

    def apply(self, round: Round, average: Average) -> None:
        at_due = self._at_due.pop(round.id, None)
        if not average.is_counted:
            super().apply(round, average)
            return
        trained_since = None if at_due is None else self._parameters.read(round.fragment).sub_(at_due)
        BoundOuterStep.apply(self, round, average)
        if trained_since is not None:
            value = self._parameters.values[round.fragment].to(trained_since.device)
            self._parameters.write(round.fragment, trained_since.add_(value))
