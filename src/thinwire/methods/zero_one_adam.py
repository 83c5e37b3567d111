"""0/1 Adam (arXiv 2202.06009, Algorithm 1): few dense gradients, signs between them, then local steps.

    t <= T0, at the multiples of an interval K:    v = beta2 v + (1 - beta2) g^2, with the mean gradient g in float32
    t <= T0, at the other steps:                   g = two-phase sign exchange of the gradients; v stays
        m = beta1 m + (1 - beta1) g;  p = p - lr m / sqrt(v)
    t > T0, on each replica i:                     v stays for ever
        m_i = beta1 m_i + (1 - beta1) g_i;  p_i = p_i - lr m_i / sqrt(v);  u_i = u_i + lr m_i
        at the multiples of an interval H:
            u = two-phase sign exchange of the u_i;  p_i = p' - u / sqrt(v), p' being the last exchanged value
            m_i = u / (sum of lr);  u_i = 0

K starts at 1 and doubles after every 16 dense exchanges. H starts at 1 and doubles every `local_doubling_steps` steps
up to 16. The sign exchange has errors at senders and owners, as in 1-bit Adam; those of gradients and of u are apart.

The two phases are those of the public code; the paper lets both intervals run from the start, and steps with the
momentum before the step's own gradient is in it. What we do where they differ or are silent:

- Momentum and variance have Adam's bias corrections, each by the number of gradients that it has taken in; so with K
  at 1 the first phase is all-reduced Adam. The public code has none.
- p' is kept in float32, and the new value is computed from it. The public code subtracts the sum of its steps instead,
  and the rounding of that lets replicas drift apart.
- u is kept in units of the momentum, as in the paper, so that weight decay does not leak into the momentum. AdamW's
  decay of the steps between two exchanges multiplies p'; Adam's is added to gradients.
- Elements whose variance is zero, tensors of different magnitudes, gradients that are missing, and checkpoints are
  dealt with as in 1-bit Adam. The first phase ends after exactly `variance_steps` steps.

Between two exchanges replicas differ. `global_parameters()` gives p'; steps after the last exchange are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from thinwire.averaging.exchange import NoExchange, TwoPhase, cheapest
from thinwire.averaging.round_context import Average
from thinwire.codecs import Codec, float32, sign
from thinwire.codecs.error_feedback import ErrorFeedback
from thinwire.methods.registry import About, register
from thinwire.sync.adam_momentum_view import AdamMomentum, BoundAdamMomentum, Factors, Slot, check_adam
from thinwire.sync.method import Method
from thinwire.sync.program import AveragedStep, Program
from thinwire.sync.schedule import DoublingIntervals, Round
from thinwire.sync.updates import Update
from thinwire.sync.views import BoundGradient, BoundView, GlobalParameters, Gradient, checksum
from thinwire.tagged_state import same
from thinwire.transport.shards import flatten, real_shard, unflatten_into

ABOUT = About(
    paper="arXiv 2202.06009",
    exchanged="gradients, whole ever more seldom and in one bit between, then sums of local steps in one bit",
    bits="2 (M - 1) / M and some whole gradients, then 2 (M - 1) / M / H with H up to 16",
    memory="4 + 2 / M (errors of both kinds, the last exchanged value, the sum of steps)",
    restrictions="inner Adam or AdamW; no GradScaler; replicas differ between exchanges",
)


@register(ABOUT)
def zero_one_adam(
    *,
    variance_steps: int = 1000,
    variance_updates: int = 16,
    local_doubling_steps: int = 1000,
    max_local_steps: int = 16,
    codec: Codec | None = None,
) -> Method:
    """Update the variance ever less often, send signs between, then take local steps; needs Adam or AdamW.

    Args:
        variance_steps: Steps until the variance is frozen and local steps begin.
        variance_updates: Dense exchanges until the interval between them doubles.
        local_doubling_steps: Steps until the interval between exchanges of local steps doubles.
        max_local_steps: The longest such interval.
        codec: The code of all but the dense exchanges; `sign()` by default.

    Raises:
        ValueError: A number is below 1, or the codec is sparse.

    Example:
        >>> zero_one_adam(variance_steps=100).schedule.variance_interval(40)
        2
    """
    schedule = DoublingIntervals(
        variance_steps=variance_steps, variance_updates=variance_updates, local_doubling_steps=local_doubling_steps,
        max_local_steps=max_local_steps,
    )  # fmt: skip
    coded = TwoPhase(codec=sign() if codec is None else codec, memory=ErrorFeedback(), owner_memory=ErrorFeedback())
    return Method(
        name="zero-one-adam",
        schedule=schedule,
        view=LocalMomentum(),
        exchange=lambda num_replicas: (cheapest(float32(), num_replicas=num_replicas), coded, coded, NoExchange()),
        update=lambda num_replicas: LocalAdam(),
    )


# As `DoublingIntervals` numbers them.
DENSE, GRADIENT, SUM, LOCAL = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMomentum(AdamMomentum):
    """Gradients in channels 0 (dense) and 1 (to be coded); in channel 2 the momenta of local steps, summed.

    The sum is `u = sum_j lr_j m_j / (1 - beta1^j)` over the steps since the last exchange, this one's among them.
    Channel 3 sends nothing. Dead elements and magnitudes are handled as in `AdamMomentum`, but by the
    variance, which is always the same on all replicas.
    """

    def bind(self, model: nn.Module, *, inner: torch.optim.Optimizer | None = None) -> BoundLocalMomentum:
        gradients = Gradient(hash_interval=self.hash_interval).bind(model)
        tensors: list[torch.Tensor] = list(gradients.parameters.parameters[0])
        count = len(tensors)
        sums = LocalSums(tensors, [0] * count, [0] * count, [0.0] * count, [1.0] * count)
        last = LastExchanged(model, gradients.parameters.fragments, sums)
        return BoundLocalMomentum(gradients, check_adam(inner), last, hash_interval=self.hash_interval)


@dataclass(slots=True)
class LocalSums:
    """Sums over the local steps since the last exchange.

    Attributes:
        parameters: Of the inner optimizer.
        total: u, what they add up to: float32, `(numel,)`, as entry 0; empty before the first one.
        taken: By parameter, how many gradients its momentum has taken in.
        updates: By parameter, how many its variance has.
        rates: By parameter, the sum of learning rates since the last exchange.
        shares: By parameter, what decoupled decay has left since then.
    """

    parameters: list[torch.Tensor]
    taken: list[int] = same("number of gradients")
    updates: list[int] = same("number of updates of the variance")
    rates: list[float] = same("sum of rates")
    shares: list[float] = same("share that decay has left")
    total: dict[int, torch.Tensor] = same("sum of local steps", like="vectors", default_factory=dict)

    @property
    def vectors(self) -> list[torch.Tensor]:
        """A vector of the size of all parameters, where they are."""
        numel = sum(real_shard(parameter).numel() for parameter in self.parameters)
        return [torch.empty(numel, device=self.parameters[0].device)]


class LastExchanged(GlobalParameters):
    """The parameters after the last exchange, kept from the first local step on; before it, the model's own are."""

    def __init__(self, model: nn.Module, fragments: tuple[tuple[str, ...], ...], sums: LocalSums) -> None:
        super().__init__(model, fragments, has_values=False)
        self.need_float32("zero_one_adam adds up steps")
        self.sums = sums

    def forget_locals(self) -> bool:
        """See `GlobalParameters.forget_locals`; what decay and learning rates say of these steps is the same on all."""
        for total in self.sums.total.values():
            total.zero_()
        return super().forget_locals()

    def keep(self) -> None:
        if not self._has_values:
            self._has_values = True
            self.read_locals()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._has_values = bool(state)
        self.values = [torch.zeros(self.numel(0))] if state else []
        super().load_state_dict(state)


