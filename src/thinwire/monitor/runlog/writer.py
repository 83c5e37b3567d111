"""Writers of the run log: whole lines only; a full disk delays lines and never ends the training.

A rank's records go to `records-rank-N.jsonl`. At half of its allowed size the file becomes `records-rank-N.old.jsonl`
and a new one begins, so that the two together hold the latest records.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from thinwire.files import append_whole, is_no_room
from thinwire.monitor.runlog.reader import parse_line
from thinwire.monitor.runlog.records import Beat, header_line, to_line

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


MOST_FILE_BYTES = 16 << 20
# Where the latest sign of life is looked for; two a second are written, beside at most 64 lines of connections each.
_TAIL_BYTES = 256 << 10


def record_paths(run_dir: Path, *, rank: int) -> tuple[Path, Path]:
    """Return where a rank's latest records are, and those before.

    Example:
        >>> [path.name for path in record_paths(Path("runs/demo"), rank=2)]
        ['records-rank-2.jsonl', 'records-rank-2.old.jsonl']
    """
    return run_dir / f"records-rank-{rank}.jsonl", run_dir / f"records-rank-{rank}.old.jsonl"


class RecordFile:
    """Takes lines, and holds the latest of them on disk.

    Lines for which there is no room on the disk are kept in memory, bounded, and written with the next ones.

    Args:
        run_dir: The run's folder.
        rank: Who writes.
        most_bytes: How long both files together may be.
        is_continued: Whether what is there already stays, and the lines come behind it.
        max_kept_bytes: Bound on what is kept in memory; beyond it the oldest lines are lost. 0 raises instead.

    Attributes:
        num_lost: Lines that could neither be written nor kept.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(
        self, run_dir: Path, *, rank: int, most_bytes: int = MOST_FILE_BYTES, is_continued: bool = False,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:  # fmt: skip
        self._path, self._old = record_paths(run_dir, rank=rank)
        self._most_bytes = most_bytes
        self._max_kept_bytes = max_kept_bytes
        self._kept: deque[bytes] = deque()
        self._num_kept = 0
        self.num_lost = 0
        if not is_continued:
            self._old.unlink(missing_ok=True)
        self._file = _open(self._path, more=0 if is_continued else os.O_TRUNC)
        self._num_bytes = os.fstat(self._file).st_size
        if not self._num_bytes:
            try:
                self._begin()
            except OSError:
                os.close(self._file)
                raise

    @property
    def is_waiting(self) -> bool:
        """Whether there are lines for which there was no room yet."""
        return bool(self._kept)

    def _begin(self) -> None:
        header = (header_line() + "\n").encode()
        try:
            append_whole(self._file, header)
        except OSError as error:
            self._keep([header], error)

    def _begin_anew(self) -> None:
        """Let the file become the old one; at no time is there none, for whoever reads the folder just then."""
        fresh = self._path.with_name(self._path.name + ".new")
        file = _open(fresh, more=os.O_TRUNC)
        try:
            append_whole(file, (header_line() + "\n").encode())
        except OSError:
            os.close(file)
            fresh.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file, self._num_bytes = file, 0
        try:
            # by way of a third name: a reader that has found the old file must be able to open it
            second = self._old.with_name(self._old.name + ".new")
            second.unlink(missing_ok=True)
            second.hardlink_to(self._path)
            second.replace(self._old)
        except OSError:  # not every file system knows a second name
            self._path.replace(self._old)
        fresh.replace(self._path)

    def write(self, lines: Iterable[str]) -> bool:
        """Write lines so that others can read them at once; return whether a new file was begun before them."""
        new = [line.encode() + b"\n" for line in lines]
        data = b"".join([*self._kept, *new])
        is_new = 2 * (self._num_bytes + len(data)) > self._most_bytes and self._num_bytes > 0
        try:
            if is_new:
                is_new = False
                self._begin_anew()
                is_new = True
            append_whole(self._file, data)
        except OSError as error:
            self._keep(new, error)
            return is_new
        self._kept.clear()
        self._num_kept = 0
        self._num_bytes += len(data)
        return is_new

    def _keep(self, lines: Iterable[bytes], error: OSError) -> None:
        if not self._max_kept_bytes or not is_no_room(error):
            raise error
        for line in lines:
            self._kept.append(line)
            self._num_kept += len(line)
        while self._num_kept > self._max_kept_bytes:
            self._num_kept -= len(self._kept.popleft())
            self.num_lost += 1

    def close(self) -> None:
        """Write what is kept as far as there is room, and no more after it; closing twice is fine."""
        if self._file < 0:
            return
        if self._kept:
            with contextlib.suppress(OSError):
                self.write([])
            self.num_lost += len(self._kept)
        os.close(self._file)
        self._file = -1


def _open(path: Path, *, more: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | more, 0o666)


def last_beat_s(run_dir: Path, *, rank: int) -> float | None:
    """Return when a rank last wrote that it lives, on its host's clock; None where it never did.

    Args:
        run_dir: The run's folder.
        rank: Whose records are read, the newest part of them.
    """
    path, _ = record_paths(run_dir, rank=rank)
    last_s = None
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
        for line in file.read(_TAIL_BYTES).splitlines():
            with contextlib.suppress(ValueError):
                record = parse_line(line)
                if isinstance(record, Beat) and not record.is_last:
                    last_s = max(record.at_s, last_s or record.at_s)
    return last_s


def write_obituary(run_dir: Path, *, rank: int, at_s: float, error: str) -> None:
    """Write that a rank has ended that could not say so itself; nothing where it recorded nothing.

    Args:
        run_dir: The run's folder.
        rank: Who has ended.
        at_s: When, on the clock of its host.
        error: How; empty where it was stopped because another rank had failed.
    """
    path, _ = record_paths(run_dir, rank=rank)
    with contextlib.suppress(OSError):
        if path.exists():
            # what it wrote last may have no end
            with path.open("a", encoding="utf-8") as file:
                file.write("\n" + to_line(Beat(rank=rank, at_s=at_s, is_last=True, error=error)) + "\n")
