"""Runs of `thinwire train` as real commands, as small as they can be; several may run at once."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

COMMAND = [sys.executable, "-m", "thinwire.cli.main", "train"]
OPTIONS = (  # noqa: SIM905 - the words as a user types them
    "--model tiny --tokenizer bytes --batch-size 1 --seq-len 16 --sync-interval 6 --overlap-steps 2 --eval-every 0 "
    "--final-eval-batches 2 --checkpoint-every 4 --log-every 4 --threads 1 --quiet --json"
).split()
DEADLINE_S = 240
_SLOW_STEPS = Path(__file__).parents[2] / "benchmarks" / "chaos" / "slow_steps"
DOCUMENTS = [f"{number}: " + "a thin wire carries little, so say little. " * 40 for number in range(20)]


MARK = "STARTED_BY_TEST"


def with_slow_steps(step_s: float, *, slower_while: Path | None = None) -> dict[str, str]:
    """Return the environment in which elastic replicas sleep at each step, and leave the cores to others meanwhile.

    Args:
        step_s: How long.
        slower_while: While there is such a file, they sleep for ten times as long.
    """
    paths = [str(_SLOW_STEPS), *filter(None, [os.environ.get("PYTHONPATH")])]
    slower = {} if slower_while is None else {"CHAOS_SLOWER_WHILE": str(slower_while)}
    return {"CHAOS_STEP_S": str(step_s), "PYTHONPATH": os.pathsep.join(paths), **slower}


class Started:
    """A running command; its children are looked at by their own ids, and carry its mark in their environment.

    Args:
        arguments: The words after `train`.
        environment: Variables besides this process's own.
        output: A file for what the command prints; by default it is kept here.
    """

    def __init__(
        self, arguments: list[str], *, environment: dict[str, str] | None = None, output: Path | None = None
    ) -> None:
        self.mark = uuid.uuid4().hex
        with contextlib.ExitStack() as files:
            target = subprocess.PIPE if output is None else files.enter_context(output.open("ab"))
            self.process = subprocess.Popen(
                [*COMMAND, *arguments], stdout=target, stderr=target, text=True,
                env={**os.environ, **(environment or {}), MARK: self.mark}, start_new_session=True,
            )  # fmt: skip
        self.stdout = self.stderr = ""

    def family(self) -> list[psutil.Process]:
        """Return all that runs now and was started by this command, also what has lost its parent."""
        return [process for process in psutil.process_iter() if _environment(process).get(MARK) == self.mark]

    def kill_family(self) -> None:
        """Kill all of it, as far as it has not just ended with its launcher."""
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait_for(self, path: Path) -> None:
        until = time.monotonic() + DEADLINE_S
        while not path.exists():
            assert self.process.poll() is None, f"ended before {path.name}: {self.process.communicate()}"
            assert time.monotonic() < until, f"{path} never came"
            time.sleep(0.01)

    def wait_to_read(self, words: str) -> None:
        """Read what the command says to its terminal, until it has said some words."""
        assert self.process.stderr is not None
        until = time.monotonic() + DEADLINE_S
        while words not in self.stderr:
            assert select.select([self.process.stderr], [], [], until - time.monotonic())[0], f"it never said {words!r}"
            said = os.read(self.process.stderr.fileno(), 1 << 16).decode()
            assert said, f"ended before it said {words!r}: {self.stderr}"
            self.stderr += said

    def end(self) -> int:
        out, rest = self.process.communicate(timeout=DEADLINE_S)
        self.stdout, self.stderr = out or "", self.stderr + (rest or "")
        return self.process.returncode


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has just ended, or is a zombie
        return {}


def as_rank(lines: Sequence[Sequence[str]], ports: Sequence[int]) -> list[tuple[int, str, str]]:
    """Run several command lines one after the other as one of torchrun's ranks; each start of torch takes seconds.

    Args:
        lines: The words after `train`.
        ports: MASTER_PORT for each, so that no rank comes to the store of the run before.

    Returns:
        Exit code, stdout and stderr of each.
    """
    from thinwire.cli.main import main

    done = []
    for words, port in zip(lines, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["train", *words])
        done.append((code, out.getvalue(), err.getvalue()))
    return done


def finish(started: Started) -> Started:
    assert started.end() == 0, started.stderr
    return started


def result(started: Started) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(started.stdout.splitlines()[-1])
    return found


def metrics(run: Path, replica: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"metrics-replica-{replica}.jsonl").read_text().splitlines()]
