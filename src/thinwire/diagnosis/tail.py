"""A file of records that still grows: each look reads what was added, whole lines only, of a long file its end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from thinwire.diagnosis.reading import MOST_LINE_BYTES, parse_line, parse_object
from thinwire.diagnosis.records import FORMAT, VERSION, Communicator, Record
from thinwire.files import open_regular

# Read at one look; what is left comes with the next one.
MOST_BYTES = 2 << 20
# Of a file that was long already: its begin, for the communicators, and its end.
_HEAD_BYTES = 64 << 10


class RecordTail:
    """Reads what was appended to a file of records since the last look.

    A line without its end waits for the rest. A file that was begun anew is read anew. What is no
    record is counted and passed over: the file is written by others.

    Args:
        path: The file; it may come later.
        most_bytes: Bytes that one look reads.

    Attributes:
        num_lines: Lines looked at.
        num_refused: Of these, lines that are no record.
        num_skipped_bytes: Bytes of a file that was long at the first look, which were never read.
    """

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self.path = path
        self.num_lines = 0
        self.num_refused = 0
        self.num_skipped_bytes = 0
        self._most_bytes = most_bytes
        self._at = 0
        self._inode = -1
        self._is_begun = False
        self._is_inside = False  # of a line that is too long, or whose begin was passed over

    def new_records(self) -> list[Record]:
        """Return the records that came since the last look; none where the file is not there or cannot be read."""
        try:
            return list(self._read())
        except OSError:
            return []

    def _read(self) -> Iterator[Record]:
        with open_regular(self.path) as file:
            size, inode = file.seek(0, 2), os.fstat(file.fileno()).st_ino
            if size < self._at or inode != self._inode:
                self._at, self._is_begun, self._is_inside, self._inode = 0, False, False, inode
            if not self._is_begun and size > self._most_bytes + _HEAD_BYTES:
                file.seek(0)
                yield from (record for record in self._take(file.read(_HEAD_BYTES)) if isinstance(record, Communicator))
                self.num_skipped_bytes += size - self._most_bytes - _HEAD_BYTES
                self._at, self._is_inside = size - self._most_bytes, True
            self._is_begun = True
            file.seek(self._at)
            content = file.read(self._most_bytes)
        whole = content.rfind(b"\n") + 1
        if not whole and len(content) > MOST_LINE_BYTES:  # nobody writes such a line
            self.num_refused += not self._is_inside
            self._at, self._is_inside = self._at + len(content), True
            return
        self._at += whole
        lines = content[:whole]
        if self._is_inside and whole:
            lines, self._is_inside = lines[lines.index(b"\n") + 1 :], False
        yield from self._take(lines)

    def _take(self, content: bytes) -> Iterator[Record]:
        for line in content[: content.rfind(b"\n") + 1].splitlines():
            if not line.strip() or _is_header(line):
                continue
            self.num_lines += 1
            try:
                yield parse_line(line if len(line) <= MOST_LINE_BYTES else None)
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
