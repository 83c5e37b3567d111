"""The launcher of replicas on one machine: whom it blames, and what it leaves."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from live_processes import until

from thinwire.errors import WorkerFailed
from thinwire.training.config import TrainConfig, resolve
from thinwire.training.launch import launch

REPLICA = """
import os, signal, sys, time
from pathlib import Path

run, rank = Path(sys.argv[1]), os.environ["RANK"]
folder = Path(os.environ["THINWIRE_RENDEZVOUS_FILE"]).parent
seen = run / f"partial-{rank}"
seen.write_text(f"{folder.stat().st_mode & 0o777:o} {folder} {os.getpid()}")
seen.rename(run / f"seen-{rank}")
if rank == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
other = run / "seen-1"
while not other.exists():
    time.sleep(0.01)
while " T " not in Path(f"/proc/{other.read_text().split()[2]}/stat").read_text():
    time.sleep(0.01)
sys.exit(5)
"""


def test_a_replica_that_the_launcher_has_to_kill_is_not_blamed_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stopping_replica.py").write_text(REPLICA)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    run = tmp_path / "run"
    run.mkdir()
    config = resolve(TrainConfig.of(replicas=2, out=run), world_size=None, cores=2, home=tmp_path)
    monkeypatch.setattr("thinwire.training.launch._STOP_S", 2.0)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    with pytest.raises(WorkerFailed, match=r"^replica 0 ended with exit code 5; see .*replica-0\.err$"):
        launch(config, module="stopping_replica", is_resumed=False)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == handlers
    for rank in (0, 1):
        mode, folder, pid = (run / f"seen-{rank}").read_text().split()
        assert mode == "700" and not Path(folder).exists()
        # the process that the tests fork from reaps it a moment after its end was reported
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), lambda: "a replica is left")  # type: ignore[misc]
