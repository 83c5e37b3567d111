"""A process that has imported torch once and forks for whoever asks: a start of torch takes seconds, a fork none.

A child is a real process with a session, an environment and files of its own, and runs at its end what runs at any
interpreter's. The nursery has one thread and no process group, so nothing half-done is copied.

`Popen` here stands for `subprocess.Popen` in the tests: `python -m thinwire...`, torchrun and a script are children of
the nursery, and fork what they start of these themselves. Every other command line, such as `thinwire ...`, is a start
as a user makes it.
"""

from __future__ import annotations

import contextlib
import fcntl
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
from pathlib import Path
from typing import Any, NoReturn

import forked_starts
import namespaces

# `torch._dynamo` is what torch imports at the first optimizer: seconds in each child, where it is not here.
_IMPORTS = (
    "torch.distributed.fsdp", "torch.distributed.tensor", "thinwire", "thinwire.methods", "thinwire.cli.train",
    "thinwire.training.worker", "thinwire.training.elastic.replica", "thinwire.training.elastic.coordinator_process",
    "thinwire.monitor.live_diagnosis", "torch._dynamo", "torch.distributed.run",
    # what commands import where they need it
    "thinwire.cli.elastic_run", "thinwire.cli.elastic_train", "thinwire.cli.elastic_commands", "thinwire.cli.lab",
    "thinwire.cli.view", "thinwire.lab.doctor", "thinwire.planning.search", "thinwire.training.probe_hosts",
    "encodings.idna", "rich.live", "rich.progress_bar",
)  # fmt: skip

_MAX_FILES = 16
_EXECUTED = subprocess.Popen  # as it is before the tests put `Popen` in its place


