"""Storage of checkpoints: a folder of this host, or a URL that fsspec knows."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
from torch import Tensor

from thinwire.errors import MissingExtra
from thinwire.files import replace_whole, sync_folder

_READ_BYTES = 1 << 23


class Place(Protocol):
    """Folders of files. What cannot be done raises whatever its file system raises; FileNotFoundError where nothing is.

    Attributes:
        name: What messages call it; holds no password of a URL.
    """

    name: str

    def folders(self) -> list[str]:
        """Return the names of the folders, none where nothing was written yet."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of each file of a folder."""
        ...

    def write(self, folder: str, file: str, chunks: Iterable[memoryview]) -> None:
        """Write a file, over an old one where there is one."""
        ...

    def read(self, folder: str, file: str) -> Iterator[bytes]:
        """Yield a file's bytes."""
        ...

    def tensors(self, folder: str, file: str) -> tuple[dict[str, Tensor], str]:
        """Return the tensors of a safetensors file and the SHA-256 of its bytes."""
        ...

    def remove(self, folder: str, files: Sequence[str]) -> None:
        """Remove files in the order given, also what a killed writer left of them, then the folder if it is empty."""
        ...


class LocalPlace:
    """A folder of this host: files are there whole or not at all, also after the power was lost.

    Args:
        root: The folder; it need not exist yet.
    """

    def __init__(self, root: Path) -> None:
        self.name = str(root)
        self._root = root

    def folders(self) -> list[str]:
        """See `Place.folders`."""
        if not self._root.exists():
            return []
        return [path.name for path in self._root.iterdir() if path.is_dir()]

    def sizes(self, folder: str) -> dict[str, int]:
        """See `Place.sizes`."""
        return {path.name: path.stat().st_size for path in (self._root / folder).iterdir()}

    def write(self, folder: str, file: str, chunks: Iterable[memoryview]) -> None:
        """See `Place.write`."""
        place = self._root / folder
        if not place.is_dir():
            place.mkdir(parents=True)
            for above in (self._root, self._root.parent):
                sync_folder(above)
        replace_whole(place / file, lambda path: _write_all(path, chunks))

    def read(self, folder: str, file: str) -> Iterator[bytes]:
        """See `Place.read`."""
        with (self._root / folder / file).open("rb") as stream:
            while chunk := stream.read(_READ_BYTES):
                yield chunk

    def tensors(self, folder: str, file: str) -> tuple[dict[str, Tensor], str]:
        """See `Place.tensors`."""
        path = self._root / folder / file
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return safetensors.torch.load_file(path), digest

    def remove(self, folder: str, files: Sequence[str]) -> None:
        """See `Place.remove`."""
        place = self._root / folder
        for file in files:
            for path in (place / file, *place.glob(f".{file}.*.partial")):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it holds files of others
            place.rmdir()


class UrlPlace:
    """A folder of an fsspec file system. A file may be there in part; what is written last must say what is whole.

    Args:
        filesystem: An `fsspec.AbstractFileSystem`.
        root: The folder in it, without the protocol.
    """

    def __init__(self, filesystem: Any, root: str) -> None:
        self.name = str(filesystem.unstrip_protocol(root))
        self._filesystem = filesystem
        self._root = root.rstrip("/")

    def folders(self) -> list[str]:
        """See `Place.folders`."""
        try:
            return [_last(entry["name"]) for entry in self._list(self._root) if entry["type"] == "directory"]
        except FileNotFoundError:
            return []

    def sizes(self, folder: str) -> dict[str, int]:
        """See `Place.sizes`."""
        entries = self._list(self._path(folder))
        return {_last(entry["name"]): int(entry["size"]) for entry in entries if entry["type"] == "file"}

    def write(self, folder: str, file: str, chunks: Iterable[memoryview]) -> None:
        """See `Place.write`."""
        self._filesystem.makedirs(self._path(folder), exist_ok=True)
        with self._filesystem.open(self._path(folder, file), "wb") as stream:
            for chunk in chunks:
                stream.write(chunk)

    def read(self, folder: str, file: str) -> Iterator[bytes]:
        """See `Place.read`."""
        with self._filesystem.open(self._path(folder, file), "rb") as stream:
            while chunk := stream.read(_READ_BYTES):
                yield chunk

    def tensors(self, folder: str, file: str) -> tuple[dict[str, Tensor], str]:
        """See `Place.tensors`."""
        content = b"".join(self.read(folder, file))
        return safetensors.torch.load(content), hashlib.sha256(content).hexdigest()

    def remove(self, folder: str, files: Sequence[str]) -> None:
        """See `Place.remove`."""
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


def open_place(folder_or_url: str | Path) -> Place:
    """Return the place that a text names; nothing is written or fetched yet.

    Args:
        folder_or_url: A folder, or a URL such as `s3://bucket/run`. `file://` is a folder.

    Raises:
        ValueError: Nobody knows the URL's protocol.
        MissingExtra: The package for it is not installed; says which.

    Example:
        >>> open_place("runs/demo/checkpoints").name, open_place("memory://demo").name
        ('runs/demo/checkpoints', 'memory:///demo')
    """
    text = str(folder_or_url)
    if "://" not in text:
        return LocalPlace(Path(folder_or_url))
    # fsspec takes a while to import, and most checkpoints are in folders
    import fsspec

    try:
        filesystem, root = fsspec.core.url_to_fs(text)
    except ImportError as error:
        raise MissingExtra(_how_to_install(text.partition("://")[0], error)) from error
    except ValueError as error:
        raise ValueError(f"checkpoints are kept in a folder or under a URL that fsspec knows: {error}") from error
    if "file" in _protocols(filesystem):
        return LocalPlace(Path(root))
    return UrlPlace(filesystem, root)


def _protocols(filesystem: Any) -> tuple[str, ...]:
    found = filesystem.protocol
    return (found,) if isinstance(found, str) else tuple(found)


def _how_to_install(protocol: str, error: ImportError) -> str:
    from fsspec.registry import known_implementations

    known = known_implementations.get(protocol, {}).get("class", "")
    package = known.partition(".")[0]
    # where fsspec has the file system itself, what is missing stands in its own words
    if package in ("", "fsspec"):
        return f"{protocol}:// cannot be opened: {error}"
    return f"{package} is not installed, and {protocol}:// needs it; install it with: pip install {package}"


def _write_all(path: Path, chunks: Iterable[memoryview]) -> None:
    with path.open("wb") as stream:
        for chunk in chunks:
            stream.write(chunk)


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
