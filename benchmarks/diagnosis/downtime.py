"""What share of its time a run loses to faults, with diagnosis and steering and without, in C4's four rows.

    python benchmarks/diagnosis/downtime.py --minutes 30 --seed 0 --write

Four runs of three replicas each on this machine at the same time, so that what else the machine does meets them alike:
elastic with `--on-finding restart` and with `off`, and of a fixed number of replicas with `abort` and with `off`. The
same faults meet all at the same seconds: one replica's process is stopped (SIGSTOP, a hang) or killed. A run of a fixed
number that ended is resumed at once. Where nothing is diagnosed an elastic run's stopped process is killed `--person-s`
later, as by somebody who has looked; its launcher then starts another. Steps sleep, so that twelve replicas fit on two
cores.

Rows are seconds weighted by the part of the replicas that stood still: work done again or never counted (since the last
mean that the replica was in, or since the checkpoint); from the fault to the finding, or to when the replica was let go
or the run ended; from there to what was done about it; from there until a mean has it (or its successor) again, or the
first new step is told.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import steering

from thinwire.runlog.downtime import Downtime, Incident, account
from thinwire.training.elastic.remediation import read_pid

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "downtime.jsonl"
REPLICAS, LOOK_S, FIRST_S, MOST_S = 3, 0.25, 90.0, 400.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens when, and to which of the replicas that then take part."""

    at_s: float
    kind: str
    victim: int