class Child:
    """A forked process, with what a test needs of `subprocess.Popen`."""

    def __init__(self, nursery: Nursery, pid: int, number: int) -> None:
        self._nursery = nursery
        self._number = number
        self.pid = pid
        self.returncode: int | None = None
        """How it ended, as far as was noted; negative for a signal."""

    def poll(self) -> int | None:
        """Return how it ended, or None while it runs; until then its process id is not another's."""
        if self.returncode is None:
            self.returncode = self._nursery.reap(self._number)
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
        self.ended: dict[int, int] = {}  # by the number of the child: the kernel gives process ids out again
        self._pids: dict[int, int] = {}
        self._num_children = 0
        self._lock = threading.RLock()
        self._connection: socket.socket | None = None

    def start(
        self, *, arguments: Sequence[str], environment: Mapping[str, str], files: Sequence[int],
        place: tuple[str, str] | None = None, imports: Sequence[str] = (), folder: str = "", words: Sequence[str] = (),
        kept: Sequence[int] = (),
    ) -> Child:  # fmt: skip
        """Fork a child on this machine or on a host of `namespaces`.

        Args:
            arguments: What `processes._main` gets, where there are no words.
            environment: All variables of the child.
            files: Its stdin, stdout and stderr.
            place: The host.
            imports: Modules that the nursery loads before.
            folder: The child's working directory, the nursery's by default.
            words: `[python, "-m", module, ...]`: what the child runs.
            kept: Numbers of other files of this process that the child has by the same numbers.
        """
        with self._lock:
            if self._connection is None:
                self._connection = self._open()
            self._num_children += 1
            number = self._num_children
            order = {
                "number": number, "arguments": list(arguments), "environment": dict(environment), "place": place,
                "imports": list(imports), "folder": folder or str(Path.cwd()), "words": list(words),
                "kept": list(kept),
            }  # fmt: skip
            socket.send_fds(self._connection, [json.dumps(order).encode()], [*files, *kept])
            while number not in self._pids:
                # it loads torch first, which takes 4 s of a core, and minutes where dozens of processes share two
                assert select.select([self._connection], [], [], 300.0)[0], "the nursery forks in time"
                self.listen(0.0)
            return Child(self, self._pids.pop(number), number)

    def reap(self, number: int) -> int | None:
        """Return how a child ended, and let the nursery forget it; None while it runs."""
        assert self._connection is not None
        with self._lock:
            self.listen(0.0)
            code = self.ended.pop(number, None)
            if code is not None:
                self._connection.send(json.dumps({"reap": number}).encode())
            return code

    def listen(self, timeout_s: float) -> None:
        """Note what the nursery tells within a time."""
        assert self._connection is not None
        with self._lock:
            while select.select([self._connection], [], [], timeout_s)[0]:
                said = self._connection.recv(1 << 16)
                assert said, "the nursery has ended"
                told = json.loads(said)
                if "code" in told:
                    self.ended[told["number"]] = told["code"]
                else:
                    self._pids[told["number"]] = told["pid"]
                timeout_s = 0.0

    def _open(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # the nursery outlives the test that needs it first, and is not among the processes which that one marks
        lasting = {name: value for name, value in os.environ.items() if not name.startswith("THINWIRE_")}
        with theirs:
            _EXECUTED(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, env={**lasting, "OMP_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip
        return ours


NURSERY = Nursery()


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, whose `python -m thinwire...`, torchrun and scripts are children of the nursery."""

    _child: Child | None = None

    def _execute_child(self, *arguments: Any) -> None:
        start = forked_starts.Start((self, *arguments))
        # an internal process of thinwire watches its parent, which is the nursery here
        is_internal = start.can_fork and start.module == "thinwire.cli.processes"
        if not start.can_fork or is_internal or start.enter is not None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        files = [own if file == -1 else file for own, file in enumerate(start.files)]
        place = (f"/var/run/netns/{start.namespace}", socket.gethostname()) if start.namespace else None
        self._child = NURSERY.start(
            arguments=(), environment=start.environment, files=files, place=place, folder=start.folder,
            words=start.words, kept=start.kept,
        )  # fmt: skip
        self.pid, self._child_created = self._child.pid, True
        self._close_pipe_fds(*start.pipes)  # type: ignore[attr-defined]

    def _internal_poll(self, *arguments: Any, **more: Any) -> int | None:
        if self._child is None:
            return super()._internal_poll(*arguments, **more)  # type: ignore[misc]
        if self.returncode is None:
            self.returncode = self._child.poll()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._child is None:
            return super()._wait(timeout)  # type: ignore[misc]
        if self.returncode is None:
            try:
                self.returncode = self._child.wait(float("inf") if timeout is None else timeout)
            except subprocess.TimeoutExpired:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
        return self.returncode


def _serve(connection: socket.socket) -> Callable[[], int]:
    """Fork on every order; return in each child what it shall do, and end where the tests are gone."""
    subprocess.Popen = forked_starts.ForkingPopen  # type: ignore[misc]  # before torch takes it by name
    for name in _IMPORTS:
        __import__(name)
    # a command line parsed once fills the method catalogue, a quarter of a second of each child
    sys.modules["thinwire.cli.train_options"].parse(["--steps", "1"])
    gc.collect()
    gc.freeze()  # what is here stays: no child looks through it for garbage, nor copies it for that
    wake_up, woken = socket.socketpair()
    for end in (wake_up, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pids: dict[int, int] = {}  # of children, by number
    told: set[int] = set()  # numbers of children that have ended, and are zombies until the test has seen it
    while True:
        ready = select.select([connection, wake_up], [], [])[0]
        if wake_up in ready:
            wake_up.recv(4096)
            _tell_of_the_dead(connection, pids, told)
        if connection in ready:
            said, files, _, _ = socket.recv_fds(connection, 1 << 20, _MAX_FILES)
            if not said:
                sys.exit(0)
            order = json.loads(said)
            if "reap" in order:
                os.waitpid(pids.pop(order["reap"]), 0)
                continue
            _import_early(order["imports"])
            pid = os.fork()
            if pid == 0:
                _settle(order, files[:3])
                # only now: whoever knows the process id may signal the session and read the files
                connection.send(json.dumps({"number": order["number"], "pid": os.getpid()}).encode())
                _close(connection.detach(), wake_up.detach(), woken.detach())
                _number(files[3:], order["kept"])
                return lambda: _live(order["arguments"], order["words"])
            pids[order["number"]] = pid
            _close(*files)


def _close(*files: int) -> None:
    for file in files:
        os.close(file)


def _number(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Move open files to other numbers."""
    free = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]
    _close(*files)
    for file, number in zip(free, numbers, strict=True):
        os.dup2(file, number)
    _close(*free)


def _import_early(names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):  # the child reports it
            __import__(name)


def _tell_of_the_dead(connection: socket.socket, pids: Mapping[int, int], told: set[int]) -> None:
    for number, pid in pids.items():
        found = None if number in told else os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None:
            told.add(number)
            code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            connection.send(json.dumps({"number": number, "code": code}).encode())


def _settle(order: Mapping[str, Any], files: Sequence[int]) -> None:
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if order["place"] is not None:
        namespaces.move_to(*order["place"])
    forked_starts.become(
        order["words"] or [sys.executable, *sys.argv], environment=order["environment"], folder=order["folder"],
        is_new_session=True,
    )  # fmt: skip
    if not order["words"]:
        sys.path += [path for path in order["environment"].get("PYTHONPATH", "").split(os.pathsep) if path]


def _live(arguments: Sequence[Any], words: Sequence[str]) -> int:
    if words:
        forked_starts.run_program(words)
        return 0
    from processes import _main

    return _main(*arguments)


def _run() -> NoReturn:
    # the child goes on from here, so that nothing of the nursery is left on its stack
    forked_starts.run_to_the_end(_serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    _run()
