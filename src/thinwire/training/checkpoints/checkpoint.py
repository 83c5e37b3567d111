"""The full state of one replica as two files that hold no code: safetensors for tensors, JSON for all else.

A checkpoint of a run is `checkpoints/step-00000150/` with `replica-N.safetensors` and `replica-N.json` for every
replica. The JSON file is written last and holds a SHA-256 of the tensors and of itself, so a pair either verifies or
does not count. Every replica looks after its own files: hosts need not share a disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from thinwire.errors import CheckpointError
from thinwire.files import replace_whole, write_whole

_FORMAT = "thinwire-checkpoint"
_VERSION = 2
_KEPT = 2
_ANEW = "train anew with --overwrite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a checkpoint must agree with to be of this run.

    Attributes:
        run: The run's id.
        replica: The replica whose state it is.
        num_replicas: How many there are.
        config_digest: Hash of the options that change what is computed.
    """

    run: str
    replica: int
    num_replicas: int
    config_digest: str


class Checkpoints:
    """One replica's checkpoints of one run.

    Args:
        run_dir: The run's folder.
        identity: What they must agree with.
    """

    def __init__(self, run_dir: Path, *, identity: Identity) -> None:
        self._folder = run_dir / "checkpoints"
        self._identity = identity

    def save(self, state: Mapping[str, Any], *, step: int, drift_steps: int) -> None:
        """Write the state after a step, then remove what nobody can need any more.

        Args:
            state: Nested dicts, lists and tuples of tensors, texts, numbers, bools and None.
            step: Inner steps done.
            drift_steps: How many steps another replica may be behind: checkpoints that young are kept, since the
                newest one that all replicas have may be among them, and at least the latest two.

        Raises:
            CheckpointError: It could not be written; earlier ones are untouched.
        """
        folder = self._step_folder(step)
        tensors, skeleton = flatten_state(state)
        tensor_path, json_path = self._pair(step)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            json_path.unlink(missing_ok=True)  # an old pair of the same step stops counting first
            replace_whole(tensor_path, lambda path: safetensors.torch.save_file(tensors, path))
            write_whole(json_path, self._describe(step, skeleton, tensors_sha256=_sha256(tensor_path)))
        except (OSError, SafetensorError) as error:
            self._remove(step)
            raise CheckpointError(
                f"cannot write the checkpoint of step {step} to {folder}: {reason_of(error)}; make room or choose "
                f"another --out, then go on from the checkpoint before with --resume"
            ) from error
        self._prune(step - drift_steps)

    def steps(self) -> list[int]:
        """Return the steps for which this replica has files, in order, verified or not."""
        name = self._pair(0)[1].name
        found = []
        for path in self._folder.glob(f"step-*/{name}"):
            digits = path.parent.name.removeprefix("step-")
            if digits.isascii() and digits.isdecimal():
                found.append(int(digits))
        return sorted(found)

    def problem(self, step: int) -> str:
        """Check a checkpoint against its hashes; return what is wrong with it, or an empty text."""
        try:
            self._read_json(step)
        except CheckpointError as error:
            return str(error)
        return ""

    def load(self, step: int) -> dict[str, Any]:
        """Read and check the state after a step.

        Raises:
            CheckpointError: It is missing, corrupt or of another run; names the file.
        """
        description = self._read_json(step)
        path = self._pair(step)[0]
        try:
            tensors = safetensors.torch.load_file(path)
            state = unflatten_state(tensors, description["state"])
        except (OSError, SafetensorError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is corrupt: {reason_of(error)}; {self._remedy(step)}") from error
        if not isinstance(state, dict):
            raise CheckpointError(f"{path} holds no state; {self._remedy(step)}")
        return state

    def forget_after(self, step: int) -> None:
        """Remove the checkpoints that a resumed run will write anew."""
        for later in self.steps():
            if later > step:
                self._remove(later)

    def _prune(self, slowest_step: int) -> None:
        present = self.steps()
        # the newest that a replica at `slowest_step` has written must stay
        needless = [step for step in present if step <= slowest_step][:-1]
        for step in set(needless) - set(present[-_KEPT:]):
            self._remove(step)

    def _describe(self, step: int, skeleton: Any, *, tensors_sha256: str) -> str:
        body = {
            **self._header(step),
            "tensors_sha256": tensors_sha256,
            "state": skeleton,
        }
        return json.dumps({**body, "sha256": body_sha256(body)})

    def _header(self, step: int) -> dict[str, Any]:
        return {"format": _FORMAT, "version": _VERSION, "step": step, **asdict(self._identity)}

    def _read_json(self, step: int) -> dict[str, Any]:
        tensor_path, path = self._pair(step)
        try:
            body = json.loads(path.read_bytes())
            stated = body.pop("sha256")
            is_intact = stated == body_sha256(body) and body["tensors_sha256"] == _sha256(tensor_path)
        except OSError as error:
            raise CheckpointError(f"cannot read {error.filename}: {error.strerror}; {self._remedy(step)}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is corrupt (no checkpoint's JSON); {self._remedy(step)}") from error
        if not is_intact:
            raise CheckpointError(f"{path} or {tensor_path.name} beside it is corrupt; {self._remedy(step)}")
        if body.get("version") != _VERSION:
            raise CheckpointError(
                f"{path} is of format version {body.get('version')!r}, and this thinwire reads {_VERSION}, which names "
                f"the run; go on with the thinwire that wrote it"
            )
        for field, value in self._header(step).items():
            if body.get(field) != value:
                raise CheckpointError(
                    f"{path} is of another run: its {field} is {body.get(field)!r}, this run's {value!r}; "
                    f"{self._remedy(step)}"
                )
        return dict(body)

    def _remedy(self, step: int) -> str:
        return f"remove {self._step_folder(step)} to go on from the checkpoint before it"

    def _step_folder(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _pair(self, step: int) -> tuple[Path, Path]:
        stem = self._step_folder(step) / f"replica-{self._identity.replica}"
        return stem.with_suffix(".safetensors"), stem.with_suffix(".json")

    def _remove(self, step: int) -> None:
        tensor_path, json_path = self._pair(step)
        # the JSON file first: without it the pair does not count
        for path in (json_path, tensor_path):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._step_folder(step).rmdir()  # fails as long as another replica's files are there


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one replica found of its own checkpoints.

    Attributes:
        good: Steps whose files verify.
        bad: Steps whose files do not, each with what is wrong.
    """

    good: tuple[int, ...]
    bad: dict[int, str]


def look(checkpoints: Checkpoints) -> Found:
    """Verify all checkpoints of a replica."""
    problems = {step: checkpoints.problem(step) for step in checkpoints.steps()}
    good = tuple(step for step, problem in problems.items() if not problem)
    return Found(good=good, bad={step: problem for step, problem in problems.items() if problem})


def choose_step(found: Sequence[Found]) -> tuple[int, list[str]]:
    """Choose the newest step that verifies on all replicas.

    Returns:
        The step (0 where no replica has a checkpoint yet: the run begins anew), and warnings about newer ones that
        cannot be used.

    Raises:
        CheckpointError: There are checkpoints, but none that all replicas can use.

    Example:
        >>> choose_step([Found(good=(10, 20), bad={}), Found(good=(10,), bad={20: "replica-1.json is corrupt"})])
        (10, ['replica-1.json is corrupt; going on from step 10'])
    """
    common = set(found[0].good).intersection(*(one.good for one in found))
    if common:
        step = max(common)
        newer = [problem for one in found for at, problem in sorted(one.bad.items()) if at > step]
        return step, [f"{problem.partition(';')[0]}; going on from step {step}" for problem in newer]
    problems = [problem for one in found for _, problem in sorted(one.bad.items(), reverse=True)]
    if problems:
        raise CheckpointError(f"{problems[0].partition(';')[0]}, and no earlier one is whole; {_ANEW}")
    if any(one.good for one in found):
        told = "; ".join(f"replica {replica}: {list(one.good)}" for replica, one in enumerate(found))
        raise CheckpointError(f"no checkpoint is there for all replicas (steps of {told}); {_ANEW}")
    return 0, []


def flatten_state(state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Separate the tensors of a nested state from its shape.

    Returns:
        The tensors by number (contiguous, on the CPU), and a value for JSON that says where each belongs.

    Raises:
        ValueError: Something in it is neither a container, a tensor, a text, a number, a bool nor None.

    Example:
        >>> tensors, skeleton = flatten_state({"a": (torch.zeros(2), 3), 7: None})
        >>> unflatten_state(tensors, skeleton)
        {'a': (tensor([0., 0.]), 3), 7: None}
    """
    tensors: dict[str, torch.Tensor] = {}
    storages: set[int] = set()

    def visit(node: Any, where: str) -> Any:
        if isinstance(node, torch.Tensor):
            own = node.detach().cpu().contiguous()
            storage = own.untyped_storage()
            # safetensors writes whole storages: a view or a second name needs one of its own
            if storage.data_ptr() in storages or storage.nbytes() != own.numel() * own.element_size():
                own = own.clone()
            storages.add(own.untyped_storage().data_ptr())
            name = str(len(tensors))
            tensors[name] = own
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
    """Take back what `flatten_state` returned.

    Raises:
        ValueError: The two do not belong together.
    """
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


def body_sha256(body: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a value for JSON, which a JSON file holds of the rest of itself."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def reason_of(error: BaseException) -> str:
    """Return in a line what an error of a file or of its content says."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text.strip() or type(error).__name__).splitlines()[0]
