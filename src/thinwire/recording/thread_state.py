"""State of the training thread while it makes no call: its stack, its share of a core, and where it sleeps.

A rank that others wait for looks the same from outside whether it loops, waits for a lock or for a worker. So the
recorder's thread samples the training thread once it has made no progress for long, and ever more rarely after that.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path

from thinwire.runlog.records import Beat
from thinwire.transport.call_sites import shown_file

LONG_S = 3.0  # without progress before the first sample; each further one is twice as late
_MOST_FRAMES = 12
_MOST_WORKERS = 8
_TASKS = Path("/proc/self/task")


class TrainingThread:
    """Samples the thread that trains: the one that made this, or the latest call.

    Args:
        rank: This process's.
        now_s: The present time.
    """

    def __init__(self, rank: int, now_s: float) -> None:
        self._rank = rank
        self._ident, self._native = threading.get_ident(), threading.get_native_id()
        self._since_s, self._due_s = now_s, LONG_S
        self._before: tuple[float, float] | None = None

    def note_call(self, now_s: float) -> None:
        """Take note of a call that the present thread makes."""
        self._since_s, self._due_s = now_s, LONG_S
        if threading.get_ident() != self._ident:
            self._ident, self._native = threading.get_ident(), threading.get_native_id()

    def note_end(self, now_s: float) -> None:
        """Take note of a call's end, in whichever thread."""
        self._since_s, self._due_s = now_s, LONG_S

    def sample(self, now_s: float) -> Beat | None:
        """Return a heartbeat with the thread's state if it is due; call it several times a second.

        The share of a core is taken between two calls.
        """
        if now_s - self._since_s < self._due_s:
            self._before = None
            return None
        wanted_s = _wanted_s(self._native)
        if self._before is None:
            self._before = now_s, wanted_s
            return None
        (before_s, before), self._before = self._before, None
        self._due_s *= 2
        cpu = (wanted_s - before) / max(now_s - before_s, 1e-3)
        return Beat(
            rank=self._rank, at_s=now_s, cpu=round(min(1.0, max(0.0, cpu)), 2), sleeps_in=_sleeps_in(self._native),
            stack=_stack(self._ident), workers=_workers(),
        )  # fmt: skip


def _stack(ident: int) -> tuple[str, ...]:
    frame, found = sys._current_frames().get(ident), list[str]()
    while frame is not None and len(found) < _MOST_FRAMES:
        name, _ = shown_file(frame.f_code.co_filename)
        found.append(f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"[:200])
        frame = frame.f_back
    return tuple(found)


def _read(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return path.read_text(errors="replace").strip()
    return ""


def _wanted_s(native: int) -> float:
    """Return the seconds that a thread has run or waited for a core so far; 0 if the system does not tell."""
    with contextlib.suppress(ValueError):
        ran, waited, *_ = (int(one) for one in _read(_TASKS / str(native) / "schedstat").split())
        return (ran + waited) / 1e9
    return 0.0


def _sleeps_in(native: int, process: Path = Path("/proc/self")) -> str:
    """Return `disk` for an uninterruptible sleep, with the kernel's function if it is known; empty if it runs."""
    task = process / "task" / str(native)
    state = _read(task / "stat").rpartition(")")[2].split()[:1]
    if state not in (["S"], ["D"]):
        return ""
    place = _read(task / "wchan")
    place = place if place not in ("", "0") else "sleep"
    return f"disk: {place}" if state == ["D"] else place


def _workers() -> tuple[str, ...]:
    """Return this process's children, with what each sleeps in."""
    children = " ".join(_read(task / "children") for task in _TASKS.iterdir()) if _TASKS.is_dir() else ""
    found = []
    for pid in children.split()[:_MOST_WORKERS]:
        place = _sleeps_in(int(pid), Path("/proc") / pid)
        found.append(f"{pid} {'sleeps in ' + place if place else 'runs'}")
    return tuple(found)
