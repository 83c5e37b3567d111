"""The parameters that replicas exchange, fixed at wrapping, and refusals to train others."""

from __future__ import annotations

import torch
from torch import nn

from thinwire.sync.fragments import parameters_by_name
from thinwire.sync.global_parameters import GlobalParameters
from thinwire.transport.shards import is_a


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
            if not is_a("torch.distributed.tensor", "DTensor", parameter)
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
