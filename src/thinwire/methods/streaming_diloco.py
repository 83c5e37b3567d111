"""Streaming DiLoCo with overlapping communication (arXiv 2501.18512, Algorithm 2).

The model is cut into fragments p = 1 .. P: groups of transformer blocks, strided, and one for the embedding and the
rest. On each replica m of M, with interval H, overlap tau < H and the fragments' offsets t_p:

    for t = 1 .. T:
        theta_m(t) = InnerOpt(theta_m(t-1))
        if (t - t_p) mod H == 0 for some p:                                  launch
            Delta_mp(t) = theta_p(t-H) - theta_mp(t)                         global minus local
            start to send Delta_mp(t), 4 bits a value (E3M0), to all
        if (t - t_p - tau) mod H == 0 for some p:                            apply
            Delta_p = (1/M) sum_m Delta_mp(t-tau)                            summed in float32
            theta_p(t) = OuterOpt(theta_p(t-tau-H), Delta_p)                 Nesterov, momentum 0.9
            theta_mp(t) = alpha theta_mp(t) + (1 - alpha) theta_p(t)         blend

With `error_feedback` beta a fragment's residual e_mp is added before the code, and keeps what it drops (arXiv
1901.09847): it makes codes of 2 bits and of 1 bit usable.

What the paper leaves open, and what we do: a fragment is not launched before it has run H steps (the paper's example,
not its formula); the pseudo-gradient refers to the pure global value theta_p, never to the blend; E3M0 payloads carry
one power-of-two scale a block of 64 values; with more than 4 replicas a two-phase exchange keeps a replica's traffic
constant and codes the mean a second time. What we changed: the outer learning rate's default follows arXiv 2503.09799
and grows with the number of replicas, where the paper uses 0.4; overlaps may differ between replicas, as in the paper's
experiment with unequal workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from thinwire.averaging.exchange import Exchange, TwoPhase, exchange_by_name
from thinwire.codecs import Codec, e3m0
from thinwire.codecs.error_feedback import ErrorFeedback
from thinwire.methods.diloco import default_outer_lr
from thinwire.methods.registry import About, register
from thinwire.sync.fragments import Pattern
from thinwire.sync.method import Method
from thinwire.sync.outer_optimizer import Nesterov, OuterOptimizer
from thinwire.sync.schedule import Staggered
from thinwire.sync.updates import OuterStep
from thinwire.sync.views import PseudoGradient

ABOUT = About(
    paper="arXiv 2501.18512",
    exchanged="pseudo-gradients in E3M0, a fragment at a time, while training goes on",
    bits="4.13 (M - 1) / H; above 4 replicas 8.25 (M - 1) / M / H",
    memory="2 (global value, outer momentum)",
    plan_codecs=("bfloat16", "e3m0"),
)


@register(ABOUT)
def streaming_diloco(
    *,
    sync_interval: int = 100,
    overlap_steps: int | Sequence[int] = 1,
    blend: float | None = None,
    codec: Codec | None = None,
    error_feedback: float | None = None,
    exchange: Literal["auto", "all-gather", "two-phase"] = "auto",
    fragment_order: Literal["strided", "sequential"] = "strided",
    layers_per_fragment: int = 3,
    num_fragments: int | None = None,
    outer_lr: float | None = None,
    outer_momentum: float = 0.9,
    outer_optimizer: OuterOptimizer | None = None,
) -> Method:
    """Exchange one fragment at a time, in 4 bits, while training goes on.

    Args:
        sync_interval: H: inner steps between two exchanges of the same fragment, at least 1.
        overlap_steps: tau: inner steps from launch to apply, 0 <= tau < H; one number, or one a replica.
        blend: alpha: weight of the local value at apply, in [0, 1); 0.5 by default, 0 where nothing overlaps.
        codec: The pseudo-gradients' code; E3M0 by default.
        error_feedback: Share of what the code dropped that the next round adds, at most 1; None for no residual.
        exchange: How payloads travel; `"auto"` takes the cheaper one for the number of replicas.
        fragment_order: How blocks are dealt out.
        layers_per_fragment: Blocks a fragment.
        num_fragments: P, the fragment of embedding and rest among them; overrides `layers_per_fragment`.
        outer_lr: Nesterov's learning rate; by default `default_outer_lr` of the number of replicas.
        outer_momentum: Nesterov's momentum.
        outer_optimizer: Another outer optimizer than Nesterov; then the two arguments above do not count.

    Raises:
        ValueError: An argument is out of its range; names the value, the limit and the remedy.

    Example:
        >>> method = streaming_diloco(sync_interval=30, overlap_steps=3)
        >>> method.schedule.overlap_of(0), method.update(2).blend
        (3, 0.5)
    """
    overlaps = overlap_steps if isinstance(overlap_steps, int) else tuple(overlap_steps)
    longest = overlaps if isinstance(overlaps, int) else max(overlaps, default=0)
    if sync_interval >= 1 and longest >= sync_interval:
        raise ValueError(
            f"overlap_steps must be below sync_interval ({sync_interval}), got {longest}; a fragment's exchange must "
            f"be applied before its next one starts; co2() overlaps a whole interval"
        )
    schedule = Staggered(sync_interval=sync_interval, overlap_steps=overlaps)
    pattern = Pattern(order=fragment_order, layers_per_fragment=layers_per_fragment, num_fragments=num_fragments)
    alpha = blend if blend is not None else (0.5 if overlaps else 0.0)

    def update(num_replicas: int) -> OuterStep:
        lr = default_outer_lr(num_replicas) if outer_lr is None else outer_lr
        optimizer = outer_optimizer or Nesterov(lr=lr, momentum=outer_momentum)
        return OuterStep(optimizer=optimizer, blend=alpha)

    update(1)  # a bad argument is refused here, not when training starts
    payload_codec = e3m0() if codec is None else codec
    memory = None
    if error_feedback is not None:
        memory = ErrorFeedback(decay=float(error_feedback))
        memory = None if payload_codec.is_lossless_for_float32 else memory
    chosen = exchange_by_name(exchange, payload_codec)

    def exchanges(num_replicas: int) -> Exchange:
        found = chosen(num_replicas)
        if isinstance(found, TwoPhase):
            return replace(found, memory=memory, owner_memory=memory)
        return replace(found, memory=memory)

    # no later round would send the residual of a coarse code
    last_codec = payload_codec if payload_codec.is_lossless_for_float32 else e3m0()
    last_exchange = None if error_feedback is None else exchange_by_name("auto", last_codec)
    return Method(
        name="streaming-diloco",
        schedule=schedule,
        view=PseudoGradient(fragments=pattern),
        exchange=exchanges,
        update=update,
        last_exchange=last_exchange,
    )
