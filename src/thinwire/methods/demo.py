"""DeMo: decoupled momentum optimization (arXiv 2411.19870).

On each replica, for every matrix, with momentum decay beta and the DCT of tiles of `chunk` times `chunk`:

    e = beta e + g                                  the momentum that stays here
    q = the k largest DCT coefficients of each tile of e
    send q;  e = e - IDCT(q)                        what was sent is no momentum any more
    theta = theta - lr sign((1/M) sum_m IDCT(q_m))

What we changed: the authors put the learning rate into the momentum, we apply it with the sign alone, which differs
only by how the rate changes along the run; the mean is taken of the decoded values, not of the coefficients, which is
the same since the transform is linear; tensors of one dimension travel whole, which is the same as k = chunk.
"""

from __future__ import annotations

from thinwire.averaging.exchange import AllGather, cheapest
from thinwire.codecs import dct_top_k, float32
from thinwire.codecs.error_feedback import ErrorFeedback
from thinwire.methods.registry import About, register
from thinwire.sync.method import Method
from thinwire.sync.schedule import EveryStep
from thinwire.sync.updates import InnerStep
from thinwire.sync.views import Gradient

ABOUT = About(
    paper="arXiv 2411.19870",
    exchanged="the largest DCT coefficients of the momentum, at every step",
    bits="28 k / chunk^2 (M - 1) of full tiles",
    memory="1 (momentum)",
    restrictions="inner optimizer SGD without momentum; no GradScaler; bytes grow with M",
    inner_optimizer="plain-sgd",
    lr=1e-3,  # it steps with signs
)


@register(ABOUT)
def demo(*, k: int = 32, chunk: int = 64, decay: float = 0.999) -> Method:
    """Send the fast parts of the momentum at every step, and step with the sign of their mean.

    Args:
        k: Coefficients of each tile.
        chunk: Side of a tile.
        decay: beta, of the momentum that stays.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> demo(k=8).exchanges(2)[0].codec.k
        8
    """
    momentum = AllGather(codec=dct_top_k(k=k, chunk=chunk), memory=ErrorFeedback(decay=decay))
    return Method(
        name="demo",
        schedule=EveryStep(num_channels=2),
        view=Gradient(is_split=True),
        exchange=lambda num_replicas: (momentum, cheapest(float32(), num_replicas=num_replicas)),
        update=lambda num_replicas: InnerStep(has_momentum_already=True, takes_sign=True),
    )
