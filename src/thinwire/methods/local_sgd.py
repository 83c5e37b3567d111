"""Local SGD (arXiv 1805.09767), also known as federated averaging: train apart, average the parameters now and then.

Every H inner steps each replica takes the mean of all replicas' parameters: theta = (1/M) sum_m theta_m. We write it as
an outer step of plain SGD with learning rate 1 on the mean pseudo-gradient, theta - (1/M) sum_m (theta - theta_m),
which is the same value; so a codec applies to differences, never to the parameters themselves.
"""

from __future__ import annotations

from thinwire.averaging.exchange import cheapest
from thinwire.codecs import Codec, float32
from thinwire.methods.registry import About, register
from thinwire.sync.fragments import Pattern
from thinwire.sync.method import Method
from thinwire.sync.outer_optimizer import PlainSGD
from thinwire.sync.schedule import Staggered
from thinwire.sync.updates import OuterStep
from thinwire.sync.views import PseudoGradient

ABOUT = About(
    paper="arXiv 1805.09767",
    exchanged="pseudo-gradients, every H steps",
    bits="64 (M - 1) / M / H",
    memory="1 (global value)",
    plan_codecs=("float32", "bfloat16"),
)


@register(ABOUT)
def local_sgd(*, sync_interval: int = 100, codec: Codec | None = None) -> Method:
    """Average the parameters every `sync_interval` inner steps and wait for it.

    Args:
        sync_interval: H, at least 1.
        codec: The code of the differences; float32 by default.

    Raises:
        ValueError: `sync_interval` is below 1.

    Example:
        >>> local_sgd(sync_interval=50).schedule.sync_interval
        50
    """
    differences = float32() if codec is None else codec
    return Method(
        name="local-sgd",
        schedule=Staggered(sync_interval=sync_interval),
        view=PseudoGradient(fragments=Pattern(num_fragments=1)),
        exchange=lambda num_replicas: cheapest(differences, num_replicas=num_replicas),
        update=lambda num_replicas: OuterStep(optimizer=PlainSGD(lr=1.0)),
    )
