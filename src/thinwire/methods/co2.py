"""CO2: local steps with an exchange that overlaps a whole round (arXiv 2401.16265).

    for t = 0 .. T - 1, on each replica i of M:
        x_i(t, tau) = tau steps of the inner optimizer from x(t, 0)
        start to average x_i(t, tau) over the replicas; wait for the average that was started a round ago
        d(t) = x(t-1, 0) - (1/M) sum_i x_i(t-1, tau)
        m(t) = Clip(beta m(t-1) + d(t) / Lambda(t), phi)           each element cut to [-phi, phi]
        x(t+1, 0) = x(t, 0) - alpha m(t)

tau is our sync interval H, alpha the outer learning rate, beta the outer momentum. Lambda is the staleness gap: d(t)
was measured from x(t-1, 0), but is applied at x(t, 0), and the farther these are apart, the less it counts. All
replicas start every round from the same x(t, 0); no replica waits, unless an exchange takes longer than a whole round.

What the paper leaves open, and what we do:
- At the first boundary (t = 0) nothing has arrived, so m stays 0 and x(1, 0) = x(0, 0): the second round starts from
  the first parameters again. What the first one made is on its way, and is applied at the second boundary.
- Where a run ends, the round in flight is applied, and the final exchange adds what was trained since its launch.

What we changed: what travels is the difference to x(t, 0), whose mean is the same, so a code applies to differences
only; we send it before the wait, which does not change the result. We could not read the paper's equation for Lambda,
only its text: a normalised distance of x(t, 0) and x(t-1, 0), plus 1. We take that distance in units of the round's own
movement, `Lambda(t) = 1 + |alpha m(t-1)| / |d(t)|`, with Euclidean norms over the whole model (over its own shard on a
rank of a sharded replica), so no second anchor need be kept: alpha m(t-1) is the distance. The penalty is more than a
refinement. Without it, on a quadratic where the inner steps of a round go the share g of the way to the minimum, the
delay makes the outer steps grow as soon as `alpha g > 1 - beta` (the roots of z^2 - (1 + beta) z + beta + alpha g).
The authors' public code takes a constant for Lambda, throws the clipped momentum away and waits in the outer step; we
follow the paper. With `shards_outer_state` each replica keeps the outer momentum of its own part of the model only, as
the paper can: it makes the step there and sends that in the mean's place, in as many bytes. The staleness gap is then
each part's own, and a `GradScaler` is refused, as with everything that an exchange remembers.

With `is_delayed=False` the exchange is waited for, nothing is stale, Lambda is 1, and without clip this is SlowMo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire.averaging.exchange import Exchange, TwoPhase, cheapest
from thinwire.codecs import Codec, float32
from thinwire.codecs.error_feedback import SenderMemory, there
from thinwire.methods.registry import About, register
from thinwire.sync.fragments import Pattern
from thinwire.sync.method import Method
from thinwire.sync.outer_optimizer import OuterOptimizer, PlainSGD, check_rates
from thinwire.sync.schedule import Staggered
from thinwire.sync.updates import DelayedOuterStep, OuterStep, TakenPseudoGradient, Update
from thinwire.sync.views import PseudoGradient, View
from thinwire.tagged_state import owner

ABOUT = About(
    paper="arXiv 2401.16265",
    exchanged="pseudo-gradients, every H steps, each while the next H steps run",
    bits="64 (M - 1) / M / H",
    memory="2 (global value, outer momentum), and 1 in flight",
    plan_codecs=("float32", "bfloat16"),
)


@register(ABOUT)
def co2(
    *,
    sync_interval: int = 48,
    codec: Codec | None = None,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.5,
    outer_clip: float | None = 1.0,
    has_gap_penalty: bool = True,
    is_delayed: bool = True,
    shards_outer_state: bool = False,
) -> Method:
    """Exchange the whole model every `sync_interval` inner steps, and apply each exchange when the next one starts.

    Args:
        sync_interval: H (the paper's tau), at least 1.
        codec: The pseudo-gradients' code; float32 by default.
        outer_lr: alpha.
        outer_momentum: beta; the authors' code takes 0 to 0.6, more for more replicas.
        outer_clip: phi: largest magnitude of an element of the outer momentum; None cuts nothing.
        has_gap_penalty: Whether stale pseudo-gradients are divided by the staleness gap.
        is_delayed: False waits for each exchange, as SlowMo does.
        shards_outer_state: Whether a replica keeps the outer momentum of its part of the model only.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> co2(sync_interval=12).schedule.overlap_of(0)
        12
    """
    payload_codec = float32() if codec is None else codec
    optimizer = StaleHeavyBall(
        lr=outer_lr, momentum=outer_momentum, has_gap_penalty=has_gap_penalty and is_delayed, clip=outer_clip
    )
    fragments = Pattern(num_fragments=1)
    view: View = TakenPseudoGradient(fragments=fragments) if is_delayed else PseudoGradient(fragments=fragments)
    step: OuterOptimizer = PlainSGD(lr=1.0) if shards_outer_state else optimizer
    update: Update = DelayedOuterStep(optimizer=step) if is_delayed else OuterStep(optimizer=step)

    def exchange(num_replicas: int) -> Exchange:
        if shards_outer_state:
            return TwoPhase(codec=payload_codec, owner_memory=ShardedMomentum(optimizer=optimizer))
        return cheapest(payload_codec, num_replicas=num_replicas)

    return Method(
        name="co2",
        schedule=Staggered(sync_interval=sync_interval, overlap_steps=sync_interval if is_delayed else 0),
        view=view,
        exchange=exchange,
        update=lambda num_replicas: update,
        last_exchange=lambda num_replicas: cheapest(payload_codec, num_replicas=num_replicas),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleHeavyBall:
    """Heavy ball for pseudo-gradients that come a round late (CO2, arXiv 2401.16265).

    `m = mu m + d / gap`, each element of m cut to [-clip, clip], `value -= lr m`, with

        gap = 1 + |lr m_before| / |d|

    `lr m_before` is the step that the value has taken since the point that d was measured from, so the gap tells how
    many rounds' worth of movement lie between the two. It is 1 before the first step, and where d is zero.

    Args:
        lr: The outer learning rate.
        momentum: mu.
        has_gap_penalty: Whether d is divided by the gap; False for 1.
        clip: Largest magnitude of an element of the momentum; None cuts nothing.

    Raises:
        ValueError: A number is out of its range.
    """

    has_momentum: ClassVar[bool] = True

    lr: float
    momentum: float = 0.5
    has_gap_penalty: bool = True
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        check_rates(self.lr, momentum=self.momentum)
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"the outer clip must be positive, got {self.clip}; None cuts nothing")

    def step(self, value: torch.Tensor, pseudo_gradient: torch.Tensor, momentum: torch.Tensor | None) -> None:
        assert momentum is not None
        gap = self.gap(pseudo_gradient, momentum) if self.has_gap_penalty else 1.0
        momentum.mul_(self.momentum).add_(pseudo_gradient.div_(gap))
        if self.clip is not None:
            momentum.clamp_(-self.clip, self.clip)
        value.add_(momentum, alpha=-self.lr)

    def gap(self, pseudo_gradient: torch.Tensor, momentum: torch.Tensor) -> float:
        """Return the staleness gap, at least 1.

        A sum's last bits depend on the machine, and all replicas must divide by the same number: so it is summed in
        float64 and rounded to 2**-10, which leaves no room for them short of a tie.
        """
        moved = self.lr * float(torch.linalg.vector_norm(momentum, dtype=torch.float64))
        measured = float(torch.linalg.vector_norm(pseudo_gradient, dtype=torch.float64))
        return 1.0 + round(1024 * moved / measured) / 1024 if measured > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedMomentum(SenderMemory):
    """The owner of a shard turns its mean into the outer step, and sends that in the mean's place.

    As `TwoPhase(owner_memory=...)`: the owner's momentum is the only one of its shard, so M replicas keep one copy
    together, and what travels has the same size. All replicas then apply what comes by `PlainSGD(lr=1)`. What an
    optimizer computes over a whole vector (CO2's staleness gap), it computes over the shard here.

    Args:
        optimizer: From the mean pseudo-gradient to the step.
    """

    optimizer: OuterOptimizer

    def init(self, numel: int) -> OwnersMomentum:
        return OwnersMomentum(torch.zeros(numel))

    def before(self, state: OwnersMomentum, x: torch.Tensor) -> torch.Tensor:
        moved = torch.zeros_like(x)
        self.optimizer.step(moved, x.clone(), there(state, "momentum", x))
        return moved.neg_()

    def after(self, state: OwnersMomentum, sent: torch.Tensor) -> None:
        pass  # what the code drops is not remembered


@dataclass(slots=True)
class OwnersMomentum:
    """The outer momentum of one owner's shard."""

    momentum: torch.Tensor = owner("outer momentum")
