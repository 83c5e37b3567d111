"""Processes of an elastic run on one host: each is restarted when it dies; a standby process saves the imports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from thinwire.errors import Stopped, WorkerFailed
from thinwire.files import write_whole
from thinwire.runlog.reader import last_lines
from thinwire.training.elastic.remediation import ProcessOrder

# Seconds. A standby process that is still importing when needed is no slower than a new one.
_STANDBY_STOP_S = 5.0


class StandbyProcess:
    """Keeps one process waiting in `read_work` for work; without a module none.

    What it prints while it waits goes to `logs/spare.err` of the run's folder.
    """

    def __init__(self, module: str, *, run_dir: Path) -> None:
        self._module = module
        self._run_dir = run_dir
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_there(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        if self.is_there or not self._module:
            return
        logs = self._run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", *self._module.split(), str(self._run_dir.resolve()), str(os.getpid())]
        with log_path(logs / "spare.err").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )

    def assign(self, *, log: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes] | None:
        """Give the waiting process its arguments, and the log of what it prints from now on; None where none waits."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return None
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"log": str(log), "arguments": list(arguments)}).encode() + b"\n")
            process.stdin.close()
        except OSError:  # it died just now
            return None
        return process

    def stop(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # which it takes for the end
        try:
            self._process.wait(timeout=_STANDBY_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def log_path(path: Path) -> Path:
    """Return where a process may write what it prints: nowhere where there is no room for a file of its own."""
    with contextlib.suppress(OSError):
        path.open("ab").close()
        return path
    return Path(os.devnull)


def read_work() -> list[str] | None:
    """Wait for arguments on stdin, and send what is printed from then on to their log; None where no work is left."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return None
    work = json.loads(line)
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(work["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)
    return [str(argument) for argument in work["arguments"]]


# Exit code of a worker that has reported why, and would fail again.
REFUSED = 3
# Exit code of a worker whose coordinator did not answer; restarted if it has answered this host before.
UNANSWERED = 4
_AGAIN_S, _LONGEST_AGAIN_S = 0.1, 30.0
_SHORT_LIFE_S = 10.0
_LOOK_S = 0.1
_STOP_S = 15.0
# Of the end of a process's log, in which its error stands.
_ERROR_BYTES = 1 << 16
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A process that is to run.

    Attributes:
        name: For messages and for its log.
        module: What `python -m` runs.
        arguments: Appended to the run's folder and this process's id.
        is_needed: Whether it does this host's part in the run, and does not only serve the others.
        spare: What `python -m` runs to wait until this process dies, and then to take its place; "" for nothing.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    is_needed: bool = True
    spare: str = ""


class _Worker:
    """One role's process, and those that came before it."""

    def __init__(self, role: Role, *, run_dir: Path) -> None:
        self.role = role
        self._run_dir = run_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._began_s = 0.0
        self._due_s = 0.0
        self._pause_s = _AGAIN_S
        self.num_starts = 0
        self.has_ended = False
        self.problem = ""

    @property
    def is_steady(self) -> bool:
        """Whether the process has been there for a while, or needs to be there no more."""
        is_here = self._process is not None and time.monotonic() - self._began_s > _SHORT_LIFE_S
        return self.has_ended or is_here

    def update(
        self, report: Callable[[str], None], standby: StandbyProcess, *, is_answered: Callable[[], bool]
    ) -> None:
        if self.has_ended:
            if self._process is not None:
                self._process.poll()  # one that was killed for good is no zombie
            return
        if self._process is None:
            if time.monotonic() >= self._due_s:
                self._start(standby)
            return
        code = self._process.poll()
        if code is None:
            return
        self._process = None
        if code == 0:
            self.has_ended = True
            return
        error = self._last_error()
        if code == REFUSED or (code == UNANSWERED and not is_answered()):
            self.has_ended = True
            self.problem = error or f"{self.role.name} could not go on"
            return
        if time.monotonic() - self._began_s > _SHORT_LIFE_S:
            self._pause_s = _AGAIN_S
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        why = f" ({error})" if error and code > 0 else ""
        report(f"{self.role.name} {how}{why}; starting it again in {self._pause_s:g} s")
        self._due_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_AGAIN_S)

    def _start(self, standby: StandbyProcess) -> None:
        logs = self._run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        name = self.role.name.replace(" ", "-")
        path = log_path(logs / f"{name}.err")
        if self.role.spare:
            self._process = standby.assign(log=path.resolve(), arguments=self.role.arguments)
        if self._process is None:
            command = [sys.executable, "-m", *self.role.module.split(), str(self._run_dir.resolve()), str(os.getpid())]
            with path.open("ab") as log:
                self._process = subprocess.Popen(
                    [*command, *self.role.arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
        with contextlib.suppress(OSError):  # for users; a full disk must not end the run
            write_whole(logs / f"{name}.pid", f"{self._process.pid}\n")
        self._began_s = time.monotonic()
        self.num_starts += 1

    def stop(self, number: int) -> None:
        self.has_ended = True
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def wait(self, until_s: float) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(timeout=max(0.1, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def execute(self, order: ProcessOrder) -> None:
        """Kill the process, and start another one in its place or none."""
        if self._process is None or self._process.pid != order.pid:
            return
        self.has_ended = self.has_ended or order.what == "end"
        self._process.kill()  # also one that is stopped

    def _last_error(self) -> str:
        path = self._run_dir / "logs" / f"{self.role.name.replace(' ', '-')}.err"
        # bounded: a log may have grown for weeks, or be a device without an end
        lines = last_lines(path, num_bytes=_ERROR_BYTES) if path.exists() else []
        told = (line.decode(errors="replace").strip() for line in lines)
        said = [line.removeprefix("error: ") for line in told if line.startswith("error: ")]
        return said[-1] if said else ""


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Collect the signals that end a run in a list instead of acting on them, in the main thread."""
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def launch(
    roles: Sequence[Role], *, run_dir: Path, report: Callable[[str], None], on_tick: Callable[[], None],
    part: Callable[[], None] = lambda: None, orders: Callable[[], list[ProcessOrder]] = list,
    is_answered: Callable[[], bool] = lambda: True, is_waiting: Callable[[], bool] = lambda: False,
) -> None:  # fmt: skip
    """Run processes until all have ended well.

    Must be called from the main thread: it handles SIGINT, SIGTERM and SIGHUP meanwhile.

    Args:
        roles: What is to run.
        run_dir: The run's folder.
        report: Takes the messages for the user.
        on_tick: Called several times a second.
        part: Called once when all that are needed have ended well, so that the others can end when they may.
        orders: Gives what is to be done to the processes, once.
        is_answered: Whether the coordinator has ever answered this host; else a process that it does not answer is not
            started again.
        is_waiting: Whether to start none of them yet, but keep a process ready. What it raises ends the waiting.

    Raises:
        WorkerFailed: One cannot go on, and said why, or the run was ended by an order; the others have ended too.
        Stopped: A signal came; all have ended.
    """
    workers = [_Worker(role, run_dir=run_dir) for role in roles]
    standby = StandbyProcess(next((role.spare for role in roles if role.spare), ""), run_dir=run_dir)
    has_parted = False
    with noted_signals() as signals:
        try:
            while not signals and is_waiting():
                standby.start()
                on_tick()
                time.sleep(_LOOK_S)
            while not signals:
                for worker in workers:
                    worker.update(report, standby, is_answered=is_answered)
                _execute(workers, orders())
                if all(worker.has_ended for worker in workers):
                    return
                is_parted = all(worker.has_ended for worker in workers if worker.role.is_needed)
                if not has_parted and is_parted:
                    with contextlib.suppress(OSError):  # a full disk; it is tried again
                        part()
                        has_parted = True
                if not is_parted and all(worker.is_steady for worker in workers):
                    standby.start()  # not before: it would slow down those that start
                on_tick()
                time.sleep(_LOOK_S)
            raise Stopped(signals[0])
        finally:
            standby.stop()
            _stop_all(workers)


def _execute(workers: Sequence[_Worker], orders: Sequence[ProcessOrder]) -> None:
    for order in orders:
        if order.what == "abort":
            raise WorkerFailed(f"the run was ended because of a finding: {order.why}")
        for worker in workers:
            worker.execute(order)
    problems = [worker.problem for worker in workers if worker.problem]
    if problems:
        raise WorkerFailed(problems[0])


def _stop_all(workers: Sequence[_Worker]) -> None:
    """Stop the replicas first: as they leave they still send messages to the coordinator."""
    until_s = time.monotonic() + _STOP_S
    for worker in [*(w for w in workers if w.role.is_needed), *(w for w in workers if not w.role.is_needed)]:
        worker.stop(signal.SIGTERM)
        if not worker.role.is_needed:
            worker.wait(until_s)
    for worker in workers:
        worker.wait(until_s)
