"""Warnings about local steps that no exchange has put into the global parameters."""

from __future__ import annotations

import atexit
import sys
import warnings
from functools import cache

from thinwire.sync.in_flight import UncountedWork

# Work of the optimizers of this process that are not closed yet, for the warning at its end.
_unclosed: set[UncountedWork] = set()


class MissingStepsWarning(UserWarning):
    """Local steps that no exchange has put into the global parameters, when these are used or the process ends."""


@cache
def _watch_exit() -> None:
    atexit.register(_warn_at_exit)


def watch(work: UncountedWork) -> None:
    """Warn at the end of the process where steps of this work are missing then."""
    _watch_exit()
    _unclosed.add(work)


def unwatch(work: UncountedWork) -> None:
    """Leave this work out of the warning at the end."""
    _unclosed.discard(work)


def _warn_at_exit() -> None:
    """Warn about the optimizer that lacks most steps; a process that ends by an error has printed that already."""
    work = max(_unclosed, key=lambda one: one.num_missing_steps, default=None)
    if work is not None and work.num_missing_steps and not hasattr(sys, "last_value"):
        warn_missing(work, remedy="call close(final_exchange=True) after the last step", stacklevel=2)


def warn_missing(work: UncountedWork, *, remedy: str, stacklevel: int) -> None:
    """Warn that local steps are missing; `stacklevel` 1 is the caller's line."""
    warnings.warn(
        f"{work.num_missing_steps} of {work.num_steps} local steps are not in the global parameters; {remedy}",
        MissingStepsWarning, stacklevel=stacklevel + 1,
    )  # fmt: skip
