"""Files that are there whole or not at all, and files that others write."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

# A full disk, a quota and a file size limit; room may come, so what is to be written is kept until then.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_no_room(error: OSError) -> bool:
    """Return whether a write failed for lack of room, so that the same write may succeed later."""
    return error.errno in _NO_ROOM


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
    replace_whole(path, lambda temporary: _write_text(temporary, text))


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


def replace_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make a file beside `path`, bring it to the disk and put it in the place of `path`.

    Raises:
        OSError: It could not be written; the old content is still there and nothing else is left.
    """
    # hosts that share the folder may write the same file at the same time
    temporary = path.parent / f".{path.name}.{os.uname().nodename}.partial"
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


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def sync_folder(folder: Path) -> None:
    """Bring to the disk what names a folder holds: a file's rename is there only when its folder is.

    Raises:
        OSError: It could not be done.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
