"""The extragradient step with a reference point whose operator is known to all (arXiv 2110.03313; 2102.08352)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.averaging.round_context import Average
from thinwire.compat import kind_of
from thinwire.errors import CheckpointError
from thinwire.sync.closure_methods import BoundOperator, Program
from thinwire.sync.schedule import Round
from thinwire.sync.views import BoundView


@dataclass(frozen=True, slots=True, kw_only=True)
class Extragradient:
    """Half a step with the reference point's operator, the other half with what has changed since.

    With z the parameters, w the reference point and F the operator, all replicas' mean:

        half = tau z + (1 - tau) w - gamma F(w)
        z = half - gamma mean_m(F_m(half) - F_m(w))

    Channel 0 carries `F_m(half) - F_m(w)`, channel 1 `F_m(w)` in the rounds in which w becomes z. gamma is the inner
    optimizer's learning rate, and its weight decay times z is part of every F_m; else nothing of it is used.

    Args:
        present_weight: tau, in [0, 1).
        sends_moves: Whether gamma times the difference is what is sent, so that what error feedback keeps are moves
            of the parameters.

    Raises:
        ValueError: `present_weight` is out of its range.
    """

    present_weight: float
    sends_moves: bool = False

    def __post_init__(self) -> None:
        """Check the range."""
        if not 0 <= self.present_weight < 1:
            raise ValueError(f"present_weight must be in [0, 1), got {self.present_weight}")

    def bind(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> BoundExtragradient:
        """See `Update.bind`."""
        if not isinstance(view, BoundOperator):
            raise ValueError("Extragradient() asks for gradients at points of its own; use Operator() as the view")
        assert inner is not None
        _check_inner(inner, view)
        return BoundExtragradient(self, view, inner)


class BoundExtragradient:
    """See `Extragradient`."""

    def __init__(self, spec: Extragradient, view: BoundOperator, inner: torch.optim.Optimizer) -> None:
        self._spec = spec
        self._view = view
        self._inner = inner
        self._reference = view.point()
        self._mean = torch.zeros_like(self._reference)

    @property
    def replaces_inner_step(self) -> bool:
        """Always."""
        return True

    def program(self, rounds: Sequence[Round], oracle: Callable[[], Any]) -> Program:
        """See `BoundProgram.program`; returns the loss at the half step."""
        present = self._view.point()
        refreshes = [round for round in rounds if round.channel == 1]
        changes = [round for round in rounds if round.channel == 0]
        is_done = False
        try:
            reference = present.clone() if refreshes else self._reference
            self._view.move_to(reference)
            oracle()
            own, mean = self._view.values(), self._mean
            for round in refreshes:
                mean = (yield round, own.clone()).mean
            lr, tau = _learning_rate(self._inner), self._spec.present_weight
            half = present.mul(tau).add_(reference, alpha=1 - tau).sub_(mean, alpha=lr)
            self._view.move_to(half)
            loss = oracle()
            change = self._view.values().sub_(own)
            for round in changes:
                if self._spec.sends_moves:
                    half.sub_((yield round, change.mul_(lr)).mean)
                else:
                    half.sub_((yield round, change).mean, alpha=lr)
            self._reference, self._mean = reference, mean
            is_done = True
            return loss
        finally:
            self._view.move_to(half if is_done else present)

    def apply(self, round: Round, average: Average) -> None:
        """Nothing is applied outside of the program."""
        raise NotImplementedError("the program takes its means in itself")

    def merge(self, fragment: int, mean: torch.Tensor) -> None:
        """There is no final exchange of gradients."""
        raise NotImplementedError("gradients are exchanged at every step; nothing is left for a final exchange")

    def state_dict(self) -> dict[str, Any]:
        """Return the reference point and the operator there."""
        return {"reference": self._reference, "mean": self._mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `BoundUpdate.load_state_dict`."""
        if set(state) != {"reference", "mean"} or any(v.shape != self._mean.shape for v in state.values()):
            raise CheckpointError("the checkpoint holds no reference point of this model; resume with its method")
        self._reference = state["reference"].to(self._mean.device).clone()
        self._mean = state["mean"].to(self._mean.device).clone()


def _learning_rate(inner: torch.optim.Optimizer) -> float:
    rates = {float(group["lr"]) for group in inner.param_groups}
    if len(rates) > 1:
        raise ValueError(f"the step size is one number for all parameters, got the learning rates {sorted(rates)}")
    return rates.pop()


def _check_inner(inner: torch.optim.Optimizer, view: BoundOperator) -> None:
    remedy = "give torch.optim.SGD(model.parameters(), lr=...), which only says the step size and the weight decay"
    if kind_of(inner) is not torch.optim.SGD:
        raise ValueError(
            f"this method makes the whole step itself, and the inner {type(inner).__name__} none; {remedy}"
        )
    for group in inner.param_groups:
        for name in ("momentum", "nesterov", "maximize"):
            if group[name]:
                raise ValueError(
                    f"this method makes the whole step itself, so the inner SGD's {name}={group[name]} would do "
                    f"nothing; {remedy}"
                )
    stepped = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
    missing = [tensor for tensor in view.parameters.parameters[0] if id(tensor) not in stepped]
    if missing:
        raise ValueError(f"the inner optimizer lacks {len(missing)} of the model's trainable parameters; {remedy}")
    _learning_rate(inner)