class BoundLocalMomentum(BoundAdamMomentum):
    """See `LocalMomentum`; `last` holds the parameters after the last exchange, and the sums of the steps since."""

    def __init__(
        self, gradients: BoundGradient, inner: torch.optim.Adam | torch.optim.AdamW, last: LastExchanged, *,
        hash_interval: int,
    ) -> None:  # fmt: skip
        super().__init__(gradients, inner)
        self.parameters = self.last = last
        self._hash_interval = hash_interval
        self.sums = last.sums

    def shapes(self, *, fragment: int, channel: int) -> tuple[torch.Size, ...]:
        return () if channel == LOCAL else super().shapes(fragment=fragment, channel=channel)

    def read(self, round: Round) -> torch.Tensor:
        if round.channel == DENSE:
            return self.gradients.read(round)
        if round.channel == LOCAL:
            return torch.zeros(0)
        return self._filled(self._gradient if round.channel == GRADIENT else self._next_total)

    def reference_hash(self, round: Round) -> int:
        """Hash the parameters that all replicas share at every `hash_interval`-th step."""
        if round.channel == LOCAL or round.launch_step % self._hash_interval:
            return 0
        return checksum(self.last.values[0] if self.last.values else flatten(self.last.locals(0)).cpu())

    def parts_of_total(self) -> list[torch.Tensor]:
        """Return each parameter's part of u, to read and to write."""
        if not self.sums.total:
            self.sums.total[0] = torch.zeros(self.last.numel(0), device=self.slots()[0].value.device)
        return list(self.parts(self.sums.total[0]))

    def _magnitude(self, slot: Slot) -> torch.Tensor:
        return slot.second.sqrt()

    def _gradient(self, index: int, slot: Slot, into: torch.Tensor) -> None:
        # decay in the gradient is the same on all replicas and need not be sent
        found = slot.own_gradient()
        if found is not None:
            into.copy_(found)

    def _next_total(self, index: int, slot: Slot, into: torch.Tensor) -> None:
        momentum = slot.first.to(torch.float32).lerp(slot.gradient().to(torch.float32), 1 - slot.betas[0])
        into.copy_(momentum).mul_(slot.lr / (1 - slot.betas[0] ** (self.sums.taken[index] + 1)))
        if self.sums.total:
            into.add_(self.parts_of_total()[index])


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAdam(Update):
    """Adam's step with mean gradients, dense or coded; then steps of each replica's own, and their mean.

    With a dense gradient the variance and the momentum move, with a coded one the momentum alone. In the second phase
    the variance is frozen. At an exchange there the local steps are undone and `p = p' - u / (sqrt(v) + eps)` is done
    from the last exchanged parameters p', with the mean u; the momentum becomes `u / sum(lr)`.
    """

    program: ClassVar[Program] = AveragedStep()

    def init(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> LocalAdamState:
        if not isinstance(view, BoundLocalMomentum):
            raise ValueError(
                "LocalAdam() applies sums of momenta, but the view reads others; use LocalMomentum() as the view"
            )
        check_adam(inner)
        return LocalAdamState(view, view.factors, view.sums)

    def apply(self, state: LocalAdamState, round: Round, average: Average) -> None:
        view = state.view
        with torch.no_grad():
            if round.channel == DENSE:
                view.gradients.write(round, average.mean)
                for index, slot in enumerate(view.slots()):
                    found = slot.own_gradient() if slot.group is not None else None
                    if found is None:
                        continue
                    slot.begin()
                    gradient, beta2 = slot.with_decay(found), slot.betas[1]
                    slot.second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                    state.sums.updates[index] += 1
                    _step(state, index, slot, gradient)
            elif round.channel == GRADIENT:
                for index, slot, part in view.received(average.mean):
                    _step(state, index, slot, slot.with_decay(part.to(slot.first.dtype)))
            else:
                view.last.keep()
                if round.channel == LOCAL:
                    _local_step(state)
                else:
                    _exchanged_step(state, average.mean)


@dataclass(slots=True)
class LocalAdamState:
    """State of `LocalAdam`; the inner optimizer holds momentum and variance."""

    view: BoundLocalMomentum
    factors: Factors = same("factors")
    sums: LocalSums = same("sums")


def _step(state: LocalAdamState, index: int, slot: Slot, gradient: torch.Tensor) -> None:
    state.sums.taken[index] += 1
    slot.count_step()
    slot.first.lerp_(gradient, 1 - slot.betas[0])
    slot.descend(steps=state.sums.taken[index], updates=state.sums.updates[index])


def _local_step(state: LocalAdamState) -> None:
    parts = state.view.parts_of_total()
    for index, slot in enumerate(state.view.slots()):
        if slot.has_moments:
            gradient = slot.gradient().masked_fill(slot.is_dead(), 0)
            _step(state, index, slot, gradient)
            parts[index].add_(slot.first, alpha=slot.lr / (1 - slot.betas[0] ** state.sums.taken[index]))
            _count_rate(state, index, slot)


def _exchanged_step(state: LocalAdamState, mean: torch.Tensor) -> None:
    view, sums = state.view, state.sums
    value = view.last.values[0].to(mean.device)
    bases = list(view.parts(value))
    for index, slot, part in view.received(mean):
        sums.taken[index] += 1
        slot.count_step()
        _count_rate(state, index, slot)
        if sums.rates[index] > 0:
            slot.first.copy_(part * ((1 - slot.betas[0] ** sums.taken[index]) / sums.rates[index]))
        base = bases[index].mul_(sums.shares[index])
        base.addcdiv_(part, slot.denominator(updates=sums.updates[index]).to(torch.float32), value=-1)
        sums.rates[index], sums.shares[index] = 0.0, 1.0
    view.last.values[0].copy_(value)
    unflatten_into(value, view.last.locals(0))
    for total in sums.total.values():
        total.zero_()


def _count_rate(state: LocalAdamState, index: int, slot: Slot) -> None:
    state.sums.rates[index] += slot.lr
    state.sums.shares[index] *= 1 - slot.lr * slot.decoupled_decay
