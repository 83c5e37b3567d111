"""Eager updates: DiLoCo whose exchange overlaps a whole interval (arXiv 2502.12996).

At the end of interval t, on each replica m of M:

    Delta_m(t) = theta_m(t-1) - (parameters after H inner steps from theta_m(t-1))
    start to exchange Delta_m(t); take in the exchange that was started an interval ago
    d_m(t) = (1/M) Delta_m(t) + (1/M) sum over j != m of Delta_j(t-1)         nothing for Delta(0)
    theta_m(t) = OuterOpt(theta_m(t-1), d_m(t))                               Nesterov

Nobody waits unless an exchange takes longer than H inner steps. A plain delay (CO2 without its penalty) learns worse,
because a replica's own work of the last interval is undone until it comes back; here it counts at once. The replicas'
parameters differ by their own fresh shares, and become one in the final exchange: the mean of all, and from it a plain
step with the others' share of the round in flight.

What is recalled: the equations are as the paper's abstract and figures tell them and as our notes on it have them; the
treatment of the first interval (others count as zero) and of the end is ours. With a lossy code a replica takes back
what it computed, not what its code made of it; the difference is the code's error over M.
"""

from __future__ import annotations

from thinwire.averaging.exchange import Exchange, cheapest
from thinwire.averaging.no_exchange import Nothing
from thinwire.averaging.topology import AllReplicas
from thinwire.codecs import Codec, float32
from thinwire.methods.about import About
from thinwire.methods.outer_learning_rate import default_outer_lr
from thinwire.sync.eager import EagerOuterStep, OwnFirst
from thinwire.sync.fragments import Pattern
from thinwire.sync.method import Method
from thinwire.sync.outer_optimizer import Nesterov
from thinwire.sync.views import OwnPseudoGradient

ABOUT = About(
    paper="arXiv 2502.12996",
    exchanged="pseudo-gradients, every H steps, each while the next H steps run; one's own count at once",
    bits="64 (M - 1) / M / H",
    memory="3 (global value, outer momentum, own pseudo-gradient), and 1 in flight",
    restrictions="replicas differ until the final exchange",
)


def eager(
    *,
    sync_interval: int = 100,
    codec: Codec | None = None,
    outer_lr: float | None = None,
    outer_momentum: float = 0.9,
) -> Method:
    """Exchange the whole model every `sync_interval` inner steps; take one's own part in at once, the others' later.

    Args:
        sync_interval: H, at least 1.
        codec: The pseudo-gradients' code; float32 by default.
        outer_lr: Nesterov's learning rate; by default `default_outer_lr` of the number of replicas.
        outer_momentum: Nesterov's momentum.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> eager(sync_interval=12).schedule.sync_interval
        12
    """
    payload_codec = float32() if codec is None else codec

    def update(num_replicas: int) -> EagerOuterStep:
        lr = default_outer_lr(num_replicas) if outer_lr is None else outer_lr
        optimizer = Nesterov(lr=lr, momentum=outer_momentum)
        return EagerOuterStep(optimizer=optimizer, num_replicas=num_replicas, lr=lr)

    def exchanges(num_replicas: int) -> tuple[Exchange, ...]:
        return cheapest(payload_codec, num_replicas=num_replicas), Nothing()

    update(1)  # a bad argument is refused here, not when training starts
    return Method(
        name="eager",
        schedule=OwnFirst(sync_interval=sync_interval),
        topology=AllReplicas(),
        view=OwnPseudoGradient(fragments=Pattern(num_fragments=1)),
        exchange=exchanges,
        update=update,
        last_exchange=lambda num_replicas: cheapest(float32(), num_replicas=num_replicas),
        has_common_value=False,
    )
