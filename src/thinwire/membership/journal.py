"""What the coordinator must not forget: one JSON line each, written before anything is said about it.

A line is handed to the system before the message that it is about leaves, so what a killed coordinator had said is
there for the one that comes after it. It is not forced onto the disk: when the whole host loses power, the run goes on
from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from thinwire.errors import ThinwireError


class Journal:
    """A file of lines.

    Args:
        path: The file; made where there is none.

    Raises:
        ThinwireError: It cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_torn = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lines = self._read()
            self._file = path.open("a", encoding="utf-8")
            if self._is_torn:
                self._file.write("\n")  # the half line stays one of its own
        except OSError as error:
            raise ThinwireError(
                f"the coordinator cannot write {path}: {error.strerror}; make room, or choose another --out"
            ) from error

    def lines(self) -> list[dict[str, Any]]:
        """Return what was written before this object was made, without a last line that a crash cut off."""
        return self._lines

    def write(self, what: str, fields: dict[str, Any]) -> None:
        """Add a line.

        Raises:
            ThinwireError: It cannot be written.
        """
        try:
            self._file.write(json.dumps({"what": what, **fields}, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            raise ThinwireError(f"the coordinator cannot write {self._path}: {error.strerror}; make room") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        raw = self._path.read_text(encoding="utf-8", errors="replace")
        self._is_torn = bool(raw) and not raw.endswith("\n")
        found = []
        for line in raw.splitlines():
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict) and isinstance(value.get("what"), str):
                    found.append(value)
        return found
