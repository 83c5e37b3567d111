"""Warnings at the first use of code that has never run on the hardware it is for."""

from __future__ import annotations

import threading
import warnings
from typing import Literal

Path = Literal["gpu calls", "nccl inspector", "nccl ras", "gpu ranks"]

_TEXTS: dict[Path, str] = {
    "gpu calls": "recording of calls on GPUs (gpu_calls=True) has never run on a GPU, only over gloo; compare a first "
    "job with and without it",
    "nccl inspector": "the reader of NCCL Inspector files was made from NCCL's source and has read no file of a real "
    "GPU job; check findings against the files",
    "nccl ras": "the reader of NCCL RAS answers was made from NCCL's source and has read no answer of a real GPU job; "
    "check findings against `ncclras -v`",
    "gpu ranks": "a replica of several ranks on GPUs has never run on a machine with several GPUs; compare a first "
    "run with one rank a replica",
}
_warned: set[Path] = set()
_lock = threading.Lock()


class UntestedWarning(RuntimeWarning):
    """A path that has not run on the hardware it is for; filter it by this class once you have checked it."""


def warn_untested(path: Path, *, stacklevel: int = 2) -> None:
    """Warn that a path has never run on its hardware, once a process.

    Args:
        path: Which.
        stacklevel: As for `warnings.warn`, seen from the caller.
    """
    with _lock:
        if path in _warned:
            return
        _warned.add(path)
    warnings.warn(f"thinwire: {_TEXTS[path]}", UntestedWarning, stacklevel=stacklevel + 1)
