"""Closure-driven methods, which need gradients at points of their own choice instead of one backward pass.

Such a method has a view whose moment is `around_closure`, and an update with a program: a generator that puts
parameters in place, calls the oracle, hands out what is to be exchanged, gets the mean back, and finishes the step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from thinwire.averaging.round_context import Average
from thinwire.sync.fragments import Pattern, find_blocks, parameters_by_name
from thinwire.sync.global_parameters import GlobalParameters, checksum
from thinwire.sync.schedule import Round
from thinwire.sync.updates import BoundUpdate
from thinwire.sync.views import Moment
from thinwire.transport.shards import drop_gathered, flatten, gradient_shard, real_shard, unflatten_into

Program = Generator[tuple[Round, torch.Tensor], Average, Any]


@runtime_checkable
class BoundProgram(BoundUpdate, Protocol):
    """An update that does the whole step itself."""

    def program(self, rounds: Sequence[Round], oracle: Callable[[], Any]) -> Program:
        """Return the generator of one step; when it is closed early, it puts the parameters back.

        Args:
            rounds: What the schedule launches in this step, in order; each is handed out once.
            oracle: Puts the gradients at the model's present parameters, on this step's batch, into their `.grad`, and
                returns the loss.
        """
        ...


def drive(program: Program, *, exchange: Callable[[Round, torch.Tensor], Average]) -> Any:
    """Run the program of one step, and exchange what it yields.

    Args:
        program: The step.
        exchange: Exchanges a tensor in a round and waits for the mean.

    Returns:
        What the program makes of the losses.

    Raises:
        TransportError: A peer was lost, was late or sent something wrong; the parameters are those before the step.
        DesyncError: Replicas hold different parameters.
        NonFiniteError: A replica sent NaN or infinity.
    """
    try:
        round, tensor = next(program)
        while True:
            round, tensor = program.send(exchange(round, tensor))
    except StopIteration as end:
        return end.value
    finally:
        program.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """The operator of a variational inequality at any point: the gradients of all trainable parameters, with signs.

    For a minimisation it is the gradient; for a game of several players that share one loss, those of the players that
    maximise it are negated. The inner optimizer's weight decay is added to all of them, as to gradients, so it pulls
    every player to zero.

    Args:
        ascent: Parameters that maximise the loss, by name; the name of a module stands for all below it.
        hash_interval: Every how many steps the parameters are hashed to prove that replicas agree.

    Raises:
        ValueError: `hash_interval` is below 1.
    """

    ascent: tuple[str, ...] = ()
    hash_interval: int = 50

    def __post_init__(self) -> None:
        """Check the range."""
        if self.hash_interval < 1:
            raise ValueError(f"hash_interval must be at least 1, got {self.hash_interval}")

    @property
    def moment(self) -> Moment:
        """Around the closure."""
        return "around_closure"

    def bind(self, model: nn.Module, *, inner: torch.optim.Optimizer | None = None) -> BoundOperator:
        return BoundOperator(self, model, inner)


class BoundOperator:
    """See `Operator`."""

    def __init__(self, spec: Operator, model: nn.Module, inner: torch.optim.Optimizer | None) -> None:
        names = Pattern(num_fragments=1).partition(find_blocks(model))[0]
        by_name = parameters_by_name(model)
        for wanted in spec.ascent:
            if not any(_is_below(name, wanted) for name in names):
                raise ValueError(
                    f"ascent names {wanted!r}, but the model has no trainable parameter of that name or below it; it "
                    f"has {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
                )
        self._model = model
        self._tensors = [by_name[name] for name in names]
        self._rises = [any(_is_below(name, wanted) for wanted in spec.ascent) for name in names]
        self._hash_interval = spec.hash_interval
        self._inner = inner
        # every replica holds the global values in its own parameters already: no second copy
        self.parameters = GlobalParameters(model, [names], has_values=False)
        self.parameters.need_float32("this method moves the parameters as one vector")

    def shapes(self, *, fragment: int, channel: int) -> tuple[torch.Size, ...]:
        return tuple(real_shard(tensor).shape for tensor in self._tensors)

    def read(self, round: Round) -> torch.Tensor:
        """See `BoundView.read`; the same as `values`."""
        return self.values()

    def read_last(self, fragment: int) -> torch.Tensor:
        """There is no final exchange of gradients."""
        raise NotImplementedError("gradients are exchanged at every step; nothing is left for a final exchange")

    def reference_hash(self, round: Round) -> int:
        """Hash the parameters at every `hash_interval`-th step: all replicas ask at the same point."""
        if round.launch_step % self._hash_interval:
            return 0
        return checksum(self.point().cpu())

    def values(self) -> torch.Tensor:
        """Return the operator where the closure was called last: float32, `(numel,)`; 0 where there is no gradient."""
        found = [gradient_shard(tensor) for tensor in self._tensors]
        flat, decays = flatten(found), self._decays()
        parts = torch.split(flat, [tensor.numel() for tensor in found])
        for part, tensor, rises in zip(parts, self._tensors, self._rises, strict=True):
            if rises:
                part.neg_()
            if tensor.grad is not None and decays.get(id(tensor)):
                part.add_(real_shard(tensor).reshape(-1), alpha=decays[id(tensor)])
        return flat

    def _decays(self) -> dict[int, float]:
        # looked up at every step: the inner optimizer's groups are others once a state was loaded
        groups = self._inner.param_groups if self._inner is not None else []
        return {id(tensor): group.get("weight_decay", 0.0) for group in groups for tensor in group["params"]}

    def point(self) -> torch.Tensor:
        """Return the parameters: float32, `(numel,)`."""
        return flatten(self.parameters.locals(0))

    def move_to(self, point: torch.Tensor) -> None:
        """Put parameters into the model."""
        unflatten_into(point, self.parameters.locals(0))
        drop_gathered(self._model)


def repeatable(closure: Callable[[], Any], model: nn.Module) -> Callable[[], Any]:
    """Return an oracle of which every call finds the model's buffers as they are now.

    A forward pass may change them. So all calls compute the same function, and what stays is of the last one alone:
    statistics of BatchNorm belong to the parameters that they were gathered with.

    Args:
        closure: Computes the loss and its gradients.
        model: Whose buffers are kept.

    Example:
        >>> norm = nn.BatchNorm1d(1, momentum=0.5)
        >>> oracle = repeatable(lambda: norm(torch.tensor([[1.0], [3.0]])), norm)
        >>> oracle().mean().item(), oracle().mean().item(), norm.running_mean.item()
        (0.0, 0.0, 1.0)
    """
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def oracle() -> Any:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
        with torch.enable_grad():
            return closure()

    return oracle


def _is_below(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(wanted + ".")
