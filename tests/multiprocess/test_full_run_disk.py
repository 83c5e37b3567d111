"""The disk of an elastic run's first host is full for a while: no process ends by it, and the run goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_processes import is_running, send, send_to_named
from test_elastic_run import active, pid_file, processes, rounds, runs, slower_file, start, status, texts, wait_until
from training_runs import Started

from thinwire.elastic.coordinator_client import send_command
from thinwire.elastic.invitation import read_invitation
from thinwire.errors import ConnectError
from thinwire.training.elastic.job import LocalSettings
from thinwire.transport.secret import read_secret

__all__ = ["runs", "texts"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Give a file system of its own that is soon full."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    path = folder / "of others"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 9, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\1" * size)
    return path


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_a_run_goes_on_while_its_disk_is_full_also_when_a_replica_and_the_coordinator_die_then(
    texts: Path, disk: Path, runs: list[Started]
) -> None:
    run = disk / "run"
    started = start(runs, texts, run, steps=100_000)
    found = wait_until(run, lambda found: len(active(found)) == 2 and found["step"] > 5, started)
    theirs = fill(disk)
    started.wait_to_read(f"the disk of {run} is full")
    found = wait_until(run, lambda later: later["step"] > found["step"] + 22, started)  # beyond a checkpoint
    size = (run / "coordinator.jsonl").stat().st_size
    send_to_named(pid_file(run, 1), signal.SIGKILL)
    # either of the two may have come first, and be number 0
    found = wait_until(run, lambda later: len(active(later)) == 2 and max(active(later)) == 2, started)
    left = active(found)
    assert (run / "coordinator.jsonl").stat().st_size > size, "there is room for what must not be forgotten"
    (coordinator,) = processes(started, "coordinator")
    assert send(coordinator, signal.SIGKILL)
    wait_until(run, lambda later: active(later) == left and later["step"] > found["step"] + 8, started)
    theirs.unlink()
    found = wait_until(run, lambda later: later["step"] > found["step"] + 8, started)
    assert active(found) == left
    started.wait_to_read(f"there is room on the disk of {run} again")
    started.process.send_signal(signal.SIGTERM)
    assert started.end() == 128 + signal.SIGTERM
    assert f"the disk of {run} is full" in started.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_a_full_disk_restarts_no_process_and_the_run_ends_as_it_would(
    texts: Path, disk: Path, runs: list[Started]
) -> None:
    run, output = disk / "run", disk / "output"
    steps = 96
    slower_file(run).touch()  # few steps pass before the disk is full
    started = start(runs, texts, run, steps=steps, output=output)
    found = wait_until(run, lambda found: len(active(found)) == 2 and found["step"] > 0, started)
    before = started.family()
    (coordinator,) = processes(started, "coordinator")
    journal = run / "coordinator.jsonl"
    os.truncate(journal, journal.stat().st_size)  # gives back the room that the journal has taken beforehand
    theirs = fill(disk)
    slower_file(run).unlink()
    found = wait_until(
        run, lambda later: any("decisions cannot be written" in text for text in later["findings"]), started
    )
    assert any("the disk of the first host's run folder" in text for text in found["findings"])
    assert found["step"] < steps and active(found) == {0, 1}, "a status is answered while decisions wait"
    size = journal.stat().st_size
    for _ in range(10):  # decisions that are not written are not sent, so no replica gets further than one interval
        later = status(run)
        time.sleep(0.3)  # of five intervals
    assert journal.stat().st_size < size + 4096 and later["rounds"] <= found["rounds"] + 4
    slower_file(run).touch()
    theirs.unlink()
    wait_until(run, lambda later: later["rounds"] > found["rounds"], started)
    assert is_running(coordinator) and all(map(is_running, before)), "no process has ended"
    slower_file(run).unlink()
    assert started.end() == 0, output.read_text()
    told = output.read_text()
    assert f"warning: the disk of {run} is full" in told and f"there is room on the disk of {run} again" in told
    assert "decisions cannot be written" in journal.read_text()
    assert "starting it again" not in told
    # replicas that end with different parameters write no summary
    summary = json.loads((run / "summary.json").read_text())
    assert json.loads(told.splitlines()[-1]) == summary
    assert summary["steps"] == steps and summary["elastic"]["replicas_ever"] == 2
    for replica in (0, 1):
        applied = rounds(run, replica)
        assert len({one["round"] for one in applied}) == len(applied)
    crcs = [{one["round"]: one["crc"] for one in rounds(run, replica)} for replica in (0, 1)]
    assert crcs[0] == crcs[1] and len(crcs[0]) > steps // 10, "no line was lost, and both applied the same rounds"


def test_processes_whose_logs_take_nothing_train_to_the_end(texts: Path, tmp_path: Path, runs: list[Started]) -> None:
    run, logs = tmp_path / "run", tmp_path / "logs"
    logs.mkdir()
    for name in ("coordinator", "replica-process-0", "replica-process-1", "spare"):
        (logs / f"{name}.err").symlink_to("/dev/full")
    run.mkdir()
    (run / "logs").symlink_to(logs)  # a folder would be cleared at the start
    started = start(runs, texts, run, steps=40)
    wait_until(run, lambda found: found["step"] > 5, started)
    settings = LocalSettings.load(run)
    with pytest.raises(ConnectError):  # what is no command is not answered, and the coordinator logs it
        send_command(
            read_invitation(settings.invitation), secret=read_secret(Path(settings.secret)), deadline_s=1, verb="dance",
            target="",
        )  # fmt: skip
    send_to_named(pid_file(run, 1), signal.SIGKILL)  # a spare takes its place
    assert started.end() == 0, started.stderr
    assert started.stderr.count("starting it again") == 1 and "replica-process 1 was ended by SIGKILL" in started.stderr
    assert json.loads((run / "summary.json").read_text())["steps"] == 40
