"""Streaming SparseLoCo: the sparse 2-bit exchange of SparseLoCo, a fragment at a time, while training goes on.

It joins two papers: fragments, overlap and blend of Streaming DiLoCo (arXiv 2501.18512, Algorithm 2), and the code,
the residual and the outer step of SparseLoCo (arXiv 2508.15706). On each replica m of M, with interval H, overlap
tau < H and the fragments' offsets t_p:

    for t = 1 .. T:
        theta_m(t) = InnerOpt(theta_m(t-1))
        if (t - t_p) mod H == 0 for some p:                                  launch
            Delta_mp(t) = theta_p(t-H) - theta_mp(t)                         global minus local
            e_mp = beta e_mp + Delta_mp(t)                                   the fragment's residual
            q_mp(t) = Q(top k of each chunk of e_mp)                         2-bit values, 12-bit places
            start to send q_mp(t) to all;  e_mp = e_mp - q_mp(t)
        if (t - t_p - tau) mod H == 0 for some p:                            apply
            q_mp = q_mp min(1, n / |q_mp|), n the median of |q_1p| .. |q_Mp|
            theta_p(t) = theta_p(t-tau-H) - lr (1/M) sum_m q_mp(t-tau)       no outer momentum
            theta_mp(t) = alpha theta_mp(t) + (1 - alpha) theta_p(t)         blend

What the papers leave open, and what we do: a fragment's tensors are joined before they are cut into chunks, so that
small ones (norms, biases) compete with their neighbours and cost no chunk of their own; lengths are compared, and their
median taken, fragment by fragment, since a round holds no more than that. What the blend leaves in the local value
counts again in the next Delta, on top of the residual: steps grow by 1 / (1 - alpha), and a blend far above 0.5
diverges. There is no two-phase exchange: the owner of a shard would have to cut the mean of sparse payloads a second
time. The final exchange is dense, as in `sparse_loco`, but in E3M0: in float32 it would cost as much as 137 rounds.
The residual decays faster and the outer rate is higher than the paper's 0.95 and 1. The authors' program divides each
value by the number of replicas that sent it, which is seldom more than one; we divide by M.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from thinwire.averaging.exchange import cheapest
from thinwire.codecs import e3m0
from thinwire.methods.registry import About, register
from thinwire.methods.sparse_loco import sparse_loco
from thinwire.methods.streaming_diloco import streaming_diloco
from thinwire.sync.method import Method
from thinwire.sync.outer_optimizer import PlainSGD
from thinwire.sync.updates import OuterStep

ABOUT = About(
    paper="arXiv 2508.15706",
    exchanged="the largest pseudo-gradients of each chunk in 2 bits, a fragment at a time, while training goes on",
    bits="0.23 (M - 1) / H",
    memory="2 (global value, residual)",
    restrictions="bytes grow with M",
)


@register(ABOUT)
def streaming_sparse_loco(
    *,
    sync_interval: int = 30,
    overlap_steps: int | Sequence[int] = 1,
    blend: float | None = None,
    k: int = 64,
    chunk: int = 4096,
    decay: float = 0.8,
    outer_lr: float = 1.6,
    clips: bool = True,
    fragment_order: Literal["strided", "sequential"] = "strided",
    layers_per_fragment: int = 3,
    num_fragments: int | None = None,
) -> Method:
    """Exchange the largest pseudo-gradients of one fragment at a time, while training goes on.

    Args:
        sync_interval: H: inner steps between two exchanges of the same fragment, at least 1.
        overlap_steps: tau: inner steps from launch to apply, 0 <= tau < H; one number, or one a replica.
        blend: alpha: weight of the local value at apply, in [0, 1); 0.5 by default, 0 where nothing overlaps.
        k: Elements of each chunk that are sent.
        chunk: Elements a chunk; a fragment's tensors are joined before they are cut into chunks.
        decay: beta, share of the residual that stays.
        outer_lr: lr of the outer step.
        clips: Whether what is longer than the median replica's is shortened to it.
        fragment_order: How blocks are dealt out.
        layers_per_fragment: Blocks a fragment.
        num_fragments: P, the fragment of embedding and rest among them; overrides `layers_per_fragment`.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> method = streaming_sparse_loco(overlap_steps=6)
        >>> method.schedule.overlap_of(0), method.exchanges(2)[0].codec.k, method.update(2).blend
        (6, 64, 0.5)
    """
    streaming = streaming_diloco(
        sync_interval=sync_interval, overlap_steps=overlap_steps, blend=blend, fragment_order=fragment_order,
        layers_per_fragment=layers_per_fragment, num_fragments=num_fragments,
    )  # fmt: skip
    sparse = sparse_loco(sync_interval=sync_interval, k=k, chunk=chunk, decay=decay, outer_lr=outer_lr, clips=clips)
    mixed = streaming.update(1)
    assert isinstance(mixed, OuterStep)
    update = replace(mixed, optimizer=PlainSGD(lr=outer_lr))
    return replace(
        sparse,
        name="streaming-sparse-loco",
        schedule=streaming.schedule,
        view=streaming.view,
        update=lambda num_replicas: update,
        last_exchange=lambda num_replicas: cheapest(e3m0(), num_replicas=num_replicas),
    )
