"""Deep Gradient Compression (arXiv 1712.01887): at every step, a thousandth of the accumulated velocity.

On each replica k of M, for every matrix, with momentum m (Algorithm 4):

    g = gradient of the local batch, scaled down to the norm c / sqrt(M) where it is longer      local clipping
    u = m u + g;  v = v + u          (Nesterov: u = m (u + g);  v = v + u + g)                   momentum correction
    S = the largest |v|, a share `density` of them, by a threshold found on a sample             selection
    send v[S];  v[S] = 0;  u[S] = 0                                                              factor masking
    theta = theta - lr (1/M) sum_k v_k[S_k]

Biases and norms travel whole, as momentum. The density starts at a quarter and falls by four until it is reached, over
`warmup_steps`. What we changed: the selection is over all matrices together rather than one by one, so that a layer
with larger velocities sends more; the momentum of biases is kept by each replica and averaged, which is the same as the
momentum of their average; weight decay is the inner optimizer's and gets no momentum, where the authors' code gives it
one. With density 1 and without masking it is SGD with momentum; with masking, SGD without.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from thinwire.averaging.exchange import AllGather, Exchange, Ramp, cheapest
from thinwire.codecs import float32, top_k
from thinwire.codecs.error_feedback import Momentum, MomentumCorrection
from thinwire.methods.registry import About, register
from thinwire.sync.method import Method
from thinwire.sync.schedule import EveryStep
from thinwire.sync.updates import InnerStep
from thinwire.sync.views import Gradient

_FIRST_DENSITY, _RAMP = 0.25, 4

ABOUT = About(
    paper="arXiv 1712.01887",
    exchanged="the largest accumulated velocities, at every step",
    bits="about 28 density (M - 1)",
    memory="2 (momentum, velocity)",
    restrictions="inner optimizer without momentum; no GradScaler; bytes grow with M",
    inner_optimizer="plain-sgd",
    lr=0.02,  # the method carries the momentum itself
)


@register(ABOUT)
def dgc(
    *,
    density: float = 0.001,
    momentum: float = 0.9,
    nesterov: bool = False,
    masks: bool = True,
    warmup_steps: int = 0,
    clip_norm: float | None = None,
    selection: Literal["sampled", "exact"] = "sampled",
    values: Literal["float16", "bfloat16", "float32"] = "float16",
) -> Method:
    """Send the largest accumulated velocities at every step.

    Args:
        density: Share of the elements that is sent, in (0, 1].
        momentum: m, of what is sent; the inner optimizer must have none.
        nesterov: Whether it is Nesterov's.
        masks: Whether sending an element clears its momentum.
        warmup_steps: Steps over which the density falls, in four equal parts from a quarter; 0 starts with `density`.
        clip_norm: Longest gradient, shared out over the replicas as `clip_norm / sqrt(M)`; None leaves clipping to
            you: before `step`, since what is remembered cannot be clipped later.
        selection: Whether the threshold is found on a sample or exactly.
        values: How a value is written.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> dgc(warmup_steps=400).exchanges(2)[0].codec.at(150).density
        0.0625
    """
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must be at least 0, got {warmup_steps}")
    final = top_k(density=density, selection=selection, values=values)
    starts = [1 + warmup_steps * part // _RAMP for part in range(_RAMP)] if warmup_steps >= _RAMP else []
    ramp = [(start, _FIRST_DENSITY ** (part + 1)) for part, start in enumerate(starts)]
    steep = [(start, replace(final, density=higher)) for start, higher in ramp if higher > density]
    code = Ramp(codecs=(*steep, (1 + warmup_steps if steep else 1, final)))

    def exchange(num_replicas: int) -> tuple[Exchange, ...]:
        longest = None if clip_norm is None else clip_norm / num_replicas**0.5
        correction = MomentumCorrection(momentum=momentum, nesterov=nesterov, masks=masks, clip_norm=longest)
        rest = Momentum(momentum=momentum, nesterov=nesterov)
        dense = cheapest(float32(), num_replicas=num_replicas)
        return AllGather(codec=code, memory=correction), replace(dense, memory=rest)

    exchange(1)  # a bad argument is refused here, not when training starts
    return Method(
        name="dgc",
        schedule=EveryStep(num_channels=2),
        view=Gradient(is_split=True),
        exchange=exchange,
        update=lambda num_replicas: InnerStep(has_momentum_already=True),
    )
