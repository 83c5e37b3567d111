"""A run that finds its own fault and acts on it, with real processes: one is stopped, and another takes its place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from live_processes import process_in, send
from test_elastic_run import STEP_S, active, runs, slower_file, start, texts, wait_until
from training_runs import DEADLINE_S, Started, with_slow_steps

from thinwire.training.elastic.job import LocalSettings
from thinwire.training.elastic.remediation import read_pid

__all__ = ["runs", "texts"]


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def stop_newest(run: Path, started: Started, *, count: int, folder: Path) -> int:
    """Stop the replica with the highest number among so many, which lives on the host of a folder; return its number.

    On a busy machine it may be taken for lost before the signal comes: then it is the one in its place that is stopped.
    """
    while True:
        number = max(active(wait_until(run, lambda found: len(active(found)) == count, started)))
        process = process_in(folder / "logs" / f"replica-{number}.pid")
        if process is not None and send(process, signal.SIGSTOP):
            return number


def first_done(run: Path, started: Started, number: int) -> dict[str, Any]:
    """Wait for the first action on a replica that was more than to tell.

    Nobody was sure enough before, where its beat was young.
    """

    def done() -> list[dict[str, Any]]:
        return [one for one in lines(run / "actions.jsonl") if one["action"] != "warn" and one["target"] == str(number)]

    first = started.until(done, "an action")[0]
    actions = lines(run / "actions.jsonl")
    before = [one for one in actions[: actions.index(first)] if one["case"] == first["case"]]
    assert all("not sure enough" in one["why"] for one in before), actions
    return first


def is_replaced(number: int, count: int) -> Callable[[dict[str, Any]], bool]:
    """Return what tells whether so many replicas train and a stopped one is not among them."""
    return lambda found: len(active(found)) == count and max(active(found)) > number not in active(found)


def test_a_replica_that_was_stopped_is_found_and_another_process_takes_its_place(
    texts: Path, tmp_path: Path, runs: list[Started]
) -> None:
    run = tmp_path / "run"
    started = start(runs, texts, run, steps=100_000, more=["--on-finding", "restart"])
    wait_until(run, lambda found: len(active(found)) == 2 and found["step"] > 20, started)
    number = stop_newest(run, started, count=2, folder=run)
    action = first_done(run, started, number)
    assert (action["action"], action["dry_run"]) == ("restart", False)
    findings = lines(run / "findings.jsonl")
    finding = next(one for one in findings if (one["case"], one["state"]) == (action["case"], "new"))
    assert (finding["finding"]["kind"], finding["finding"]["where"]) == ("non-communication hang", f"rank {number}")
    wait_until(run, is_replaced(number, 2), started)
    started.process.send_signal(signal.SIGTERM)
    started.end()
    lost = json.loads((run / "downtime.json").read_text())
    assert lost["num_incidents"] == number and 0 < lost["total_s"] < lost["run_s"]
    assert f"{action['action']} replica {number}" in started.stderr


def join(run: Path, other: Path, *more: str) -> subprocess.Popen[str]:
    """Add a host: a folder of its own, and a launcher of its own."""
    settings = LocalSettings.load(run)
    words = [settings.invitation, "--secret", settings.secret, "--out", str(other), "--threads", "1"]
    words += ["--data", str(settings.data), *more]
    return subprocess.Popen(
        [sys.executable, "-m", "thinwire.cli.main", "join", *words],
        stderr=subprocess.PIPE, text=True, env={**os.environ, **with_slow_steps(STEP_S)},
    )  # fmt: skip


def test_the_first_host_also_restarts_a_process_of_another_one(
    texts: Path, tmp_path: Path, runs: list[Started]
) -> None:  # fmt: skip
    run, other = tmp_path / "run", tmp_path / "other"
    started = start(runs, texts, run, steps=100_000, more=["--on-finding", "restart"])
    wait_until(run, lambda found: len(active(found)) == 2, started)
    joined = join(run, other)
    try:
        found = wait_until(run, lambda found: len(active(found)) == 3, started)
        wait_until(run, lambda later: later["step"] > found["step"] + 10, started)
        number = stop_newest(run, started, count=3, folder=other)
        stopped = process_in(other / "logs" / f"replica-{number}.pid")
        assert read_pid(run, number) is None
        action = first_done(run, started, number)
        assert action["action"] == "restart" and f"replica {number} on" in action["result"]
        back = max(active(wait_until(run, is_replaced(number, 3), started)))
        assert joined.poll() is None and read_pid(other, back) is not None
        assert stopped is None or not stopped.is_running()
    finally:
        joined.send_signal(signal.SIGTERM)
        joined.communicate(timeout=DEADLINE_S)


def test_a_spare_that_nobody_needs_ends_with_the_run(texts: Path, tmp_path: Path, runs: list[Started]) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    slower_file(run).touch()
    started = start(runs, texts, run, steps=20, replicas=1)
    wait_until(run, lambda found: active(found) == {0}, started)
    spare = join(run, other, "--spare")
    try:
        wait_until(run, lambda found: len(found["spares"]) == 1, started)
        slower_file(run).unlink()
        started.end()
        _, told = spare.communicate(timeout=DEADLINE_S)
        assert spare.returncode == 0 and "this spare was not needed" in told, told
    finally:
        spare.kill()
        spare.communicate(timeout=DEADLINE_S)


def test_a_spare_host_takes_the_place_of_a_replica_that_was_stopped_and_others_end_with_the_run(
    texts: Path, tmp_path: Path, runs: list[Started]
) -> None:
    run, others = tmp_path / "run", [tmp_path / name for name in ("first", "second")]
    started = start(runs, texts, run, steps=100_000, more=["--on-finding", "replace"])
    wait_until(run, lambda found: active(found) == {0, 1} and found["step"] > 20, started)
    spares: list[subprocess.Popen[str]] = []
    try:
        for number, other in enumerate(others):
            spares.append(join(run, other, "--spare"))
            wait_until(run, lambda found, count=number + 1: len(found["spares"]) == count, started)
        assert not list(others[0].glob("logs/replica-*.pid"))
        number = stop_newest(run, started, count=2, folder=run)
        stopped = process_in(run / "logs" / f"replica-{number}.pid")
        action = first_done(run, started, number)
        assert action["action"] == "replace" and "takes its place" in action["result"]
        found = wait_until(run, is_replaced(number, 2), started)
        assert read_pid(others[0], max(active(found))) is not None and len(found["spares"]) == 1
        assert stopped is None or not stopped.is_running()
        started.process.send_signal(signal.SIGTERM)
        started.end()
        lost = json.loads((run / "downtime.json").read_text())
        assert lost["num_incidents"] == number and 0 < lost["total_s"] < lost["run_s"]
    finally:
        for spare in spares:
            spare.send_signal(signal.SIGTERM)
        told = [spare.communicate(timeout=DEADLINE_S)[1] for spare in spares]
    assert "as a spare" in told[1] and spares[1].returncode == 128 + signal.SIGTERM, told[1]
