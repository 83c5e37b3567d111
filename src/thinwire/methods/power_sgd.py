"""PowerSGD (arXiv 1905.13727, Algorithms 1 and 2): gradients as products of two thin matrices, with error feedback.

    M = g + e                            for every matrix, on each replica
    P = mean M Q;  orthonormalise P      first exchange
    Q = mean M^T P                       second exchange; the next step starts from this Q
    g = P Q^T;  e = M - P Q^T

The mean g goes to the inner optimizer, as an all-reduced gradient would. Biases and norms travel whole. What we
changed: the paper's optimizer is SGD with momentum after the mean; here it is whatever the inner optimizer does.
"""

from __future__ import annotations

from thinwire.averaging.exchange import cheapest
from thinwire.averaging.low_rank import LowRank
from thinwire.averaging.topology import AllReplicas
from thinwire.codecs import float32
from thinwire.methods.registry import About, register
from thinwire.sync.method import Method
from thinwire.sync.schedule import EveryStep
from thinwire.sync.updates import InnerStep
from thinwire.sync.views import Gradient

ABOUT = About(
    paper="arXiv 1905.13727",
    exchanged="two thin factors of each gradient matrix, at every step",
    bits="64 r (rows + columns) / (rows columns) (M - 1) / M",
    memory="1 (residual), and the thin factors",
    restrictions="replicas with the same kind of processor; no GradScaler",
)


@register(ABOUT)
def power_sgd(*, rank: int = 4, seed: int = 0) -> Method:
    """Average gradients at every step as matrices of low rank.

    Args:
        rank: r, of the factors.
        seed: Of the first factors.

    Raises:
        ValueError: The rank is below 1.

    Example:
        >>> power_sgd(rank=2).exchanges(2)[0].rank
        2
    """
    factors = LowRank(rank=rank, seed=seed)
    return Method(
        name="power-sgd",
        schedule=EveryStep(num_channels=2),
        topology=AllReplicas(),
        view=Gradient(is_split=True),
        exchange=lambda num_replicas: (factors, cheapest(float32(), num_replicas=num_replicas)),
        update=lambda num_replicas: InnerStep(),
    )
