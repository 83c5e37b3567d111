"""Activity of a rank that others wait for: from samples of its training thread, or of its process from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.monitor.detect.timeline import Job
from thinwire.runlog.records import ENDED, STOPPED

RUNNING = 0.5  # share of a core, waits for one included, from which on a thread runs
_LOADER = "torch/utils/data/dataloader.py:"
_DISK = "look at the disk or network file system that it reads or writes (dmesg)"
_NATIVE_STACK = (
    "take its native stack (py-spy dump --native, or gdb): a call into C code does not release Python's lock"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """State of a rank's training thread."""

    text: str  # as a sentence goes on after the rank's name
    remedy: str  # advice
    stack: Sequence[str] = ()  # frames, innermost first


def activity_of(job: Job, rank: int, *, since_s: float) -> Activity | None:
    """Return what a rank did when it was last sampled; None if that was before a time."""
    samples = [(at_s, beat) for at_s, beat in job.samples.get(rank, ()) if at_s >= since_s]
    if not samples:
        return None
    _, beat = samples[-1]
    own = next((frame for frame in beat.stack if "/" not in frame), "")
    at = f", at {own}" if own else ""
    if beat.cpu >= RUNNING:
        return Activity(
            text=f"runs in its own code with {beat.cpu:.0%} of a core{at}", stack=beat.stack,
            remedy="look for an endless loop, or for much work on this rank alone, at this line",
        )  # fmt: skip
    if any(frame.startswith(_LOADER) for frame in beat.stack):
        workers = f" (process {', '.join(beat.workers[:4])})" if beat.workers else ""
        return Activity(
            text=f"waits for a DataLoader worker{workers}{at}", stack=beat.stack,
            remedy="take the worker's stack (py-spy dump): a lock that was held at the fork, a slow or dead file "
            "system; DataLoader(timeout=...) makes it an error",
        )  # fmt: skip
    if beat.sleeps_in.startswith("disk: "):
        return Activity(
            text=f"waits in the kernel ({beat.sleeps_in.removeprefix('disk: ')}){at}", stack=beat.stack,
            remedy=_DISK,
        )  # fmt: skip
    return Activity(
        text=f"sleeps ({beat.sleeps_in or 'state unknown'}){at}", stack=beat.stack,
        remedy="look for a lock, a queue, a socket or another thread or process that it waits for at this line",
    )  # fmt: skip


def silent_activity(job: Job, rank: int, *, since_s: float) -> Activity | None:
    """Return what another process saw of a rank whose recorder is silent; None if that was before a time.

    Nothing but the GIL keeps a recorder's thread from running in a process that is neither stopped nor waits for a
    disk, since the process that saw it writes to the same folder.
    """
    at_s, seen = job.processes.get(rank, (since_s, None))
    if seen is None or at_s < since_s:
        return None
    state, remedy = seen.sleeps_in, _NATIVE_STACK
    if state == STOPPED:
        text, remedy = "is stopped by a signal or a debugger", "go on with it (kill -CONT), and find out who stopped it"
    elif state == ENDED:
        text, remedy = "is no process any more", "read its log and the system's (dmesg names processes out of memory)"
    elif state.startswith("disk: "):
        text, remedy = f"waits in the kernel ({state.removeprefix('disk: ')})", _DISK
    elif seen.cpu >= RUNNING:
        text = f"runs without releasing the GIL, with {seen.cpu:.0%} of a core"
    else:
        text = f"sleeps ({state or 'state unknown'}) without releasing the GIL, or its container is frozen"
    return Activity(text=text, remedy=remedy)
