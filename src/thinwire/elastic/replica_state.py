"""State of a replica as tensors by name: global parameters, outer and inner optimizer state.

A joining replica receives the first two; a replica that restarts keeps all three.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from thinwire import tagged_state
from thinwire.elastic.global_state import MOST_HEADER_BYTES
from thinwire.errors import CheckpointError
from thinwire.sync.fragments import parameters_by_name
from thinwire.sync.round_engine import RoundEngine

# Stands between a parameter's name and the key of its state: no name of a module holds it.
_OF = "|"
# Bytes of an element that outer optimizers remember, at most: two values in float32.
_MOST_OUTER_BYTES = 8


def most_state_bytes(model: nn.Module) -> int:
    """Return a bound on the packed bytes of a model's global state, whatever its method.

    Example:
        >>> most_state_bytes(nn.Linear(2, 1)) - MOST_HEADER_BYTES
        36
    """
    tensors = sum(p.numel() * (p.element_size() + p.requires_grad * _MOST_OUTER_BYTES) for p in model.parameters())
    return tensors + MOST_HEADER_BYTES


def global_tensors(engine: RoundEngine, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return copies of the global parameters by name, and of what the outer optimizer remembers by fragment.

    Between the rounds of two steps they are the same bits on all replicas. Parameters that are not trained are there
    too, and buffers are not.
    """
    values = engine.view.parameters
    parameters = {name: values.read_whole(name) for name, p in parameters_by_name(model).items() if not p.requires_grad}
    for names, tensors, vector in zip(values.fragments, values.parameters, values.values, strict=True):
        start = 0
        for name, tensor in zip(names, tensors, strict=True):
            parameters[name] = vector[start : start + tensor.numel()].clone().view(tensor.shape)
            start += tensor.numel()
    return parameters, tagged_state.transfer(engine.update_state)


def load_global_tensors(
    engine: RoundEngine, model: nn.Module, parameters: dict[str, torch.Tensor], outer: dict[str, torch.Tensor]
) -> None:
    """Take over what `global_tensors` returned on another replica; local parameters become the global ones.

    Raises:
        CheckpointError: It is of another model or method.
    """
    load_global_parameters(engine, model, parameters)
    load_outer(engine, outer)


def load_outer(engine: RoundEngine, outer: dict[str, torch.Tensor]) -> None:
    """Take over what another replica's outer optimizer remembers.

    Raises:
        CheckpointError: It is of another model or method.
    """
    tagged_state.take_over(engine.update_state, outer)


def load_global_parameters(engine: RoundEngine, model: nn.Module, parameters: dict[str, torch.Tensor]) -> None:
    """Take over another replica's global parameters alone; local parameters become those.

    Raises:
        CheckpointError: They are of another model.
    """
    values = engine.view.parameters
    own = parameters_by_name(model)
    if set(parameters) != set(own):
        raise CheckpointError(
            f"the state has {len(parameters)} parameters, this model {len(own)}; all replicas must train the same model"
        )
    vectors = {}
    for fragment, names in enumerate(values.fragments):
        dtype = values.values[fragment].dtype
        vectors[str(fragment)] = torch.cat([parameters[name].reshape(-1).to(dtype) for name in names])
    with torch.no_grad():
        for name, parameter in own.items():
            if parameters[name].shape != parameter.shape:
                raise CheckpointError(
                    f"{name} has the shape {tuple(parameters[name].shape)} in the state, {tuple(parameter.shape)} "
                    f"here; all replicas must train the same model"
                )
            if not parameter.requires_grad:
                values.write_whole(name, parameters[name])
        values.load_state_dict(vectors)
        values.forget_locals()


def inner_tensors(inner: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return CPU copies of an inner optimizer's state of each parameter.

    What is no tensor is left out; the optimizers of torch keep nothing else that training needs.

    Returns:
        By `PARAMETER|KEY`, such as `head.weight|exp_avg`.
    """
    found = {}
    for name, parameter in parameters_by_name(model).items():
        for key, value in inner.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}{_OF}{key}"] = value.detach().cpu().clone()
    return found


def load_inner_tensors(inner: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load what `inner_tensors` returned.

    Raises:
        CheckpointError: A tensor is of no parameter here, or of another shape; nothing was taken over then.
    """
    own = parameters_by_name(model)
    for full, tensor in tensors.items():
        name, _, key = full.partition(_OF)
        if name not in own or not key:
            raise CheckpointError(f"the inner optimizer's {full!r} is of no parameter of this model; begin without it")
        if tensor.dim() and tensor.shape != own[name].shape:
            raise CheckpointError(
                f"the inner optimizer's {full} has the shape {tuple(tensor.shape)}, the parameter "
                f"{tuple(own[name].shape)}; begin without it"
            )
    for full, tensor in tensors.items():
        name, _, key = full.partition(_OF)
        # numbers such as Adam's count of steps stay where torch keeps them
        device = own[name].device if tensor.dim() else tensor.device
        inner.state[own[name]][key] = tensor.to(device, copy=True)
