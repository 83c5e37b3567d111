"""What the coordinator must not forget: one JSON line each, written before anything is said about it.

A line is handed to the system before the message that it is about leaves, so what a killed coordinator had said is
there for the one that comes after it. It is not forced onto the disk: when the whole host loses power, the run goes on
from its last checkpoint.

Room for thousands of rounds is taken beforehand where the file system can do that, so that a disk that others fill does
not stop the run at once. Once that is used up, whoever writes waits until there is room: what was not written must not
be said.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.errors import ThinwireError

RESERVE_BYTES = 8 << 20
_KEEP_SIZE = 1
_WAIT_S = 0.5


class Journal:
    """A file of lines.

    Args:
        path: The file; made where there is none.
        say: Told once when there is no room any more, and when there is again.
        until: Ends the waiting for room.
        reserve_bytes: How much room is taken beforehand; half as much at the least.

    Raises:
        ThinwireError: It cannot be written.
    """

    def __init__(
        self, path: Path, *, say: Callable[[str], None] = lambda text: None, until: threading.Event | None = None,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:  # fmt: skip
        self._path = path
        self._say = say
        self._until = until
        self._reserve_bytes = reserve_bytes
        self._is_torn = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lines = self._read()
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._num_bytes = self._reserved = os.fstat(self._file).st_size
            if self._is_torn:
                self._append(b"\n")  # the half line stays one of its own
        except OSError as error:
            raise ThinwireError(
                f"the coordinator cannot write {path}: {error.strerror}; make room, or choose another --out"
            ) from error

    def lines(self) -> list[dict[str, Any]]:
        """Return what was written before this object was made, without a last line that a crash cut off."""
        return self._lines

    def write(self, what: str, fields: dict[str, Any]) -> None:
        """Add a line; wait as long as the disk is full, where there is something to end the waiting.

        Raises:
            ThinwireError: It cannot be written.
        """
        line = json.dumps({"what": what, **fields}, separators=(",", ":")).encode() + b"\n"
        is_told = False
        while True:
            try:
                self._append(line)
                break
            except OSError as error:
                is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                if not is_full or self._until is None or self._until.is_set():
                    raise ThinwireError(
                        f"the coordinator cannot write {self._path}: {error.strerror}; make room"
                    ) from error
            if not is_told:
                is_told = True
                self._say(f"cannot write {self._path}: the disk is full; replicas wait until there is room")
            self._until.wait(_WAIT_S)
        if is_told:
            self._say(f"there is room for {self._path} again, and the run goes on")

    def close(self) -> None:
        """Close the file, and give back the room that was not needed; closing twice is fine."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, os.fstat(self._file).st_size)  # which lets go of what lies behind it
            os.close(self._file)
            self._file = -1

    def _append(self, data: bytes) -> None:
        """Add bytes, all or none.

        Raises:
            OSError: There is no room.
        """
        if self._num_bytes + self._reserve_bytes // 2 > self._reserved:
            self._reserve()
        left = data
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._num_bytes)
                self._reserved = self._num_bytes  # what lay behind it went with it
            raise
        self._num_bytes += len(data)

    def _reserve(self) -> None:
        """Take room behind the file's end; where that is not possible, there is none beforehand."""
        with contextlib.suppress(OSError, AttributeError):
            reserve = ctypes.CDLL(None, use_errno=True).fallocate
            size = ctypes.c_int64(self._reserve_bytes)
            if reserve(self._file, _KEEP_SIZE, ctypes.c_int64(self._num_bytes), size) == 0:
                self._reserved = self._num_bytes + self._reserve_bytes

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        raw = self._path.read_text(encoding="utf-8", errors="replace")
        self._is_torn = bool(raw) and not raw.endswith("\n")
        found = []
        for line in raw.splitlines():
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict) and isinstance(value.get("what"), str):
                    found.append(value)
        return found
