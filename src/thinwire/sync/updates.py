"""Updates: a mean is applied as the gradient of the inner step, or by an outer step with a blend, also a late one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch

from thinwire.averaging.round_context import Average
from thinwire.sync.outer_optimizer import NeedsMatrices, OuterOptimizer
from thinwire.sync.program import AveragedGradients, LocalSteps, Program
from thinwire.sync.schedule import Round
from thinwire.sync.views import BoundGradient, BoundView, GlobalParameters, PseudoGradient
from thinwire.tagged_state import same


class Update(Protocol):
    """A rule that applies means, as a value without state.

    Attributes:
        program: What happens in a step of a method with this update.
    """

    __slots__ = ()
    program: ClassVar[Program]

    def init(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> Any:
        """Return the first state: a dataclass whose fields are tagged by `thinwire.tagged_state`.

        Args:
            view: What is exchanged.
            inner: The replica's optimizer.

        Raises:
            ValueError: The update does not go with the view or the optimizer.
        """

    def apply(self, state: Any, round: Round, average: Average) -> None:
        """Apply a round's result.

        Args:
            state: What `init` returned; changed in place.
            round: The round.
            average: Its mean is float32, `(numel,)`, on the model's device, and may be overwritten.
        """

    def merge(self, state: Any, fragment: int, mean: torch.Tensor) -> None:
        """Apply the mean of the final exchange as it is, without the momentum of earlier rounds.

        By default there is none: what is applied is exchanged at every step.

        Args:
            state: What `init` returned; changed in place.
            fragment: The fragment.
            mean: Of what the view's `read_last` gave; float32, `(numel,)`, on the model's device; may be overwritten.
        """
        why = "what this update applies is exchanged at every step; there is no final exchange"
        raise NotImplementedError(why)


@dataclass(slots=True)
class GradientState:
    """Reference to the gradients, without anything remembered."""

    view: BoundGradient


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerStep(Update):
    """The mean becomes the gradient that the inner optimizer steps with.

    Args:
        has_momentum_already: Whether the mean is a momentum itself, so that the inner optimizer must have none.
        takes_sign: Whether the inner optimizer gets only the mean's signs.
    """

    program: ClassVar[Program] = AveragedGradients()

    has_momentum_already: bool = False
    takes_sign: bool = False

    def init(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> GradientState:
        if self.has_momentum_already and inner is not None:
            check_momentum_free(inner)
        if not isinstance(view, BoundGradient):
            raise ValueError(
                "InnerStep() applies mean gradients, but the view reads pseudo-gradients; use Gradient() as the view, "
                "or OuterStep() as the update"
            )
        return GradientState(view)

    def apply(self, state: GradientState, round: Round, average: Average) -> None:
        state.view.write(round, average.mean.sign_() if self.takes_sign else average.mean)


@dataclass(slots=True)
class OuterState:
    """Momenta of the outer steps. They rest in host memory and visit the device with their fragment.

    Attributes:
        parameters: The global values.
        optimizers: By fragment.
        momentum: By fragment, as large as its values; empty where the optimizer has none.
        at_due: By overdue round: the local values at the step that it was due.
    """

    parameters: GlobalParameters
    optimizers: list[OuterOptimizer]
    momentum: list[torch.Tensor] = same("outer momentum")
    at_due: dict[int, torch.Tensor] = field(default_factory=dict)


def outer_state(optimizer: OuterOptimizer, parameters: GlobalParameters) -> OuterState:
    """Return the first state of outer steps on the fragments of a model."""
    fragments = range(len(parameters.values))
    optimizers = [
        optimizer.with_matrices(parameters.hidden_matrices(fragment))
        if isinstance(optimizer, NeedsMatrices)
        else optimizer
        for fragment in fragments
    ]
    momentum = [parameters.beside(value) for value in parameters.values] if optimizer.has_momentum else []
    return OuterState(parameters, optimizers, momentum)


def outer_step(state: OuterState, round: Round, mean: torch.Tensor, *, blend: float) -> None:
    """Move a fragment's global value by a mean pseudo-gradient, and blend the local one with it."""
    fragment, parameters = round.fragment, state.parameters
    value = parameters.values[fragment]
    mean = mean.to(value.dtype)
    momentum = state.momentum[fragment] if state.momentum else None
    optimizer = state.optimizers[fragment]
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
    parameters.blend_into_locals(fragment, blend=blend, value=value)
    parameters.begin_checksum(fragment)


