"""Limits of planned paths, set by findings: a file in the run's folder that the ranks of this host read as they train.

The diagnosis runs in another process than the ranks. The file holds all limits that are in force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from thinwire.files import write_whole

PATH_LIMITS_FILE = "path-limits.json"
# Part of its measured rate that a path keeps while a finding names it: enough to measure that it is well again.
FINDING_LIMIT = 0.1
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PathLimit:
    """Limit of one path.

    Attributes:
        rank: The rank that sends.
        peer: The rank that it sends to.
        limit: Part of its measured rate that counts.
    """

    rank: int
    peer: int
    path: Annotated[int, msgspec.Meta(ge=0, lt=256)]
    limit: Annotated[float, msgspec.Meta(gt=0, le=1)]
    why: str = ""


def write_path_limits(run_dir: Path, limits: Iterable[PathLimit]) -> None:
    """Write all limits that are in force.

    Raises:
        OSError: The file cannot be written.
    """
    write_whole(run_dir / PATH_LIMITS_FILE, msgspec.json.encode(list(limits)).decode() + "\n")


class PathLimitReader:
    """Applies the limits of one rank's paths whenever the file changes.

    Args:
        apply: Called with the other rank, the path and the limit; 1 for a path whose limit has ended.
    """

    def __init__(self, run_dir: Path, *, rank: int, apply: Callable[[int, int, float], None]) -> None:
        self._path, self._rank, self._apply = run_dir / PATH_LIMITS_FILE, rank, apply
        self._mark: tuple[int, int] | None = None
        self._limits: dict[tuple[int, int], float] = {}

    def poll(self) -> str:
        """Read the file if it has changed; return why it cannot be read, or an empty text."""
        try:
            found = self._path.stat()
        except OSError:
            mark = None
        else:
            mark = (found.st_ino, found.st_mtime_ns)
        if mark == self._mark:
            return ""
        self._mark = mark
        try:
            limits = msgspec.json.decode(self._text(), type=list[PathLimit])
        except (OSError, msgspec.DecodeError) as error:
            return f"cannot read {self._path}: {error}"
        wanted = {(one.peer, one.path): one.limit for one in limits if one.rank == self._rank}
        for way in sorted({*wanted, *self._limits}):
            if wanted.get(way, 1.0) != self._limits.get(way, 1.0):
                self._apply(*way, wanted.get(way, 1.0))
        self._limits = wanted
        return ""

    def _text(self) -> bytes:
        if self._mark is None:
            return b"[]"
        with self._path.open("rb") as file:
            return file.read(_MOST_BYTES)
