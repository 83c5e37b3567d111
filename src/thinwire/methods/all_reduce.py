"""All-reduce baseline: gradients are averaged at every step, as DistributedDataParallel does.

With g_m the gradient of replica m of M, every replica steps its inner optimizer with g = (1/M) sum_m g_m. Replicas that
start from the same parameters keep the same parameters, bit for bit.
"""

from __future__ import annotations

from thinwire.averaging.exchange import cheapest
from thinwire.codecs import Codec, float32
from thinwire.methods.registry import About, register
from thinwire.sync.method import Method
from thinwire.sync.schedule import EveryStep
from thinwire.sync.updates import InnerStep
from thinwire.sync.views import Gradient

ABOUT = About(
    paper="-",
    exchanged="gradients, at every step",
    bits="64 (M - 1) / M",
    memory="0",
    plan_codecs=("float32", "bfloat16"),
)


@register(ABOUT)
def all_reduce(*, codec: Codec | None = None) -> Method:
    """Average gradients at every step and wait for them.

    Args:
        codec: The gradients' code; float32 by default.

    Example:
        >>> all_reduce().name
        'all-reduce'
    """
    gradients = float32() if codec is None else codec
    return Method(
        name="all-reduce",
        schedule=EveryStep(),
        view=Gradient(),
        exchange=lambda num_replicas: cheapest(gradients, num_replicas=num_replicas),
        update=lambda num_replicas: InnerStep(),
    )
