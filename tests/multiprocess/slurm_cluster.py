"""A Slurm cluster of one node on this machine, with daemons, ports and keys of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from processes import free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
_CONFIG = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Return why no cluster can run here; empty where it can."""
    missing = [name for name in (*DAEMONS, "srun") if shutil.which(name, path=_path()) is None]
    if missing:
        return f"{', '.join(missing)} not installed (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "slurmd needs root"


@contextlib.contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Run a cluster for as long as the block lasts, and yield the environment in which its commands find it."""
    # munged refuses a folder that others can write to, and a long path for its socket
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/var/tmp"))
    folder.chmod(0o711)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "munge.key").chmod(0o600)
    ports = {"controller_port": free_port(), "node_port": free_port()}
    (folder / "slurm.conf").write_text(_CONFIG.format(host=socket.gethostname(), folder=folder, **ports))
    munge = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
    words = [f"--{option}={folder}/munge.{name}" for option, name in munge.items()]
    try:
        for command in (["munged", "--force", *words], ["slurmctld"], ["slurmd"]):
            # they go into the background by themselves, and keep no pipe of ours open
            subprocess.run(command, env=environment, check=True, timeout=60, stdout=subprocess.DEVNULL)
        _wait_for_node(environment)
        yield environment
    finally:
        subprocess.run(["scancel", "--full", "--user=root"], env=environment, check=False, timeout=60)
        for name in ("slurmd", "slurmctld", "munge"):
            _end(folder / f"{name}.pid")
        shutil.rmtree(folder, ignore_errors=True)


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _wait_for_node(environment: dict[str, str]) -> None:
    end = time.monotonic() + 60
    state = ""
    while time.monotonic() < end:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%t"], env=environment, capture_output=True, text=True, check=False
        )
        state = done.stdout.strip() or done.stderr
        if state == "idle":
            return
        time.sleep(0.1)
    raise AssertionError(f"the node did not become idle: {state}")


def _end(pid_file: Path) -> None:
    """End a daemon by the number that it wrote down, and wait until it is gone."""
    try:
        pid = int(pid_file.read_text())
    except (OSError, ValueError):
        return
    end = time.monotonic() + 10
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        while time.monotonic() < end:
            os.kill(pid, 0)
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
