"""An elastic run in the lab: its hosts, the processes on them, and what they write down."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.lab import HostProcess, Lab

PORT = 4000
# All that take part have come to the end of the run so soon after the first has.
_LATE_S = 20.0
_HERE = Path(__file__).parent
_REPLICAS = ("elastic-replica", "standby-replica")
_COORDINATOR = "coordinator"


@dataclass(slots=True)
class Life:
    """One stay of a replica, which began with its process or with its joining again; in seconds of the clock."""

    host: int
    began_s: float
    replica: int | None = None
    live_s: float | None = None
    ended_s: float | None = None
    state_bytes: int = 0
    stopped_s: float = 0.0
    has_own: bool = False
    why: str = ""
    is_ahead: bool = False  # its log was read before its process was seen


@dataclass(slots=True)
class Host:
    number: int
    folder: Path
    launcher: HostProcess | None = None
    pid: int | None = None
    log_bytes: int = 0
    lives: list[Life] = field(default_factory=list)

    @property
    def is_running(self) -> bool:
        return self.launcher is not None and self.launcher.exit_code is None


class ChaosJob:
    """Starts hosts' parts in a run, finds their processes, and follows their logs."""

    def __init__(self, lab: Lab, folder: Path, *, step_s: float, words: list[str]) -> None:
        self.lab = lab
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.hosts = [Host(number, folder / f"host-{number}") for number in range(lab.num_hosts)]
        self._words = words
        self._environment = {
            "OMP_NUM_THREADS": "1", "CHAOS_STEP_S": str(step_s), "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(_HERE / "slow_steps"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }  # fmt: skip

    def start_first(self) -> None:
        out = self.hosts[0].folder
        words = ["train", "--elastic", "--address", self.lab.address(0), "--port", str(PORT), "--out", str(out)]
        self._start(0, [*words, *self._words])
        until_s = time.monotonic() + 120
        while not (out / "coordinator.json").exists():
            if time.monotonic() > until_s or not self.hosts[0].is_running:
                raise RuntimeError(f"the first host did not start; see {self.folder}")
            time.sleep(0.1)

    def join(self, host: int) -> None:
        at = self._words.index("--data") if "--data" in self._words else len(self._words)
        # all hosts of a lab see the same files, and each says so itself
        self._start(host, ["join", *self._whither(), *self._words[at : at + 2], "--out", str(self.hosts[host].folder)])

    def end_late(self, *, since_s: float, now_s: float) -> None:
        """End hosts that joined when the run was nearly over: nobody is there any more who would let them in."""
        late = [host for host in self.hosts if host.is_running and host.lives and host.lives[-1].live_s is None]
        for host in late if now_s - since_s > _LATE_S else []:
            assert host.launcher is not None
            host.launcher.terminate()

    def leave(self, replica: int) -> None:
        self._run(0, ["leave", *self._whither(), "--replica", str(replica)])

    def _whither(self) -> list[str]:
        # the first host's own address, which names the coordinator's key
        settings = json.loads((self.hosts[0].folder / "elastic.json").read_text())
        return [settings["invitation"], "--secret", settings["secret"]]

    def _start(self, host: int, words: list[str]) -> None:
        self.hosts[host].launcher = self._run(host, words)

    def _run(self, host: int, words: list[str]) -> HostProcess:
        with (self.folder / f"host-{host}.err").open("ab") as log:
            command = [sys.executable, "-m", "thinwire.cli.main", *words]
            return self.lab.start(command, host=host, environment=self._environment, stdout=log, stderr=log)

    def processes(self) -> dict[int, int]:
        """Return the replica processes by host, as this machine numbers them."""
        found = {}
        for host in self.hosts:
            path = host.folder / "logs" / "replica-process-0.pid"
            inside = int(path.read_text()) if path.exists() else 0
            for pid in [pid for kind in _REPLICAS for pid in _pids(kind, host.folder)]:
                if _number_inside(pid) == inside:  # the others wait for its place
                    found[host.number] = pid
        return found

    def coordinator(self) -> int | None:
        return next(iter(_pids(_COORDINATOR, self.hosts[0].folder)), None)

    def look(self) -> None:
        """Follow processes and logs."""
        there, now_s = self.processes(), time.time()
        for host in self.hosts:
            pid = there.get(host.number)
            if pid != host.pid:
                self._read_log(host, now_s)
                host.pid = pid
                if host.lives and host.lives[-1].is_ahead:
                    host.lives[-1].is_ahead = False
                    continue
                self._end(host, now_s, why="process ended")
                if pid is not None:
                    host.lives.append(Life(host=host.number, began_s=now_s))
            self._read_log(host, now_s)

    def _end(self, host: Host, now_s: float, *, why: str) -> None:
        if host.lives and host.lives[-1].ended_s is None:
            host.lives[-1].ended_s, host.lives[-1].why = now_s, why

    def _read_log(self, host: Host, now_s: float) -> None:
        path = host.folder / "logs" / "replica-process-0.err"
        if not host.lives:  # its lines belong to the life that is noticed next
            return
        if not path.exists() or path.stat().st_size == host.log_bytes:
            return
        with path.open("rb") as log:
            log.seek(host.log_bytes)
            new = log.read()
        new = new[: new.rfind(b"\n") + 1]
        host.log_bytes += len(new)
        for line in new.decode(errors="replace").splitlines():
            self._take_line(host, line, now_s)

    def _take_line(self, host: Host, line: str, now_s: float) -> None:
        life = host.lives[-1]
        is_begin = "going on from its own state" in line or "takes part from step" in line
        if is_begin and life.live_s is not None:  # of a process that has taken this one's place
            self._end(host, now_s, why="process ended")
            host.lives.append(life := Life(host=host.number, began_s=now_s, is_ahead=True))
        if found := re.search(r"fetched the state of step \d+ \((\d+) bytes\)", line):
            life.state_bytes = int(found[1])
        elif "going on from its own state" in line:
            life.has_own = True
        elif found := re.search(r"replica (\d+) takes part from step", line):
            life.replica, life.live_s = int(found[1]), now_s
        elif "joins again" in line or "joining again" in line:
            self._end(host, now_s, why=line[9:])
            host.lives.append(Life(host=host.number, began_s=now_s))

    def kill(self, host: int) -> None:
        self._signal(host, signal.SIGKILL)

    def stop(self, host: int) -> int | None:
        return self._signal(host, signal.SIGSTOP)

    @contextlib.contextmanager
    def stopped(self, host: int) -> Iterator[None]:
        """Stop a host's replica for as long as a block lasts."""
        pid = self.stop(host)
        try:
            yield
        finally:
            if pid is not None:
                os.kill(pid, signal.SIGCONT)

    def _signal(self, host: int, number: int) -> int | None:
        pid = self.processes().get(host)
        if pid is not None:
            os.kill(pid, number)
        return pid


def _number_inside(pid: int) -> int:
    """Return a process's number in the lab's own process namespace."""
    try:
        return int(re.findall(r"^NSpid:.*\s(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[0])
    except OSError:
        return -1


def _pids(kind: str, folder: Path) -> list[int]:
    found = []
    wanted = [b"-m", b"thinwire.cli.processes", kind.encode(), str(folder.resolve()).encode()]
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                words = (path / "cmdline").read_bytes().split(b"\0")
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if words[1:5] == wanted and state != "Z":
                found.append(int(path.name))
    return sorted(found)
