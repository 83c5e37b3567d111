"""MuLoCo: DiLoCo with Muon as the inner optimizer, 2-bit payloads and error feedback (arXiv 2505.23725).

    Delta_m = theta - theta_m                     after H steps of Muon from theta
    e_m = beta e_m + Delta_m                      error feedback
    send q_m = Q(e_m);  e_m = e_m - q_m
    theta = OuterOpt(theta, (1/M) sum_m q_m)      Nesterov

Muon orthogonalises the momentum of each hidden matrix; embeddings, the head, norms and biases go to AdamW, as in the
paper. The inner optimizer is the caller's: `torch.optim.Muon` and an AdamW, joined by `thinwire.MultiOptimizer`, which
`thinwire train --method muloco` does. The method is the rest, and runs with any other inner optimizer too.

The defaults of the outer step (lr 0.7, momentum 0.6) and H = 30 are what our notes have of the paper's later version.
What we changed: the two-bit code is that of SparseLoCo with blocks of 1024 (`thinwire.codecs.block_2bit`), in place of
the paper's statistical codebook; a residual decays by `decay`, 1 for plain error feedback. Give `codec=float32()` for
plain exchanges, which then remember nothing. The final exchange is dense.
"""

from __future__ import annotations

from dataclasses import replace

from thinwire.averaging.exchange import cheapest
from thinwire.codecs import Codec, block_2bit, float32
from thinwire.methods.registry import About, register
from thinwire.methods.streaming_diloco import streaming_diloco
from thinwire.sync.method import Method

ABOUT = About(
    paper="arXiv 2505.23725",
    exchanged="pseudo-gradients of Muon's steps in 2 bits, every H steps",
    bits="2.06 (M - 1) / H",
    memory="3 (global value, outer momentum, residual)",
    restrictions="bytes grow with M; thinwire train takes Muon as its inner optimizer by default",
    inner_optimizer="muon",
)


@register(ABOUT)
def muloco(
    *,
    sync_interval: int = 30,
    codec: Codec | None = None,
    decay: float = 1.0,
    overlap_steps: int = 0,
    blend: float | None = None,
    num_fragments: int | None = 1,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.6,
) -> Method:
    """Exchange the whole model's pseudo-gradient in two bits every `sync_interval` inner steps, and wait for it.

    With fragments and an overlap the rounds are those of Streaming DiLoCo, and each fragment has its own residual.

    Args:
        sync_interval: H, at least 1.
        codec: The pseudo-gradients' code; two bits by default.
        decay: beta, share of the residual that stays.
        overlap_steps: tau: inner steps from launch to apply, 0 <= tau < H.
        blend: alpha: weight of the local value at apply, in [0, 1); 0.5 by default, 0 where nothing overlaps.
        num_fragments: P, the fragment of embedding and rest among them; None for 3 blocks a fragment.
        outer_lr: Nesterov's learning rate.
        outer_momentum: Nesterov's momentum.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> muloco().exchanges(2)[0].codec.name
        'block-2bit'
    """
    payload_codec = block_2bit() if codec is None else codec
    streaming = streaming_diloco(
        sync_interval=sync_interval, overlap_steps=overlap_steps, blend=blend, codec=payload_codec,
        error_feedback=decay, exchange="auto" if payload_codec.is_lossless_for_float32 else "all-gather",
        num_fragments=num_fragments, outer_lr=outer_lr, outer_momentum=outer_momentum,
    )  # fmt: skip
    return replace(
        streaming, name="muloco", last_exchange=lambda num_replicas: cheapest(float32(), num_replicas=num_replicas)
    )
