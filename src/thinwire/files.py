"""Files that are there whole or not at all, files that others write, and JSON files with errors that name them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from thinwire.errors import DataError

# Of a number in a file: a whole number of any length is no float.
LARGEST_NUMBER = 1e300
MOST_PLAN_BYTES = 16 * 2**20
_LOCK_POLL_S = 0.05
_LONGEST = 60  # characters of a value in an error's text


def append_whole(descriptor: int, data: bytes) -> None:
    """Append bytes to a file, all or none.

    Raises:
        OSError: They could not be written; the file is as it was.
    """
    before = os.fstat(descriptor).st_size
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, before)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader, also after a crash, finds the old content or the new one.

    Raises:
        OSError: It could not be written; the old content is still there.
    """
    replace_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read; a pipe or a device, which would be waited for, is none.

    Raises:
        OSError: It cannot be opened, or is no regular file.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is no regular file")
    return file


def replace_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside `path`, bring it to the disk and put it in the place of `path`.

    Raises:
        OSError: It could not be written; the old content is still there and nothing else is left.
    """
    # processes of this host, and hosts that share the folder, may write the same file at the same time
    temporary = path.parent / f".{path.name}.{os.uname().nodename}.{os.getpid()}.partial"
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):  # nobody has asked for the temporary file, so no error names it
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    sync_folder(path.parent)


def make_readable(path: Path) -> None:
    """Give a file that a library made for its owner alone the mode of any new file here."""
    probe = path.with_name(f"{path.name}.mode")
    descriptor = os.open(probe, os.O_CREAT | os.O_WRONLY, 0o666)  # the umask is not readable without changing it
    try:
        path.chmod(stat.S_IMODE(os.fstat(descriptor).st_mode))
    finally:
        os.close(descriptor)
        probe.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Bring to the disk what names a folder holds: a file's rename is there only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def wait_for_lock(descriptor: int, *, deadline_s: float) -> bool:
    """Take the lock of an open file, which the kernel drops with its process; return whether it came in time."""
    until_s = time.monotonic() + deadline_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until_s:
                return False
            time.sleep(_LOCK_POLL_S)
        except OSError:  # a file system without locks
            return True


def read_json(path: Path, *, most_bytes: int, command: str = "", remedy: str = "") -> Any:
    """Read a JSON file of a bounded size.

    Args:
        path: The file.
        most_bytes: Its bound.
        command: That writes such a file, for the error's text.
        remedy: Or another way to get one.

    Raises:
        DataError: There is no such file, it is too long, or it is no JSON; names the file and the remedy.
    """
    remedy = remedy or f"`{command}` writes such a file"
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most_bytes:
                raise DataError(f"{path} has {size} bytes, more than {most_bytes}; {remedy}")
            return json.loads(file.read(most_bytes).decode("utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON: {error}; {remedy}") from error


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_whole(path, json.dumps(content, indent=2) + "\n")


def short(found: object) -> str:
    """Return a value for an error's text, cut where it is long.

    Example:
        >>> short("x" * 100)[-8:], short(12)
        ('xxxxx...', '12')
    """
    try:
        text = repr(found)
    except (RecursionError, ValueError):  # nested too deep, or a number with too many digits
        text = f"a {type(found).__name__} of too many parts"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number here")
