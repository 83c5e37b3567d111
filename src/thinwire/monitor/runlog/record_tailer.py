"""A file of records that still grows: each look reads what was added, of a long file its begin and its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from thinwire.monitor.runlog.reader import parse_line, parse_object
from thinwire.monitor.runlog.records import FORMAT, VERSION, Communicator, Record
from thinwire.monitor.runlog.tailer import GrowingFile, Line

# Read at one look; what is left comes with the next one.
MOST_BYTES = 2 << 20
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

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES) -> None:
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
