"""Standard output and standard error: streams that survive a full disk, and the form of messages.

A redirected stream may point at a file on a disk without room. A plain `print` then raises, and the process that only
wanted to report something dies of it. The streams here keep what cannot be written in memory, bounded, and write it
once there is room.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import threading
from typing import TextIO

from thinwire.errors import is_no_room

# What one stream keeps in memory; a log line has about 100 bytes.
MAX_WAITING_BYTES = 1 << 20
_RETRY_S = 0.25
_CONTROL = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], "\ufffd")


def printable(text: object) -> str:
    """Return a text without control characters, with which a name in a file could steer the terminal."""
    return str(text).translate(_CONTROL)


def print_line(text: object = "") -> None:
    """Print a line on stdout without control characters."""
    print(printable(text))


def log(text: object, *, command: str = "") -> None:
    """Print a line for people on stderr, with the command that prints it."""
    print(f"thinwire {command}".rstrip() + f": {text}", file=sys.stderr, flush=True)


def log_nothing(text: object) -> None:
    """Print nothing: for a quiet command, or a rank of a host that is not its first."""


def log_if_possible(text: str) -> None:
    """Print a line on stderr, or nothing where the terminal has gone."""
    with contextlib.suppress(OSError):
        log(text)


def print_error(command: str, error: object) -> None:
    """Print an error on stderr, in one line."""
    log(f"error: {printable(' '.join(str(error).split()))}", command=command)


class ReaderGone(OSError):
    """The reader of a pipe has gone, as `| head` does. No BrokenPipeError, for rich would end the process with 1."""


class DurableStream(io.TextIOBase):
    """A text stream on a file descriptor; a write never fails for lack of room.

    Any thread may write. Lines reach the descriptor whole and in order.

    Args:
        descriptor: The file descriptor.
        encoding: Of the text.
        errors: How characters are handled that the encoding lacks.
        is_lossy: Whether output is discarded that can never be written, as after the reader of a pipe has gone. Else
            the write raises `OSError`.
        max_waiting_bytes: Bound on what is kept in memory. Beyond it the lines in the middle are dropped: the first
            ones hold the cause, the last ones the current state.

    Attributes:
        num_dropped: Lines that were dropped.
    """

    def __init__(
        self, descriptor: int, *, encoding: str = "utf-8", errors: str = "backslashreplace", is_lossy: bool = False,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:  # fmt: skip
        super().__init__()
        self._descriptor = descriptor
        self._encoding = encoding
        self._errors = errors
        self._is_lossy = is_lossy
        self._max_waiting_bytes = max_waiting_bytes
        self._lock = threading.RLock()
        # by thread: `print` writes a line and its end separately, and another thread may write between the two
        self._begun: dict[int, str] = {}
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._is_retrying = False
        self.num_dropped = 0

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    @property
    def errors(self) -> str:  # type: ignore[override]
        return self._errors

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes for which there was no room yet."""
        return self._num_bytes

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        try:
            return os.isatty(self._descriptor)
        except OSError:
            return False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Take text; whole lines are written at once, the rest with its line's end or by `flush`."""
        with self._lock:
            begun = self._begun.pop(threading.get_ident(), "") + text
            end = begun.rfind("\n") + 1
            if begun[end:]:
                self._begun[threading.get_ident()] = begun[end:]
            if end:
                self._add(begun[:end])
        return len(text)

    def flush(self) -> None:
        """Write what waits, as far as there is room."""
        with self._lock:
            if begun := self._begun.pop(threading.get_ident(), ""):
                self._add(begun)
            elif self._lines:
                self._drain()

    def close(self) -> None:
        """Write what can be written; the descriptor stays open, for it belongs to the process."""
        with self._lock, contextlib.suppress(OSError):
            self._add("".join(self._begun.values()))
            self._begun.clear()

    def _add(self, text: str) -> None:
        for line in text.encode(self._encoding, self._errors).splitlines(keepends=True):
            self._lines.append(line)
            self._num_bytes += len(line)
        self._drain()
        if self._num_bytes > self._max_waiting_bytes:
            self._drop_middle()
        if self._lines and not self._is_retrying:
            self._is_retrying = True
            threading.Thread(target=self._retry, name="thinwire-output", daemon=True).start()

    def _drain(self) -> None:
        data = b"".join(self._lines)
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError as error:
            # EAGAIN: a pipe or terminal that takes nothing at the moment
            if not is_no_room(error) and error.errno != errno.EAGAIN:
                self._lines, self._num_bytes = [], 0
                if not self._is_lossy:
                    if isinstance(error, BrokenPipeError):
                        raise ReaderGone(*error.args) from None
                    raise
                return
        rest = data[written:]
        self._lines, self._num_bytes = rest.splitlines(keepends=True), len(rest)

    def _drop_middle(self) -> None:
        lines, quarter = self._lines, self._max_waiting_bytes // 4
        first, last = 0, len(lines)
        kept = 0
        while first < last and kept + len(lines[first]) <= quarter:
            kept += len(lines[first])
            first += 1
        kept = 0
        while last > first and kept + len(lines[last - 1]) <= quarter:
            last -= 1
            kept += len(lines[last])
        self.num_dropped += last - first
        mark = f"[{last - first} lines dropped here: no room for this output]\n".encode()
        self._lines = [*lines[:first], mark, *lines[last:]]
        self._num_bytes = sum(map(len, self._lines))

    def _retry(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(_RETRY_S)
            with self._lock:
                with contextlib.suppress(OSError):  # raised again to whoever writes next, if it lasts
                    self._drain()
                if not self._lines:
                    self._is_retrying = False
                    return


def protect_output() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that a full disk cannot make fail.

    For a process of its own, at its start; a stream without a descriptor stays as it is.
    """
    sys.stdout = _protected(sys.stdout, is_lossy=False)
    sys.stderr = _protected(sys.stderr, is_lossy=True)


def _protected(stream: TextIO, *, is_lossy: bool) -> TextIO:
    if stream is None or isinstance(stream, DurableStream):
        return stream
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    return DurableStream(descriptor, encoding=stream.encoding, errors=stream.errors or "strict", is_lossy=is_lossy)  # type: ignore[return-value]


def finish_output() -> bool:
    """Write what still waits, at the end of a process; return whether all of standard output was written."""
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.close() if isinstance(sys.stderr, DurableStream) else sys.stderr.flush()
    out = sys.stdout
    if not isinstance(out, DurableStream):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no stream where its descriptor was closed
            out.flush()
        return True
    out.close()
    return not out.num_waiting_bytes and not out.num_dropped
