"""A job of torchft's DiLoCo in the lab, with the same handles as `ChaosJob`, so that `Chaos` falls on it alike."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from chaos_job import Host, Life, _number_inside, _pids

from thinwire.lab import HostProcess, Lab, rank_environment

PORT = 29510
LIGHTHOUSE = str(Path(sys.executable).parent / "torchft_lighthouse")
_HERE = Path(__file__).parent
_MODULE = "torchft_diloco"


class TorchftJob:
    """A Lighthouse on the first host, a replica on each, and a supervisor for all of them, which is this process.

    What has ended is started again as soon as it is seen (`look`). Folders of hosts hold what `chaos_checks` reads.
    """

    def __init__(
        self, lab: Lab, folder: Path, *, step_s: float, setting: str, outer_steps: int, sync_interval: int
    ) -> None:
        self.lab = lab
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        self.hosts = [Host(number, folder / f"host-{number}") for number in range(lab.num_hosts)]
        for host in self.hosts:
            host.folder.mkdir(parents=True)
        self.starts: dict[str, int] = {"replica": 0, "lighthouse": 0}
        self._setting, self._outer_steps = setting, outer_steps
        self._lighthouse: HostProcess | None = None
        path = os.pathsep.join([str(_HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._environment = {
            "OMP_NUM_THREADS": "1", "CHAOS_STEP_S": str(step_s), "CHAOS_SYNC_INTERVAL": str(sync_interval),
            "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore",
        }  # fmt: skip

    def start(self) -> None:
        """Start the Lighthouse (its own time-outs: heartbeat 5 s, join 60 s, tick 100 ms) and all replicas."""
        self._start_lighthouse()
        for host in self.hosts:
            self._start_replica(host)

    def join(self, host: int) -> None:
        raise NotImplementedError("a supervisor starts what has ended; nobody joins by hand")

    def leave(self, replica: int) -> None:
        raise NotImplementedError("torchft's replicas have no word for leaving")

    def processes(self) -> dict[int, int]:
        """Return the replica processes by host, as this machine numbers them."""
        return {host.number: pid for host in self.hosts for pid in _pids(_MODULE, host.folder.resolve())[:1]}

    def coordinator(self) -> int | None:
        """Return the Lighthouse's process."""
        if self._lighthouse is None or self._lighthouse.exit_code is not None:
            return None
        return next(iter(_pids_of_script(LIGHTHOUSE, inside=self._lighthouse.pid)), None)

    def kill(self, host: int) -> None:
        self._signal(host, signal.SIGKILL)

    def stop(self, host: int) -> int | None:
        return self._signal(host, signal.SIGSTOP)

    def look(self) -> None:
        """Follow processes and logs, and start what has ended."""
        there, now_s = self.processes(), time.time()
        if self._lighthouse is None or self._lighthouse.exit_code is not None:
            self._start_lighthouse()
        for host in self.hosts:
            host.pid = there.get(host.number)
            self._read(host)
            if not host.is_running and not (host.folder / "summary.json").exists():
                life = host.lives[-1]
                life.ended_s, life.why = now_s, f"process ended ({host.launcher.exit_code if host.launcher else None})"
                self._start_replica(host)

    def _start_lighthouse(self) -> None:
        self.starts["lighthouse"] += 1
        words = [LIGHTHOUSE, "--bind", f"[::]:{PORT}", "--min_replicas", "2"]
        with (self.folder / "lighthouse.err").open("ab") as log:
            self._lighthouse = self.lab.start(words, host=0, environment=self._environment, stdout=log, stderr=log)

    def _start_replica(self, host: Host) -> None:
        replica, self.starts["replica"] = self.starts["replica"], self.starts["replica"] + 1
        host.lives.append(Life(host=host.number, began_s=time.time(), replica=replica))
        host.pid, host.log_bytes = None, 0
        words = [
            sys.executable, "-m", _MODULE, str(host.folder.resolve()), str(replica), str(host.number),
            str(len(self.hosts)), self.lab.address(host.number), f"http://{self.lab.address(0)}:{PORT}",
            str(self._outer_steps), self._setting,
        ]  # fmt: skip
        variables = {**rank_environment(host.number, self.lab.num_hosts), **self._environment}
        with (self.folder / f"host-{host.number}.err").open("ab") as log:
            host.launcher = self.lab.start(words, host=host.number, environment=variables, stdout=log, stderr=log)

    def _read(self, host: Host) -> None:
        life = host.lives[-1]
        path = host.folder / f"events-replica-{life.replica}.jsonl"
        if not path.exists() or path.stat().st_size == host.log_bytes:
            return
        with path.open("rb") as log:
            log.seek(host.log_bytes)
            new = log.read()
        new = new[: new.rfind(b"\n") + 1]
        host.log_bytes += len(new)
        for line in new.splitlines():
            take_event(life, json.loads(line))

    def _signal(self, host: int, number: int) -> int | None:
        pid = self.processes().get(host)
        if pid is not None:
            os.kill(pid, number)
        return pid


def take_event(life: Life, event: dict[str, object]) -> None:
    """Note what an event says of a life: it takes part from its first quorum without an error on."""
    if event["event"] == "quorum" and event["error"] is None and life.live_s is None:
        life.live_s = float(str(event["at_s"]))
    elif event["event"] == "joined":
        life.has_own = bool(event["step"])


def _pids_of_script(script: str, *, inside: int) -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                words = (path / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if script.encode() in words[:3] and _number_inside(int(path.name)) == inside:
                found.append(int(path.name))
    return found
