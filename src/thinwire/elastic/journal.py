"""Journal of the coordinator: one JSON line for each decision, written before any message about it.

A line is handed to the system before the message that it is about leaves, so what a killed coordinator had said is
there for the one that comes after it. It is not forced onto the disk: when the whole host loses power, the run goes on
from its last checkpoint.

The file is compacted as it grows: the lines that a later process needs are written beside it, and renamed to it.
Whoever is killed meanwhile, or finds no room, leaves the old lines or the new ones, whole. So the file takes at most
`COMPACT_BYTES`, or twice what must be kept where that is more.

Room for thousands of rounds is taken beforehand where the file system can do that, so that a disk that others fill does
not stop the run at once. Once that is used up, lines are kept in memory until there is room, and so are the messages
that may depend on them: what was not written must not be sent.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from thinwire.errors import ThinwireError
from thinwire.files import is_no_room, sync_folder

RESERVE_BYTES = 8 << 20
COMPACT_BYTES = 4 << 20
_KEEP_SIZE = 1
_WAIT_S = 0.5
# What is kept in memory while there is no room; a decision has a few hundred bytes. Beyond it the coordinator stands
# still until there is room.
MAX_UNWRITTEN_BYTES = 8 << 20
MAX_HELD_MESSAGES = 4096


class Journal:
    """A file of lines.

    Args:
        path: The file; made where there is none.
        say: Told once when there is no room any more, and when there is again.
        until: Ends the waiting for room; without it a line that cannot be written is an error at once.
        reserve_bytes: How much room is taken beforehand; half as much at the least.
        compact_bytes: The size from which on `compact` rewrites the file.

    Raises:
        ThinwireError: It cannot be written.
    """

    def __init__(
        self, path: Path, *, say: Callable[[str], None] = lambda text: None, until: threading.Event | None = None,
        reserve_bytes: int = RESERVE_BYTES, compact_bytes: int = COMPACT_BYTES,
    ) -> None:  # fmt: skip
        self._compact_bytes = self._least_bytes = compact_bytes
        self._beside = path.with_name(f".{path.name}.compacted")
        self._path = path
        self._say = say
        self._until = until
        self._reserve_bytes = reserve_bytes
        self._is_torn = False
        self._unwritten: deque[bytes] = deque()
        self._num_unwritten_bytes = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lines = self._read()
            self._beside.unlink(missing_ok=True)  # of a process that was killed before the rename
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._num_bytes = self._reserved = os.fstat(self._file).st_size
            if self._is_torn:
                self._append_or_keep(b"\n")  # the half line stays one of its own
        except OSError as error:
            raise ThinwireError(
                f"the coordinator cannot write {path}: {error.strerror}; make room, or choose another --out"
            ) from error

    def lines(self) -> list[dict[str, Any]]:
        """Return what was written before this object was made, without a last line that a crash cut off."""
        return self._lines

    @property
    def is_behind(self) -> bool:
        """Whether there are lines for which there was no room yet."""
        return bool(self._unwritten)

    def write(self, what: str, fields: dict[str, Any]) -> None:
        """Add a line; keep it in memory while the disk is full, where there is something to end that.

        Raises:
            ThinwireError: It cannot be written.
        """
        line = msgspec.json.encode({"what": what, **fields}) + b"\n"
        try:
            self._append_or_keep(line)
            while self._num_unwritten_bytes > MAX_UNWRITTEN_BYTES and not self.flush():
                if self._until is None or self._until.wait(_WAIT_S):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise ThinwireError(f"the coordinator cannot write {self._path}: {error.strerror}; make room") from error

    def flush(self) -> bool:
        """Write what is kept in memory, as far as there is room; return whether nothing is left.

        Raises:
            ThinwireError: It cannot be written for another reason than lack of room.
        """
        while self._unwritten:
            try:
                self._append(self._unwritten[0])
            except OSError as error:
                if not is_no_room(error):
                    raise ThinwireError(
                        f"the coordinator cannot write {self._path}: {error.strerror}; make room"
                    ) from error
                return False
            self._num_unwritten_bytes -= len(self._unwritten.popleft())
            if not self._unwritten:
                self._say(f"there is room for {self._path} again, and the run goes on")
        return True

    def _append_or_keep(self, line: bytes) -> None:
        if not self._unwritten:
            try:
                self._append(line)
                return
            except OSError as error:
                if not is_no_room(error) or self._until is None or self._until.is_set():
                    raise
            self._say(f"cannot write {self._path}: the disk is full; replicas wait until there is room")
        self._unwritten.append(line)
        self._num_unwritten_bytes += len(line)

    def compact(self, lines: Callable[[], Sequence[Mapping[str, Any]]]) -> bool:
        """Replace all lines by fewer ones where the file has grown large; where there is no room for that, later.

        Args:
            lines: Returns lines that a later process makes the same of as of all those that were written.

        Returns:
            Whether it was done.
        """
        if self._unwritten or self._num_bytes < self._compact_bytes:
            return False
        data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines())
        try:
            file = self._replace(data)
        except OSError:  # the old lines are there, and are added to
            with contextlib.suppress(OSError):
                self._beside.unlink(missing_ok=True)
            self._compact_bytes = self._num_bytes + self._least_bytes
            return False
        os.close(self._file)
        self._file, self._num_bytes, self._reserved = file, len(data), len(data)
        self._compact_bytes = max(self._least_bytes, 2 * len(data))
        self._reserve()
        return True

    def _replace(self, data: bytes) -> int:
        """Write a file beside the journal, bring it to the disk, rename it, and return its descriptor.

        Raises:
            OSError: It could not be done; the journal is as it was.
        """
        file = os.open(self._beside, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            while data:
                data = data[os.write(file, data) :]
            os.fsync(file)  # else a host that loses power may find the new name and no lines
            self._beside.replace(self._path)
        except BaseException:
            os.close(file)
            raise
        with contextlib.suppress(OSError):  # without it a host that loses power may find the old lines
            sync_folder(self._path.parent)
        return file

    def close(self) -> None:
        """Close the file, and give back the room that was not needed; closing twice is fine."""
        if self._file >= 0:
            with contextlib.suppress(ThinwireError):
                self.flush()
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, os.fstat(self._file).st_size)  # which lets go of what lies behind it
            os.close(self._file)
            self._file = -1

    def _append(self, data: bytes) -> None:
        """Add bytes, all or none.

        Raises:
            OSError: There is no room.
        """
        if self._num_bytes + self._reserve_bytes // 2 > self._reserved:
            self._reserve()
        left = data
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._num_bytes)
                self._reserved = self._num_bytes  # what lay behind it went with it
            raise
        self._num_bytes += len(data)

    def _reserve(self) -> None:
        """Take room behind the file's end; where that is not possible, there is none beforehand."""
        with contextlib.suppress(OSError, AttributeError):
            reserve = ctypes.CDLL(None, use_errno=True).fallocate
            size = ctypes.c_int64(self._reserve_bytes)
            if reserve(self._file, _KEEP_SIZE, ctypes.c_int64(self._num_bytes), size) == 0:
                self._reserved = self._num_bytes + self._reserve_bytes

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        raw = self._path.read_bytes()
        self._is_torn = bool(raw) and not raw.endswith(b"\n")
        found = []
        for line in raw.split(b"\n"):
            with contextlib.suppress(ValueError):
                value = msgspec.json.decode(line)
                if isinstance(value, dict) and isinstance(value.get("what"), str):
                    found.append(value)
        return found


class HeldMessages:
    """Holds the coordinator's messages back while its journal lacks lines that they may depend on.

    Answers without a text, as to a status command, are sent at once: no replica acts on them. Beyond the bound messages
    are lost as on a broken connection, and replicas ask for them again.

    Args:
        journal: The journal.
        send: Sends a message to a connection.
    """

    def __init__(self, journal: Journal, *, send: Callable[[bytes, str, dict[str, Any]], None]) -> None:
        self._journal = journal
        self._send = send
        self._held: deque[tuple[bytes, str, dict[str, Any]]] = deque()

    def send(self, token: bytes, kind: str, fields: dict[str, Any]) -> None:
        """Send a message, or hold it until the journal is written."""
        is_free = kind == "answer" and not fields.get("text")
        if is_free or not (self._journal.is_behind or self._held):
            self._send(token, kind, fields)
        elif len(self._held) < MAX_HELD_MESSAGES:
            self._held.append((token, kind, fields))

    def release(self) -> None:
        """Write what the journal keeps in memory, and send what was held once that is done."""
        if self._journal.flush():
            while self._held:
                self._send(*self._held.popleft())
