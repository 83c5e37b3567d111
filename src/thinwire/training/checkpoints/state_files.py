"""Global states as files of a place: written so that each verifies or does not count, and read with suspicion.

The state of a step is `step-00000150/` with `model.safetensors` (the global parameters by the model's names),
`outer.safetensors` (what the outer optimizer remembers) and `checkpoint.json` (run, step, note, bytes and SHA-256 of
both files and of itself). The JSON file goes first and comes last, also where the place knows no renaming.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from safetensors import SafetensorError
from torch import Tensor

from thinwire.errors import CheckpointError
from thinwire.training.checkpoints.checkpoint import body_sha256, reason_of
from thinwire.training.checkpoints.global_state import GlobalState
from thinwire.training.checkpoints.places import Place
from thinwire.training.checkpoints.tensor_file import tensor_file
from thinwire.training.run_identity import RunIdentity

MODEL_FILE = "model.safetensors"
OUTER_FILE = "outer.safetensors"
JSON_FILE = "checkpoint.json"
_TENSOR_FILES = (MODEL_FILE, OUTER_FILE)
_ALL_FILES = (JSON_FILE, *_TENSOR_FILES)
_FORMAT = "thinwire-global-checkpoint"
_VERSION = 2
_FOLDER = re.compile(r"step-(\d{8,18})", re.ASCII)
_Read = TypeVar("_Read")


class ForeignCheckpoint(CheckpointError):
    """A checkpoint is of another run, or of an incarnation that is no past of the present one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Description of a checkpoint by its JSON file.

    Attributes:
        run: Id, option hash and incarnation of the run that wrote it; None where it was written outside a run.
        step: The step after which the state was taken.
        num_bytes: Bytes of its tensors' files.
        note: The state's note.
    """

    run: Mapping[str, str] | None
    step: int
    num_bytes: int
    note: Mapping[str, Any]


class StateFiles:
    """The states in one place.

    Args:
        place: The place.
        run: The run that reads and writes them: states of another one are refused. None reads every run's.
    """

    def __init__(self, place: Place, *, run: RunIdentity | None = None) -> None:
        self._place = place
        self._run = run

    def write(self, state: GlobalState) -> None:
        """Write a state; what else is of its step stops counting first.

        Raises:
            ForeignCheckpoint: Another run's state is in the place; nothing is written or removed.
            CheckpointError: It could not be written; names the remedy. Other steps are untouched.
        """
        self._check_place()
        folder = _folder(state.step)
        try:
            files = self._same_files(state)
            if files is None:
                self.remove(state.step)
                files = {file: self._write_tensors(folder, file, tensors) for file, tensors in _contents(state)}
            self._place.write(folder, JSON_FILE, [memoryview(_describe(state, files, run=self._run))])
        except Exception as error:  # stores raise errors of their own kinds
            raise self._cannot_write(state.step, error) from error

    def folders(self) -> dict[int, bool]:
        """Return the steps that have files of ours, and whether each was brought to an end."""
        found = {}
        for name in self._place.folders():
            match = _FOLDER.fullmatch(name)
            if match and _folder(int(match.group(1))) == name:
                files = {file for file in self._place.sizes(name) if _is_ours(file)}
                if files:
                    found[int(match.group(1))] = JSON_FILE in files
        return found

    def steps(self) -> list[int]:
        """Return the steps whose states were brought to an end, in order, verified or not.

        Raises:
            CheckpointError: The place cannot be listed.
        """
        try:
            return sorted(step for step, is_complete in self.folders().items() if is_complete)
        except Exception as error:
            raise CheckpointError(
                f"cannot list {self._place.name}: {reason_of(error)}; see that it can be reached and read"
            ) from error

    def describe(self, step: int) -> Description:
        """Read what a state's JSON says; the other files' sizes are checked, and their content is not.

        Raises:
            CheckpointError: It is missing, incomplete or damaged; names the file.
        """
        body = self._body(step)
        num_bytes = sum(body["files"][file]["bytes"] for file in _TENSOR_FILES)
        return Description(run=body["run"], step=step, num_bytes=num_bytes, note=body["note"])

    def newest_first(self) -> list[int]:
        """Return the steps, the newest state first: by incarnation, then era, then step.

        A run that goes back to an earlier checkpoint begins a new era; states of later steps may be of an older one.
        A state whose JSON is damaged comes before the others, so that it is reported.

        Raises:
            ForeignCheckpoint: One is of another run.
            CheckpointError: The place cannot be listed.
        """
        steps = self.steps()
        steps.reverse()  # so that of several foreign ones the newest is named
        return sorted(steps, key=self._order, reverse=True)

    def _order(self, step: int) -> tuple[int, int, int]:
        try:
            body = self._body(step)
        except ForeignCheckpoint:
            raise
        except CheckpointError:
            return 1 << 62, 0, step
        era = body["note"].get("era")
        age = 0 if self._run is None else self._run.age(body["run"])
        return age, era if type(era) is int else 0, step

    def verify(self, step: int) -> None:
        """Read all of a state's files and check their hashes.

        Raises:
            CheckpointError: It is missing, incomplete or damaged; names the file.
        """
        body = self._body(step)
        for file in _TENSOR_FILES:
            chunks = _Hashed(self._place.read(_folder(step), file))
            self._read(step, partial(_pass, chunks))
            self._check_hash(step, file, body, chunks.digest.hexdigest())

    def load(self, step: int) -> GlobalState:
        """Read and check a state.

        Raises:
            CheckpointError: It is missing, incomplete or damaged; names the file.
        """
        body = self._body(step)
        groups: list[dict[str, Tensor]] = []
        for file in _TENSOR_FILES:
            tensors, sha256 = self._read(step, partial(self._place.tensors, _folder(step), file))
            self._check_hash(step, file, body, sha256)
            groups.append(tensors)
        try:
            return GlobalState(step=step, parameters=groups[0], outer=groups[1], note=body["note"])
        except ValueError as error:
            raise CheckpointError(f"{self._path(step)} holds no state: {error}; {self._remedy(step)}") from error

    def remove(self, step: int) -> None:
        """Remove a step's files, and what a killed writer left of them.

        Raises:
            Exception: Whatever the place's file system raises.
        """
        self._place.remove(_folder(step), _ALL_FILES)

    def _check_place(self) -> None:
        """Refuse a place in which another run keeps states: a later start could go on from the wrong one."""
        for step in self.steps() if self._run is not None else ():
            try:
                self._body(step)
            except ForeignCheckpoint:
                raise
            except CheckpointError:
                continue  # a damaged one, which does not count and is told where it is read

    def _same_files(self, state: GlobalState) -> dict[str, Any] | None:
        """Return what is known of the tensors' files if they are there: those of a good state are not put at risk."""
        try:
            self.verify(state.step)
            there = self._body(state.step)["files"]
        except ForeignCheckpoint:
            raise
        except CheckpointError:
            return None
        wanted = {}
        for file, tensors in _contents(state):
            chunks = _Hashed(tensor_file(tensors))
            _pass(chunks)
            wanted[file] = chunks.facts()
        return wanted if wanted == there else None

    def _write_tensors(self, folder: str, file: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        chunks = _Hashed(tensor_file(tensors))
        self._place.write(folder, file, chunks)
        return chunks.facts()

    def _cannot_write(self, step: int, error: Exception) -> CheckpointError:
        remedy = "see that the place can be reached and written"
        code = error.errno if isinstance(error, OSError) else None
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "make room there, keep fewer, or choose another place"
        elif code in (errno.EACCES, errno.EPERM, errno.EROFS):
            remedy = "let this user write there, or choose another place"
        told = f"cannot write the checkpoint of step {step} to {self._place.name}: {reason_of(error)}; {remedy}"
        try:
            self.remove(step)  # half a state helps nobody, and takes the room of the next
        except Exception as second:
            told += f" (what was written of it cannot be removed: {reason_of(second)})"
        return CheckpointError(told)

    def _body(self, step: int) -> dict[str, Any]:
        folder, path = _folder(step), f"{self._path(step)}/{JSON_FILE}"
        content = self._read(step, lambda: b"".join(self._place.read(folder, JSON_FILE)))
        sizes = self._read(step, lambda: self._place.sizes(folder))
        try:
            body = json.loads(content)
            is_intact = body.pop("sha256") == body_sha256(body)
            found = {field: body[field] for field in ("format", "version", "step")}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged (no checkpoint's JSON); {self._remedy(step)}") from error
        if not is_intact:
            raise CheckpointError(f"{path} is damaged (its SHA-256 is wrong); {self._remedy(step)}")
        if found["format"] == _FORMAT and found["version"] != _VERSION:
            raise ForeignCheckpoint(
                f"{path} is of format version {found['version']!r}, and this thinwire reads {_VERSION}, which names "
                f"the run; go on with the thinwire that wrote it, or load its weights into a new run"
            )
        for field, value in {"format": _FORMAT, "version": _VERSION, "step": step}.items():
            if found[field] != value:
                raise CheckpointError(f"{path}: its {field} is {found[field]!r}, not {value!r}; {self._remedy(step)}")
        try:
            expected = {file: int(body["files"][file]["bytes"]) for file in _TENSOR_FILES}
            {body["files"][file]["sha256"] for file in _TENSOR_FILES}, dict(body["note"]), body["run"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} lacks a field ({error!r}); {self._remedy(step)}") from error
        if self._run is not None and (why := self._run.foreign(body["run"])):
            raise ForeignCheckpoint(
                f"{self._path(step)} is not of this run: {why}; go on with the other run in its own folder, name "
                f"another place, or remove {self._path(step)}"
            )
        for file, num_bytes in expected.items():
            if sizes.get(file) != num_bytes:
                size = f"{sizes[file]} bytes" if file in sizes else "missing"
                raise CheckpointError(
                    f"{self._path(step)}/{file} is {size}, {num_bytes} bytes were written; {self._remedy(step)}"
                )
        return dict(body)

    def _check_hash(self, step: int, file: str, body: Mapping[str, Any], sha256: str) -> None:
        if sha256 != body["files"][file]["sha256"]:
            raise CheckpointError(f"{self._path(step)}/{file} is damaged (its SHA-256 is wrong); {self._remedy(step)}")

    def _read(self, step: int, read: Callable[[], _Read]) -> _Read:
        path = self._path(step)
        try:
            return read()
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is no whole checkpoint: a file is missing; {self._remedy(step)}") from error
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {reason_of(error)}; {self._remedy(step)}") from error
        except Exception as error:
            raise CheckpointError(
                f"cannot read {path}: {reason_of(error)}; see that it can be reached and read"
            ) from error

    def _path(self, step: int) -> str:
        return f"{self._place.name.rstrip('/')}/{_folder(step)}"

    def _remedy(self, step: int) -> str:
        return f"remove {self._path(step)} to go on from the one before it"


class _Hashed:
    """Chunks on their way, counted and hashed as they pass."""

    def __init__(self, chunks: Iterable[memoryview] | Iterable[bytes]) -> None:
        self.digest = hashlib.sha256()
        self._num_bytes = 0
        self._chunks = chunks

    def __iter__(self) -> Iterator[Any]:
        for chunk in self._chunks:
            self.digest.update(chunk)
            self._num_bytes += len(chunk)
            yield chunk

    def facts(self) -> dict[str, Any]:
        return {"bytes": self._num_bytes, "sha256": self.digest.hexdigest()}


def _pass(chunks: _Hashed) -> None:
    for _ in chunks:
        pass


def _contents(state: GlobalState) -> list[tuple[str, Mapping[str, Tensor]]]:
    return [(MODEL_FILE, state.parameters), (OUTER_FILE, state.outer)]


def _describe(state: GlobalState, files: Mapping[str, Any], *, run: RunIdentity | None) -> bytes:
    stamp = None if run is None else run.stamp()
    body = {
        "format": _FORMAT, "version": _VERSION, "run": stamp, "step": state.step, "files": files, "note": state.note
    }  # fmt: skip
    # as it will be read, so that its hash is that of what is read
    body = json.loads(json.dumps(body, default=dict))
    return json.dumps({**body, "sha256": body_sha256(body)}, indent=1).encode() + b"\n"


def _folder(step: int) -> str:
    return f"step-{step:08d}"


def _is_ours(file: str) -> bool:
    return file in _ALL_FILES or any(file.startswith(f".{name}.") and file.endswith(".partial") for name in _ALL_FILES)
