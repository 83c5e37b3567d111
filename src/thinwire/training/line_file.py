"""Files of lines that are written while a replica trains, and that no full disk takes the training down with."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

# What waits is written at the latest when it is so long.
_MOST_WAITING = 1 << 16


class LineFile:
    """Appends whole lines to a file; lines for which there is no room are lost, and that is told.

    A write that fails half way is taken back, so that the file holds whole lines only, and the next lines are tried
    again: once there is room, the file goes on.

    Any thread may write.

    Args:
        path: The file; it is made where there is none.
        warn: Is told once for each time that there is no room, and at the end how many lines were lost.

    Attributes:
        num_lost: Lines that could not be written.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path, *, warn: Callable[[str], None] = lambda text: None) -> None:
        self._path = path
        self._warn = warn
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._lock = threading.Lock()
        self._waiting: list[bytes] = []
        self._num_waiting = 0
        self._is_told = False
        self.num_lost = 0

    @property
    def closed(self) -> bool:
        """Whether it takes no more lines."""
        return self._file < 0

    def write(self, line: str, *, is_last: bool = False) -> None:
        """Take a line in, without its end; it is in the file after `flush`, or where `is_last`."""
        with self._lock:
            self._waiting.append(line.encode() + b"\n")
            self._num_waiting += len(self._waiting[-1])
            if is_last or self._num_waiting >= _MOST_WAITING:
                self._flush()

    def flush(self) -> None:
        """Write what waits."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        lines, self._waiting, self._num_waiting = self._waiting, [], 0
        if not lines or self.closed:
            return
        try:
            self._append(b"".join(lines))
            self._is_told = False
        except OSError as error:
            self.num_lost += len(lines)
            if not self._is_told:
                self._is_told = True
                self._warn(
                    f"cannot write {self._path}: {error.strerror or error}; training goes on, and lines are lost until "
                    f"there is room: make room there"
                )

    def _append(self, data: bytes) -> None:
        before = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, before)
            raise

    def truncate(self, num_bytes: int) -> None:
        """Cut the file off; what waits is written first.

        Raises:
            OSError: It cannot be cut off.
        """
        self.flush()
        os.ftruncate(self._file, num_bytes)

    def close(self) -> None:
        """Write what waits, and tell how much is missing."""
        with self._lock:
            if self.closed:
                return
            self._flush()
            os.close(self._file)
            self._file = -1
        if self.num_lost:
            self._warn(f"{self.num_lost} lines are missing in {self._path}, since there was no room for them")
