"""SlowMo: slow momentum on top of local steps (arXiv 1910.00643, Algorithm 1, with exact averages).

    for t = 0 .. T - 1, on each replica i of M:
        x_i(t, tau) = tau steps of the inner optimizer from x(t, 0)
        d(t) = x(t, 0) - (1/M) sum_i x_i(t, tau)
        u(t + 1) = beta u(t) + d(t) / gamma(t)
        x(t + 1, 0) = x(t, 0) - alpha gamma(t) u(t + 1)

tau is our sync interval H, alpha the outer learning rate (1 in the paper), beta the outer momentum. gamma is the inner
learning rate. Where it is constant it cancels, and SlowMo is a heavy ball on the mean pseudo-gradient. What we changed:
we leave gamma out, since an optimizer wrapped around any other does not know one learning rate; so where the inner rate
falls, older pseudo-gradients weigh what they weighed when they were made, while the paper scales them down with it. The
inner optimizer's state lives on (the paper's "maintain" strategy; it also tries to reset or to average it).
"""

from __future__ import annotations

from thinwire.averaging.exchange import cheapest
from thinwire.codecs import Codec, float32
from thinwire.methods.registry import About, register
from thinwire.sync.fragments import Pattern
from thinwire.sync.method import Method
from thinwire.sync.outer_optimizer import HeavyBall
from thinwire.sync.schedule import Staggered
from thinwire.sync.updates import OuterStep
from thinwire.sync.views import PseudoGradient

ABOUT = About(
    paper="arXiv 1910.00643",
    exchanged="pseudo-gradients, every H steps",
    bits="64 (M - 1) / M / H",
    memory="2 (global value, outer momentum)",
    plan_codecs=("float32", "bfloat16"),
)


@register(ABOUT)
def slowmo(
    *, sync_interval: int = 48, codec: Codec | None = None, outer_lr: float = 1.0, outer_momentum: float = 0.5
) -> Method:
    """Exchange the whole model's pseudo-gradient every `sync_interval` inner steps, and step with slow momentum.

    Args:
        sync_interval: H (the paper's tau), at least 1.
        codec: The pseudo-gradients' code; float32 by default.
        outer_lr: alpha.
        outer_momentum: beta; the paper finds 0.4 to 0.8 best.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> slowmo(sync_interval=12).update(4).optimizer
        HeavyBall(lr=1.0, momentum=0.5)
    """
    payload_codec = float32() if codec is None else codec
    update = OuterStep(optimizer=HeavyBall(lr=outer_lr, momentum=outer_momentum))
    return Method(
        name="slowmo",
        schedule=Staggered(sync_interval=sync_interval),
        view=PseudoGradient(fragments=Pattern(num_fragments=1)),
        exchange=lambda num_replicas: cheapest(payload_codec, num_replicas=num_replicas),
        update=lambda num_replicas: update,
    )
