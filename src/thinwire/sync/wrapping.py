"""What the optimizer that is wrapped, and a state that is loaded into the wrapper, must be."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from thinwire.errors import CheckpointError

STATE_VERSION = 1
_STATE_KEYS = {"version", "inner", "sync", "steps_done", "buffer_rounds", "gradient_rounds"}


def check_state(state_dict: dict[str, Any]) -> None:
    """Refuse what is no state of a `DistributedOptimizer`.

    Raises:
        CheckpointError: Something is missing, or it is of another version.
    """
    if missing := _STATE_KEYS - set(state_dict):
        raise CheckpointError(f"this is no state of a DistributedOptimizer; it lacks {sorted(missing)}")
    if state_dict["version"] != STATE_VERSION:
        raise CheckpointError(f"the state has version {state_dict['version']}; this thinwire reads {STATE_VERSION}")


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
