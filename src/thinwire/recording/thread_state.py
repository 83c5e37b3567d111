"""State of the training thread while it makes no call: its stack, its share of a core, and where it sleeps.

A rank that others wait for looks the same from outside whether it loops, waits for a lock or for a worker. So the
recorder's thread samples the training thread once it has made no progress for long, and ever more rarely after that.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from thinwire.runlog.process_state import LONG_S, read_text, sleeps_in, wanted_s
from thinwire.runlog.records import Beat
from thinwire.transport.call_sites import shown_file

_MOST_FRAMES = 12
_MOST_WORKERS = 8
_TASKS = Path("/proc/self/task")


class TrainingThread:
    """Samples the thread that trains: the one that made this, or the latest call."""

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
        task = _TASKS / str(self._native)
        wanted = wanted_s(task)
        if self._before is None:
            self._before = now_s, wanted
            return None
        (before_s, before), self._before = self._before, None
        self._due_s *= 2
        cpu = (wanted - before) / max(now_s - before_s, 1e-3)
        return Beat(
            rank=self._rank, at_s=now_s, cpu=round(min(1.0, max(0.0, cpu)), 2), sleeps_in=sleeps_in(task),
            stack=_stack(self._ident), workers=_workers(),
        )  # fmt: skip


def _stack(ident: int) -> tuple[str, ...]:
    frame, found = sys._current_frames().get(ident), list[str]()
    while frame is not None and len(found) < _MOST_FRAMES:
        name, _ = shown_file(frame.f_code.co_filename)
        found.append(f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"[:200])
        frame = frame.f_back
    return tuple(found)


def _workers() -> tuple[str, ...]:
    """Return this process's children, with what each sleeps in."""
    children = " ".join(read_text(task / "children") for task in _TASKS.iterdir()) if _TASKS.is_dir() else ""
    found = []
    for pid in children.split()[:_MOST_WORKERS]:
        place = sleeps_in(Path("/proc") / pid / "task" / pid)
        found.append(f"{pid} {'sleeps in ' + place if place else 'runs'}")
    return tuple(found)
