"""A file that holds one JSON object and is written whole: read again only when it changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from thinwire.files import open_regular
from thinwire.monitor.dashboard.rejected_lines import Refused
from thinwire.monitor.runlog.reader import parse_object

_MOST_BYTES = 256 * 1024


class ObjectFile:
    """Follows one such file.

    Args:
        path: The file; it may come later.
        refused: Told of what cannot be read.

    Attributes:
        value: What it holds; none while it is not there or holds no object.
        changed_at: When it was written, seconds since 1970; none while it is not there.
    """

    def __init__(self, path: Path, refused: Refused) -> None:
        self._path = path
        self._refused = refused
        self._seen: tuple[int, int, int] | None = None
        self.value: dict[str, Any] | None = None
        self.changed_at: float | None = None

    def look(self) -> bool:
        """Read it where it changed, and return whether it did."""
        try:
            with open_regular(self._path) as file:
                found = os.fstat(file.fileno())
                seen = (found.st_ino, found.st_mtime_ns, found.st_size)
                if seen == self._seen:
                    return False
                content = file.read(_MOST_BYTES + 1)
        except OSError:
            is_gone = self._seen is not None
            self._seen, self.value, self.changed_at = None, None, None
            return is_gone
        self._seen, self.changed_at = seen, found.st_mtime
        try:
            self.value = parse_object(content)
        except ValueError as error:
            self.value = None
            self._refused.add(self._path.name, str(error))
        return True
