"""DiLoCo: Distributed Low-Communication training of language models (arXiv 2311.08105, Algorithm 1).

    for t = 1 .. T, on each replica m of M:
        theta_m = H steps of the inner optimizer from theta(t-1)
        Delta(t) = (1/M) sum_m (theta(t-1) - theta_m)          the outer gradient
        theta(t) = OuterOpt(theta(t-1), Delta(t))               Nesterov, momentum 0.9
        all replicas go on from theta(t)

The inner optimizer's state stays on its replica and lives on across rounds, as in the paper. What we changed: the outer
learning rate's default follows the later scaling laws (arXiv 2503.09799) and grows with the number of replicas, where
the paper uses 0.7 for all; payloads may be coded.
"""

from __future__ import annotations

from typing import Literal

from thinwire.averaging.exchange import exchange_by_name
from thinwire.codecs import Codec, float32
from thinwire.methods.registry import About, register
from thinwire.sync.fragments import Pattern
from thinwire.sync.method import Method
from thinwire.sync.outer_optimizer import Nesterov, OuterOptimizer
from thinwire.sync.schedule import Staggered
from thinwire.sync.updates import OuterStep
from thinwire.sync.views import PseudoGradient

ABOUT = About(
    paper="arXiv 2311.08105",
    exchanged="pseudo-gradients, every H steps",
    bits="64 (M - 1) / M / H",
    memory="2 (global value, outer momentum)",
    plan_codecs=("float32", "bfloat16", "e3m0"),
)


@register(ABOUT)
def diloco(
    *,
    sync_interval: int = 100,
    codec: Codec | None = None,
    exchange: Literal["auto", "all-gather", "two-phase"] = "auto",
    outer_lr: float | None = None,
    outer_momentum: float = 0.9,
    outer_optimizer: OuterOptimizer | None = None,
) -> Method:
    """Exchange the whole model's pseudo-gradient every `sync_interval` inner steps and wait for it.

    Args:
        sync_interval: H, at least 1.
        codec: The pseudo-gradients' code; float32 by default.
        exchange: How payloads travel; `"auto"` takes the cheaper one for the number of replicas.
        outer_lr: Nesterov's learning rate; by default `default_outer_lr` of the number of replicas.
        outer_momentum: Nesterov's momentum.
        outer_optimizer: Another outer optimizer than Nesterov; then the two arguments above do not count.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> diloco(sync_interval=500).view.fragments.num_fragments
        1
    """
    payload_codec = float32() if codec is None else codec

    def update(num_replicas: int) -> OuterStep:
        lr = default_outer_lr(num_replicas) if outer_lr is None else outer_lr
        return OuterStep(optimizer=outer_optimizer or Nesterov(lr=lr, momentum=outer_momentum))

    update(1)  # a bad argument is refused here, not when training starts
    return Method(
        name="diloco",
        schedule=Staggered(sync_interval=sync_interval),
        view=PseudoGradient(fragments=Pattern(num_fragments=1)),
        exchange=exchange_by_name(exchange, payload_codec),
        update=update,
    )


def default_outer_lr(num_replicas: int) -> float:
    """Return the outer learning rate for Nesterov with momentum 0.9.

    The best rate does not depend on the model's size and grows with the number of replicas (arXiv 2503.09799, section
    4 and figure 7: 0.4 to 0.6 for one, 0.6 for 2 and 4, 0.8 for 8, at a sync interval of 30). It also grows with the
    sync interval (section 5.1, intervals of 1 to 300), but figure 8 draws that and no number is stated. So the default
    ignores the interval: try a higher rate above 30, and a lower one below.

    Example:
        >>> default_outer_lr(2), default_outer_lr(8)
        (0.6, 0.8)
    """
    return 0.6 if num_replicas < 8 else 0.8
