"""Processes that a test looks at and signals; any of them may end between two looks.

What has ended is left out, never an error: it is no zombie in a list, has no command line, and takes no signal. A
process is a `psutil.Process`, which knows by the time of its start whether its id is another's by now.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import psutil

DEADLINE_S = 840.0
"""For whatever a test waits for. A busy machine takes as long as it takes: the suite ends a test after 900 s."""

POLL_S = 0.02
_GONE = (psutil.Error, OSError)  # `/proc` has no such file, or a zombie's is not readable
_Found = TypeVar("_Found")


def until(
    what: Callable[[], _Found], why: Callable[[], object] = lambda: "it never came", *, deadline_s: float = DEADLINE_S,
    poll_s: float = POLL_S,
) -> _Found:  # fmt: skip
    """Wait until something is there, and return it.

    Args:
        what: Looks for it; what is not true is not there.
        why: Makes the text of the failure.
        deadline_s: How long to wait at most.
        poll_s: Time between two looks.
    """
    end_s = time.monotonic() + deadline_s
    while not (found := what()):
        assert time.monotonic() < end_s, why()
        time.sleep(poll_s)
    return found


def is_running(process: psutil.Process) -> bool:
    """Tell whether a process has not ended; a zombie has, once its last thread has given back files and ports."""
    try:
        if not process.is_running():
            return False
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        return not is_zombie or len(list(Path(f"/proc/{process.pid}/task").iterdir())) > 1
    except _GONE:
        return False


def is_stopped(process: psutil.Process) -> bool:
    """Tell whether a process is stopped by a signal."""
    try:
        return process.is_running() and process.status() == psutil.STATUS_STOPPED
    except _GONE:
        return False


def words_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process, nothing where it has ended."""
    try:
        return list(process.cmdline())
    except _GONE:
        return []


def name_of(process: psutil.Process) -> str:
    """Return the name of the program, "" where the process has ended."""
    try:
        return str(process.name())
    except _GONE:
        return ""


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Return the variables with which a process began, none where it has ended."""
    try:
        return dict(process.environ())
    except _GONE:
        return {}


def is_listening(process: psutil.Process) -> bool:
    """Tell whether a process listens on a TCP port."""
    try:
        return any(one.status == psutil.CONN_LISTEN for one in process.net_connections("tcp"))
    except _GONE:
        return False


def marked(name: str, value: str) -> list[psutil.Process]:
    """Return all that runs with a variable in its environment, also what has lost its parent."""
    return [one for one in psutil.process_iter() if environment_of(one).get(name) == value]


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """Return the processes below one, by default below this one, that run now."""
    try:
        return [one for one in psutil.Process(pid).children(recursive=True) if is_running(one)]
    except _GONE:
        return []


def send(process: psutil.Process, number: int) -> bool:
    """Send a signal to a process; tell whether it was still there to take it."""
    try:
        process.send_signal(number)
    except _GONE:
        return False
    return True


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill processes, as far as they have not ended by themselves."""
    for process in processes:
        send(process, signal.SIGKILL)


def read_pid(path: Path) -> int | None:
    """Return the process id that a file holds; None where there is no such file or it is just being written."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def process_in(path: Path) -> psutil.Process | None:
    """Return the process whose id a file holds; None where it has ended."""
    try:
        process = psutil.Process(read_pid(path) or 0)
    except _GONE:
        return None
    # a process that has been given the id of an ended one is not the file's, which names another by then
    return process if is_running(process) and read_pid(path) == process.pid else None


def named_in(path: Path) -> psutil.Process:
    """Return the running process whose id a file holds, once its launcher has written that of one."""
    return until(lambda: process_in(path), lambda: f"{path} names no running process")


def send_to_named(path: Path, number: int) -> psutil.Process:
    """Send a signal to the process whose id a file holds, whichever that is by then; return it."""

    def sent() -> psutil.Process | None:
        process = named_in(path)
        return process if send(process, number) else None

    return until(sent)
