"""1-bit Adam (arXiv 2102.02888, Algorithm 1): Adam's momentum in one bit an element, once its variance has settled.

    for t = 1 .. T0, the warm-up:                             Adam's own step with the mean gradient, in float32
    for t = T0+1 .. T, on each replica i of M:
        m_i = beta1 m + (1 - beta1) g_i                       the replica's own gradient
        c_i = sign-code(m_i + e_i);  e_i = m_i + e_i - c_i    error at the sender
        for the part of the vector that replica j owns:
            s_j = (1/M) sum_i c_i                             the mean over the replicas
            d_j = sign-code(s_j + E_j);  E_j = s_j + E_j - d_j    error at the owner
        m = (d_1, .., d_M), the same on all replicas
        p = p - lr (m / sqrt(v_T0) + decay p)

The sign code is 1 bit an element and one float32 scale, `||x||_2 / sqrt(n)`, a part. What we do where the paper and its
public code differ or are silent:

- The warm-up is the inner optimizer's own step, with its bias correction; the public code has none. After it, the
  variance keeps the correction that it had, and the momentum's goes on.
- torch.optim.AdamW decays the parameters, as the public code does; torch.optim.Adam adds decay to the gradient.
- One bit has no code for zero. An element whose variance is zero after the warm-up has never had a gradient; it gets
  none after that either, and stays (but for AdamW's decay). The public code leaves finding such elements to the user.
- The public code has a scale for each tensor and part. Here one vector holds all tensors, and so that they can share
  a scale, each is multiplied by a power of two that is found at the end of the warm-up, as 1-bit LAMB does.
- Both errors are kept in checkpoints; the public code drops them.
- Gradients that are clipped before the step are the replica's own, in the warm-up too.
- After the warm-up a parameter without gradient counts as one with gradient zero.

Let the warm-up of the learning rate end before this one: the variance of small steps predicts little of later ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire.averaging.exchange import TwoPhase, cheapest
from thinwire.averaging.round_context import Average
from thinwire.codecs import Codec, float32, sign
from thinwire.codecs.error_feedback import ErrorFeedback
from thinwire.methods.registry import About, register
from thinwire.sync.adam_momentum_view import AdamMomentum, BoundAdamMomentum, Factors
from thinwire.sync.method import Method
from thinwire.sync.program import AveragedStep, Program
from thinwire.sync.schedule import Round, WarmUp
from thinwire.sync.updates import Update
from thinwire.sync.views import BoundView
from thinwire.tagged_state import same

ABOUT = About(
    paper="arXiv 2102.02888",
    exchanged="gradients in a warm-up, then momenta in one bit, at every step",
    bits="64 (M - 1) / M in the warm-up, then 2 (M - 1) / M",
    memory="1 + 1 / M (errors of sender and owner)",
    restrictions="inner Adam or AdamW; no GradScaler",
)


@register(ABOUT)
def one_bit_adam(*, warmup_steps: int = 100, codec: Codec | None = None) -> Method:
    """Average gradients in a warm-up, then momenta in 1 bit an element with a frozen variance; needs Adam or AdamW.

    Args:
        warmup_steps: Steps until the variance is frozen, at least 1. Give 15 to 25 % of all steps; the default suits
            runs of about 500.
        codec: The momenta's code; `sign()` by default.

    Raises:
        ValueError: `warmup_steps` is below 1, or the codec is sparse.

    Example:
        >>> one_bit_adam(warmup_steps=200).schedule.warmup_steps
        200
    """
    momenta = TwoPhase(codec=sign() if codec is None else codec, memory=ErrorFeedback(), owner_memory=ErrorFeedback())
    return Method(
        name="one-bit-adam",
        schedule=WarmUp(warmup_steps=warmup_steps),
        view=AdamMomentum(),
        exchange=lambda num_replicas: (cheapest(float32(), num_replicas=num_replicas), momenta),
        update=lambda num_replicas: FrozenAdam(warmup_steps=warmup_steps),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenAdam(Update):
    """Adam's own step in channel 0; in channel 1 a step along the mean momentum, with the variance as it is.

    The mean momentum replaces the inner optimizer's. The variance keeps the bias correction that it had at the last
    step of the warm-up; the momentum's goes on with the steps, as Adam's does.

    Args:
        warmup_steps: How many steps the warm-up has.
    """

    program: ClassVar[Program] = AveragedStep()

    warmup_steps: int

    def init(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> FrozenAdamState:
        if not isinstance(view, BoundAdamMomentum):
            raise ValueError(
                "FrozenAdam() applies mean momenta, but the view reads others; use AdamMomentum() as the view"
            )
        return FrozenAdamState(view, view.inner, view.factors)

    def apply(self, state: FrozenAdamState, round: Round, average: Average) -> None:
        with torch.no_grad():
            if round.channel == 0:
                state.view.gradients.write(round, average.mean)
                state.inner.step()
                return
            since = round.launch_step - self.warmup_steps
            if not state.frozen_at:  # reading steps may wait for the device, so once is enough
                state.frozen_at = [steps - (since - 1) for steps in state.view.steps()]
            for index, slot, part in state.view.received(average.mean):
                slot.first.copy_(part)
                slot.count_step()
                slot.descend(steps=state.frozen_at[index] + since, updates=state.frozen_at[index])


@dataclass(slots=True)
class FrozenAdamState:
    """State of `FrozenAdam`; momentum and variance are the inner optimizer's.

    Attributes:
        frozen_at: By parameter, the steps that its variance had at the end of the warm-up; empty before.
    """

    view: BoundAdamMomentum
    inner: torch.optim.Optimizer
    factors: Factors = same("factors")
    frozen_at: list[int] = same("steps at the end of the warm-up", default_factory=list)
