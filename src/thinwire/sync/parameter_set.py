"""The parameters that replicas exchange, fixed at wrapping: changes of the set, and buffers that training changes."""

from __future__ import annotations

import warnings
import zlib

import torch
from torch import nn

from thinwire.sync.fragments import parameters_by_name, plain_name
from thinwire.sync.global_parameters import GlobalParameters
from thinwire.transport.shards import is_a, local_shard

# BatchNorm's statistics, by class or by the names that its relatives use, are documented to be local.
_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}


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


class LocalBuffers:
    """Checksums of the buffers that training should not change, to warn when it does.

    Args:
        model: The replica's model.
        remedy: What the warning tells the user to do.
    """

    def __init__(self, model: nn.Module, *, remedy: str) -> None:
        self._model, self._remedy = model, remedy
        self._first = self._checksums()

    def check(self) -> None:
        """Warn, once, about the buffers that have changed; BatchNorm's statistics are left out."""
        now = self._checksums() if self._first else {}
        changed = [name for name, found in self._first.items() if now.get(name, found) != found]
        if changed:
            self._first = {}
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            warnings.warn(
                f"training changes the buffer {changed[0]}{more}, and buffers are not exchanged, so replicas part in "
                f"it; {self._remedy}",
                stacklevel=5,  # the loop that called `step`, through torch's wrapper of it
            )

    def _checksums(self) -> dict[str, int]:
        saved = self._model.state_dict(keep_vars=True)
        found = {}
        for name, buffer in self._model.named_buffers():
            is_watched = name in saved and name.rpartition(".")[2] not in _STATISTICS
            if is_watched and (buffer.is_floating_point() or buffer.is_complex()):
                raw = local_shard(buffer).cpu().contiguous().reshape(-1)
                found[plain_name(name)] = zlib.crc32(raw.view(torch.uint8).numpy().data) if raw.numel() else 0
        return found
