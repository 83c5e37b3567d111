"""Pier: a lazy start with averaged gradients, then Streaming DiLoCo with a scheduled outer step (arXiv 2511.17849).

With T steps in all, T0 of them lazy, interval H, on each replica m of M and for each fragment:

    for t = 1 .. T0:                                              lazy start
        theta = InnerOpt(theta, (1/M) sum_m g_m)                  gradients averaged at every step
        if t mod H == 0:                                          momentum warm-up, nothing is sent
            u = mu u + (phi - theta);  phi = theta                mu 0.9
    for t = T0+1 .. T:                                            as Streaming DiLoCo, with Nesterov's
        momentum   0.99 for the first 5 % of T, 0.95 for the next 5 %, then 0.9
        rate       from 0 to 1.1 over the first 10 % of T, 1.1 until 0.8 T, then 0.9

Rate and momentum of a round follow from the step of its launch, so a resumed run finds the same ones.

Sources: the paper's abstract for the idea, and the comments of the authors' public program for the numbers; that
program now anneals both by a cosine. What we changed: the paper is about DiLoCo, which exchanges the whole model and
waits; here rounds are those of Streaming DiLoCo. Without `total_steps` the outer step keeps DiLoCo's constant rate and
momentum, which is a lazy start alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from thinwire.averaging.exchange import Exchange, NoExchange, cheapest
from thinwire.averaging.round_context import Average
from thinwire.codecs import Codec, float32
from thinwire.methods.diloco import default_outer_lr
from thinwire.methods.registry import About, register
from thinwire.methods.streaming_diloco import streaming_diloco
from thinwire.sync.global_parameters import GlobalParameters
from thinwire.sync.method import Method
from thinwire.sync.outer_optimizer import Nesterov, OuterOptimizer
from thinwire.sync.schedule import GRADIENTS, UNSENT, LazyStart, Round, Staggered
from thinwire.sync.updates import BoundOuterStep, OuterStep
from thinwire.sync.views import BoundGradient, BoundPseudoGradient, BoundView, Gradient, PseudoGradient

ABOUT = About(
    paper="arXiv 2511.17849",
    exchanged="gradients in a lazy start, then pseudo-gradients in E3M0, a fragment at a time",
    bits="64 (M - 1) / M in the lazy start, then 4.13 (M - 1) / H",
    memory="2 (global value, outer momentum)",
    restrictions="no closure and no GradScaler in the lazy start",
)

_MOMENTA = ((0.05, 0.99), (0.10, 0.95))  # until so much of all steps after the lazy start
_LAST_MOMENTUM = 0.9
_WARMUP_SHARE, _HIGH, _HIGH_UNTIL, _LOW = 0.10, 1.1, 0.8, 0.9


@register(ABOUT)
def pier(
    *,
    sync_interval: int = 30,
    lazy_steps: int = 0,
    total_steps: int | None = None,
    warms_momentum: bool = True,
    overlap_steps: int | Sequence[int] = 1,
    blend: float | None = None,
    codec: Codec | None = None,
    exchange: Literal["auto", "all-gather", "two-phase"] = "auto",
    layers_per_fragment: int = 3,
    num_fragments: int | None = None,
    outer_lr: float | None = None,
    outer_momentum: float = 0.9,
) -> Method:
    """Average gradients for the first steps, then exchange as Streaming DiLoCo does, with a scheduled outer step.

    Args:
        sync_interval: H: inner steps between two exchanges of the same fragment, at least 1.
        lazy_steps: T0: first steps, in which gradients are averaged; a multiple of H. 10 % of all is the paper's.
        total_steps: T: steps of the run, by which the outer rate and momentum are scheduled; None keeps both constant.
        warms_momentum: Whether the outer momentum gathers pseudo-gradients in the lazy start.
        overlap_steps: tau: inner steps from launch to apply, 0 <= tau < H; one number, or one a replica.
        blend: alpha: weight of the local value at apply, in [0, 1); 0.5 by default, 0 where nothing overlaps.
        codec: The pseudo-gradients' code; E3M0 by default. Gradients travel in float32.
        exchange: How payloads travel; `"auto"` takes the cheaper one for the number of replicas.
        layers_per_fragment: Blocks a fragment.
        num_fragments: P, the fragment of embedding and rest among them; overrides `layers_per_fragment`.
        outer_lr: Nesterov's learning rate without `total_steps`; by default `default_outer_lr`.
        outer_momentum: Nesterov's momentum without `total_steps`, and in the lazy start.

    Raises:
        ValueError: An argument is out of its range; names the value, the limit and the remedy.

    Example:
        >>> method = pier(sync_interval=30, lazy_steps=270, total_steps=2600)
        >>> method.update(2).optimizer.at_step(2000)
        Nesterov(lr=1.1, momentum=0.9)
    """
    streaming = streaming_diloco(
        sync_interval=sync_interval, overlap_steps=overlap_steps, blend=blend, codec=codec, exchange=exchange,
        layers_per_fragment=layers_per_fragment, num_fragments=num_fragments, outer_lr=outer_lr,
        outer_momentum=outer_momentum,
    )  # fmt: skip
    assert isinstance(streaming.schedule, Staggered) and isinstance(streaming.view, PseudoGradient)

    def exchanges(num_replicas: int) -> tuple[Exchange, ...]:
        gradients = cheapest(float32(), num_replicas=num_replicas)
        return (*streaming.exchanges(num_replicas), gradients, NoExchange())

    def update(num_replicas: int) -> LazyOuterStep:
        plain = streaming.update(num_replicas)
        assert isinstance(plain, OuterStep)
        lr = default_outer_lr(num_replicas) if outer_lr is None else outer_lr
        step: OuterOptimizer = Nesterov(lr=lr, momentum=outer_momentum)
        if total_steps is not None:
            step = ScheduledNesterov(lazy_steps=lazy_steps, total_steps=total_steps)
        return LazyOuterStep(
            optimizer=step, blend=plain.blend, warmup_momentum=outer_momentum if warms_momentum else None
        )

    update(1)  # a bad argument is refused here, not when training starts
    return replace(
        streaming, name="pier", schedule=LazyStart(lazy_steps=lazy_steps, then=streaming.schedule),
        view=LazyPseudoGradient(fragments=streaming.view.fragments), exchange=exchanges, update=update,
        lazy_steps=lazy_steps,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledNesterov:
    """Nesterov with Pier's decay of the momentum and warm-up of the rate.

    Args:
        lazy_steps: T0.
        total_steps: T.

    Raises:
        ValueError: There are no steps after the lazy ones.

    Example:
        >>> step = ScheduledNesterov(lazy_steps=100, total_steps=1000)
        >>> [(s.lr, s.momentum) for s in map(step.at_step, (150, 180, 300, 900))]
        [(0.55, 0.99), (0.88, 0.95), (1.1, 0.9), (0.9, 0.9)]
    """

    lazy_steps: int
    total_steps: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.total_steps <= self.lazy_steps:
            raise ValueError(
                f"total_steps must be above lazy_steps ({self.lazy_steps}), got {self.total_steps}; give the number of "
                f"steps of the whole run"
            )

    @property
    def has_momentum(self) -> bool:
        """Keeps the momentum."""
        return True

    def at_step(self, launch_step: int) -> Nesterov:
        since = (launch_step - self.lazy_steps) / self.total_steps
        momentum = next((value for until, value in _MOMENTA if since <= until), _LAST_MOMENTUM)
        lr = _HIGH if launch_step <= _HIGH_UNTIL * self.total_steps else _LOW
        if since < _WARMUP_SHARE:
            lr = round(_HIGH * since / _WARMUP_SHARE, 12)
        return Nesterov(lr=lr, momentum=momentum)

    def step(self, value: torch.Tensor, pseudo_gradient: torch.Tensor, momentum: torch.Tensor | None) -> None:
        """Do the step of the end of a run; see `OuterOptimizer.step`."""
        self.at_step(self.total_steps).step(value, pseudo_gradient, momentum)


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyPseudoGradient(PseudoGradient):
    """Gradients in the lazy start, of the whole model with fragment 0; then pseudo-gradients of each fragment."""

    def bind(self, model: nn.Module, *, inner: torch.optim.Optimizer | None = None) -> BoundLazyPseudoGradient:
        return BoundLazyPseudoGradient(self.cut(model, inner), gradients=Gradient().bind(model))


class BoundLazyPseudoGradient(BoundPseudoGradient):
    """See `LazyPseudoGradient`."""

    def __init__(self, parameters: GlobalParameters, *, gradients: BoundGradient) -> None:
        super().__init__(parameters)
        self._gradients = gradients

    def shapes(self, *, fragment: int, channel: int) -> tuple[torch.Size, ...]:
        if channel != GRADIENTS:
            return super().shapes(fragment=fragment, channel=channel)
        return self._gradients.shapes(fragment=0, channel=0) if fragment == 0 else ()

    def read(self, round: Round) -> torch.Tensor:
        return self._gradients.read(replace(round, channel=0)) if round.channel == GRADIENTS else super().read(round)

    def reference_hash(self, round: Round) -> int:
        if round.channel == GRADIENTS:
            return self._gradients.reference_hash(replace(round, channel=0))
        return super().reference_hash(round)

    def write_gradients(self, round: Round, mean: torch.Tensor) -> None:
        """Put mean gradients into the parameters' `.grad`."""
        self._gradients.write(replace(round, channel=0), mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyOuterStep(OuterStep):
    """Mean gradients for the inner step in the lazy start, then an outer step; see `OuterStep`.

    Args:
        warmup_momentum: The outer momentum's decay in the lazy start; None leaves it zero.
    """

    warmup_momentum: float | None = None

    def bind(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> BoundLazyOuterStep:
        if not isinstance(view, BoundLazyPseudoGradient):
            raise ValueError("LazyOuterStep() needs gradients too; use LazyPseudoGradient() as the view")
        return BoundLazyOuterStep(self, view)


class BoundLazyOuterStep(BoundOuterStep):
    """See `LazyOuterStep`."""

    def __init__(self, spec: LazyOuterStep, view: BoundLazyPseudoGradient) -> None:
        super().__init__(spec, view)
        self._view = view
        self._warmup_momentum = spec.warmup_momentum

    def apply(self, round: Round, average: Average) -> None:
        if round.channel == GRADIENTS:
            self._view.write_gradients(round, average.mean)
        elif round.channel == UNSENT:
            self._follow(round.fragment, average.mean)
        else:
            super().apply(round, average)

    def _follow(self, fragment: int, difference: torch.Tensor) -> None:
        """Set the global value to the local one, which is the same on all replicas, and warm the momentum up."""
        value = self._parameters.values[fragment]
        if self._warmup_momentum is not None:
            momentum = self._momenta[fragment]
            momentum.mul_(self._warmup_momentum).add_(difference.to(momentum.device))
        value.copy_(self._parameters.read(fragment))
