"""Files of lines that are written during training; a full disk delays the lines and never ends the training."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from thinwire.files import append_whole, is_no_room

# What waits is written at the latest when it is so long.
_MOST_WAITING = 1 << 16
# What is kept in memory while the disk is full; a line of metrics has about 400 bytes.
MAX_KEPT_BYTES = 1 << 20


class LineFile:
    """Appends whole lines to a file; lines for which there is no room are kept in memory, bounded, until there is.

    A write that fails half way is taken back, so that the file holds whole lines only. Beyond the bound the oldest
    lines are lost, and so are lines that the disk refuses for another reason than lack of room.

    Any thread may write.

    Args:
        path: The file; it is made where there is none.
        warn: Called once for each time that there is no room, and at the end with the number of lost lines.
        max_kept_bytes: Bound on what is kept in memory.

    Attributes:
        num_lost: Lines that could not be written.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(
        self, path: Path, *, warn: Callable[[str], None] = lambda text: None, max_kept_bytes: int = MAX_KEPT_BYTES
    ) -> None:
        self._path = path
        self._warn = warn
        self._max_kept_bytes = max_kept_bytes
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
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
        """Write what waits, as far as there is room."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting or self.closed:
            return
        try:
            append_whole(self._file, b"".join(self._waiting))
        except OSError as error:
            self._keep(error)
            return
        self._waiting.clear()
        self._num_waiting = 0
        self._is_told = False

    def _keep(self, error: OSError) -> None:
        """Keep the lines that could not be written, as far as the bound allows."""
        bound = self._max_kept_bytes if is_no_room(error) else 0
        while self._num_waiting > bound:
            self._num_waiting -= len(self._waiting.popleft())
            self.num_lost += 1
        if not self._is_told:
            self._is_told = True
            kept = "are kept in memory" if bound else "are lost"
            self._warn(
                f"cannot write {self._path}: {error.strerror or error}; training goes on, and lines {kept} until "
                f"there is room: make room there"
            )

    def truncate(self, num_bytes: int) -> None:
        """Cut the file off; what waits is written first, and is dropped where there is no room for it.

        Raises:
            OSError: It cannot be cut off.
        """
        with self._lock:
            self._flush()
            self._waiting.clear()
            self._num_waiting = 0
            os.ftruncate(self._file, num_bytes)

    def close(self) -> None:
        """Write what waits, and warn of what is missing."""
        with self._lock:
            if self.closed:
                return
            self._flush()
            self.num_lost += len(self._waiting)
            os.close(self._file)
            self._file = -1
        if self.num_lost:
            self._warn(f"{self.num_lost} lines are missing in {self._path}, since there was no room for them")