def keep_distance(state: OuterState, round: Round, mean: torch.Tensor) -> None:
    """Move a fragment's global value by a mean pseudo-gradient, and the local one by the same step."""
    trained = state.parameters.trained(round.fragment)
    outer_step(state, round, mean, blend=0.0)
    state.parameters.write(round.fragment, trained.add_(state.parameters.values[round.fragment].to(trained.device)))


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterUpdate(Update):
    """Base of updates by an outer optimizer.

    Args:
        optimizer: Moves the global parameters.
    """

    program: ClassVar[Program] = LocalSteps()

    optimizer: OuterOptimizer

    def init(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> OuterState:
        if isinstance(view, BoundGradient):
            raise ValueError(
                f"{type(self).__name__}() applies mean pseudo-gradients, but the view reads gradients; use "
                f"PseudoGradient() as the view, or InnerStep() as the update"
            )
        return outer_state(self.optimizer, view.parameters)

    def merge(self, state: OuterState, fragment: int, mean: torch.Tensor) -> None:
        # an outer step would let the momentum move the value once more, also where nothing has happened since its last
        # round
        state.parameters.values[fragment].sub_(mean.cpu())
        state.parameters.blend_into_locals(fragment, blend=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStep(OuterUpdate):
    """An outer optimizer moves the global value, and the local one is blended with it.

    Args:
        optimizer: Moves the global parameters.
        blend: alpha, the weight of the local value: `local = alpha * local + (1 - alpha) * global`, in [0, 1).

    Raises:
        ValueError: `blend` is out of its range.
    """

    blend: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.blend < 1:
            raise ValueError(f"blend must be in [0, 1), got {self.blend}; 1 would never take the global value in")

    def apply(self, state: OuterState, round: Round, average: Average) -> None:
        outer_step(state, round, average.mean, blend=self.blend)


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

    def read(self, round: Round) -> torch.Tensor:
        taken = self.parameters.pseudo_gradient(round.fragment)
        self.parameters.blend_into_locals(round.fragment, blend=0.0)
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedOuterStep(OuterUpdate):
    """An outer optimizer moves the global value, and the local one by the same step.

    So local parameters keep what they have been trained since the last launch: nothing right after one, where the view
    takes what it reads, and the last steps' work where a run ends between two.

    Args:
        optimizer: Moves the global parameters.
    """

    def apply(self, state: OuterState, round: Round, average: Average) -> None:
        keep_distance(state, round, average.mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class LateOuterStep(OuterUpdate):
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

    blend: float = 0.0

    def __post_init__(self) -> None:
        OuterStep(optimizer=self.optimizer, blend=self.blend)

    def init(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> OuterState:
        if view.parameters.is_sharded:
            raise ValueError(
                "the model is sharded, and each rank would find out for itself whether its shard came too late; with a "
                "quorum a replica is one rank: take streaming_diloco() for replicas of several"
            )
        return OuterUpdate.init(self, view)

    def defer(self, state: OuterState, round: Round) -> None:
        """Note that a round is due and its result is not here: training goes on, and `apply` comes later."""
        if self.blend == 0:
            state.at_due[round.id] = state.parameters.read(round.fragment)

    def apply(self, state: OuterState, round: Round, average: Average) -> None:
        at_due = state.at_due.pop(round.id, None)
        if not average.is_counted:
            keep_distance(state, round, average.mean)
            return
        trained_since = None if at_due is None else state.parameters.read(round.fragment).sub_(at_due)
        outer_step(state, round, average.mean, blend=self.blend)
        if trained_since is not None:
            value = state.parameters.values[round.fragment].to(trained_since.device)
            state.parameters.write(round.fragment, trained_since.add_(value))
