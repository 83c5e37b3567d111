"""Activity of a rank that others wait for: from samples of its training thread, whether it loops or waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.monitor.detect.timeline import Job

RUNNING = 0.5  # share of a core, waits for one included, from which on a thread runs
_LOADER = "torch/utils/data/dataloader.py:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """State of a rank's training thread.

    Attributes:
        text: As a sentence goes on after the rank's name.
        remedy: Advice.
        stack: Frames, innermost first.
    """

    text: str
    remedy: str
    stack: Sequence[str]


def activity_of(job: Job, rank: int, *, since_s: float) -> Activity | None:
    """Return what a rank did when it was last sampled; None if that was before a time.

    Args:
        job: All records.
        rank: Whose training thread.
        since_s: Begin of the wait for it.
    """
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
            remedy="look at the disk or network file system that it reads or writes (dmesg)",
        )  # fmt: skip
    return Activity(
        text=f"sleeps ({beat.sleeps_in or 'state unknown'}){at}", stack=beat.stack,
        remedy="look for a lock, a queue, a socket or another thread or process that it waits for at this line",
    )  # fmt: skip
