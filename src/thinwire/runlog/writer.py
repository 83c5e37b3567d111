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
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import is_no_room
from thinwire.files import append_whole
from thinwire.runlog.reader import last_lines, parse_line
from thinwire.runlog.records import Beat, header_line, to_line

# Buffered lines are written at the latest at this size.
_MOST_BUFFERED_BYTES = 1 << 16
# Kept in memory while the disk is full; a line of metrics has about 400 bytes.
MAX_KEPT_BYTES = 1 << 20
MOST_FILE_BYTES = 16 << 20
# Searched for the latest heartbeat; two a second are written, beside at most 64 lines of connections each.
_TAIL_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Bound of a file: at half of `most_bytes` it is moved to `old`, and a new one begins with `header`."""

    old: Path
    most_bytes: int
    header: str


class JsonlWriter:
    """Appends whole lines to a file; lines that a full disk refuses wait in memory, bounded, until there is room.

    A write that fails half way is undone, so that the file holds whole lines only. Beyond the bound the oldest lines
    are lost. Any thread may write.

    Args:
        path: The file; it is created if it is missing.
        warn: Receives one warning each time the disk becomes full, and the number of lost lines at the end.
        max_kept_bytes: Bound on the lines that wait in memory.
        rotation: Bound of the file; none lets it grow.
        is_strict: Whether errors other than a full disk are raised. By default their lines are lost with a warning.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(
        self, path: Path, *, warn: Callable[[str], None] = lambda text: None, max_kept_bytes: int = MAX_KEPT_BYTES,
        rotation: Rotation | None = None, is_strict: bool = False,
    ) -> None:  # fmt: skip
        self._path, self._warn, self._max_kept_bytes = path, warn, max_kept_bytes
        self._rotation, self._is_strict = rotation, is_strict
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._num_waiting = 0
        self._has_warned = False
        self.num_lost = 0
        self._file = _open(path)
        if rotation is not None and not os.fstat(self._file).st_size:
            try:
                self.write_all([rotation.header])
            except OSError:
                os.close(self._file)
                raise

    @property
    def closed(self) -> bool:
        return self._file < 0

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def write(self, line: str, *, is_last: bool = False) -> None:
        """Take a line without its newline; it is in the file after `flush`, or at once if `is_last`."""
        with self._lock:
            self._add(line)
            if is_last or self._num_waiting >= _MOST_BUFFERED_BYTES:
                self._flush()

    def write_all(self, lines: Iterable[str]) -> bool:
        """Write lines so that readers see them at once; return whether the file was rotated before them."""
        with self._lock:
            for line in lines:
                self._add(line)
            return self._flush()

    def flush(self) -> None:
        """Write what waits, if there is room."""
        with self._lock:
            self._flush()

    def _add(self, line: str) -> None:
        self._waiting.append(line.encode() + b"\n")
        self._num_waiting += len(self._waiting[-1])

    def _flush(self) -> bool:
        if not self._waiting or self.closed:
            return False
        data, is_rotated = b"".join(self._waiting), False
        try:
            if self._rotation is not None:
                size = os.fstat(self._file).st_size - len(self._rotation.header) - 1
                if size > 0 and 2 * (size + len(data)) > self._rotation.most_bytes:
                    self._rotate(self._rotation)
                    is_rotated = True
            append_whole(self._file, data)
        except OSError as error:
            self._keep(error)
            return is_rotated
        self._clear()
        self._has_warned = False
        return is_rotated

    def _clear(self) -> None:
        self._waiting.clear()
        self._num_waiting = 0

    def _keep(self, error: OSError) -> None:
        """Keep the lines that could not be written, within the bound."""
        bound = self._max_kept_bytes if is_no_room(error) else 0
        if self._is_strict and not bound:
            self._clear()
            raise error
        while self._num_waiting > bound:
            self._num_waiting -= len(self._waiting.popleft())
            self.num_lost += 1
        if not self._has_warned:
            self._has_warned = True
            kept = "are kept in memory" if bound else "are lost"
            self._warn(
                f"cannot write {self._path}: {error.strerror or error}; training goes on, and lines {kept} until "
                f"there is room: make room there"
            )

    def _rotate(self, rotation: Rotation) -> None:
        """Move the file to `rotation.old` and begin a new one; the path exists at all times, for readers."""
        fresh = self._path.with_name(self._path.name + ".new")
        file = _open(fresh, flags=os.O_TRUNC)
        try:
            append_whole(file, (rotation.header + "\n").encode())
        except OSError:
            os.close(file)
            fresh.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file = file
        try:
            # by way of a third name: a reader that has found the old file must be able to open it
            second = rotation.old.with_name(rotation.old.name + ".new")
            second.unlink(missing_ok=True)
            second.hardlink_to(self._path)
            second.replace(rotation.old)
        except OSError:  # some file systems have no hard links
            self._path.replace(rotation.old)
        fresh.replace(self._path)

    def truncate(self, num_bytes: int) -> None:
        """Cut the file to `num_bytes`; lines that wait are written first, and dropped if there is no room.

        Raises:
            OSError: It cannot be cut.
        """
        with self._lock:
            self._flush()
            self._clear()
            os.ftruncate(self._file, num_bytes)

    def close(self) -> None:
        """Write what waits and report lost lines; closing twice is fine."""
        with self._lock:
            if self.closed:
                return
            with contextlib.suppress(OSError):
                self._flush()
            self.num_lost += len(self._waiting)
            os.close(self._file)
            self._file = -1
        if self.num_lost:
            self._warn(f"{self.num_lost} lines are missing in {self._path}, since there was no room for them")


