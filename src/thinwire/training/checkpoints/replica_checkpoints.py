"""Checkpoints of a static run: the full state of each replica, in files of its own.

A step's folder holds `replica-N.safetensors` and `replica-N.json` for every replica; see `checkpoint_files`. Each
replica writes, verifies and removes its own: hosts need not share a disk.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thinwire.errors import CheckpointError
from thinwire.training.checkpoints.checkpoint_files import CheckpointFiles, LocalStorage, Storage
from thinwire.transport.shards import local_shard

_KEPT = 2
_JSON_FILE = re.compile(r"replica-(\d{1,9})\.json", re.ASCII)
_RESTART = "train again from the start with --overwrite"


class ReplicaCheckpoints:
    """One replica's checkpoints of one run, by its id and the digest of the options that change what is computed."""

    def __init__(self, run_dir: Path, *, run: str, replica: int, num_replicas: int, config_digest: str) -> None:
        header: dict[str, dict[str, Any]] = {
            "run": {"id": run, "config": config_digest}, "replica": {"index": replica, "of": num_replicas},
        }  # fmt: skip

        def foreign(body: Mapping[str, Any]) -> str:
            for field, own in header.items():
                for name, value in own.items():
                    there = body.get(field)
                    found = there.get(name) if isinstance(there, Mapping) else None
                    if found != value:
                        return f"its {field} {name} is {str(found)[:64]!r}, this one's {value!r}"
            return ""

        self._tensor_file = f"replica-{replica}.safetensors"
        self._files = _files_of(replica, LocalStorage(run_dir / "checkpoints"), header=header, foreign=foreign)

    def save(self, state: Mapping[str, Any], *, step: int, drift_steps: int) -> None:
        """Write a state of nested containers, tensors and plain values, then remove those that no replica can need.

        Another replica may be `drift_steps` behind: checkpoints that young are kept, since the newest one that all
        replicas have may be among them, and at least the latest two.

        Raises:
            CheckpointError: It could not be written; earlier ones are untouched.
        """
        tensors, skeleton = flatten_state(state)
        self._files.write(step, {self._tensor_file: tensors}, skeleton)
        present = self.steps()
        # the newest that a replica `drift_steps` behind has written must stay
        needless = [earlier for earlier in present if earlier <= step - drift_steps][:-1]
        for earlier in set(needless) - set(present[-_KEPT:]):
            self._remove(earlier)

    def steps(self) -> list[int]:
        return self._files.steps()

    def problem(self, step: int) -> str:
        return self._files.problem(step)

    def load(self, step: int) -> dict[str, Any]:
        tensors, skeleton = self._files.load(step)
        path = f"{self._files.path(step)}/{self._tensor_file}"
        try:
            state = unflatten_state(tensors[self._tensor_file], skeleton)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: {error}; {self._files.remedy(step)}") from error
        if not isinstance(state, dict):
            raise CheckpointError(f"{path} holds no state; {self._files.remedy(step)}")
        return state

    def forget_after(self, step: int) -> None:
        """Remove the checkpoints that a resumed run will write again."""
        for later in self.steps():
            if later > step:
                self._remove(later)

    def _remove(self, step: int) -> None:
        with contextlib.suppress(OSError):
            self._files.remove(step)


def replica_files(storage: Storage) -> dict[int, CheckpointFiles]:
    """Return the files of each replica that has checkpoints in a storage, of whatever run, to list and verify them."""
    names = {file for folder in storage.folders() for file in storage.sizes(folder)}
    replicas = sorted(int(match.group(1)) for match in map(_JSON_FILE.fullmatch, names) if match)
    return {replica: _files_of(replica, storage, header={}) for replica in replicas}


