"""A run that finds its own fault and acts on it, with real processes: one is stopped, and another takes its place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from test_elastic_run import MOST_QUESTIONS, PAUSE_S, STEP_S, active, runs, start, status, texts, wait_until
from training_runs import Started, with_slow_steps

from thinwire.training.elastic.job import LocalSettings
from thinwire.training.elastic.remediation import read_pid

__all__ = ["runs", "texts"]
SOON_S = 120.0


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def first_done(run: Path) -> dict[str, Any]:
    """Wait for the first action that was more than to tell; nobody was sure enough before, where its beat was young."""
    for _ in range(MOST_QUESTIONS):
        actions = lines(run / "actions.jsonl")
        done = [one for one in actions if one["action"] != "warn"]
        if done:
            before = [one for one in actions[: actions.index(done[0])] if one["case"] == done[0]["case"]]
            assert all("not sure enough" in one["why"] for one in before), actions
            return done[0]
        found = status(run)  # takes as long as the machine is busy
        time.sleep(PAUSE_S)
    raise AssertionError(f"nothing was done: {actions}, {found}")


def test_a_replica_that_was_stopped_is_found_and_another_process_takes_its_place(
    texts: Path, tmp_path: Path, runs: list[Started]
) -> None:
    run = tmp_path / "run"
    started = start(runs, texts, run, steps=100_000, more=["--on-finding", "restart"])
    wait_until(run, lambda found: len(active(found)) == 2 and found["step"] > 20, started)
    pid = read_pid(run, 1)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    action = first_done(run)
    assert (action["action"], action["target"], action["dry_run"]) == ("restart", "1", False)
    findings = lines(run / "findings.jsonl")
    finding = next(one for one in findings if (one["case"], one["state"]) == (action["case"], "new"))
    assert (finding["finding"]["kind"], finding["finding"]["where"]) == ("non-communication hang", "rank 1")
    is_back: Callable[[dict[str, Any]], bool] = lambda found: active(found) == {0, 2}  # noqa: E731
    wait_until(run, is_back, started)
    started.process.send_signal(signal.SIGTERM)
    started.end()
    lost = json.loads((run / "downtime.json").read_text())
    assert lost["num_incidents"] == 1 and 0 < lost["total_s"] < lost["run_s"]
    assert f"{action['action']} replica 1" in started.stderr


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
        found = wait_until(run, lambda found: active(found) == {0, 1, 2}, started)
        wait_until(run, lambda later: later["step"] > found["step"] + 10, started)
        pid = read_pid(other, 2)
        assert pid is not None and read_pid(run, 2) is None
        os.kill(pid, signal.SIGSTOP)
        action = first_done(run)
        assert (action["action"], action["target"]) == ("restart", "2") and "replica 2 on" in action["result"]
        wait_until(run, lambda found: active(found) == {0, 1, 3}, started)
        assert joined.poll() is None and read_pid(other, 3) not in (None, pid) and not psutil.pid_exists(pid)
    finally:
        joined.send_signal(signal.SIGTERM)
        joined.communicate(timeout=SOON_S)


def test_a_spare_that_nobody_needs_ends_with_the_run(texts: Path, tmp_path: Path, runs: list[Started]) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    started = start(runs, texts, run, steps=120, replicas=1)
    wait_until(run, lambda found: active(found) == {0}, started)
    spare = join(run, other, "--spare")
    try:
        wait_until(run, lambda found: len(found["spares"]) == 1, started)
        started.end()
        _, told = spare.communicate(timeout=SOON_S)
        assert spare.returncode == 0 and "this spare was not needed" in told, told
    finally:
        spare.kill()
        spare.communicate(timeout=SOON_S)


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
        pid = read_pid(run, 1)
        assert pid is not None and not list(others[0].glob("logs/replica-*.pid"))
        os.kill(pid, signal.SIGSTOP)
        action = first_done(run)
        assert (action["action"], action["target"]) == ("replace", "1") and "takes its place" in action["result"]
        found = wait_until(run, lambda found: active(found) == {0, 2}, started)
        assert read_pid(others[0], 2) is not None and len(found["spares"]) == 1 and not psutil.pid_exists(pid)
        started.process.send_signal(signal.SIGTERM)
        started.end()
        lost = json.loads((run / "downtime.json").read_text())
        assert lost["num_incidents"] == 1 and 0 < lost["total_s"] < lost["run_s"]
    finally:
        for spare in spares:
            spare.send_signal(signal.SIGTERM)
        told = [spare.communicate(timeout=SOON_S)[1] for spare in spares]
    assert "as a spare" in told[1] and spares[1].returncode == 128 + signal.SIGTERM, told[1]
