"""Checks of the model and its inner optimizer: a refusal names what cannot be trained or exchanged, and the remedy."""

from __future__ import annotations

from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from thinwire.errors import refusal
from thinwire.sync.fragments import parameters_by_name, plain_name
from thinwire.sync.views import GlobalParameters
from thinwire.transport.shards import is_a

_DTENSOR = ("torch.distributed.tensor", "DTensor")


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
    if found := [name for name, tensor in trained.items() if is_elastic or is_a(*_DTENSOR, tensor)]:
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
            allowed="one for each model", remedy="thinwire.split_model(model, [...]), a part for each, or "
            "thinwire.MultiOptimizer([...]) where all step together",
        )  # fmt: skip
    _steppers[model] = [*alive, ref(optimizer)]


class ParameterSet:
    """The parameters of all fragments, to find those that were added or replaced since.

    Args:
        model: The replica's model.
        parameters: Its fragments.
    """

    def __init__(self, model: nn.Module, parameters: GlobalParameters) -> None:
        self._model = model
        self._ids = {id(p) for tensors in parameters.parameters for p in tensors}
        # FSDP2 itself exchanges the objects of sharded parameters for gathered ones and back
        self._places = [
            (module._parameters, key, parameter)
            for module in model.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in self._ids
            if not is_a(*_DTENSOR, parameter)
        ]

    def check_replaced(self) -> None:
        """Refuse to go on where the model holds another tensor than the one that is exchanged.

        Raises:
            ValueError: It does; names it.
        """
        for owner, key, parameter in self._places:
            if owner.get(key) is not parameter:
                raise ValueError(
                    f"the model's {key} of shape {tuple(parameter.shape)} is another tensor than at wrapping, as after "
                    f"load_state_dict(assign=True), so the inner optimizer steps one that the model does not use; load "
                    f"with assign=False, or load first and build the optimizer then"
                )

    def check_trained(self, inner: torch.optim.Optimizer) -> None:
        """Refuse to train what is not exchanged.

        Raises:
            ValueError: The inner optimizer holds such parameters; names the first.
        """
        ids = self._ids
        new = [p for group in inner.param_groups for p in group["params"] if p.requires_grad and id(p) not in ids]
        if new:
            names = {id(p): name for name, p in parameters_by_name(self._model).items()}
            first = names.get(id(new[0]), f"one of shape {tuple(new[0].shape)} that is not the model's")
            raise ValueError(
                f"{len(new)} parameters are trained and not exchanged, the first is {first}: they were unfrozen or "
                f"added after wrapping, when the set is fixed; on all replicas after the same step, call "
                f"close(final_exchange=True), then wrap the model with an optimizer that holds them"
            )
