"""SparseLoCo (arXiv 2508.15706): rare exchanges of a few pseudo-gradients, in 2 bits, with a decaying residual.

On each replica m of M, after H steps of the inner optimizer from theta:

    Delta_m = theta - theta_m                       the pseudo-gradient
    e_m = beta e_m + Delta_m
    q_m = Q(top k of each chunk of e_m)             2-bit values, 12-bit places
    send q_m;  e_m = e_m - q_m
    q_m = q_m min(1, n / |q_m|), n the median of all |q_m|      (as the authors' training program has it)
    theta = theta - alpha (1/M) sum_m q_m           no outer momentum: the decaying residual plays it

All replicas go on from theta. The final exchange is dense, so that the last interval's work is not left behind in the
residuals.
"""

from __future__ import annotations

from thinwire.averaging.aggregation_rules import MedianNormClip
from thinwire.averaging.exchange import AllGather, cheapest
from thinwire.codecs import chunked_top_k, float32
from thinwire.codecs.error_feedback import ErrorFeedback
from thinwire.methods.registry import About, register
from thinwire.sync.fragments import Pattern
from thinwire.sync.method import Method
from thinwire.sync.outer_optimizer import PlainSGD
from thinwire.sync.schedule import Staggered
from thinwire.sync.updates import OuterStep
from thinwire.sync.views import PseudoGradient

ABOUT = About(
    paper="arXiv 2508.15706",
    exchanged="the largest pseudo-gradients of each chunk in 2 bits, every H steps",
    bits="0.22 (M - 1) / H",
    memory="2 (global value, residual)",
    restrictions="bytes grow with M",
)


@register(ABOUT)
def sparse_loco(
    *,
    sync_interval: int = 30,
    k: int = 64,
    chunk: int = 4096,
    decay: float = 0.95,
    outer_lr: float = 1.0,
    clips: bool = True,
) -> Method:
    """Exchange the largest pseudo-gradients every `sync_interval` inner steps and wait for it.

    Args:
        sync_interval: H, at least 1.
        k: Elements of each chunk that are sent.
        chunk: Elements a chunk.
        decay: beta, share of the residual that stays.
        outer_lr: alpha.
        clips: Whether what is longer than the median replica's is shortened to it.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> sparse_loco(k=32).exchanges(2)[0].codec.k
        32
    """
    code = chunked_top_k(k=k, chunk=chunk, values="codebook2")
    exchange = AllGather(codec=code, memory=ErrorFeedback(decay=decay), aggregate=MedianNormClip() if clips else None)
    return Method(
        name="sparse-loco",
        schedule=Staggered(sync_interval=sync_interval),
        view=PseudoGradient(fragments=Pattern(num_fragments=1)),
        exchange=lambda num_replicas: exchange,
        update=lambda num_replicas: OuterStep(optimizer=PlainSGD(lr=outer_lr)),
        last_exchange=lambda num_replicas: cheapest(float32(), num_replicas=num_replicas),
    )
