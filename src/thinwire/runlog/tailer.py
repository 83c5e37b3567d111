"""Tailers of growing JSON-lines files: bounded reads of what was appended."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from thinwire.files import open_regular
from thinwire.runlog.reader import MOST_LINE_BYTES, parse_line, parse_object
from thinwire.runlog.records import FORMAT, VERSION, Communicator, Record

MOST_BYTES = 1 << 20
# Of a file of records that was long at the first poll: its head, for the communicators, and its end.
_RECORD_BYTES, _HEAD_BYTES = 2 << 20, 64 << 10
NumberedLine = tuple[int, bytes | None]


class JsonlTailer:
    """Reads what was appended to a file of lines since the last poll.

    A line without its newline waits for the rest. A file that became shorter was cut by a resumed run, and one with
    another inode was rewritten: both are read from the start.

    Args:
        head_bytes: Of a file longer than this and `most_bytes` at the first poll, the first poll reads this much of
            the head, and the second one the end; None reads all of any file.

    Attributes:
        is_behind: Whether more is there than was read.
        number: Lines read so far: the number of the last one, from 1, unless bytes were skipped.
        changed_at: Time of the last write to the file, seconds since 1970; None while it is missing.
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
        self._is_skipping = False  # the rest of a line that is too long
        self._is_torn = False  # a line whose beginning was skipped

    def poll(self) -> tuple[bool, list[NumberedLine]]:
        """Return whether the file is read from the start again, and its new lines with their numbers.

        A line that is too long is None. A file that cannot be read has no new lines.
        """
        try:
            with open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                is_restarted = self._at > 0 and (status.st_size < self._at or status.st_ino != self._inode)
                if is_restarted:
                    self._at, self.number, self._is_skipping, self._is_torn = 0, 0, False, False
                self._inode, self.changed_at = status.st_ino, status.st_mtime
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
        return is_restarted, lines

    def new_lines(self) -> list[bytes]:
        """Return the new lines that are not too long."""
        return [line for _, line in self.poll()[1] if line is not None]

    def _lines(self, content: bytes) -> list[NumberedLine]:
        found: list[NumberedLine] = []
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
        if len(content) - whole > MOST_LINE_BYTES:  # no writer makes such a line: it is skipped, not kept
            self._is_skipping = not self._is_torn
            self._at += len(content) - whole
        return found


class RecordTailer:
    """Reads what was appended to a file of records since the last poll, see `JsonlTailer`.

    Lines that are no record are counted and skipped: other processes write the file.

    Attributes:
        num_refused: Of these, lines that are no record.
    """

    def __init__(self, path: Path, *, most_bytes: int = _RECORD_BYTES) -> None:
        self.num_lines = 0
        self.num_refused = 0
        self._file = JsonlTailer(path, most_bytes=most_bytes, head_bytes=_HEAD_BYTES)

    @property
    def num_skipped_bytes(self) -> int:
        """Bytes of a file that was long at the first poll, which were never read."""
        return self._file.num_skipped_bytes

    def new_records(self) -> list[Record]:
        """Return the records since the last poll; none if the file is missing or cannot be read."""
        skipped = self.num_skipped_bytes
        records = list(self._parsed(self._file.poll()[1]))
        if self.num_skipped_bytes == skipped:
            return records
        # of the head only the communicators matter: ranks and their hosts
        known: list[Record] = [record for record in records if isinstance(record, Communicator)]
        return [*known, *self._parsed(self._file.poll()[1])]

    def _parsed(self, lines: Iterable[NumberedLine]) -> Iterator[Record]:
        for _, line in lines:
            self.num_lines += 1
            try:
                if line is not None and line.startswith(b'{"format"'):
                    header = parse_object(line)
                    if header.get("format") == FORMAT and header.get("version") == VERSION:
                        self.num_lines -= 1
                        continue
                yield parse_line(line)
            except ValueError:
                self.num_refused += 1
