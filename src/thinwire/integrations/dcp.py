"""Checkpoints by torch.distributed.checkpoint, in safetensors: saved in the background, loaded by another set of ranks.

torch's own metadata file is a pickle, so tensors are stored in the layout that torch calls Hugging Face's: safetensors
files that state the place of each shard. Everything that is no tensor is one JSON text, stored as bytes.

Vectors of a fragment, such as global values and momenta, are stored as tensors of the model's parameters. So they are
cut along with the parameters, and a replica of two ranks is loaded by one rank, or the other way round.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import async_save as torch_async_save
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from thinwire.errors import CheckpointError, MissingExtra
from thinwire.sync.engine_state import OWN_KEYS, OWN_STATE
from thinwire.sync.fragments import parameters_by_name
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.sync.portable_state import StateLayout
from thinwire.transport.shards import is_distributed, local_shard, placed

_TEXT = "thinwire.json"
_MODEL, _OPTIMIZER = "model", "optimizer"
# Of each model, for its checkpoints; it stays, for a rank that ended it would cut off a slower one.
_groups: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_FOLDER = re.compile(r"replica-(\d+)")


def save(path: Path | str, model: nn.Module, optimizer: DistributedOptimizer) -> None:
    """Save a replica: its model, the inner optimizer's state and thinwire's own.

    All ranks of a replica call it after the same step. Each replica writes `path/replica-N`; together they are one
    checkpoint, once all have returned.

    Args:
        path: A folder, the same on all replicas.
        model: The replica's model, plain or sharded by FSDP2.
        optimizer: Its optimizer.

    Raises:
        MissingExtra: This torch has no safetensors storage.
    """
    writer, ranks = _writer(path, optimizer), _Ranks(model)
    torch_save(_to_save(model, optimizer, ranks), storage_writer=writer, **ranks.arguments)


def async_save(path: Path | str, model: nn.Module, optimizer: DistributedOptimizer) -> Any:
    """Save as `save` does, in a thread of its own; training may go on when this returns.

    Returns:
        A future; its `result()` waits until everything is written, and raises what went wrong.
    """
    writer, ranks = _writer(path, optimizer), _Ranks(model)
    tensors = {name: _clone(tensor) for name, tensor in _to_save(model, optimizer, ranks).items()}
    return torch_async_save(tensors, storage_writer=writer, async_stager=_Cloned(), **ranks.arguments)


def load(path: Path | str, model: nn.Module, optimizer: DistributedOptimizer) -> tuple[str, ...]:
    """Load what `save` wrote, into a model and an optimizer that are built as at the start of the run.

    A replica may have another number of ranks than before. With another number of replicas, each new one takes the
    state of an old one; see `DistributedOptimizer.adopt_state_dict`.

    Returns:
        What was reset, a line each; empty for the same number of replicas.

    Raises:
        CheckpointError: There is no whole checkpoint, or it is of another model or method.
    """
    saved = sorted(int(found[1]) for entry in Path(path).glob("*") if (found := _FOLDER.fullmatch(entry.name)))
    if saved != list(range(len(saved))) or not saved:
        raise CheckpointError(f"{path} holds no whole checkpoint: found replicas {saved}; take another folder")
    replica, count = optimizer.transport.replica, optimizer.transport.num_replicas
    folder = Path(path) / f"replica-{replica % len(saved)}"
    sizes = _storage("Reader", folder).read_metadata().state_dict_metadata
    if _TEXT not in sizes:
        raise CheckpointError(f"{folder} holds no checkpoint of thinwire; take another folder")
    ranks = _Ranks(model)
    text = torch.empty(sizes[_TEXT].size, dtype=torch.uint8)
    torch_load({_TEXT: text}, storage_reader=_storage("Reader", folder), **ranks.arguments)
    try:
        skeleton = json.loads(bytes(text.numpy()))
        target = _Target(model, optimizer, sizes, saved_ranks=skeleton["num_ranks"], ranks=ranks)
        own, inner = target.expand(skeleton["own"]), target.expand(skeleton["inner"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder} does not fit this run: {error}; resume with its model and method") from error
    torch_load(target.tensors, storage_reader=_storage("Reader", folder), **ranks.arguments)
    state = {**target.finish(own), **_inner_state(target.finish(inner), model, optimizer)}
    if len(saved) == count:
        optimizer.load_state_dict(state)
        return ()
    return optimizer.adopt_state_dict(state)


def _to_save(model: nn.Module, optimizer: DistributedOptimizer, ranks: _Ranks) -> dict[str, torch.Tensor]:
    named = parameters_by_name(model)
    tensors: dict[str, torch.Tensor] = {f"{_MODEL}/{name}": tensor for name, tensor in model.state_dict().items()}
    whole = optimizer.state_dict()
    own = {name: whole[name] for name in sorted(OWN_KEYS)}
    own["sync"].pop("sample")  # the model is in the checkpoint too, and a replica may have other ranks
    layout = StateLayout(model, optimizer.fragments)
    inner = {
        "state": {
            name: {
                key: layout.store(value, tensors, f"{_OPTIMIZER}/{key}/{name}") if torch.is_tensor(value) else value
                for key, value in optimizer.inner.state[parameter].items()
            }
            for name, parameter in named.items()
            if parameter in optimizer.inner.state
        },
        "param_groups": [
            {key: _number(value) for key, value in group.items() if key != "params"}
            for group in optimizer.inner.param_groups
        ],
    }
    skeleton = {"own": layout.flatten(own, tensors, OWN_STATE), "inner": inner, "num_ranks": ranks.count}
    text = json.dumps(skeleton).encode()
    return {**tensors, _TEXT: torch.frombuffer(bytearray(text), dtype=torch.uint8)}


class _Ranks:
    """Ranks of one replica, by the shards of its model, in a group of their own: training uses the others meanwhile.

    Attributes:
        count: The number of ranks.
        arguments: For the functions of torch.distributed.checkpoint.
    """

    def __init__(self, model: nn.Module) -> None:
        layout = StateLayout(model, ())
        members, self.count, self.own_name = layout.members, layout.num_ranks, layout.own_name
        if members and model not in _groups:
            _groups[model] = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        self.arguments: dict[str, Any] = {"process_group": _groups[model]} if members else {"no_dist": True}


class _Cloned(AsyncStager):
    """Stages nothing: what is saved was cloned already; torch's own stager fails for sharded tensors on a CPU."""

    _synchronize_after_execute = False

    def stage(self, state_dict: Any) -> Any:
        return state_dict

    def synchronize_staging(self) -> None: ...

    def close(self) -> None: ...


