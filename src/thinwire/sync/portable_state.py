"""State as torch's checkpoint functions carry it: one JSON text, and tensors by name that are cut as parameters are.

Vectors of a fragment, such as global values and momenta, become tensors of the model's parameters, DTensors beside
sharded ones. So torch gathers and cuts them along with the parameters. All else is in the text: torch drops empty
lists and mappings on the way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from thinwire.errors import CheckpointError
from thinwire.sync.fragments import parameters_by_name
from thinwire.transport.default_group import rank_or_zero
from thinwire.transport.shards import cut, is_distributed, local_shard, placed

_ROOT, _RANK, _TEXT, _TENSORS = "thinwire", "rank", "text", "tensors"


class StateLayout:
    """Names of a state's tensors, and places of a fragment's parameters in its vectors.

    Args:
        model: The replica's model.
        fragments: Names of the parameters of each fragment.

    Attributes:
        parameters: By name.
        members: Ranks of torch's default group that hold the model's shards; none where it is not sharded.
    """

    def __init__(self, model: nn.Module, fragments: Sequence[Sequence[str]]) -> None:
        self.parameters, self.fragments = parameters_by_name(model), fragments
        sharded: list[Any] = [parameter for parameter in model.parameters() if is_distributed(parameter)]
        self.members = sorted({rank for one in sharded for rank in one.device_mesh.mesh.flatten().tolist()})

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the replica."""
        return max(1, len(self.members))

    def own_name(self, path: str) -> str:
        """Return the name of what belongs to this rank alone."""
        return f"{_RANK}-{self.members.index(rank_or_zero()) if self.members else 0}/{path}"

    def flatten(self, value: Any, tensors: dict[str, torch.Tensor], path: str, fragment: int | None = None) -> Any:
        """Move the tensors of a nested state into `tensors`, and return the rest, ready for JSON."""
        if isinstance(value, dict):
            if isinstance(value.get("round"), dict):
                fragment = value["round"]["fragment"]
            return {
                key: self.flatten(one, tensors, f"{path}/{key}", int(key) if str(key).isdecimal() else fragment)
                for key, one in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.flatten(one, tensors, f"{path}/{index}", fragment) for index, one in enumerate(value)]
        if not torch.is_tensor(value):
            return value
        if not self._is_vector(value, fragment):
            return self.store(value, tensors, path)
        assert fragment is not None
        start = 0
        for name in self.fragments[fragment]:
            like = local_shard(self.parameters[name])
            part = value[start : start + like.numel()].view(like.shape)
            tensors[f"{path}/{name}"] = placed(part, like=self.parameters[name])
            start += like.numel()
        return {"vector": path, "fragment": fragment, "dtype": _dtype_name(value)}

    def store(self, value: torch.Tensor, tensors: dict[str, torch.Tensor], path: str) -> dict[str, str]:
        """Move one tensor; a plain one of a sharded replica belongs to its rank, unless it is one number."""
        is_own = self.num_ranks > 1 and not is_distributed(value) and value.dim() > 0
        tensors[self.own_name(path) if is_own else path] = value
        return {"tensor": path, "dtype": _dtype_name(value)}

    def _is_vector(self, value: torch.Tensor, fragment: int | None) -> bool:
        if fragment is None or value.dim() != 1 or fragment >= len(self.fragments):
            return False
        return value.numel() == sum(local_shard(self.parameters[name]).numel() for name in self.fragments[fragment])


def to_portable(own: Mapping[str, Any], layout: StateLayout) -> dict[str, Any]:
    """Return thinwire's own part of a state as a text and tensors by name, which share its memory."""
    tensors: dict[str, torch.Tensor] = {}
    skeleton = {"own": layout.flatten(dict(own), tensors, _ROOT), "num_ranks": layout.num_ranks}
    return {_TEXT: json.dumps(skeleton), _TENSORS: tensors}


def from_portable(found: Any, layout: StateLayout) -> dict[str, Any]:
    """Restore what `to_portable` returned, also after torch gathered it or cut it for other ranks.

    Raises:
        CheckpointError: A tensor or the text is missing, or of another model.
    """
    remedy = "save and load by thinwire.integrations.dcp, which needs none of these options"
    try:
        skeleton, tensors = json.loads(found[_TEXT]), found.get(_TENSORS, {})

        def fetch(path: str, like: torch.Tensor | None) -> torch.Tensor:
            tensor: torch.Tensor = tensors[path]
            if like is not None and is_distributed(like) and not is_distributed(tensor):
                tensor = cut(tensor, like=like)
            return local_shard(tensor)

        def expand(value: Any) -> Any:
            if isinstance(value, list):
                return [expand(one) for one in value]
            if not isinstance(value, dict):
                return value
            if "vector" in value:
                names = layout.fragments[value["fragment"]]
                parts = [fetch(f"{value['vector']}/{name}", layout.parameters[name]) for name in names]
                return torch.cat([part.reshape(-1) for part in parts])
            if "tensor" in value:
                path = value["tensor"]
                return fetch(path if path in tensors else layout.own_name(path), None)
            return {key: expand(one) for key, one in value.items()}

        expanded: dict[str, Any] = expand(skeleton["own"])
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"the state is not whole on this rank, or of another model: {error}; {remedy}") from error
    return expanded


def _dtype_name(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
