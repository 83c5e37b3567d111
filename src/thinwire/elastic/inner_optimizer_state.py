"""State of the inner optimizer as tensors by name, kept by a replica that may die and come back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from thinwire.errors import CheckpointError

# Stands between a parameter's name and the key of its state: no name of a module holds it.
_OF = "|"


def inner_tensors(inner: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return CPU copies of an inner optimizer's state of each parameter.

    What is no tensor is left out; the optimizers of torch keep nothing else that training needs.

    Returns:
        By `PARAMETER|KEY`, such as `head.weight|exp_avg`.
    """
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in inner.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}{_OF}{key}"] = value.detach().cpu().clone()
    return found


def load_inner_tensors(inner: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load what `inner_tensors` returned.

    Raises:
        CheckpointError: A tensor is of no parameter here, or of another shape; nothing was taken over then.
    """
    own = dict(model.named_parameters())
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