class _Target:
    """Empty tensors for what a checkpoint holds, in this run's shards; its model's are filled in place.

    Args:
        model: The model.
        optimizer: Its optimizer.
        sizes: What is stored, by name.
        saved_ranks: Ranks of the replica that saved.
        ranks: Those of this one.
    """

    def __init__(
        self, model: nn.Module, optimizer: DistributedOptimizer, sizes: Any, *, saved_ranks: int, ranks: _Ranks
    ) -> None:
        self._parameters = parameters_by_name(model)
        self._fragments = optimizer.fragments
        self._sizes = sizes
        self._saved_ranks, self._ranks = saved_ranks, ranks
        self.tensors: dict[str, Any] = {f"{_MODEL}/{name}": tensor for name, tensor in model.state_dict().items()}
        if missing := [name for name in self.tensors if name not in sizes]:
            raise KeyError(f"it lacks {missing[0]}")

    def expand(self, value: Any) -> Any:
        """Return the nested state with a list of names where a tensor belongs."""
        if isinstance(value, list):
            return [self.expand(one) for one in value]
        if not isinstance(value, dict):
            return value
        if "vector" in value:
            names = self._fragments[value["fragment"]]
            paths = [f"{value['vector']}/{name}" for name in names]
            for path, name in zip(paths, names, strict=True):
                self._make(path, value["dtype"], like=self._parameters[name])
            return _Names(paths, is_vector=True)
        if "tensor" in value:
            path = value["tensor"]
            if path not in self._sizes:
                if self._saved_ranks != self._ranks.count:
                    raise ValueError(
                        f"{path} belongs to one of {self._saved_ranks} ranks of a replica and cannot be cut for "
                        f"{self._ranks.count}; "
                        f"give the replica as many ranks as before, or save after a method without residuals"
                    )
                path = self._ranks.own_name(path)
            self._make(path, value["dtype"], like=self._parameters.get(path.split("/", 2)[-1]))
            return _Names([path], is_vector=False)
        return {key: self.expand(one) for key, one in value.items()}

    def finish(self, value: Any) -> Any:
        """Return the nested state with the tensors, after they were loaded."""
        if isinstance(value, _Names):
            found = [self.tensors[path] for path in value.paths]
            return torch.cat([local_shard(one).reshape(-1) for one in found]) if value.is_vector else found[0]
        if isinstance(value, list):
            return [self.finish(one) for one in value]
        return {key: self.finish(one) for key, one in value.items()} if isinstance(value, dict) else value

    def _make(self, path: str, dtype: str, *, like: torch.Tensor | None) -> None:
        size, kind = self._sizes[path].size, getattr(torch, dtype)
        if like is not None and size == like.shape:
            shard = local_shard(like)
            self.tensors[path] = placed(torch.empty(shard.shape, dtype=kind, device=shard.device), like=like)
        else:
            self.tensors[path] = torch.empty(size, dtype=kind)


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of the stored tensors that make one tensor of a state."""

    paths: list[str]
    is_vector: bool


def _inner_state(inner: dict[str, Any], model: nn.Module, optimizer: DistributedOptimizer) -> dict[str, Any]:
    """Return a state for the inner optimizer's `load_state_dict`, which counts parameters."""
    names = {id(parameter): name for name, parameter in parameters_by_name(model).items()}
    ordered = [parameter for group in optimizer.inner.param_groups for parameter in group["params"]]
    numbers = {names[id(parameter)]: number for number, parameter in enumerate(ordered)}
    groups, first = [], 0
    for group, saved in zip(optimizer.inner.param_groups, inner["param_groups"], strict=True):
        restored = {key: tuple(v) if isinstance(group.get(key), tuple) else v for key, v in saved.items()}
        groups.append({**restored, "params": list(range(first, first + len(group["params"])))})
        first += len(group["params"])
    return {"state": {numbers[name]: state for name, state in inner["state"].items()}, "param_groups": groups}


def _number(value: Any) -> Any:
    return value.item() if torch.is_tensor(value) and value.dim() == 0 else value


def _clone(tensor: Any) -> torch.Tensor:
    """Return a copy on the CPU, in the same shards."""
    if not is_distributed(tensor):
        copied: torch.Tensor = tensor.detach().to("cpu", copy=True)
        return copied
    return placed(local_shard(tensor).clone(), like=tensor)


def _storage(kind: str, folder: Path, **options: Any) -> Any:
    """Return torch's reader or writer of safetensors files in a folder."""
    if not hasattr(checkpoint, f"HuggingFaceStorage{kind}"):
        raise MissingExtra("this torch has no safetensors storage; install it with: pip install 'torch>=2.9'")
    return getattr(checkpoint, f"HuggingFaceStorage{kind}")(str(folder), **options)


def _writer(path: Path | str, optimizer: DistributedOptimizer) -> Any:
    folder = Path(path) / f"replica-{optimizer.transport.replica}"
    folder.mkdir(parents=True, exist_ok=True)
    return _storage("Writer", folder, save_distributed=True)
