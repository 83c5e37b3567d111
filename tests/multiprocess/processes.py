"""Several real processes for a test: each runs one function of a test file with torchrun's environment.

A test names a module-level function; every process imports the test's file, calls the function with the given
arguments and hands its return value back as JSON:

    def sum_of_ranks(offset: int) -> int: ...

    outcomes = run(sum_of_ranks, num_ranks=2, arguments={"offset": 1})
    assert [outcome.value for outcome in outcomes] == [...]

`Processes` is the same with hands on: wait for a line of output, stop or kill one process while the others run.
Whatever happens in the test, no process is left behind: each is killed, by its own id, when the `with` block ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from live_processes import DEADLINE_S
from nursery import NURSERY, Child

POLL_S = 0.02
_NOT_LENT, _WORKERS = (10_000, 29_000), 16
_handed_out: set[int] = set()
ENVIRONMENT_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one process.

    Attributes:
        rank: Its RANK.
        returncode: 0 when the function returned, 1 when it raised, negative for a signal.
        value: What the function returned; None when it did not.
        error: Name of the exception's class, or an empty text.
        text: The exception's text.
        stdout: All it printed.
        stderr: All it logged, with the traceback of an exception.
    """

    rank: int
    returncode: int
    value: Any
    error: str
    text: str
    stdout: str
    stderr: str


