"""Text of the error that ends a process, with the full disk that some libraries' messages hide.

torch.save writes by C++ that says "unexpected pos 64 vs 0" when the disk has no room, and Python's own error is lost or
stands behind another one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from thinwire.runlog.records import FULL_DISK

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LEAST_FREE_BYTES = 1 << 16
_WRITERS = ("PytorchStreamWriter", "inline_container")
_MOST_ERRORS = 16


def fault_text(error: BaseException) -> str:
    """Return the type and message of an error, after the full disk that caused it.

    Example:
        >>> fault_text(OSError(28, "No space left on device", "/data/x.pt"))
        "the disk is full (/data/x.pt); OSError: [Errno 28] No space left on device: '/data/x.pt'"
    """
    text = f"{type(error).__name__}: {error}"
    for one in _chain(error):
        if isinstance(one, OSError) and one.errno in _NO_ROOM:
            return f"{FULL_DISK} ({one.filename or 'file unknown'}); {text}"
    if any(writer in text for writer in _WRITERS):
        for path in _written(error):
            with contextlib.suppress(OSError, ValueError):
                if shutil.disk_usage(path.parent).free < _LEAST_FREE_BYTES:
                    return f"{FULL_DISK} ({path}); {text}"
    return text


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those that it stands for."""
    seen: BaseException | None = error
    for _ in range(_MOST_ERRORS):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__ or seen.__context__


def _written(error: BaseException) -> Iterator[Path]:
    """Yield the paths among the arguments and variables of the frames that an error came through."""
    for one in _chain(error):
        traceback = one.__traceback__
        while traceback is not None:
            for value in list(traceback.tb_frame.f_locals.values()):
                if isinstance(value, str | os.PathLike) and len(os.fspath(value)) < 4096:
                    path = Path(os.fsdecode(value))
                    if path.parent != Path() and path.parent.is_dir():
                        yield path
            traceback = traceback.tb_next