def _open(path: Path, *, flags: int = 0) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | flags, 0o666)


def record_paths(run_dir: Path, *, rank: int) -> tuple[Path, Path]:
    """Return the paths of a rank's latest records and of those before.

    Example:
        >>> [path.name for path in record_paths(Path("runs/demo"), rank=2)]
        ['records-rank-2.jsonl', 'records-rank-2.old.jsonl']
    """
    return run_dir / f"records-rank-{rank}.jsonl", run_dir / f"records-rank-{rank}.old.jsonl"


def process_path(run_dir: Path, *, rank: int) -> Path:
    """Return the path of the file that names a rank's process."""
    return run_dir / f"records-rank-{rank}.pid"


def record_writer(
    run_dir: Path, *, rank: int, most_bytes: int = MOST_FILE_BYTES, is_continued: bool = False,
    max_kept_bytes: int = MAX_KEPT_BYTES, warn: Callable[[str], None] = lambda text: None,
) -> JsonlWriter:  # fmt: skip
    """Return the writer of a rank's records; errors other than a full disk are raised.

    `most_bytes` bounds both files together; existing lines stay where `is_continued`; with `max_kept_bytes` 0 nothing
    waits in memory, and a full disk raises too.

    Raises:
        OSError: The file cannot be written.
    """
    path, old = record_paths(run_dir, rank=rank)
    if not is_continued:
        old.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.truncate(path, 0)
    rotation = Rotation(old=old, most_bytes=most_bytes, header=header_line())
    return JsonlWriter(path, warn=warn, max_kept_bytes=max_kept_bytes, rotation=rotation, is_strict=True)


def last_beat_s(run_dir: Path, *, rank: int) -> float | None:
    """Return the time of a rank's latest heartbeat on its host's clock; None if there is none."""
    path, _ = record_paths(run_dir, rank=rank)
    last_s = None
    with contextlib.suppress(OSError):
        for line in last_lines(path, num_bytes=_TAIL_BYTES):
            with contextlib.suppress(ValueError):
                record = parse_line(line)
                if isinstance(record, Beat) and not record.is_last:
                    last_s = max(record.at_s, last_s or record.at_s)
    return last_s


def write_obituary(run_dir: Path, *, rank: int, at_s: float, error: str) -> None:
    """Write the last heartbeat of a rank that was killed, on its host's clock; nothing if it recorded nothing.

    The error is empty if the rank was stopped because another one had failed.
    """
    path, _ = record_paths(run_dir, rank=rank)
    with contextlib.suppress(OSError):
        if path.exists():
            # its last line may be torn
            with path.open("a", encoding="utf-8") as file:
                file.write("\n" + to_line(Beat(rank=rank, at_s=at_s, is_last=True, error=error)) + "\n")