class Processes:
    """Processes that run `function(**arguments)`, one a rank.

    Args:
        function: Module-level function of a test file; returns something JSON can hold.
        num_ranks: WORLD_SIZE.
        ranks: Which ranks to start (all by default): a rank left out never comes.
        arguments: Keyword arguments for every rank, JSON values.
        environment: Variables on top of torchrun's; a value None removes the variable.
        place: The host a rank lives on, as `namespaces.Hosts.place` tells it; this machine by default.
        master_address: MASTER_ADDR.
        master_port: MASTER_PORT, a free one by default.
        imports: Modules that the nursery loads before it forks, for libraries that take seconds to import.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        num_ranks: int,
        ranks: Sequence[int] | None = None,
        arguments: Mapping[str, Any] | None = None,
        environment: Mapping[str, str | None] | None = None,
        place: Callable[[int], tuple[str, str] | None] = lambda rank: None,
        master_address: str = "127.0.0.1",
        master_port: int | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        self.master_port = free_port() if master_port is None else master_port
        self.ranks = list(range(num_ranks) if ranks is None else ranks)
        self._folder = tempfile.TemporaryDirectory(prefix="thinwire-processes-")
        self._processes: dict[int, Child] = {}
        file = inspect.getsourcefile(function)
        assert file is not None
        for rank in self.ranks:
            torchrun = {
                "RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": master_address,
                "MASTER_PORT": str(self.master_port),
                "OMP_NUM_THREADS": "1",
            }
            wanted = {**os.environ, **torchrun, **(environment or {})}
            words = [file, function.__name__, json.dumps(dict(arguments or {})), str(self._file(rank, "json"))]
            present = {name: value for name, value in wanted.items() if value is not None}
            with (
                Path(os.devnull).open("rb") as nothing,
                self._file(rank, "out").open("wb") as out,
                self._file(rank, "err").open("wb") as err,
            ):
                self._processes[rank] = NURSERY.start(
                    arguments=words, environment=present, files=[each.fileno() for each in (nothing, out, err)],
                    place=place(rank), imports=imports,
                )  # fmt: skip

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for rank in self._processes:
            self.signal(rank, signal.SIGKILL)
        for process in self._processes.values():
            process.wait(timeout=DEADLINE_S)
        self._folder.cleanup()

    def pid(self, rank: int) -> int:
        """Return the process id of a rank."""
        return self._processes[rank].pid

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank and what it started; a process that is gone is left alone."""
        process = self._processes[rank]
        if process.poll() is None:
            # The session is the child's own, so its group holds nothing but the child and its children.
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, number)

    def kill(self, rank: int) -> None:
        """Kill one rank the hard way and wait until it is gone."""
        self.signal(rank, signal.SIGKILL)
        self._processes[rank].wait(timeout=DEADLINE_S)

    def wait_for(self, line: str, *, rank: int, deadline_s: float = DEADLINE_S) -> None:
        """Wait until a rank printed a line."""
        end = time.monotonic() + deadline_s
        while line not in self._read(rank, "out").splitlines():
            ended = self._processes[rank].poll() is not None
            if ended and line not in self._read(rank, "out").splitlines():
                raise AssertionError(f"rank {rank} ended before it printed {line!r}:\n{self._read(rank, 'err')}")
            if time.monotonic() > end:
                raise AssertionError(
                    f"rank {rank} did not print {line!r} in {deadline_s} s:\n{self._read(rank, 'err')}"
                )
            time.sleep(POLL_S)

    def join(self, *, deadline_s: float = DEADLINE_S, ranks: Sequence[int] | None = None) -> list[Outcome]:
        """Wait for ranks (all by default) to end and return their outcomes in order of rank."""
        end = time.monotonic() + deadline_s
        waited = self.ranks if ranks is None else list(ranks)
        for rank in waited:
            try:
                self._processes[rank].wait(timeout=max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                said = "\n".join(f"--- rank {other}\n{self._read(other, 'err')}" for other in waited)
                raise AssertionError(f"rank {rank} still ran after {deadline_s} s:\n{said}") from None
        return [self._outcome(rank) for rank in waited]

    def _file(self, rank: int, suffix: str) -> Path:
        return Path(self._folder.name) / f"rank{rank}.{suffix}"

    def _read(self, rank: int, suffix: str) -> str:
        return self._file(rank, suffix).read_text(errors="replace")

    def _outcome(self, rank: int) -> Outcome:
        file = self._file(rank, "json")
        found = json.loads(file.read_text()) if file.exists() else {"value": None, "error": "", "text": ""}
        code = self._processes[rank].poll()
        assert code is not None
        return Outcome(
            rank=rank, returncode=code, stdout=self._read(rank, "out"), stderr=self._read(rank, "err"), **found
        )


def run(function: Callable[..., Any], *, num_ranks: int, deadline_s: float = DEADLINE_S, **more: Any) -> list[Outcome]:
    """Run a function in `num_ranks` processes to the end; see `Processes` for the other arguments."""
    with Processes(function, num_ranks=num_ranks, **more) as processes:
        return processes.join(deadline_s=deadline_s)


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """Return what the processes returned, and fail with the first traceback where one did not."""
    for outcome in outcomes:
        assert outcome.returncode == 0, f"rank {outcome.rank} ended with {outcome.returncode}:\n{outcome.stderr}"
    return [outcome.value for outcome in outcomes]


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that nobody listens on just now, and that no other test gets.

    It is none of those that the kernel lends to connections. Of the others each pytest worker has its own, by the
    remainder of their numbers, and it hands out none twice.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = range(_NOT_LENT[0] + worker % _WORKERS, _NOT_LENT[1], _WORKERS)
    for port in random.SystemRandom().sample(own, len(own)):
        if port not in _handed_out:
            with contextlib.suppress(OSError), socket.create_server((host, port)):
                _handed_out.add(port)
                return port
    raise AssertionError(f"no port of {_NOT_LENT} is free on {host}")


def announce(line: str) -> None:
    """Print a line from inside a process for `Processes.wait_for`."""
    print(line, flush=True)


def _main(file: str, name: str, arguments: str, result: str) -> int:
    path = Path(file)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    outcome: dict[str, Any] = {"value": None, "error": "", "text": ""}
    try:
        outcome["value"] = getattr(module, name)(**json.loads(arguments))
    except Exception as error:
        outcome.update(error=type(error).__name__, text=str(error))
        raise
    finally:
        partial = Path(f"{result}.partial")
        partial.write_text(json.dumps(outcome))
        partial.replace(result)
    return 0
