"""Files of lines that grow while they are read: only what is new is read, a bounded piece at a time."""

from __future__ import annotations

import os
from pathlib import Path

from thinwire.files import open_regular

MOST_BYTES = 1 << 20
MOST_LINE_BYTES = 256 * 1024
Line = bytes | None


class GrowingFile:
    """Reads what was appended to a file of lines since the last look.

    A line without its end waits for the rest. A file that became shorter was cut by a run that was resumed, and one
    with another inode was written anew: both are read from the start.

    Args:
        path: The file; it may come later.

    Attributes:
        path: The file.
        is_behind: Whether more is there than was read.
        number: Number of the last line that was read, from 1.
        changed_at: When the file was last written to, seconds since 1970; none while it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_behind = False
        self.number = 0
        self.changed_at: float | None = None
        self._at = 0
        self._inode = -1
        self._is_skipping = False

    def look(self) -> tuple[bool, list[tuple[int, Line]]]:
        """Return whether the file was begun anew, and its new lines with their numbers; none for one that is too long.

        A file that cannot be read has no new lines.
        """
        try:
            with open_regular(self.path) as file:
                is_anew = self._is_anew(file.fileno())
                file.seek(self._at)
                content = file.read(MOST_BYTES)
                self.is_behind = len(content) == MOST_BYTES
        except OSError:
            self.is_behind = False
            return False, []
        return is_anew, self._lines(content)

    def _is_anew(self, descriptor: int) -> bool:
        found = os.fstat(descriptor)
        is_anew = self._at > 0 and (found.st_size < self._at or found.st_ino != self._inode)
        if is_anew:
            self._at, self.number, self._is_skipping = 0, 0, False
        self._inode, self.changed_at = found.st_ino, found.st_mtime
        return is_anew

    def _lines(self, content: bytes) -> list[tuple[int, Line]]:
        found: list[tuple[int, Line]] = []
        whole = content.rfind(b"\n") + 1
        for line in content[:whole].split(b"\n")[:-1]:
            self.number += 1
            if self._is_skipping or len(line) > MOST_LINE_BYTES:
                self._is_skipping = False
                found.append((self.number, None))
            elif line.strip():
                found.append((self.number, line))
        self._at += whole
        if len(content) - whole > MOST_LINE_BYTES:  # nobody writes such a line: it is passed over, not kept
            self._is_skipping = True
            self._at += len(content) - whole
        return found
