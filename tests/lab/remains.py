"""What a lab would leave behind: processes, devices, temporary folders.

A namespace lives as long as a process is in it or holds it open, so those processes are looked for: the kernel gives
its number to another lab as soon as it is gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

_KINDS = ("cgroup", "ipc", "mnt", "net", "pid", "pid_for_children", "user", "uts")
_NAMESPACE = re.compile(r"^(?:cgroup|ipc|mnt|net|pid|user|uts):\[(\d+)\]$")
_DEADLINE_S = 240.0
_POLL_S = 0.05


class Remains:
    """Watches one lab.

    Every process that the lab starts inherits a variable of the test's own. One that wiped its environment is known by
    the namespace that it is in while the lab lives.

    Args:
        temporary: The folder in which the lab makes its temporary one.
    """

    def __init__(self, *, temporary: Path) -> None:
        self.environment = {"THINWIRE_TEST_MARK": uuid.uuid4().hex, "TMPDIR": str(temporary)}
        self._temporary = temporary
        self._devices = devices()
        self._ours = namespaces_of(os.getpid())
        self._members: dict[int, float] = {}

    def processes(self) -> set[int]:
        """Return the processes that belong to the lab."""
        mark = f"THINWIRE_TEST_MARK={self.environment['THINWIRE_TEST_MARK']}".encode()
        found = set()
        for pid in psutil.pids():
            # a zombie's environment cannot be read: it has ended, and holds no namespace
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes():
                    found.add(pid)
        return found - {os.getpid()}

    def daemons(self) -> tuple[int, int]:
        """Return the outer and the inner process of the daemon."""
        found = [pid for pid in sorted(self.processes()) if "thinwire.lab.namespace_daemon" in words_of(pid)]
        parents = {pid: psutil.Process(pid).ppid() for pid in found}
        outer = next(pid for pid in found if parents[pid] not in found)
        (inner,) = (pid for pid in found if parents[pid] == outer)
        return outer, inner

    def relay(self) -> int:
        """Return the process that delays packets."""
        (found,) = (pid for pid in self.processes() if "thinwire.lab.relay" in words_of(pid))
        return found

    def note(self) -> set[int]:
        """Note the processes in the lab's namespaces; return those namespaces."""
        found: set[int] = set()
        for pid in self.processes():
            found |= namespaces_of(pid) | held_by(pid)
        found -= self._ours
        for pid in psutil.pids():
            if (namespaces_of(pid) | held_by(pid)) & found:
                with contextlib.suppress(psutil.Error):
                    self._members[pid] = psutil.Process(pid).create_time()
        return found

    def members(self) -> set[int]:
        """Return the processes that were in the lab's namespaces and still run."""
        return {pid for pid, began_s in self._members.items() if _runs_since(pid, began_s)}

    def assert_nothing_is_left(self) -> None:
        """Wait until nothing is left, and fail where something stays."""
        end_s = time.monotonic() + _DEADLINE_S
        while (left := self._left()) and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        assert not left, "\n".join(left)

    def _left(self) -> list[str]:
        left = [f"process {pid}: {' '.join(words_of(pid))}" for pid in self.processes() | self.members()]
        left += [f"device {name}" for name in sorted(devices() - self._devices)]
        left += [f"folder {path}" for path in sorted(self._temporary.glob("thinwire-lab-*"))]
        return left


def devices() -> set[str]:
    """Return the network devices of this process's own namespace."""
    return {name for _, name in socket.if_nameindex()}


def namespaces_of(pid: int) -> set[int]:
    """Return the namespaces that a process lives in; none where it has ended."""
    return set(_numbers(Path(f"/proc/{pid}/ns") / kind for kind in _KINDS))


def held_by(pid: int) -> set[int]:
    """Return the namespaces that a process holds by open files."""
    try:
        files = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return set()
    return set(_numbers(files))


def words_of(pid: int) -> list[str]:
    """Return a process's command line."""
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


def _runs_since(pid: int, began_s: float) -> bool:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return process.create_time() == began_s and process.status() != psutil.STATUS_ZOMBIE
    return False


def _numbers(paths: Iterable[Path]) -> Iterator[int]:
    for path in paths:
        with contextlib.suppress(OSError):
            match = _NAMESPACE.match(str(path.readlink()))
            if match:
                yield int(match.group(1))
