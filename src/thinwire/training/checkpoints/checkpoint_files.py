"""Checkpoint files: the one format in which replicas and elastic runs keep states, in a folder or an object store.

A checkpoint of a step lies in `step-00000150/`. It is a few safetensors files and one JSON file, which holds:

| field | content |
| --- | --- |
| `format`, `version` | `thinwire-checkpoint`, 3 |
| `step` | inner steps done |
| `run` | id, options' hash and incarnation of the run; null where a loop of your own wrote it |
| `replica` | index and count, where the state is one replica's (`replica-0.json`, `replica-0.safetensors`) |
| `files` | bytes and SHA-256 of each safetensors file |
| `state` | all that is no tensor |
| `sha256` | of all fields above, as JSON with sorted keys |

The JSON file is removed first and written last, so that at any instant, also where the writer is killed, a checkpoint
either verifies or does not count. Nothing in it is code.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from thinwire.elastic.global_state import raw_bytes
from thinwire.errors import CheckpointError, MissingExtra
from thinwire.files import replace_whole, sync_folder

_FORMAT = "thinwire-checkpoint"
_VERSION = 3
_FOLDER = re.compile(r"step-(\d{8,18})", re.ASCII)
_CHUNK_BYTES = 1 << 23
_ALIGNMENT = 8
_SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32",
    torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

_Read = TypeVar("_Read")


class ForeignCheckpoint(CheckpointError):
    """A checkpoint is of another run, or of an incarnation that is no past of the present one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Description of a checkpoint by its JSON file.

    Attributes:
        run: Id, option hash and incarnation of the run that wrote it; None where it was written outside a run.
        step: The step after which the state was taken.
        num_bytes: Bytes of its safetensors files.
        note: All that is no tensor, as the JSON holds it.
    """

    run: Mapping[str, str] | None
    step: int
    num_bytes: int
    note: Mapping[str, Any]


class CheckpointFiles:
    """The checkpoints of one writer in one storage.

    Args:
        storage: Where they are.
        json_file: Name of the JSON file.
        tensor_files: Names of the safetensors files.
        header: Fields that its JSON files hold beside those of every checkpoint.
        foreign: Returns why a JSON's content is of another run, naming both, or an empty text.
    """

    def __init__(
        self, storage: Storage, *, json_file: str, tensor_files: Sequence[str], header: Mapping[str, Any],
        foreign: Callable[[Mapping[str, Any]], str] = lambda body: "",
    ) -> None:  # fmt: skip
        self._storage = storage
        self._json_file = json_file
        self._tensor_files = tuple(tensor_files)
        self._all_files = (json_file, *tensor_files)
        self._header = header
        self._foreign = foreign

    def write(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Any) -> None:
        """Write the CPU tensors of each file and a JSON state; an older checkpoint of the step stops counting first.

        Raises:
            ForeignCheckpoint: That of this step is of another run; nothing is written or removed.
            CheckpointError: It could not be written; names the remedy. Other steps are untouched.
        """
        folder = _folder(step)
        try:
            files = self._same_files(step, tensors)
            if files is None:
                if step in self.folders():  # else the removal could take an empty folder from another replica
                    self.remove(step)
                files = {}
                for file in self._tensor_files:
                    chunks = _Hashed(safetensors_chunks(tensors[file]))
                    self._storage.write(folder, file, chunks)
                    files[file] = chunks.facts()
            body = {"format": _FORMAT, "version": _VERSION, "step": step, **self._header, "files": files}
            # as it will be read, so that its hash is that of what is read
            body = json.loads(json.dumps({**body, "state": state}, default=dict))
            content = json.dumps({**body, "sha256": body_sha256(body)}).encode() + b"\n"
            self._storage.write(folder, self._json_file, [memoryview(content)])
        except ForeignCheckpoint:
            raise
        except Exception as error:  # stores raise errors of their own kinds
            raise self._cannot_write(step, error) from error

    def folders(self) -> dict[int, bool]:
        """Return the steps that have files of this writer, and whether each was completed."""
        found = {}
        unfinished = tuple(f".{name}." for name in self._all_files)
        for name in self._storage.folders():
            match = _FOLDER.fullmatch(name)
            if match and _folder(int(match.group(1))) == name:
                with contextlib.suppress(FileNotFoundError):  # another replica has removed it just now
                    files = self._storage.sizes(name)
                    if any(
                        file in self._all_files or (file.startswith(unfinished) and file.endswith(".partial"))
                        for file in files
                    ):
                        found[int(match.group(1))] = self._json_file in files
        return found

    def steps(self) -> list[int]:
        """Return the steps whose checkpoints were completed, in order, verified or not."""
        try:
            return sorted(step for step, is_complete in self.folders().items() if is_complete)
        except Exception as error:
            raise CheckpointError(
                f"cannot list {self._storage.name}: {reason_of(error)}; see that it can be reached and read"
            ) from error

    def describe(self, step: int) -> Description:
        """Read a checkpoint's JSON; the other files' sizes are checked, and their content is not."""
        body = self.body(step)
        num_bytes = sum(body["files"][file]["bytes"] for file in self._tensor_files)
        return Description(run=body["run"], step=step, num_bytes=num_bytes, note=body["state"])

    def verify(self, step: int) -> None:
        body = self.body(step)
        for file in self._tensor_files:
            chunks = _Hashed(self._storage.read(_folder(step), file))
            self._read(step, chunks.consume)
            self._check_hash(step, file, body, chunks.digest.hexdigest())

    def problem(self, step: int) -> str:
        """Verify a checkpoint; return what is wrong with it, or an empty text."""
        try:
            self.verify(step)
        except CheckpointError as error:
            return str(error)
        return ""

    def load(self, step: int) -> tuple[dict[str, dict[str, Tensor]], Any]:
        """Read and check a checkpoint; return its tensors by file and name, and its state.

        Raises:
            CheckpointError: It is missing, incomplete or damaged; names the file.
        """
        body = self.body(step)
        found: dict[str, dict[str, Tensor]] = {}
        for file in self._tensor_files:
            found[file], sha256 = self._read(step, partial(self._storage.tensors, _folder(step), file))
            self._check_hash(step, file, body, sha256)
        return found, body["state"]

    def remove(self, step: int) -> None:
        """Remove a step's files, with partial ones of a killed writer; raises what the file system raises."""
        self._storage.remove(_folder(step), self._all_files)

    def body(self, step: int) -> dict[str, Any]:
        """Read and check the JSON of a checkpoint, and the sizes of its other files.

        Raises:
            ForeignCheckpoint: It is of another run or format version.
            CheckpointError: It is missing, incomplete or damaged; names the file.
        """
        folder, path = _folder(step), f"{self.path(step)}/{self._json_file}"
        content = self._read(step, lambda: b"".join(self._storage.read(folder, self._json_file)))
        sizes = self._read(step, lambda: self._storage.sizes(folder))
        try:
            body = json.loads(content)
            is_intact = body.pop("sha256") == body_sha256(body)
            found = {field: body[field] for field in ("format", "version", "step")}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged (no checkpoint's JSON); {self.remedy(step)}") from error
        if not is_intact:
            raise CheckpointError(f"{path} is damaged (its SHA-256 is wrong); {self.remedy(step)}")
        if str(found["format"]).startswith("thinwire-") and found["version"] != _VERSION:
            raise ForeignCheckpoint(
                f"{path} is of format version {found['version']!r}, and this thinwire reads {_VERSION}; go on with the "
                f"thinwire that wrote it, or load its weights into a new run"
            )
        for field, value in {"format": _FORMAT, "version": _VERSION, "step": step}.items():
            if found[field] != value:
                raise CheckpointError(f"{path}: its {field} is {found[field]!r}, not {value!r}; {self.remedy(step)}")
        try:
            expected = {file: int(body["files"][file]["bytes"]) for file in self._tensor_files}
            {body["files"][file]["sha256"] for file in self._tensor_files}, dict(body["state"]), body["run"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} lacks a field ({error!r}); {self.remedy(step)}") from error
        if why := self._foreign(body):
            raise ForeignCheckpoint(
                f"{path} is not of this run: {why}; go on with the other run in its own folder, name another place, "
                f"or remove {self.path(step)}"
            )
        for file, num_bytes in expected.items():
            if sizes.get(file) != num_bytes:
                size = f"{sizes[file]} bytes" if file in sizes else "missing"
                raise CheckpointError(
                    f"{self.path(step)}/{file} is {size}, {num_bytes} bytes were written; {self.remedy(step)}"
                )
        return dict(body)

    def path(self, step: int) -> str:
        return f"{self._storage.name.rstrip('/')}/{_folder(step)}"

    def remedy(self, step: int) -> str:
        return f"remove {self.path(step)} to go on from the one before it"

    def _same_files(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any] | None:
        """Return the facts of the tensors' files if the same are there: those of a good state are not put at risk."""
        try:
            self.verify(step)
            there = self.body(step)["files"]
        except ForeignCheckpoint:
            raise
        except CheckpointError:
            return None
        wanted = {}
        for file in self._tensor_files:
            chunks = _Hashed(safetensors_chunks(tensors[file]))
            chunks.consume()
            wanted[file] = chunks.facts()
        return wanted if wanted == there else None

    def _cannot_write(self, step: int, error: Exception) -> CheckpointError:
        remedy = "see that the place can be reached and written"
        code = error.errno if isinstance(error, OSError) else None
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "make room there, keep fewer, or choose another place"
        elif code in (errno.EACCES, errno.EPERM, errno.EROFS):
            remedy = "let this user write there, or choose another place"
        text = f"cannot write the checkpoint of step {step} to {self._storage.name}: {reason_of(error)}; {remedy}"
        try:
            self.remove(step)  # half a state is of no use, and takes the room of the next
        except Exception as second:
            text += f" (the part that was written cannot be removed: {reason_of(second)})"
        return CheckpointError(text)

    def _check_hash(self, step: int, file: str, body: Mapping[str, Any], sha256: str) -> None:
        if sha256 != body["files"][file]["sha256"]:
            raise CheckpointError(f"{self.path(step)}/{file} is damaged (its SHA-256 is wrong); {self.remedy(step)}")

    def _read(self, step: int, read: Callable[[], _Read]) -> _Read:
        path = self.path(step)
        try:
            return read()
        except FileNotFoundError as error:
            missing = str(error.filename or "a file").rpartition("/")[2]
            raise CheckpointError(
                f"{path} is no whole checkpoint: {missing} is missing; {self.remedy(step)}"
            ) from error
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {reason_of(error)}; {self.remedy(step)}") from error
        except Exception as error:
            raise CheckpointError(
                f"cannot read {path}: {reason_of(error)}; see that it can be reached and read"
            ) from error


class _Hashed:
    """Chunks that are counted and hashed as they pass."""

    def __init__(self, chunks: Iterable[memoryview] | Iterable[bytes]) -> None:
        self.digest = hashlib.sha256()
        self._num_bytes = 0
        self._chunks = chunks

    def __iter__(self) -> Iterator[Any]:
        for chunk in self._chunks:
            self.digest.update(chunk)
            self._num_bytes += len(chunk)
            yield chunk

    def consume(self) -> None:
        for _ in self:
            pass

    def facts(self) -> dict[str, Any]:
        return {"bytes": self._num_bytes, "sha256": self.digest.hexdigest()}


def body_sha256(body: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a value for JSON, which a JSON file holds of the rest of itself."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def reason_of(error: BaseException) -> str:
    """Return in a line what an error of a file or of its content says."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text.strip() or type(error).__name__).splitlines()[0]


def _folder(step: int) -> str:
    return f"step-{step:08d}"


def safetensors_chunks(tensors: Mapping[str, Tensor], *, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[memoryview]:
    """Yield the bytes of a safetensors file of CPU tensors, its header first, so that no second copy is needed.

    `safetensors.torch.load_file` reads it. The same tensors give the same bytes, in whatever order they come; several
    names may share a tensor, which is written under each.

    Raises:
        ValueError: A name or a dtype has no place in such a file.

    Example:
        >>> import safetensors.torch
        >>> safetensors.torch.load(b"".join(safetensors_chunks({"w": torch.ones(2)})))
        {'w': tensor([1., 1.])}
    """
    # large elements first: each tensor then begins at a multiple of its element's size
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        if name in header or tensor.dtype not in _SAFETENSORS_DTYPES:
            raise ValueError(f"a safetensors file cannot hold {tensor.dtype} as {name!r}")
        begin, end = end, end + tensor.nbytes
        dtype = _SAFETENSORS_DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield memoryview(struct.pack("<Q", len(text)) + text)
    for name in names:
        raw = raw_bytes(tensors[name])
        for begin in range(0, len(raw), chunk_bytes):
            yield raw[begin : begin + chunk_bytes]


class Storage(Protocol):
    """Folders of files. An operation raises what its file system raises; FileNotFoundError for a missing file.

    Attributes:
        name: Name in messages; holds no password of a URL.
    """

    name: str

    def folders(self) -> list[str]:
        """Return the names of the folders, none where nothing was written yet."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of each file of a folder."""

    def write(self, folder: str, file: str, chunks: Iterable[memoryview]) -> None:
        """Write a file, over an old one where there is one."""

    def read(self, folder: str, file: str) -> Iterator[bytes]:
        """Yield a file's bytes."""

    def tensors(self, folder: str, file: str) -> tuple[dict[str, Tensor], str]:
        """Return the tensors of a safetensors file and the SHA-256 of its bytes."""

    def remove(self, folder: str, files: Sequence[str]) -> None:
        """Remove files in the order given, with partial ones of a killed writer, then the folder if it is empty."""


class LocalStorage:
    """A folder of this host, which may not exist yet: files are there whole or not at all, also after a power loss."""

    def __init__(self, root: Path) -> None:
        self.name = str(root)
        self._root = root

    def folders(self) -> list[str]:
        if not self._root.exists():
            return []
        return [path.name for path in self._root.iterdir() if path.is_dir()]

    def sizes(self, folder: str) -> dict[str, int]:
        found = {}
        for path in (self._root / folder).iterdir():
            with contextlib.suppress(FileNotFoundError):  # another replica has removed its own just now
                found[path.name] = path.stat().st_size
        return found

    def write(self, folder: str, file: str, chunks: Iterable[memoryview]) -> None:
        place = self._root / folder
        if not place.is_dir():
            place.mkdir(parents=True, exist_ok=True)
            for above in (self._root, self._root.parent):
                sync_folder(above)

        def write_all(path: Path) -> None:
            with path.open("wb") as stream:
                stream.writelines(chunks)

        replace_whole(place / file, write_all)

    def read(self, folder: str, file: str) -> Iterator[bytes]:
        with (self._root / folder / file).open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk

    def tensors(self, folder: str, file: str) -> tuple[dict[str, Tensor], str]:
        path = self._root / folder / file
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return safetensors.torch.load_file(path), digest

    def remove(self, folder: str, files: Sequence[str]) -> None:
        place = self._root / folder
        for file in files:
            for path in (place / file, *place.glob(f".{file}.*.partial")):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it holds files of others
            place.rmdir()


class UrlStorage:
    """A folder of an `fsspec.AbstractFileSystem`. A file may be there in part, so the JSON file lists all sizes."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self.name = str(filesystem.unstrip_protocol(root))
        self._filesystem = filesystem
        self._root = root.rstrip("/")

    def folders(self) -> list[str]:
        try:
            return [_last(entry["name"]) for entry in self._list(self._root) if entry["type"] == "directory"]
        except FileNotFoundError:
            return []

    def sizes(self, folder: str) -> dict[str, int]:
        entries = self._list(self._path(folder))
        return {_last(entry["name"]): int(entry["size"]) for entry in entries if entry["type"] == "file"}

    def write(self, folder: str, file: str, chunks: Iterable[memoryview]) -> None:
        self._filesystem.makedirs(self._path(folder), exist_ok=True)
        with self._filesystem.open(self._path(folder, file), "wb") as stream:
            for chunk in chunks:
                stream.write(chunk)

    def read(self, folder: str, file: str) -> Iterator[bytes]:
        with self._filesystem.open(self._path(folder, file), "rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk

    def tensors(self, folder: str, file: str) -> tuple[dict[str, Tensor], str]:
        content = b"".join(self.read(folder, file))
        return safetensors.torch.load(content), hashlib.sha256(content).hexdigest()

    def remove(self, folder: str, files: Sequence[str]) -> None:
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.rm_file(self._path(folder, file))
        # folders of object stores are names only, and many cannot be removed
        with contextlib.suppress(Exception):
            self._filesystem.rmdir(self._path(folder))

    def _list(self, path: str) -> list[dict[str, Any]]:
        self._filesystem.invalidate_cache()  # others may have written meanwhile
        return list(self._filesystem.ls(path, detail=True))

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *parts))


def open_storage(folder_or_url: str | Path) -> Storage:
    """Return the storage at a folder, or a URL such as `s3://bucket/run`; nothing is written or fetched yet.

    Raises:
        ValueError: The URL's protocol is unknown.
        MissingExtra: The package for it is not installed; names it.

    Example:
        >>> open_storage("runs/demo/checkpoints").name, open_storage("memory://demo").name
        ('runs/demo/checkpoints', 'memory:///demo')
    """
    text = str(folder_or_url)
    if "://" not in text:
        return LocalStorage(Path(folder_or_url))
    # fsspec takes a while to import, and most checkpoints are in folders
    import fsspec

    try:
        filesystem, root = fsspec.core.url_to_fs(text)
    except ImportError as error:
        from fsspec.registry import known_implementations

        protocol = text.partition("://")[0]
        package = known_implementations.get(protocol, {}).get("class", "").partition(".")[0]
        # where fsspec has the file system itself, its error names what is missing
        if package in ("", "fsspec"):
            raise MissingExtra(f"{protocol}:// cannot be opened: {error}") from error
        raise MissingExtra(
            f"{package} is not installed, and {protocol}:// needs it; install it with: pip install {package}"
        ) from error
    except ValueError as error:
        raise ValueError(f"checkpoints are kept in a folder or under a URL that fsspec knows: {error}") from error
    is_local = "file" in ([filesystem.protocol] if isinstance(filesystem.protocol, str) else filesystem.protocol)
    return LocalStorage(Path(root)) if is_local else UrlStorage(filesystem, root)


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