def _files_of(replica: int, storage: Storage, **more: Any) -> CheckpointFiles:
    tensor_files = [f"replica-{replica}.safetensors"]
    return CheckpointFiles(storage, json_file=f"replica-{replica}.json", tensor_files=tensor_files, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Steps of one replica whose checkpoints verify, and what is wrong with each of the others."""

    good: tuple[int, ...]
    bad: dict[int, str]


def verify_all(checkpoints: ReplicaCheckpoints) -> Found:
    """Verify all checkpoints of a replica."""
    problems = {step: checkpoints.problem(step) for step in checkpoints.steps()}
    good = tuple(step for step, problem in problems.items() if not problem)
    return Found(good=good, bad={step: problem for step, problem in problems.items() if problem})


def choose_step(found: Sequence[Found]) -> tuple[int, list[str]]:
    """Choose the newest step that verifies on all replicas.

    Returns:
        The step (0 where no replica has a checkpoint yet: the run begins from the seed), and warnings about newer
        ones that cannot be used.

    Raises:
        CheckpointError: There are checkpoints, but none that all replicas can use.

    Example:
        >>> choose_step([Found(good=(10, 20), bad={}), Found(good=(10,), bad={20: "replica-1.json is damaged"})])
        (10, ['replica-1.json is damaged; going on from step 10'])
    """
    common = set(found[0].good).intersection(*(one.good for one in found))
    if common:
        step = max(common)
        newer = [problem for one in found for at, problem in sorted(one.bad.items()) if at > step]
        return step, [f"{problem.partition(';')[0]}; going on from step {step}" for problem in newer]
    problems = [problem for one in found for _, problem in sorted(one.bad.items(), reverse=True)]
    if problems:
        raise CheckpointError(f"{problems[0].partition(';')[0]}, and no earlier one is whole; {_RESTART}")
    if any(one.good for one in found):
        steps = "; ".join(f"replica {replica}: {list(one.good)}" for replica, one in enumerate(found))
        raise CheckpointError(f"no checkpoint is there for all replicas (steps of {steps}); {_RESTART}")
    return 0, []


def flatten_state(state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Separate the tensors of a nested state from its shape.

    Returns:
        The tensors by number (on the CPU, of a DTensor this rank's shard), and a value for JSON that holds the place
        of each.

    Raises:
        ValueError: Something in it is neither a container, a tensor, a text, a number, a bool nor None.

    Example:
        >>> tensors, skeleton = flatten_state({"a": (torch.zeros(2), 3), 7: None})
        >>> unflatten_state(tensors, skeleton)
        {'a': (tensor([0., 0.]), 3), 7: None}
    """
    tensors: dict[str, torch.Tensor] = {}

    def visit(node: Any, where: str) -> Any:
        if isinstance(node, torch.Tensor):
            name = str(len(tensors))
            tensors[name] = local_shard(node).cpu()
            return {"tensor": name}
        if isinstance(node, Mapping):
            if not all(isinstance(key, str | int) and not isinstance(key, bool) for key in node):
                raise ValueError(
                    f"keys of the state must be texts or whole numbers, got {sorted(map(repr, node))} {where}"
                )
            return {"dict": [[key, visit(value, f"{where}[{key!r}]")] for key, value in node.items()]}
        if isinstance(node, list | tuple):
            kind = "tuple" if isinstance(node, tuple) else "list"
            return {kind: [visit(value, f"{where}[{index}]") for index, value in enumerate(node)]}
        if node is None or isinstance(node, str | bool | int | float):
            return {"value": node}
        raise ValueError(f"a state holds tensors, texts, numbers, bools and None, got {type(node).__name__} at {where}")

    return tensors, visit(state, "state")


def unflatten_state(tensors: Mapping[str, torch.Tensor], skeleton: Any) -> Any:
    """Rebuild a state from what `flatten_state` returned."""
    if not isinstance(skeleton, dict) or len(skeleton) != 1:
        raise ValueError("the shape of the state is damaged")
    ((kind, content),) = skeleton.items()
    if kind == "value":
        return content
    if kind == "tensor":
        if content not in tensors:
            raise ValueError(f"tensor {content!r} of the state is missing")
        return tensors[content]
    if not isinstance(content, list):
        raise ValueError("the shape of the state is damaged")
    if kind == "dict":
        if not all(isinstance(entry, list) and len(entry) == 2 for entry in content):
            raise ValueError("the shape of the state is damaged")
        return {key: unflatten_state(tensors, value) for key, value in content}
    values = [unflatten_state(tensors, value) for value in content]
    if kind not in ("list", "tuple"):
        raise ValueError(f"the state holds a {kind!r}, which this thinwire does not know")
    return tuple(values) if kind == "tuple" else values
