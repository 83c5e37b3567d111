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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
from live_processes import DEADLINE_S, descendants, environment_of, kill, marked, until

COMMAND = [sys.executable, "-m", "thinwire.cli.main", "train"]
OPTIONS = (  # noqa: SIM905 - the words as a user types them
    "--model tiny --tokenizer bytes --batch-size 1 --seq-len 16 --sync-interval 6 --overlap-steps 2 --eval-every 0 "
    "--final-eval-batches 2 --checkpoint-every 4 --log-every 4 --threads 1 --quiet --json"
).split()
_SLOW_STEPS = Path(__file__).parents[2] / "benchmarks" / "chaos" / "slow_steps"
DOCUMENTS = [f"{number}: " + "a thin wire carries little, so say little. " * 40 for number in range(20)]


MARK = "STARTED_BY_TEST"
_Found = TypeVar("_Found")


def with_slow_steps(
    step_s: float = 0.0, *, slower_while: Path | None = None, held_at: Path | None = None
) -> dict[str, str]:
    """Return the environment in which replicas sleep at each step, and leave the cores to others meanwhile.

    Args:
        step_s: How long.
        slower_while: While there is such a file, they sleep for ten times as long.
        held_at: A file that holds the number of a step: while it is there, they do not begin this one unless their
            launcher stops the run, so that no run ends before a test has acted on it.
    """
    paths = [str(_SLOW_STEPS), *filter(None, [os.environ.get("PYTHONPATH")])]
    files = {"CHAOS_SLOWER_WHILE": slower_while, "CHAOS_HELD_AT": held_at}
    named = {name: str(path) for name, path in files.items() if path is not None}
    return {"CHAOS_STEP_S": str(step_s), "PYTHONPATH": os.pathsep.join(paths), **named}


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
        return marked(MARK, self.mark)

    def kill_family(self) -> None:
        """Kill all of it."""
        kill(self.family())

    def workers(self) -> list[psutil.Process]:
        return descendants(self.process.pid)

    def wait_for(self, path: Path) -> None:
        self.until(path.exists, path.name)

    def until(self, what: Callable[[], _Found], why: str) -> _Found:
        """Wait until something is there while the command runs, and return it."""

        def look() -> _Found:
            has_ended = self.process.poll() is not None
            found = what()
            assert found or not has_ended, f"ended before {why}: {self.process.communicate()}"
            return found

        return until(look, lambda: f"{why} never came")

    def wait_to_read(self, words: str) -> None:
        """Read what the command says to its terminal, until it has said some words."""
        assert self.process.stderr is not None
        end_s = time.monotonic() + DEADLINE_S
        while words not in self.stderr:
            assert select.select([self.process.stderr], [], [], end_s - time.monotonic())[0], f"it never said {words!r}"
            said = os.read(self.process.stderr.fileno(), 1 << 16).decode()
            assert said, f"ended before it said {words!r}: {self.stderr}"
            self.stderr += said

    def end(self) -> int:
        out, rest = self.process.communicate(timeout=DEADLINE_S)
        self.stdout, self.stderr = out or "", self.stderr + (rest or "")
        return self.process.returncode


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


def sent_in_rounds(run: Path) -> int:
    """Return payload bytes of rounds alone: how much measures the wire depends on how fast this machine is just now."""
    lines = map(json.loads, (run / "transfers-replica-0.jsonl").read_text().splitlines())
    return sum(one["payload_bytes"] for one in lines if (one["kind"], one["direction"]) == ("round", "sent"))


def worker_of(started: Started, number: int) -> psutil.Process:
    """Return the process of a replica, or of a rank of one, by its RANK."""

    def look() -> psutil.Process | None:
        found = (worker for worker in started.workers() if environment_of(worker).get("RANK") == str(number))
        return next(found, None)

    return started.until(look, f"rank {number}")