def faults(seed: int, *, minutes: float, every_s: float) -> list[Fault]:
    """Return the faults of a run: two hangs for each kill."""
    draw, found, at_s = random.Random(seed), [], FIRST_S
    while at_s < 60 * minutes - 60:
        found.append(Fault(round(at_s, 1), ("stop", "kill", "stop")[len(found) % 3], draw.randrange(REPLICAS)))
        at_s += every_s * draw.uniform(0.8, 1.2)
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    """Return what a file that grows holds by now."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class Run:
    """One of the four runs; a thread each waits for its incidents to end."""

    def __init__(self, folder: Path, action: str, options: argparse.Namespace) -> None:
        self.out = folder / f"{type(self).__name__.lower()}-{action}"
        self.action, self.options = action, options
        self.incidents: list[dict[str, Any]] = []
        self.began_s, self.stop_s = 0.0, math.inf
        self._log = (folder / f"{self.out.name}.log").open("w")
        self.process = self._start(self.words())

    def words(self) -> list[str]:
        raise NotImplementedError

    def is_whole(self) -> bool:
        """Whether all replicas train."""
        raise NotImplementedError

    def strike(self, fault: Fault) -> None:
        """Let a fault happen, and note what becomes of it."""
        raise NotImplementedError

    def _start(self, words: list[str]) -> subprocess.Popen[str]:
        paths = [str(HERE / "slow_steps"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "LAB_STEP_FILE": str(self.options.step_file),
            "PYTHONPATH": os.pathsep.join(paths),
        }  # fmt: skip
        command = [sys.executable, "-m", "thinwire.cli.main", "train", *words]
        return subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environment, text=True)

    def shared_words(self) -> list[str]:
        return [
            "--replicas", str(REPLICAS), "--steps", "1000000", "--out", str(self.out), "--batch-size", "1", "--seq-len",
            "32", "--sync-interval", "15", "--overlap-steps", "3", "--threads", "1", "--eval-every", "0", "--log-every",
            "1", "--eval-batches", "1", "--final-eval-batches", "1", "--on-finding", self.action, "--quiet",
        ]  # fmt: skip

    def wait(self, what: Callable[[], Any], *, most_s: float = MOST_S) -> float:
        """Return when something came to be; when the time was over, if it did not before."""
        until_s = min(time.time() + most_s, self.stop_s)
        while time.time() < until_s and not what():
            time.sleep(LOOK_S)
        return min(time.time(), self.stop_s)

    @property
    def is_over(self) -> bool:
        """Whether the run's time is."""
        return time.time() >= self.stop_s

    def found(self, since_s: float) -> float | None:
        """Return when the run itself told a hang or an end since then."""
        told = lines(self.out / "findings.jsonl")
        return next((one["at"] for one in told if one["at"] > since_s and "hang" in one["finding"]["kind"]), None)

    def note(self, fault: Fault, incident: Incident) -> None:
        """Take an incident in that is over."""
        row = {**asdict(fault), **{name: getattr(incident, name) for name in incident.__slots__}}
        self.incidents.append({"incident": incident, "row": row})
        print(json.dumps({"run": self.out.name, **row}), flush=True)

    def downtime(self) -> Downtime:
        """Return what was lost."""
        incidents = [one["incident"] for one in self.incidents]
        return account(incidents, run_s=self.stop_s - self.began_s, end_s=self.stop_s)

    def kill_all(self) -> None:
        """Leave no process behind."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.kill()
        self.process.wait()
        self._log.close()


class Elastic(Run):
    """Goes on without those that are gone."""

    def words(self) -> list[str]:
        more = ["--elastic", "--port", "0", "--address", "127.0.0.1", "--checkpoint-every", "0"]
        return [*self.shared_words(), *more]

    def active(self) -> set[int]:
        return steering.Play(self.out, self.process).active()

    def is_whole(self) -> bool:
        return len(self.active()) == REPLICAS

    def strike(self, fault: Fault) -> None:
        active = sorted(self.active())
        victim = active[fault.victim % len(active)]
        pid = read_pid(self.out, victim)
        assert pid is not None
        last_s = max((one["at_s"] for one in self._rounds(victim)), default=time.time())
        struck_s = time.time()
        os.kill(pid, signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)
        gone_s = self.wait(lambda: self.found(struck_s) or victim not in self.active())
        told_s = self.found(struck_s)
        acted_s = found_s = min(gone_s, told_s or gone_s)
        if fault.kind == "stop":
            person_s = max(0.0, struck_s + self.options.person_s - time.time())
            acted_s = self.wait(lambda: not psutil.pid_exists(pid), most_s=person_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        back_s = self.wait(lambda: self._has_successor(struck_s, active))
        self.note(fault, Incident(
            since_s=struck_s, found_s=found_s, acted_s=max(found_s, acted_s), back_s=max(back_s, acted_s),
            lost_work_s=struck_s - last_s, share=1 / REPLICAS, text=fault.kind,
        ))  # fmt: skip

    def _rounds(self, replica: int) -> list[dict[str, Any]]:
        own = lines(self.out / f"rounds-replica-{replica}.jsonl")
        return [one for one in own if replica in one["members"]]

    def _has_successor(self, since_s: float, before: list[int]) -> bool:
        """Tell whether a replica that came after the fault is in a mean, one for each fault until now."""
        born = {int(path.stem.rpartition("-")[2]) for path in self.out.glob("rounds-replica-*.jsonl")}
        return any(
            one["at_s"] > since_s for number in born if number > max(before) for one in self._rounds(number)
        )  # fmt: skip


class Static(Run):
    """Ends when a replica does, and is resumed from its checkpoint."""

    def words(self) -> list[str]:
        return [*self.shared_words(), "--checkpoint-every", "50"]

    @property
    def metrics(self) -> Path:
        return self.out / "metrics-replica-0.jsonl"

    def steps(self) -> list[tuple[float, int]]:
        """Return the seconds of training and the step of each line."""
        return [(one["time_s"], one["step"]) for one in lines(self.metrics) if one["kind"] == "step"]

    def saved(self) -> int:
        """Return the step of the newest checkpoint that all replicas have written."""
        folders = (self.out / "checkpoints").glob("step-*")
        whole = [one for one in folders if len(list(one.glob("replica-*.json"))) == REPLICAS]
        return max((int(one.name.removeprefix("step-")) for one in whole), default=0)

    def _last_step(self) -> int:
        return max((step for _, step in self.steps()), default=0)

    def is_whole(self) -> bool:
        return self.process.poll() is None and self._last_step() > 5

    def strike(self, fault: Fault) -> None:
        workers = [
            one for one in psutil.Process(self.process.pid).children(recursive=True)
            if one.environ().get("RANK") == str(fault.victim)
        ]  # fmt: skip
        before, struck_s = self.steps()[-40:], time.time()
        workers[0].send_signal(signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)
        ended_s = self.wait(lambda: self.process.poll() is not None)
        if self.is_over:
            self._note(fault, struck_s, ended_s, ended_s, ended_s, lost_work_s=0.0)
            return
        told_s, last, saved, resumed_s = self.found(struck_s), self.steps()[-1][1], self.saved(), time.time()
        self.process = self._start(["--resume", str(self.out), "--quiet"])
        # the file is cut off at the checkpoint first
        back_s = self.wait(lambda: self.metrics.stat().st_mtime > resumed_s and self._last_step() > saved)
        step_s = (before[-1][0] - before[0][0]) / max(1, before[-1][1] - before[0][1])
        self._note(
            fault, struck_s, min(told_s or ended_s, ended_s), resumed_s, back_s, lost_work_s=(last - saved) * step_s
        )

    def _note(
        self, fault: Fault, struck_s: float, found_s: float, acted_s: float, back_s: float, *, lost_work_s: float
    ) -> None:
        self.note(fault, Incident(
            since_s=struck_s, found_s=found_s, acted_s=acted_s, back_s=back_s, lost_work_s=lost_work_s, text=fault.kind,
        ))  # fmt: skip


def play(run: Run, planned: list[Fault]) -> None:
    """Let the faults meet a run, each when it is due, or once the run is up again."""
    waiting: list[threading.Thread] = []
    for fault in planned:
        run.wait(lambda due_s=run.began_s + fault.at_s: time.time() >= due_s, most_s=1e9)
        if isinstance(run, Static):
            for thread in waiting:
                thread.join()
        if run.is_over:
            break
        run.wait(lambda: len(run.active()) > 1 if isinstance(run, Elastic) else run.is_whole(), most_s=1e9)
        waiting.append(threading.Thread(target=run.strike, args=(fault,)))
        waiting[-1].start()
    run.wait(lambda: False, most_s=1e9)
    for thread in waiting:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every-s", type=float, default=200.0, help="seconds between faults, about")
    parser.add_argument("--person-s", type=float, default=300.0)
    parser.add_argument("--step-s", type=float, default=0.6, help="what each step sleeps")
    parser.add_argument("--only", choices=("elastic", "static"))
    parser.add_argument("--write", action="store_true", help=f"append to {RESULTS.name}")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    planned = faults(options.seed, minutes=options.minutes, every_s=options.every_s)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options.step_file = folder / "step"
        options.step_file.write_text(str(options.step_s))
        makers: list[tuple[type[Run], str]] = [
            (Elastic, "restart"), (Elastic, "off"), (Static, "abort"), (Static, "off")
        ]  # fmt: skip
        runs = [
            kind(folder, action, options) for kind, action in makers if options.only in (None, kind.__name__.lower())
        ]
        try:
            for run in runs:
                run.wait(run.is_whole, most_s=300)
                assert run.is_whole(), (folder / f"{run.out.name}.log").read_text()
            start_s = time.time()
            for run in runs:
                run.began_s, run.stop_s = start_s, start_s + 60 * options.minutes
            threads = [threading.Thread(target=play, args=(run, planned)) for run in runs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for run in runs:
                run.stop_s = min(run.stop_s, time.time())
                run.kill_all()
        told(runs, options)


def told(runs: list[Run], options: argparse.Namespace) -> None:
    """Print the rows of each run, and write them down."""
    asked = {name: getattr(options, name) for name in ("minutes", "seed", "every_s", "person_s", "step_s")}
    load = [round(one, 1) for one in os.getloadavg()]
    for run in runs:
        lost = run.downtime()
        share = round(lost.total_s / lost.run_s, 4)
        row = {"run": run.out.name, **asked, "load": load, "replicas": REPLICAS, **lost.to_json(), "share": share}
        print(json.dumps(row), flush=True)
        if options.write:
            with RESULTS.open("a") as file:
                file.write(json.dumps({**row, "incidents": [one["row"] for one in run.incidents]}) + "\n")


if __name__ == "__main__":
    main()
