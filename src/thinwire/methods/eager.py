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

Sources: the equations follow the paper's abstract and figures, and our notes on it; the
treatment of the first interval (others count as zero) and of the end is ours. With a lossy code a replica takes back
what it computed, not what its code made of it; the difference is the code's error over M.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from thinwire.averaging.exchange import Exchange, NoExchange, cheapest
from thinwire.averaging.round_context import Average
from thinwire.codecs import Codec, float32
from thinwire.methods.diloco import default_outer_lr
from thinwire.methods.registry import About, register
from thinwire.sync.fragments import Pattern
from thinwire.sync.method import Method
from thinwire.sync.outer_optimizer import Nesterov, OuterOptimizer
from thinwire.sync.program import LocalSteps, Program
from thinwire.sync.schedule import Round, Schedule, Staggered
from thinwire.sync.updates import OuterState, outer_state, outer_step
from thinwire.sync.views import BoundView, OwnPseudoGradient
from thinwire.tagged_state import own

ABOUT = About(
    paper="arXiv 2502.12996",
    exchanged="pseudo-gradients, every H steps, each while the next H steps run; one's own count at once",
    bits="64 (M - 1) / M / H",
    memory="3 (global value, outer momentum, own pseudo-gradient), and 1 in flight",
    restrictions="replicas differ until the final exchange",
)


@register(ABOUT)
def eager(
    *, sync_interval: int = 100, codec: Codec | None = None, outer_lr: float | None = None, outer_momentum: float = 0.9
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
        return cheapest(payload_codec, num_replicas=num_replicas), NoExchange()

    update(1)  # a bad argument is refused here, not when training starts
    return Method(
        name="eager",
        schedule=OwnFirst(sync_interval=sync_interval),
        view=OwnPseudoGradient(fragments=Pattern(num_fragments=1)),
        exchange=exchanges,
        update=update,
        last_exchange=lambda num_replicas: cheapest(float32(), num_replicas=num_replicas),
        has_common_value=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFirst(Schedule):
    """Two rounds at every launch: channel 0 travels for a whole interval, channel 1 stays here and is applied at once.

    Channel 0 of the launch before is applied right before channel 1: both make one outer step.

    Args:
        sync_interval: H, at least 1.

    Example:
        >>> [(r.channel, r.launch_step, r.apply_step) for r in OwnFirst(sync_interval=5).applies(10, num_fragments=1)]
        [(0, 5, 10), (1, 10, 10)]
    """

    sync_interval: int

    def __post_init__(self) -> None:
        Staggered(sync_interval=self.sync_interval)

    def launches(self, step: int, *, num_fragments: int, replica: int = 0) -> Sequence[Round]:
        """Return both rounds of each fragment that is due."""
        late = Staggered(sync_interval=self.sync_interval, overlap_steps=self.sync_interval)
        return [
            replace(round, id=2 * round.id + channel, channel=channel, apply_step=step if channel else round.apply_step)
            for round in late.launches(step, num_fragments=num_fragments)
            for channel in (0, 1)
        ]

    def applies(self, step: int, *, num_fragments: int, replica: int = 0) -> Sequence[Round]:
        """Return what was launched an interval ago and is here by now, then what stays here."""
        where = {"num_fragments": num_fragments, "replica": replica}
        arrived = [round for round in self.launches(step - self.sync_interval, **where) if round.channel == 0]
        return [*arrived, *(round for round in self.launches(step, **where) if round.channel == 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerOuterStep:
    """An outer step with the replica's own fresh pseudo-gradient and the others' of an interval ago.

        d = (1/M) Delta_me(t) + (1/M) sum over the others of Delta(t - H)
        value = OuterOpt(value, d)

    Args:
        optimizer: Moves the replica's global parameters.
        num_replicas: M.
        lr: Of the last step, by which a round that is still in flight at the end is taken in, without momentum.
    """

    program: ClassVar[Program] = LocalSteps()

    optimizer: OuterOptimizer
    num_replicas: int
    lr: float

    def init(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> EagerState:
        # not those below it, which send something else in channel 0
        if type(view) is not OwnPseudoGradient:
            raise ValueError(
                "EagerOuterStep() applies a replica's own pseudo-gradients before the others', which only "
                "OwnPseudoGradient() reads; use that as the view"
            )
        outer = outer_state(self.optimizer, view.parameters)
        return EagerState(outer, [torch.zeros_like(value) for value in view.parameters.values])

    def apply(self, state: EagerState, round: Round, average: Average) -> None:
        """See `Update.apply`: what all have sent waits for what this replica has made since, and comes first."""
        fragment = round.fragment
        if round.channel == 0:
            state.arrived[fragment] = average.mean
            return
        fresh, sent = average.mean, state.sent[fragment]
        # what it sent an interval ago is in the mean, and was applied then
        step = (fresh - sent.to(fresh.device)).div_(self.num_replicas)
        arrived = state.arrived.pop(fragment, None)
        if arrived is not None:
            step.add_(arrived)
        sent.copy_(fresh)
        outer_step(state.outer, round, step, blend=0.0)

    def merge(self, state: EagerState, fragment: int, mean: torch.Tensor) -> None:
        """Set the global value and the local one to the mean of all local ones, and take in what was in flight.

        Each replica has taken in its own share of that round already, a part in M of the mean.
        """
        value = state.outer.parameters.values[fragment]
        value.copy_(mean)
        arrived = state.arrived.pop(fragment, None)
        if arrived is not None:
            value.sub_(arrived.to(value.device), alpha=self.lr * (1 - 1 / self.num_replicas))
        state.outer.parameters.blend_into_locals(fragment, blend=0.0)


@dataclass(slots=True)
class EagerState:
    """State of `EagerOuterStep`, by fragment; means that have arrived wait for the next step."""

    outer: OuterState = own("outer momentum")
    sent: list[torch.Tensor] = own("last pseudo-gradient of its own")
    arrived: dict[int, torch.Tensor] = own("mean", like="sent", default_factory=dict)
