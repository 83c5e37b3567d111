"""A process that has imported torch once and forks for whoever asks: a start of torch takes seconds, a fork none.

A child is a real process with a session, an environment and files of its own; its interpreter ends as any other does,
with everything that runs at its end. The nursery has one thread and no process group, so nothing half-done is copied.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import namespaces

# The last is what torch imports at the first optimizer: seconds in each child, where it is not here.
_IMPORTS = ("torch.distributed.fsdp", "torch.distributed.tensor", "thinwire", "thinwire.methods", "torch._dynamo")


class Child:
    """A forked process, with what a test needs of `subprocess.Popen`."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid

    @property
    def returncode(self) -> int | None:
        """How it ended, as far as was noted; negative for a signal."""
        return self._nursery.ended.get(self.pid)

    def poll(self) -> int | None:
        """Return how it ended, or None while it runs."""
        self._nursery.listen(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        end_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            self._nursery.listen(min(left_s, 0.2))
        return code


class Nursery:
    """The test's end of a nursery; the process starts with the first child and ends with the test run."""

    def __init__(self) -> None:
        self.ended: dict[int, int] = {}
        self._pids: list[int] = []
        self._lock = threading.RLock()
        self._connection: socket.socket | None = None

    def start(
        self, *, arguments: Sequence[str], environment: Mapping[str, str], place: tuple[str, str] | None, out: str,
        err: str, imports: Sequence[str] = (),
    ) -> Child:  # fmt: skip
        """Fork a child that runs `processes._main(*arguments)`, on this machine or on a host of `namespaces`."""
        with self._lock:
            if self._connection is None:
                self._connection = self._open()
            order = {
                "arguments": list(arguments), "environment": dict(environment), "place": place, "out": out, "err": err,
                "imports": list(imports),
            }  # fmt: skip
            self._connection.send(json.dumps(order).encode())
            while not self._pids:
                assert select.select([self._connection], [], [], 60.0)[0], "the nursery forks within a minute"
                self.listen(0.0)
            return Child(self, self._pids.pop())

    def listen(self, timeout_s: float) -> None:
        """Note what the nursery tells within a time."""
        assert self._connection is not None
        with self._lock:
            while select.select([self._connection], [], [], timeout_s)[0]:
                said = self._connection.recv(1 << 16)
                assert said, "the nursery has ended"
                told = json.loads(said)
                if "code" in told:
                    self.ended[told["pid"]] = told["code"]
                else:
                    self.ended.pop(told["pid"], None)  # of an earlier child: the kernel gives numbers out again
                    self._pids.append(told["pid"])
                timeout_s = 0.0

    def _open(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip
        return ours


def _serve(connection: socket.socket) -> Callable[[], int]:
    """Fork on every order; return in each child what it shall do, and end where the tests are gone."""
    for name in _IMPORTS:
        __import__(name)
    gc.collect()
    gc.freeze()  # what is here stays: no child looks through it for garbage, nor copies it for that
    wake_up, woken = socket.socketpair()
    for end in (wake_up, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = select.select([connection, wake_up], [], [])[0]
        if wake_up in ready:
            wake_up.recv(4096)
            _tell_of_the_dead(connection)
        if connection in ready:
            said = connection.recv(1 << 20)
            if not said:
                sys.exit(0)
            order = json.loads(said)
            for name in order["imports"]:
                with contextlib.suppress(ImportError):  # the child reports it
                    __import__(name)
            if os.fork() == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _settle(**{name: order[name] for name in ("environment", "place", "out", "err")})
                # only now: whoever knows the number may signal the session and read the files
                connection.send(json.dumps({"pid": os.getpid()}).encode())
                for end in (connection, wake_up, woken):
                    end.close()
                return lambda: _live(order["arguments"])


def _tell_of_the_dead(connection: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            connection.send(json.dumps({"pid": found[0], "code": os.waitstatus_to_exitcode(found[1])}).encode())


def _settle(*, environment: Mapping[str, str], place: Sequence[str] | None, out: str, err: str) -> None:
    os.setsid()
    if place is not None:
        namespaces.move_to(*place)
    os.environ.clear()
    os.environ.update(environment)
    # torch asks for the compiler when it is imported, which was before there was this environment
    sys.modules["torch"]._inductor.config.cpp.cxx = (None, environment.get("CXX", "g++"))
    sys.path += [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    for path, number in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)


def _live(arguments: Sequence[Any]) -> int:
    from processes import _main

    return _main(*arguments)


def _run() -> NoReturn:
    # the child goes on from here, so that nothing of the nursery is left on its stack
    sys.exit(_serve(socket.socket(fileno=int(sys.argv[1])))())


if __name__ == "__main__":
    _run()
