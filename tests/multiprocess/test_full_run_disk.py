"""The disk of the host that began an elastic run is full: nothing more is written, and the run goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_elastic_run import active, processes, runs, start, texts, wait_until
from training_runs import Started

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
    pid = int((run / "logs" / "replica-1.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    found = wait_until(run, lambda later: active(later) == {0, 2}, started)
    assert (run / "coordinator.jsonl").stat().st_size > size, "there is room for what must not be forgotten"
    processes(started, "thinwire.cli.coordinator")[0].kill()
    wait_until(run, lambda later: active(later) == {0, 2} and later["step"] > found["step"] + 8, started)
    theirs.unlink()
    found = wait_until(run, lambda later: later["step"] > found["step"] + 8, started)
    assert active(found) == {0, 2}
    started.wait_to_read(f"there is room on the disk of {run} again")
    started.process.send_signal(signal.SIGTERM)
    assert started.end() == 128 + signal.SIGTERM
    assert f"the disk of {run} is full" in started.stderr
