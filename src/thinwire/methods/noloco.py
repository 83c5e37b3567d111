"""NoLoCo: local steps and random pairs, without any exchange between all replicas (arXiv 2506.10911).

Each replica i has its own slow weights phi_i. For outer step t = 0, 1, ..., on each replica:

    theta_i = H steps of the inner optimizer from phi_i(t)
    Delta_i = phi_i(t) - theta_i                                              the pseudo-gradient
    a group of n replicas, n = 2, drawn at random from a seed that all share
    delta_i(t) = alpha delta_i(t-1) - beta mean(Delta) - gamma (phi_i(t) - mean(phi(t)))      means over the group
    phi_i(t+1) = phi_i(t) + delta_i(t),   theta_i = phi_i(t+1)                equation 2

The last term pulls the replicas together. It sums to zero over a group, so the mean of all replicas follows heavy ball
on the mean of all pseudo-gradients, and with one group of all replicas this is DiLoCo with heavy-ball momentum.

How far the pull may go: with random groups the variance of the replicas' distances follows a linear recursion of three
moments, E phi^2, E phi delta and E delta^2. In the mean square they come together as long as

    gamma < 2 (1 - alpha^2) / (1 + alpha - 2 alpha (1 - 1/n))

which for pairs is 2 (1 - alpha^2). More is refused, although few replicas would tolerate a little more. With the usual
DiLoCo momentum of 0.9 and gamma = 0.7 replicas in pairs drift apart exponentially, and those are the defaults of the
authors' builder; their experiments take alpha = 0.5. The rule comes from our own analysis (`largest_pull`), not from
the paper, and it is necessary only: the pseudo-gradients act on the distances too.

What is exchanged: phi is known a whole interval before it is needed, so it is sent right after the outer step and is
on the wire while the inner steps run; only the pseudo-gradient has to be waited for, and with `overlap_steps` not even
that. Every message goes from one member of a group to another. Only the final exchange involves all replicas: the
final exchange gives them the mean of their local parameters, where the paper ends with as many models as replicas. An
evaluation before that is one of different models.

What we changed: gamma = beta by default, as in the authors' code, where it is no number of its own; replicas that
cannot be dealt into groups of n evenly form a smaller or a larger group, where the code refuses their number; groups
are drawn by a hash of seed, outer step and replica. Left out: the random routing between pipeline stages, which is an
exchange inside the forward pass. Not changed: the momentum is a heavy ball, though the paper calls it a variant of
Nesterov's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire.averaging.exchange import Exchange, cheapest
from thinwire.averaging.mixing import RandomPairs
from thinwire.averaging.round_context import Average
from thinwire.codecs import Codec, float32
from thinwire.methods.registry import About, register
from thinwire.sync.fragments import Pattern
from thinwire.sync.method import Method
from thinwire.sync.outer_optimizer import HeavyBall
from thinwire.sync.program import LocalSteps, Program
from thinwire.sync.schedule import Prefetched, Round
from thinwire.sync.updates import OuterState, OuterStep, outer_state, outer_step
from thinwire.sync.views import BoundView, OwnPseudoGradient
from thinwire.tagged_state import own

ABOUT = About(
    paper="arXiv 2506.10911",
    exchanged="with one random other replica: slow weights ahead, while H steps run; pseudo-gradients every H steps",
    bits="64 / H",
    memory="2 (slow weights, outer momentum), and 2 in flight",
    restrictions="pull below 2 (1 - momentum^2); replicas differ until the final exchange",
    plan_codecs=("float32", "bfloat16"),
)


@register(ABOUT)
def noloco(
    *,
    sync_interval: int = 50,
    overlap_steps: int = 0,
    blend: float | None = None,
    codec: Codec | None = None,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    pull: float | None = None,
    group_size: int = 2,
    pairing_seed: int = 0,
) -> Method:
    """Exchange with one random other replica every `sync_interval` inner steps, and never with all.

    Args:
        sync_interval: H, at least 1.
        overlap_steps: Inner steps from the launch of the pseudo-gradients to their apply, 0 <= tau < H.
        blend: Weight of the local value at apply, in [0, 1); 0.5 by default, 0 where nothing overlaps.
        codec: The pseudo-gradients' code; float32 by default. Slow weights travel in float32: they are values, and a
            code's error is small only beside a difference.
        outer_lr: beta.
        outer_momentum: alpha.
        pull: gamma; beta by default.
        group_size: n, at least 2.
        pairing_seed: Draws the groups; the same on all replicas.

    Raises:
        ValueError: An argument is out of its range, or replicas would drift apart.

    Example:
        >>> noloco().update(8)
        ConsensusStep(lr=0.7, momentum=0.5, pull=0.7, blend=0.0)
    """
    differences = float32() if codec is None else codec
    gamma = outer_lr if pull is None else pull
    alpha = blend if blend is not None else (0.5 if overlap_steps else 0.0)
    update = ConsensusStep(lr=outer_lr, momentum=outer_momentum, pull=gamma, blend=alpha)
    limit = largest_pull(momentum=outer_momentum, group_size=group_size)
    if gamma >= limit:
        raise ValueError(
            f"pull must be below {limit:.4g} with outer_momentum {outer_momentum} and groups of {group_size}, got "
            f"{gamma}; from there on random groups drive replicas apart instead of together; take outer_momentum 0.5 "
            f"and a pull of 0.7, or larger groups"
        )

    def exchanges(num_replicas: int) -> tuple[Exchange, ...]:
        members = min(group_size, num_replicas)
        return tuple(cheapest(code, num_replicas=members) for code in (float32(), differences))

    return Method(
        name="noloco",
        schedule=Prefetched(sync_interval=sync_interval, overlap_steps=overlap_steps),
        topology=RandomPairs(seed=pairing_seed, group_size=group_size, num_rounds=2),
        view=SlowWeightsAndPseudoGradient(fragments=Pattern(num_fragments=1)),
        exchange=exchanges,
        update=lambda num_replicas: update,
        last_exchange=lambda num_replicas: cheapest(float32(), num_replicas=num_replicas),
        has_common_value=False,
    )


def largest_pull(*, momentum: float, group_size: int) -> float:
    """Return the gamma from which on random groups no longer pull replicas together.

    With a = E phi^2, b = E phi delta and d = E delta^2 of a replica's distance from the mean of all, and c = 1 - 1/n,
    one outer step gives

        d' = alpha^2 d - 2 alpha gamma c b + gamma^2 c a
        b' = alpha b - gamma c a + d'
        a' = a + 2 (alpha b - gamma c a) + d'

    At the limit these have a fixed point that is not zero. That is exact for infinitely many replicas. Among M of them
    c is `(M - number of groups) / (M - 1)`, since their distances sum to zero. That is never less, also where groups
    are uneven, so fewer replicas tolerate a little more.

    Args:
        momentum: alpha, in [0, 1).
        group_size: n, at least 2.

    Example:
        >>> largest_pull(momentum=0.5, group_size=2), largest_pull(momentum=0.5, group_size=4)
        (1.5, 2.0)
    """
    share = 1 - 1 / group_size
    return 2 * (1 - momentum**2) / (1 + momentum - 2 * momentum * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowWeightsAndPseudoGradient(OwnPseudoGradient):
    """The replica's own global value in channel 0, and its pseudo-gradient in channel 1; see `OwnPseudoGradient`."""

    def read(self, round: Round) -> torch.Tensor:
        # slow weights stay in host memory, so that they rest there until they are needed
        parameters, fragment = self.parameters, round.fragment
        return parameters.pseudo_gradient(fragment) if round.channel else parameters.values[fragment].clone()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsensusStep:
    """Heavy-ball momentum on the group's mean pseudo-gradient, and on the distance to the group's mean value.

    With phi this replica's global value, d the pseudo-gradient, and means over the replica's group,

        m = alpha m + beta mean(d) + gamma (phi - mean(phi)),   phi -= m

    (arXiv 2506.10911, equation 2, with m = -delta). `phi - mean(phi)` sums to zero over a group, so the mean of all
    replicas moves by heavy ball on the mean of all pseudo-gradients, whatever the groups are.

    Args:
        lr: beta.
        momentum: alpha.
        pull: gamma.
        blend: The weight of the local value: see `OuterStep`.

    Raises:
        ValueError: A number is out of its range.
    """

    program: ClassVar[Program] = LocalSteps()

    lr: float
    momentum: float
    pull: float
    blend: float = 0.0

    def __post_init__(self) -> None:
        OuterStep(optimizer=HeavyBall(lr=self.lr, momentum=self.momentum), blend=self.blend)
        if not self.pull > 0:
            raise ValueError(f"the pull must be positive, got {self.pull}; without it replicas drift apart")

    def init(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> ConsensusState:
        if type(view) is not SlowWeightsAndPseudoGradient:
            raise ValueError(
                "ConsensusStep() applies slow weights and pseudo-gradients, which only SlowWeightsAndPseudoGradient() "
                "reads; use that as the view"
            )
        return ConsensusState(outer_state(HeavyBall(lr=1.0, momentum=self.momentum), view.parameters))

    def apply(self, state: ConsensusState, round: Round, average: Average) -> None:
        """See `Update.apply`: a group's mean value waits for its mean pseudo-gradient, which comes right after."""
        fragment = round.fragment
        if round.channel == 0:
            value = state.values[fragment]
            state.distances[fragment] = value - average.mean.to(value.device)
            return
        # channel 1 completes the step: beta mean(d) + gamma (phi - mean(phi))
        distance = state.distances.pop(fragment).to(average.mean.device)
        step = average.mean.mul_(self.lr).add_(distance, alpha=self.pull)
        outer_step(state.outer, round, step, blend=self.blend)

    def merge(self, state: ConsensusState, fragment: int, mean: torch.Tensor) -> None:
        state.values[fragment].copy_(mean)
        state.outer.parameters.blend_into_locals(fragment, blend=0.0)


@dataclass(slots=True)
class ConsensusState:
    """State of `ConsensusStep`; distances, by fragment, wait for the next step."""

    outer: OuterState = own("outer momentum")
    distances: dict[int, torch.Tensor] = own("distance to the group's mean", like="values", default_factory=dict)

    @property
    def values(self) -> list[torch.Tensor]:
        return self.outer.parameters.values
