"""Tokens on disk: two flat files and a manifest in a folder of their own, memory-mapped for training.

```
CACHE/corpora/NAME-KEY/
  tokenizer.json   what turned text into tokens
  train.bin        little-endian uint16, or uint32 from 65,537 tokens on
  held_out.bin
  manifest.json    version, key, dtype, counts, hashes; written last
```

KEY is a hash of everything that the content follows from, so a folder is never changed, only made. Each file has mode
0600, and appears under its name complete or not at all; a folder without a manifest that fits is made again.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from thinwire.errors import DataError
from thinwire.files import wait_for_lock
from thinwire.units import format_bytes, format_seconds

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"

TokenArray = NDArray[Any]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `manifest.json`.

    Attributes:
        version: Of this format.
        key: Hash of what the content follows from: the listing of the source, the tokenizer, the split.
        dtype: Of both files of tokens.
        num_text_bytes: UTF-8 bytes in the corpus.
        tokens_sha256: Of `train.bin`, then `held_out.bin`.
    """

    version: int
    key: str
    dtype: Literal["uint16", "uint32"]
    num_train_tokens: int
    num_held_out_tokens: int
    num_documents: int
    num_text_bytes: int
    tokenizer_sha256: str
    tokens_sha256: str


def read_manifest(folder: Path, *, key: str) -> Manifest | None:
    """Return the manifest of a folder, None if there is none or the folder is not what it states."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        tokenizer = (folder / TOKENIZER).read_bytes()
        sizes = [(folder / name).stat().st_size for name in ("train.bin", "held_out.bin")]
    except (OSError, ValueError):
        return None
    width = np.dtype(manifest.dtype).itemsize
    is_whole = sizes == [width * manifest.num_train_tokens, width * manifest.num_held_out_tokens]
    is_ours = manifest.version == FORMAT_VERSION and manifest.key == key
    return manifest if is_ours and is_whole and sha256(tokenizer) == manifest.tokenizer_sha256 else None


def map_tokens(path: Path, *, dtype: str) -> TokenArray:
    """Return the tokens of a file, (tokens,), read-only and read from disk as they are used."""
    if path.stat().st_size == 0:
        # Nothing cannot be mapped.
        return np.zeros(0, dtype=np.dtype(dtype).newbyteorder("<"))
    return np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file as a whole or not at all."""
    with TokenWriter(path) as file:
        file.write(data)


class TokenWriter:
    """A file that appears under its name when all is written; leaving the `with` block by an error leaves nothing.

    Raises:
        DataError: It cannot be written; where the disk is full the text says how many bytes are needed.
    """

    def __init__(self, path: Path) -> None:
        self.num_bytes = 0
        self.needed_bytes = 0
        self._path = path
        self._partial = partial_path(path)
        self._hash = hashlib.sha256()
        try:
            # tokens are text that other users of this machine may have no right to read
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._file = os.fdopen(os.open(self._partial, flags, 0o600), "wb")
        except OSError as error:
            raise self._refusal(error) from error

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._partial.replace(self._path)
        except OSError as error:
            raise self._refusal(error) from error
        finally:
            # Closing writes what is buffered, which fails again where writing failed.
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                self._partial.unlink()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def write(self, data: bytes, *, needed_bytes: int = 0) -> None:
        """Append bytes; `needed_bytes` is what the whole corpus will need, for the text of an error."""
        self.num_bytes += len(data)
        self.needed_bytes = max(needed_bytes, self.num_bytes)
        self._hash.update(data)
        try:
            self._file.write(data)
        except OSError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> DataError:
        folder = self._path.parent
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DataError(
                f"no space left in {folder}: the tokens need about {format_bytes(self.needed_bytes)}; "
                "make room, or choose another cache folder"
            )
        return _unwritable(folder, error)


def _unwritable(folder: Path, error: OSError) -> DataError:
    return DataError(f"cannot write in {folder}: {error.strerror or error}; choose a cache folder that can be written")


def partial_path(path: Path) -> Path:
    """Return the name under which this process writes a file before it is whole."""
    # host and process: a cache may be on a disk that several hosts share
    return path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.partial")


@contextmanager
def sole_builder(folder: Path, *, deadline_s: float) -> Iterator[None]:
    """Make a folder, and hold off other processes that would fill it until the block ends.

    The kernel drops the lock with its process, so a killed builder holds nobody up.

    Raises:
        DataError: The folder cannot be made, or another process was not done before the deadline.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("ab")
    except OSError as error:
        raise _unwritable(folder, error) from error
    with lock:
        # without locks two builders do the same work, and the last whole file stays
        if not wait_for_lock(lock.fileno(), deadline_s=deadline_s):
            raise DataError(
                f"another process has been building {folder} for {format_seconds(deadline_s)}; "
                "wait for it, or end it and start again"
            )
        for leftover in folder.glob("*.partial"):
            with suppress(OSError):
                leftover.unlink()
        yield


def sha256(data: bytes) -> str:
    """Return the SHA-256 of bytes in hexadecimal."""
    return hashlib.sha256(data).hexdigest()
