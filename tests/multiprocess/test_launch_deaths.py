"""Reasons that a local run gives when replicas end: the root cause first, never a replica that the launcher stopped."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from thinwire.errors import WorkerFailed
from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.detect.hangs import HANGS
from thinwire.monitor.findings import Finding
from thinwire.runlog.run_folder import read_files
from thinwire.training.config import TrainConfig
from thinwire.training.launch import launch

pytestmark = pytest.mark.multiprocess

# Rank 1 breaks in one of the ways below; rank 0 loses it, says so and ends, as a replica of a run does.
REPLICA = """
import os, pathlib, signal, sys, time
import psutil
from thinwire.errors import PeerLost
from thinwire.training.launch import write_failure_report
from thinwire.recording.recorder import Recorder
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
recorder = Recorder(folder, rank=rank)
time.sleep(1.2)
mine = folder / f"pid-{rank}"
mine.with_suffix(".partial").write_text(str(os.getpid()))
mine.with_suffix(".partial").rename(mine)
while not (folder / "pid-1").exists():
    time.sleep(0.05)
if rank == 1:
    BREAK
if rank == 0:
    WAIT
    write_failure_report(folder, 0, PeerLost("replica 1 (rank 1) was lost"))
    recorder.close()
    sys.exit(1)
while True:
    time.sleep(1)
"""
STOPPED = "os.kill(os.getpid(), signal.SIGSTOP)"
UNTIL_STOPPED = """\
other = psutil.Process(int((folder / "pid-1").read_text()))
    while other.status() != psutil.STATUS_STOPPED:
        time.sleep(0.05)
    time.sleep(SILENCE)"""
DEAF = "signal.signal(signal.SIGUSR1, signal.SIG_IGN); (folder / 'deaf').touch()"
UNTIL_DEAF = "while not (folder / 'deaf').exists(): time.sleep(0.05)"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
UNTIL_KILLED = "time.sleep(600)"
STOP_S = 4.0  # from the launcher's signal to SIGKILL


def _end(folder: Path, monkeypatch: pytest.MonkeyPatch, *, broken: str, wait: str) -> tuple[str, list[Finding]]:
    """Run three replicas until they have ended; return the launcher's reason, and what the records tell."""
    wait = wait.replace("SILENCE", str(HANGS.silence_s + 1))
    (folder / "replica_that_breaks.py").write_text(REPLICA.replace("BREAK", broken).replace("WAIT", wait))
    monkeypatch.setattr("thinwire.training.launch._STOP_S", STOP_S)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    config = TrainConfig.of(replicas=3, out=folder / "run")
    (folder / "run").mkdir()
    with pytest.raises(WorkerFailed) as failed:
        launch(config, module="replica_that_breaks", is_resumed=False)
    return str(failed.value), diagnose(read_files([folder / "run"]))


def test_a_paused_replica_that_the_launcher_killed_is_named_as_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason, findings = _end(tmp_path, monkeypatch, broken=STOPPED, wait=UNTIL_STOPPED)
    told = re.fullmatch(r"replica 1 was silent for (\d+) s; stopped by the launcher; replica 0: (.*)", reason)
    assert told and int(told[1]) >= STOP_S + HANGS.silence_s and told[2] == "replica 1 (rank 1) was lost", reason
    (finding,) = findings
    assert finding.where == "rank 1"
    assert re.fullmatch(r"Rank 1 was silent for \d+ s; stopped by the launcher\.", finding.text), finding.text


def test_a_live_replica_that_the_launcher_had_to_kill_is_not_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason, findings = _end(tmp_path, monkeypatch, broken=DEAF, wait=UNTIL_DEAF)
    assert reason == "replica 0: replica 1 (rank 1) was lost"
    assert findings == []


def test_a_replica_that_somebody_killed_is_named_with_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason, findings = _end(tmp_path, monkeypatch, broken=KILLED, wait=UNTIL_KILLED)
    assert reason.startswith("replica 1 was ended by SIGKILL (by hand, or because the system ran out of memory)")
    (finding,) = findings
    assert finding.where == "rank 1" and finding.text == "Rank 1 was ended by SIGKILL."
