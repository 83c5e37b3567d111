"""A run that torchrun started is judged too, by a process that is not stopped with a rank."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live_processes import until
from processes import free_port
from training_runs import DEADLINE_S, DOCUMENTS, OPTIONS, Started

from thinwire.cli import run_watchdog
from thinwire.cli.run_watchdog import watchdog_process
from thinwire.monitor.live_diagnosis import LOOK_S
from thinwire.runlog.records import Beat, Communicator, header_line, to_line
from thinwire.training.config import TrainConfig


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Started]]:
    """Two ranks of one host that train for long, started as torchrun starts them."""
    (tmp_path / "data.txt").write_text("\n".join(DOCUMENTS))
    port = free_port()
    words = [*OPTIONS, "--data", str(tmp_path / "data.txt"), "--steps", "100000", "--out", str(tmp_path / "run")]
    started = [
        Started(words, environment={
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        })
        for rank in range(2)
    ]  # fmt: skip
    yield started
    for one in started:
        one.kill_family()
        one.process.communicate()


def test_the_terminal_of_a_host_says_that_its_own_first_rank_has_stopped(ranks: list[Started], tmp_path: Path) -> None:
    first = ranks[0]
    records, until_s = tmp_path / "run" / "records-rank-0.jsonl", time.monotonic() + DEADLINE_S
    for path in (records, records.with_name("records-rank-1.jsonl")):  # either may come first
        first.wait_for(path)
    while records.read_text().count('"record":"operation"') < 20:
        assert time.monotonic() < until_s, "the ranks do not exchange"
        time.sleep(0.1)
    os.kill(first.process.pid, signal.SIGSTOP)
    assert first.process.stderr is not None
    line = ""
    while "finding: non-communication hang: rank 0" not in line:  # the test's own deadline ends a wait in vain
        line = first.process.stderr.readline()
        assert line, "the judge has ended"
    assert '"where":"rank 0"' in (tmp_path / "run" / "findings.jsonl").read_text()
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    until(lambda: not first.family(), first.family)  # what was started beside it ends with it


def _is_judging(pid: int) -> bool:
    """Tell whether the judge's own thread runs, which has a lower priority than all others."""
    with contextlib.suppress(OSError):  # a thread has just ended, or the process
        tasks = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
        return any(os.getpriority(os.PRIO_PROCESS, task) > os.getpriority(os.PRIO_PROCESS, pid) for task in tasks)
    return False


def _write_ranks(folder: Path) -> None:
    """Write what three ranks wrote, of which rank 1 has stopped."""
    where = Communicator(communicator="rounds", ranks=(0, 1, 2), hosts=("a",) * 3, clocks=("c",) * 3)
    for rank, end_s in enumerate((30, 10, 30)):
        beats = [Beat(rank=rank, at_s=half / 2) for half in range(2 * end_s)]
        lines = [header_line(), *map(to_line, [where, *beats])]
        (folder / f"records-rank-{rank}.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("rank", [0, 1])
def test_of_hosts_that_share_a_folder_one_judges(tmp_path: Path, rank: int) -> None:
    line = [sys.executable, "-m", "thinwire.cli.processes", "watchdog", str(tmp_path), str(rank), str(os.getpid())]
    told, until_s = tmp_path / "findings.jsonl", time.monotonic() + DEADLINE_S

    def wait_until(what: Callable[[], bool]) -> None:
        while not what():
            assert time.monotonic() < until_s and process.poll() is None
            time.sleep(0.05)

    with subprocess.Popen(line, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: _is_judging(process.pid))  # what is there before is of an earlier part of the run
        _write_ranks(tmp_path)
        if rank != 0:
            time.sleep(4 * LOOK_S)  # it could have told in half of that
            assert not told.exists()
            (tmp_path / "records-rank-0.jsonl").unlink()  # a folder of its own, without the first host's records
        wait_until(told.exists)
        assert process.stdin is not None and process.stderr is not None
        process.stdin.close()
        assert process.wait(DEADLINE_S) == 0
        said = process.stderr.read()
    assert "finding: non-communication hang: rank 1" in said and "non-communication hang: rank 1; not over" in said


def test_a_folder_that_the_ranks_make_later_is_no_fault_of_the_diagnosis(tmp_path: Path) -> None:
    run = tmp_path / "run"
    line = [sys.executable, "-m", "thinwire.cli.processes", "watchdog", str(run), "1", str(os.getpid())]
    until_s = time.monotonic() + DEADLINE_S
    with subprocess.Popen(line, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not _is_judging(process.pid):
            assert time.monotonic() < until_s and process.poll() is None
            time.sleep(0.05)
        time.sleep(4 * LOOK_S)  # it looks at a folder that is not there, as on every host but the first
        run.mkdir()
        _write_ranks(run)
        (run / "records-rank-0.jsonl").unlink()
        while not (run / "findings.jsonl").exists():
            assert time.monotonic() < until_s and process.poll() is None
            time.sleep(0.05)
        assert process.stdin is not None and process.stderr is not None
        process.stdin.close()
        assert process.wait(DEADLINE_S) == 0
        said = process.stderr.read()
    assert "finding: non-communication hang: rank 1" in said
    assert "warning" not in said


@pytest.mark.parametrize(("local_rank", "on_finding"), [("1", "warn"), ("0", "off")])
def test_other_ranks_of_a_host_and_runs_that_are_not_judged_start_nothing(
    monkeypatch: pytest.MonkeyPatch, local_rank: str, on_finding: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(run_watchdog.subprocess, "Popen", None)
    with watchdog_process(TrainConfig.of(on_finding=on_finding)):
        pass


def test_a_judge_that_cannot_be_started_is_told_and_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*unused: object, **also: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(run_watchdog.subprocess, "Popen", refuse)
    with watchdog_process(TrainConfig.of(out="runs/x")):
        pass
    assert "the run is not diagnosed while it trains: Cannot allocate memory" in capsys.readouterr().err
