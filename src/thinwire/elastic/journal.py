"""Journal of the coordinator: one JSON line for each decision, written before any message about it.

A line is passed to the system before a message that depends on it is sent, so it survives a killed coordinator. It is
not forced onto the disk: when the whole host loses power, the run resumes from its last checkpoint.

The file is compacted as it grows: the lines that a later process needs are written beside it, and renamed to it. A
process that is killed meanwhile, or finds no room, leaves the old lines or the new ones whole. So the file takes at
most `COMPACT_BYTES`, or twice what must be kept where that is more.

Room for thousands of rounds is reserved where the file system can do that, so that a full disk does not stop the run at
once. After that, lines wait in memory until there is room, and so do the messages that may depend on them.
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
from typing import Any, Protocol

import msgspec

from thinwire.errors import ThinwireError, is_no_room
from thinwire.files import append_whole, sync_folder

RESERVE_BYTES = 8 << 20
COMPACT_BYTES = 4 << 20
_KEEP_SIZE = 1
_WAIT_S = 0.5
# Limits on what waits in memory for room; a decision has a few hundred bytes. Beyond the first the coordinator blocks.
MAX_UNWRITTEN_BYTES = 8 << 20
MAX_HELD_MESSAGES = 4096


class Journal:
    """A file of lines.

    Args:
        path: The file; made where there is none.
        say: Reports, once each, that the disk is full and that there is room again.
        until: Ends the wait for room; without it a line that cannot be written is an error at once.
        reserve_bytes: Room reserved beyond the end; renewed at half of it.
        compact_bytes: The size from which on `compact` rewrites the file.

    Raises:
        ThinwireError: It cannot be written.

    Attributes:
        lines: The lines from before this object was made, without a last line that a crash cut off.
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
        self._unwritten: deque[bytes] = deque()
        self._num_unwritten_bytes = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            raw = path.read_bytes() if path.exists() else b""
            self.lines = _decode(raw)
            self._beside.unlink(missing_ok=True)  # of a process that was killed before the rename
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._num_bytes = self._reserved = os.fstat(self._file).st_size
            if raw and not raw.endswith(b"\n"):
                self._append_or_keep(b"\n")  # the half line stays one of its own
        except OSError as error:
            raise self._failure(error, remedy="make room, or choose another --out") from error

    @property
    def is_behind(self) -> bool:
        """Whether lines wait in memory for room."""
        return bool(self._unwritten)

    def write(self, what: str, fields: dict[str, Any]) -> None:
        """Add a line; keep it in memory while the disk is full, where `until` can end that.

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
            raise self._failure(error) from error

    def flush(self) -> bool:
        """Write the lines in memory, as far as there is room; return whether none is left.

        Raises:
            ThinwireError: It cannot be written for another reason than lack of room.
        """
        while self._unwritten:
            try:
                self._append(self._unwritten[0])
            except OSError as error:
                if not is_no_room(error):
                    raise self._failure(error) from error
                return False
            self._num_unwritten_bytes -= len(self._unwritten.popleft())
            if not self._unwritten:
                self._say(f"there is room for {self._path} again, and the run goes on")
        return True

    def _failure(self, error: OSError, *, remedy: str = "make room") -> ThinwireError:
        return ThinwireError(f"the coordinator cannot write {self._path}: {error.strerror}; {remedy}")

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
        """Replace all lines by fewer ones where the file has grown large; without room for that, try again later.

        Args:
            lines: Returns lines whose replay gives the same state as that of all written ones.

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
        """Write a file beside the journal, force it onto the disk, rename it, and return its descriptor."""
        file = os.open(self._beside, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            append_whole(file, data)
            os.fsync(file)  # else a host that loses power may find the new name and no lines
            self._beside.replace(self._path)
        except BaseException:
            os.close(file)
            raise
        with contextlib.suppress(OSError):  # without it a host that loses power may find the old lines
            sync_folder(self._path.parent)
        return file

    def close(self) -> None:
        """Close the file and free the reserved room; closing twice is fine."""
        if self._file >= 0:
            with contextlib.suppress(ThinwireError):
                self.flush()
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, os.fstat(self._file).st_size)  # frees the reserved room behind it
            os.close(self._file)
            self._file = -1

    def _append(self, data: bytes) -> None:
        """Add bytes, all or none; an OSError leaves the file as it was."""
        if self._num_bytes + self._reserve_bytes // 2 > self._reserved:
            self._reserve()
        try:
            append_whole(self._file, data)
        except OSError:
            self._reserved = self._num_bytes  # the reserved room was freed with the half line
            raise
        self._num_bytes += len(data)

    def _reserve(self) -> None:
        """Reserve room behind the file's end, where the file system can."""
        with contextlib.suppress(OSError, AttributeError):
            reserve = ctypes.CDLL(None, use_errno=True).fallocate
            size = ctypes.c_int64(self._reserve_bytes)
            if reserve(self._file, _KEEP_SIZE, ctypes.c_int64(self._num_bytes), size) == 0:
                self._reserved = self._num_bytes + self._reserve_bytes


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a journal, without a last line that a crash cut off; none where there is no file.

    Raises:
        OSError: It cannot be read.
    """
    return _decode(path.read_bytes() if path.exists() else b"")


def _decode(raw: bytes) -> list[dict[str, Any]]:
    found = []
    for line in raw.split(b"\n"):
        with contextlib.suppress(ValueError):
            value = msgspec.json.decode(line)
            if isinstance(value, dict) and isinstance(value.get("what"), str):
                found.append(value)
    return found


class PendingJournal(Protocol):
    """Lines that are not written yet, for which messages wait."""

    @property
    def is_behind(self) -> bool:
        """Whether lines wait in memory."""
        ...

    def flush(self) -> bool:
        """Write them; return whether none is left."""
        ...


class HeldMessages:
    """Holds messages back while the journal lacks lines that they may depend on.

    Answers without a text, as to a status command, are sent at once: no replica acts on them. Beyond the limit messages
    are lost as on a broken connection, and replicas ask for them again.
    """

    def __init__(self, journal: PendingJournal, *, send: Callable[[bytes, str, dict[str, Any]], None]) -> None:
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
        """Write the journal's lines in memory, then send the held messages."""
        if self._journal.flush():
            while self._held:
                self._send(*self._held.popleft())
