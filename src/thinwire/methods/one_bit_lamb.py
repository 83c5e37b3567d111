"""1-bit LAMB (arXiv 2104.06069, Algorithm 1): LAMB's momentum in one bit an element, with layers' coefficients frozen.

For every layer (tensor) p, with m and v as in Adam and without bias correction:

    for t = 1 .. T0, the warm-up, with the mean gradient g in float32:
        u = m / (sqrt(v) + eps) + decay p;   c = clip(|p| / |u|, 0.01, 10)
        C = 0.9 C + 0.1 c;   p = p - lr c u
    for t = T0+1 .. T, on each replica i:
        m_i = beta1 m + (1 - beta1) g_i;   m' = two-phase sign exchange of all m_i, scaled by layer
        w = beta2 w + (1 - beta2) ((m' - beta1 m) / (1 - beta1))^2,  from w = v at T0;   m = m'
        r = max((sqrt(v) + eps) / (sqrt(w) + eps)), less for the share that decay has in u,
            clipped to [0.5, 4], and by at most 10 % from the last step's
        p = p - lr C r u

Momenta of all layers travel as one vector with one scale a part, so each layer is multiplied by a factor that brings it
to the others' magnitude, found at the end of the warm-up. Errors are kept at senders and owners, as in 1-bit Adam.

torch has no LAMB: the inner optimizer is a torch.optim.AdamW that holds learning rate, betas, eps, decay and the
moments, and never steps. What we do where the public code differs or is silent:

- The factors of layers are powers of two, which round nothing.
- A layer is a tensor. Elements whose variance is zero after the warm-up get no gradient and do not count in the
  maximum; a layer whose coefficient was 1 at every step of the warm-up keeps 1, where the code would keep 0.
- `warmup_steps` below 1 / (1 - coeff_beta) are refused: C would be too small.
- Both errors, the coefficients and w are kept in checkpoints; the public code drops the errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire.averaging.exchange import TwoPhase, cheapest
from thinwire.averaging.round_context import Average
from thinwire.codecs import Codec, float32, sign
from thinwire.codecs.base import ordered_sum
from thinwire.codecs.error_feedback import ErrorFeedback
from thinwire.methods.registry import About, register
from thinwire.sync.adam_momentum_view import AdamMomentum, BoundAdamMomentum, Factors, Slot, check_adam
from thinwire.sync.method import Method
from thinwire.sync.program import AveragedStep, Program
from thinwire.sync.schedule import Round, WarmUp
from thinwire.sync.updates import Update
from thinwire.sync.views import BoundView
from thinwire.tagged_state import same
from thinwire.transport.shards import gather_over_shards, real_shard

ABOUT = About(
    paper="arXiv 2104.06069",
    exchanged="gradients in a warm-up, then momenta in one bit, at every step",
    bits="64 (M - 1) / M in the warm-up, then 2 (M - 1) / M",
    memory="2 + 1 / M (errors of sender and owner, the fresh variance)",
    restrictions="inner AdamW as the holder of its numbers; no GradScaler",
)


@register(ABOUT)
def one_bit_lamb(
    *,
    warmup_steps: int = 100,
    coeff_beta: float = 0.9,
    min_coeff: float = 0.01,
    max_coeff: float = 10.0,
    factor_min: float = 0.5,
    factor_max: float = 4.0,
    factor_threshold: float = 0.1,
    codec: Codec | None = None,
) -> Method:
    """Step as LAMB in a warm-up, then average momenta in 1 bit an element with frozen coefficients; needs AdamW.

    Args:
        warmup_steps: Steps until variance and coefficients are frozen, at least `1 / (1 - coeff_beta)`. Give 15 to 25 %
            of all steps; the default suits runs of about 500.
        coeff_beta: Decay of the average of a layer's coefficient.
        min_coeff: The least coefficient.
        max_coeff: The largest one.
        factor_min: The least factor on the frozen coefficient.
        factor_max: The largest one.
        factor_threshold: By which share the factor may change in a step.
        codec: The momenta's code; `sign()` by default.

    Raises:
        ValueError: A number is out of its range, or the codec is sparse.

    Example:
        >>> one_bit_lamb(warmup_steps=200).schedule.warmup_steps
        200
    """
    update = FrozenLamb(
        coeff_beta=coeff_beta, coeff_range=(min_coeff, max_coeff), factor_range=(factor_min, factor_max),
        factor_threshold=factor_threshold,
    )  # fmt: skip
    schedule = WarmUp(warmup_steps=warmup_steps)
    least = round(1 / (1 - coeff_beta))
    if warmup_steps < least:
        raise ValueError(
            f"warmup_steps must be at least 1 / (1 - coeff_beta) = {least}, got {warmup_steps}; the average of the "
            f"coefficients starts at 0 and would be frozen too small"
        )
    momenta = TwoPhase(codec=sign() if codec is None else codec, memory=ErrorFeedback(), owner_memory=ErrorFeedback())
    return Method(
        name="one-bit-lamb",
        schedule=schedule,
        view=AdamMomentum(),
        exchange=lambda num_replicas: (cheapest(float32(), num_replicas=num_replicas), momenta),
        update=lambda num_replicas: update,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenLamb(Update):
    """LAMB's step in channel 0; in channel 1 one along the mean momentum, with coefficients that follow frozen ones.

    Norms and ratios are those of whole layers: where ranks hold shards (FSDP2), each sends the others of its replica a
    number or two for each parameter and step.

    Args:
        coeff_beta: Decay of the average of a layer's coefficient over the warm-up, in [0, 1).
        coeff_range: The least and the largest coefficient.
        factor_range: The least and the largest factor on the frozen coefficient.
        factor_threshold: By which share the factor may change in a step, in (0, 1).

    Raises:
        ValueError: A number is out of its range.
    """

    program: ClassVar[Program] = AveragedStep()

    coeff_beta: float = 0.9
    coeff_range: tuple[float, float] = (0.01, 10.0)
    factor_range: tuple[float, float] = (0.5, 4.0)
    factor_threshold: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.coeff_beta < 1:
            raise ValueError(f"coeff_beta must be in [0, 1), got {self.coeff_beta}; 0.9 is usual")
        if not 0 < self.factor_threshold < 1:
            raise ValueError(f"factor_threshold must be in (0, 1), got {self.factor_threshold}; 0.1 is usual")
        for name, (least, largest) in (("coeff_range", self.coeff_range), ("factor_range", self.factor_range)):
            if not 0 < least <= 1 <= largest:
                raise ValueError(f"{name} must hold 1 and start above 0, got {least} to {largest}")

    def init(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> LambState:
        if not isinstance(view, BoundAdamMomentum):
            raise ValueError(
                "FrozenLamb() applies mean momenta, but the view reads others; use AdamMomentum() as the view"
            )
        if not isinstance(check_adam(inner), torch.optim.AdamW):
            raise ValueError(
                "LAMB decays weights as AdamW does, but the inner optimizer is Adam, which adds decay to the gradient; "
                "give torch.optim.AdamW"
            )
        coefficients, scales = ([_number(first, like=one) for one in view.tensors] for first in (0.0, 1.0))
        return LambState(view, view.factors, coefficients, scales)

    def apply(self, state: LambState, round: Round, average: Average) -> None:
        with torch.no_grad():
            if round.channel == 0:
                state.view.gradients.write(round, average.mean)
                for index, slot in enumerate(state.view.slots()):
                    if slot.group is not None and slot.own_gradient() is not None:
                        self._warm_step(state, index, slot)
            else:
                for index, slot, part in state.view.received(average.mean):
                    if slot.parameter.numel():  # of the whole: a rank with an empty shard speaks to the others too
                        self._frozen_step(state, index, slot, part)

    def _warm_step(self, state: LambState, index: int, slot: Slot) -> None:
        slot.begin()
        slot.count_step()
        gradient, (beta1, beta2) = slot.gradient(), slot.betas
        slot.first.lerp_(gradient, 1 - beta1)
        slot.second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = slot.first.to(torch.float32) / _denominator(slot.second, eps=slot.eps)
        update.add_(slot.value, alpha=slot.decoupled_decay)
        weight, length = _norms(slot, slot.value, update)
        found = (weight / length).clamp(*self.coeff_range)
        coefficient = torch.where((weight > 0) & (length > 0), found, 1.0)
        average, beta = state.coefficients[index], self.coeff_beta
        average.copy_(torch.where(coefficient == 1, average, beta * average + (1 - beta) * coefficient))
        slot.value.sub_(update.mul_(slot.lr * coefficient))

    def _frozen_step(self, state: LambState, index: int, slot: Slot, mean: torch.Tensor) -> None:
        beta1, beta2 = slot.betas
        fresh = state.fresh.get(index)
        if fresh is None:
            fresh = state.fresh[index] = slot.second.to(torch.float32, copy=True)
        # the mean gradient that would have led from the last mean momentum to this one
        gradient = (mean - slot.first.to(torch.float32) * beta1).div_(1 - beta1)
        fresh.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        slot.first.copy_(mean)
        slot.count_step()
        denominator = _denominator(slot.second, eps=slot.eps)
        step = slot.first.to(torch.float32) / denominator
        update = step.add(slot.value, alpha=slot.decoupled_decay)
        ratios = (denominator / _denominator(fresh, eps=slot.eps)).masked_fill_(slot.is_dead(), 0)
        largest = ratios.max() if ratios.numel() else _number(0.0, like=ratios)
        ratio = gather_over_shards(largest.to(torch.float64), parameter=slot.parameter).max()
        own, length = _norms(slot, step, update)
        share = torch.where(length > 0, (own / length).clamp(max=1.0), 1.0)  # of an update: what is not weight decay
        factor, threshold = state.scales[index], self.factor_threshold
        wanted = torch.where(ratio > 0, ratio, 1.0) * share + (1 - share)
        wanted = wanted.clamp(*self.factor_range)
        factor.copy_(torch.minimum(torch.maximum(wanted, factor * (1 - threshold)), factor * (1 + threshold)))
        frozen = state.coefficients[index]
        coefficient = torch.where(frozen > 0, frozen, 1.0) * factor
        slot.value.sub_(update.mul_(slot.lr * coefficient))


@dataclass(slots=True)
class LambState:
    """State of `FrozenLamb`. Coefficients and scales stay on the device, so that no step waits for it.

    Attributes:
        coefficients: By parameter, the mean of LAMB's coefficients in the warm-up.
        scales: By parameter, by what the coefficient is multiplied after it.
        fresh: By parameter, the variance that goes on after the warm-up.
    """

    view: BoundAdamMomentum
    factors: Factors = same("factors")
    coefficients: list[torch.Tensor] = same("coefficient")
    scales: list[torch.Tensor] = same("scale")
    fresh: dict[int, torch.Tensor] = same("fresh variance", like="shards", default_factory=dict)

    @property
    def shards(self) -> list[torch.Tensor]:
        return [real_shard(parameter) for parameter in self.view.tensors]


def _denominator(variance: torch.Tensor, *, eps: float) -> torch.Tensor:
    return variance.to(torch.float32).sqrt().add_(eps)


def _norms(slot: Slot, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the lengths of what a whole parameter's tensors are, in float64, the same bits everywhere."""
    own = [ordered_sum(tensor.reshape(1, -1).to(torch.float64).square()).reshape(()) for tensor in tensors]
    squares = [gather_over_shards(square, parameter=slot.parameter) for square in own]
    return [ordered_sum(square.reshape(1, -1)).sqrt().reshape(()) for square in squares]


def _number(value: float, *, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, device=like.device)
