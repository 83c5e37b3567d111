"""Checks of the model and its inner optimizer at wrapping: a refusal names what cannot be trained, and the remedy."""

from __future__ import annotations

from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from thinwire.errors import refusal
from thinwire.sync.fragments import plain_name
from thinwire.transport.shards import is_a


def check_tensors(model: nn.Module, *, is_elastic: bool = False) -> None:
    """Refuse a model whose tensors cannot be exchanged.

    Args:
        model: The replica's model.
        is_elastic: Whether replicas come and go, and fetch the global state as it lies on others.

    Raises:
        ValueError: One has no values yet, or is complex where that cannot be handled; names the first.
    """
    named = {plain_name(name): t for name, t in [*model.named_parameters(), *model.named_buffers()]}
    if lazy := [name for name, tensor in named.items() if is_lazy(tensor)]:
        raise ValueError(
            f"{len(lazy)} of {len(named)} tensors of the model have no shape yet, the first is {lazy[0]}; run a "
            f"forward pass before the optimizer is built and wrapped"
        )
    if meta := [name for name, tensor in named.items() if tensor.is_meta]:
        raise ValueError(
            f"{len(meta)} of {len(named)} tensors of the model are on the meta device and have no values, the first is "
            f"{meta[0]}; call model.to_empty(device=...), set its values, then build the optimizer and wrap both"
        )
    trained = {name: tensor for name, tensor in named.items() if tensor.requires_grad and tensor.is_complex()}
    if found := [name for name, tensor in trained.items() if is_elastic or _is_distributed(tensor)]:
        why = "in an elastic run" if is_elastic else "sharded over ranks"
        raise ValueError(
            f"the parameter {found[0]} is {trained[found[0]].dtype} {why}; keep it as a real parameter of two columns, "
            f"and take torch.view_as_complex of that in forward"
        )


def check_parameters(model: nn.Module, inner: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that steps what is not the model's.

    Raises:
        ValueError: Says how many parameters, and what to do.
    """
    stepped = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
    foreign = stepped - {id(parameter) for parameter in model.parameters()}
    if foreign:
        raise ValueError(
            f"the inner optimizer holds {len(foreign)} parameters that are not the model's, so they would never be "
            f"exchanged; build it from model.parameters()"
        )


def _is_distributed(tensor: torch.Tensor) -> bool:
    return is_a("torch.distributed.tensor", "DTensor", tensor)


# By model, the wrappers that have stepped it; the latest one is last.
_steppers: WeakKeyDictionary[nn.Module, list[ReferenceType[object]]] = WeakKeyDictionary()


def refuse_turns(model: nn.Module, optimizer: object) -> None:
    """Note which wrapper steps a model, and refuse two that do it in turns: each round would be applied twice.

    Raises:
        ValueError: This one has stepped the model before, and another one since.
    """
    steppers = _steppers.setdefault(model, [])
    if steppers and steppers[-1]() is optimizer:
        return
    alive = [one for one in steppers if one() is not None]
    if alive and any(one() is optimizer for one in alive):
        raise refusal(
            "two DistributedOptimizers step one model in turns, so all of it is exchanged twice", got="two of them",
            allowed="one for each model", remedy="thinwire.MultiOptimizer([...]), which joins inner optimizers",
        )  # fmt: skip
    _steppers[model] = [*alive, ref(optimizer)]
