"""A rank's file of records, written while it runs and bounded: `records-rank-N.jsonl` in the run's folder.

When the file is half as long as it may be, it becomes `records-rank-N.old.jsonl` in place of the one before, and a new
one begins: whoever follows the file sees it become shorter. The two together hold the latest records.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from thinwire.diagnosis.records import Beat, header_line, to_line

MOST_FILE_BYTES = 16 << 20


def record_paths(run_dir: Path, *, rank: int) -> tuple[Path, Path]:
    """Return where a rank's latest records are, and those before.

    Example:
        >>> [path.name for path in record_paths(Path("runs/demo"), rank=2)]
        ['records-rank-2.jsonl', 'records-rank-2.old.jsonl']
    """
    return run_dir / f"records-rank-{rank}.jsonl", run_dir / f"records-rank-{rank}.old.jsonl"


class RecordFile:
    """Takes lines, and holds the latest of them on disk.

    Args:
        run_dir: The run's folder.
        rank: Who writes.
        most_bytes: How long both files together may be.
        is_continued: Whether what is there already stays, and the lines come behind it.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(
        self, run_dir: Path, *, rank: int, most_bytes: int = MOST_FILE_BYTES, is_continued: bool = False
    ) -> None:
        self._path, self._old = record_paths(run_dir, rank=rank)
        self._most_bytes = most_bytes
        if is_continued and self._path.exists():
            self._file: TextIO = self._path.open("a", encoding="utf-8")
            self._num_bytes = self._file.tell()
            return
        self._old.unlink(missing_ok=True)
        self._file = self._begin(self._path)

    def _begin(self, path: Path) -> TextIO:
        file = path.open("w", encoding="utf-8")
        file.write(header_line() + "\n")
        self._num_bytes = 0
        return file

    def _begin_anew(self) -> None:
        """Let the file become the old one; at no time is there none, for whoever reads the folder just then."""
        self._file.close()
        fresh = self._path.with_name(self._path.name + ".new")
        self._file = self._begin(fresh)
        self._file.flush()
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
        text = "".join(line + "\n" for line in lines)
        is_new = 2 * (self._num_bytes + len(text)) > self._most_bytes and self._num_bytes > 0
        if is_new:
            self._begin_anew()
        self._file.write(text)
        self._file.flush()
        self._num_bytes += len(text)
        return is_new

    def close(self) -> None:
        """Write no more."""
        self._file.close()


def write_obituary(run_dir: Path, *, rank: int, at_s: float, error: str) -> None:
    """Write that a rank has ended that could not say so itself; nothing where it recorded nothing.

    Args:
        run_dir: The run's folder.
        rank: Who has ended.
        at_s: When, on the clock of its host.
        error: How.
    """
    path, _ = record_paths(run_dir, rank=rank)
    with contextlib.suppress(OSError):
        if path.exists():
            # what it wrote last may have no end
            with path.open("a", encoding="utf-8") as file:
                file.write("\n" + to_line(Beat(rank=rank, at_s=at_s, is_last=True, error=error)) + "\n")
