"""State of a silent rank's process, which another process of its host reads from the kernel.

C code that holds the GIL keeps the thread that records from running too. The rank then looks like one that is paused,
killed or cut off, unless another process tells what the kernel shows of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from thinwire.files import write_whole
from thinwire.runlog.records import ENDED, STOPPED, ProcessState
from thinwire.runlog.writer import process_path, record_paths

LONG_S = 3.0  # without progress or records before the first sample; each further one is twice as late


class SilentProcesses:
    """Reads the state of processes of this host whose recorders have stopped to write.

    Args:
        rank: Own rank; None in a process that is no rank.
        clock: Seconds that only grow, the clock of the records.

    Attributes:
        wrote: Ranks that have written since this began. Of another one, a process that has ended says nothing: its
            files may be of an earlier run.
    """

    def __init__(self, run_dir: Path, *, rank: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_dir, self._rank, self._clock = run_dir, rank, clock
        self._marks: dict[int, tuple[int, float]] = {}  # size of a rank's records, and since when it has been so
        self.wrote: set[int] = set()
        self._before: dict[int, tuple[float, float]] = {}
        self._due_s: dict[int, float] = {}

    def sample(self) -> list[ProcessState]:
        """Return the states that are due; call it several times a second. A share of a core takes two calls."""
        now_s, found = self._clock(), list[ProcessState]()
        for path in self._run_dir.glob("records-rank-*.pid"):
            number = path.stem.rpartition("-")[2]
            rank = int(number) if number.isdecimal() else self._rank
            if rank is None or rank == self._rank:
                continue
            with contextlib.suppress(OSError):
                size = record_paths(self._run_dir, rank=rank)[0].stat().st_size
                known, since_s = self._marks.get(rank, (-1, now_s))
                if size != known:
                    if known >= 0:
                        self.wrote.add(rank)
                    self._marks[rank], self._due_s[rank] = (size, now_s), now_s + LONG_S
                    self._before.pop(rank, None)
                elif now_s >= self._due_s[rank]:
                    found += self._state_of(rank, read_text(path), now_s, silent_s=now_s - since_s)
        return found

    def _state_of(self, rank: int, name: str, now_s: float, *, silent_s: float) -> list[ProcessState]:
        kernel, _, own = name.partition(" ")
        if kernel != _kernel():  # on another host, which shares the folder
            return []
        pid = own.partition(" ")[0]
        process = Path("/proc") / pid
        state = {"T": STOPPED, "t": STOPPED, "Z": ENDED, "X": ENDED}.get(_state(process), "")
        if own != _process_name(process):
            if rank not in self.wrote:  # it may be of an earlier run
                return []
            state = ENDED
        wanted = 0.0 if state else sum(wanted_s(task) for task in (process / "task").iterdir())
        if not state and rank not in self._before:
            self._before[rank] = now_s, wanted
            return []
        before_s, before = self._before.pop(rank, (now_s - 1.0, wanted))
        self._due_s[rank] = now_s + silent_s  # each one is twice as late
        cpu = (wanted - before) / max(now_s - before_s, 1e-3)
        return [ProcessState(
            rank=rank if self._rank is None else self._rank, peer=rank, at_s=now_s,
            cpu=round(min(1.0, max(0.0, cpu)), 2), sleeps_in=state or sleeps_in(process / "task" / pid),
        )]  # fmt: skip


def write_process(run_dir: Path, *, rank: int, process: Path = Path("/proc/self")) -> None:
    """Name a rank's process, so that others of its host can read its state; nothing without /proc or on a full disk."""
    if own := _process_name(process.resolve()):
        with contextlib.suppress(OSError):
            write_whole(process_path(run_dir, rank=rank), f"{_kernel()} {own}\n")


def _process_name(process: Path) -> str:
    """Return number and start of a process, which together are no other one's; empty if it has ended."""
    fields = read_text(process / "stat").rpartition(")")[2].split()
    return f"{process.name} {fields[19]}" if len(fields) > 19 else ""


def _state(task: Path) -> str:
    return read_text(task / "stat").rpartition(")")[2][1:2]


def _kernel() -> str:
    return read_text(Path("/proc/sys/kernel/random/boot_id"))


def read_text(path: Path) -> str:
    """Return a file of the kernel; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return path.read_text(errors="replace").strip()
    return ""


def wanted_s(task: Path) -> float:
    """Return the seconds that a thread has run or waited for a core so far; 0 if the system does not tell."""
    with contextlib.suppress(ValueError):
        ran, waited, *_ = (int(one) for one in read_text(task / "schedstat").split())
        return (ran + waited) / 1e9
    return 0.0


def sleeps_in(task: Path) -> str:
    """Return `disk` for an uninterruptible sleep, with the kernel's function if it is known; empty if it runs."""
    state = _state(task)
    if state not in ("S", "D"):
        return ""
    place = read_text(task / "wchan")
    place = place if place not in ("", "0") else "sleep"
    return f"disk: {place}" if state == "D" else place
