"""Tailers of growing JSON-lines files: bounded reads of what was appended."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from thinwire.files import open_regular
from thinwire.monitor.runlog.reader import MOST_LINE_BYTES, parse_line, parse_object
from thinwire.monitor.runlog.records import FORMAT, VERSION, Communicator, Record

MOST_BYTES = 1 << 20
Line = bytes | None


class GrowingFile:
    """Reads what was appended to a file of lines since the last look.

    A line without its end waits for the rest. A file that became shorter was cut by a run that was resumed, and one
    with another inode was written anew: both are read from the start.

    Args:
        path: The file; it may come later.
        most_bytes: Bytes that one look reads.
        head_bytes: Where a file is longer than this and `most_bytes` when it is begun, so much of its head is read at
            the first look, and its end from the second one on; None reads all of any file.

    Attributes:
        path: The file.
        is_behind: Whether more is there than was read.
        number: How many lines were read: the number of the last one, from 1, where no bytes were skipped.
        changed_at: When the file was last written to, seconds since 1970; none while it is not there.
        num_skipped_bytes: Bytes between the head and the end, which are never read.
    """

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES, head_bytes: int | None = None) -> None:
        self.path = path
        self.is_behind = False
        self.number = 0
        self.changed_at: float | None = None
        self.num_skipped_bytes = 0
        self._most_bytes = most_bytes
        self._head_bytes = head_bytes
        self._at = 0
        self._inode = -1
        self._is_skipping = False  # what is left of a line that is too long
        self._is_torn = False  # the line, since its begin was skipped

    def look(self) -> tuple[bool, list[tuple[int, Line]]]:
        """Return whether the file was begun anew, and its new lines with their numbers; none for one that is too long.

        A file that cannot be read has no new lines.
        """
        try:
            with open_regular(self.path) as file:
                is_anew = self._is_anew(file)
                size = file.seek(0, os.SEEK_END)
                is_long = self._head_bytes is not None and not self._at and size > self._most_bytes + self._head_bytes
                num_bytes = self._head_bytes if is_long and self._head_bytes is not None else self._most_bytes
                file.seek(self._at)
                content = file.read(num_bytes)
        except OSError:
            self.is_behind = False
            return False, []
        self.is_behind = len(content) == num_bytes
        lines = self._lines(content)
        if is_long:
            end_at = size - self._most_bytes
            self.num_skipped_bytes += end_at - num_bytes
            self._at, self._is_skipping, self._is_torn = end_at, False, True
        return is_anew, lines

    def _is_anew(self, file: BinaryIO) -> bool:
        found = os.fstat(file.fileno())
        is_anew = self._at > 0 and (found.st_size < self._at or found.st_ino != self._inode)
        if is_anew:
            self._at, self.number, self._is_skipping, self._is_torn = 0, 0, False, False
        self._inode, self.changed_at = found.st_ino, found.st_mtime
        return is_anew

    def _lines(self, content: bytes) -> list[tuple[int, Line]]:
        found: list[tuple[int, Line]] = []
        whole = content.rfind(b"\n") + 1
        for line in content[:whole].split(b"\n")[:-1]:
            if self._is_torn:
                self._is_torn = False
                continue
            self.number += 1
            if self._is_skipping or len(line) > MOST_LINE_BYTES:
                self._is_skipping = False
                found.append((self.number, None))
            elif line.strip():
                found.append((self.number, line))
        self._at += whole
        if len(content) - whole > MOST_LINE_BYTES:  # nobody writes such a line: it is passed over, not kept
            self._is_skipping = not self._is_torn
            self._at += len(content) - whole
        return found


# Read at one look; what is left comes with the next one.
_RECORD_BYTES = 2 << 20
# Of a file that was long already: its begin, for the communicators, and its end.
_HEAD_BYTES = 64 << 10


class RecordTail:
    """Reads what was appended to a file of records since the last look, see `GrowingFile`.

    What is no record is counted and passed over: the file is written by others.

    Args:
        path: The file; it may come later.
        most_bytes: Bytes that one look reads.

    Attributes:
        num_lines: Lines looked at.
        num_refused: Of these, lines that are no record.
    """

    def __init__(self, path: Path, *, most_bytes: int = _RECORD_BYTES) -> None:
        self.num_lines = 0
        self.num_refused = 0
        self._file = GrowingFile(path, most_bytes=most_bytes, head_bytes=_HEAD_BYTES)

    @property
    def num_skipped_bytes(self) -> int:
        """Bytes of a file that was long at the first look, which were never read."""
        return self._file.num_skipped_bytes

    def new_records(self) -> list[Record]:
        """Return the records that came since the last look; none where the file is not there or cannot be read."""
        skipped = self.num_skipped_bytes
        records = list(self._taken(self._file.look()[1]))
        if self.num_skipped_bytes == skipped:
            return records
        # what is long over is left out, but for who is there and where
        known: list[Record] = [record for record in records if isinstance(record, Communicator)]
        return [*known, *self._taken(self._file.look()[1])]

    def _taken(self, lines: Iterable[tuple[int, Line]]) -> Iterator[Record]:
        for _, line in lines:
            if line is not None and _is_header(line):
                continue
            self.num_lines += 1
            try:
                yield parse_line(line)
            except ValueError:
                self.num_refused += 1


def _is_header(line: bytes) -> bool:
    if not line.startswith(b'{"format"'):
        return False
    try:
        told = parse_object(line)
    except ValueError:
        return False
    return told.get("format") == FORMAT and told.get("version") == VERSION
