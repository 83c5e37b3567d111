"""The fault matrix in the lab: real processes on real shaped links, one fault each, and what is diagnosed when.

sudo python benchmarks/diagnosis/lab_matrix.py --scenarios 16 --seed 1

Each scenario trains a small model on three or four hosts, waits until all have done some rounds, breaks one thing, and
reads the run's folder twice a second as `thinwire diagnose` does. The result is one JSON line a scenario: what was told
first and when, whether kind and place were right then and at the end, and what was told before anything was broken.
Places that the records cannot tell apart count as right where the true one is among those named, and say so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lab_report import keep, report
from long_faults import Part

from thinwire.errors import DataError
from thinwire.lab import Lab, rank_environment
from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.findings import Finding, Place
from thinwire.runlog.run_folder import read_files

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "diagnosis_lab.jsonl"
RATE = 100
STEP_S = 0.1
FAULTS = (
    "none", "paused", "killed", "black hole", "slow link", "slow sender", "slow receiver", "slow host", "slow work",
    "slow cpu",
)  # fmt: skip
KINDS = {
    "paused": ("non-communication hang",), "killed": ("non-communication hang",), "black hole": ("communication hang",),
    **dict.fromkeys(("slow link", "slow sender", "slow receiver", "slow host"), ("communication slow",)),
    "slow work": ("non-communication slow",), "slow cpu": ("non-communication slow", "slowing compute"),
}  # fmt: skip
WORDS = {
    "diloco": ["--method", "diloco", "--codec", "e3m0", "--sync-interval", "3"],
    "streaming-diloco": ["--method", "streaming-diloco", "--sync-interval", "6", "--overlap-steps", "2"],
}
SETTLE_S, LOOK_S, WATCH_S, START_S = 20.0, 0.5, 25.0, 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(Part):
    """One fault in one job.

    Attributes:
        seed: Its number.
        method: Of the run.
        hosts: How many.
    """

    seed: int
    method: str
    hosts: int


def scenario(seed: int, number: int, faults: tuple[str, ...]) -> Scenario:
    """Return one scenario of a list; the faults come in turns, all else is drawn."""
    draw = random.Random(f"{seed}/{number}")
    hosts = draw.choice((3, 4))
    victim, other = draw.sample(range(hosts), 2)
    return Scenario(
        seed=seed * 1000 + number, fault=faults[number % len(faults)], method=draw.choice(sorted(WORDS)), hosts=hosts,
        victim=victim, other=other, severity=draw.choice((3.0, 5.0, 20.0)),
    )  # fmt: skip


def truth(one: Scenario) -> set[str]:
    """Return the names of the places that are right; a host of one rank is also known by its rank."""
    low, high = sorted((one.victim, one.other))
    return {
        "black hole": {str(Place(kind="link both ways", ranks=(low, high)))},
        "slow link": {str(Place(kind="link both ways", ranks=(low, high)))},
        "slow sender": {f"sender rank {one.victim}"}, "slow receiver": {f"receiver rank {one.victim}"},
        "slow host": {f"host {one.victim}"}, "slow cpu": {f"rank {one.victim}"},
    }.get(one.fault, {f"rank {one.victim}"})  # fmt: skip


class Run:
    """A job in the lab."""

    def __init__(self, one: Scenario, lab: Lab, folder: Path, *, data: Path) -> None:
        self.one, self.lab = one, lab
        self.folders = [folder / f"host-{host}" for host in range(one.hosts)]
        self._steps = [folder / f"step-{host}" for host in range(one.hosts)]
        self._group: Path | None = None
        self.processes = []
        for host, out in enumerate(self.folders):
            self._steps[host].write_text(str(STEP_S))
            words = [
                sys.executable, "-m", "thinwire.cli.main", "train", "--out", str(out), *WORDS[one.method],
                "--model", "nano", "--data", str(data / "text"), "--tokenizer", "bytes", "--cache-dir",
                str(data / "cache"), "--steps", "100000", "--batch-size", "1", "--seq-len", "32", "--threads", "1",
                "--eval-every", "0", "--checkpoint-every", "0", "--quiet",
            ]  # fmt: skip
            paths = [str(HERE / "slow_steps"), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = {
                **rank_environment(host, one.hosts), "OMP_NUM_THREADS": "1", "LAB_STEP_FILE": str(self._steps[host]),
                "PYTHONPATH": os.pathsep.join(paths),
            }  # fmt: skip
            with (folder / f"host-{host}.log").open("wb") as log:
                self.processes.append(lab.start(words, host=host, environment=environment, stdout=log, stderr=log))

    def rounds(self) -> int:
        """Return how many rounds the slowest rank has finished."""
        counts = []
        for folder in self.folders:
            path = next(iter(folder.glob("records-rank-*.jsonl")), None)
            lines = path.read_text().splitlines() if path else []
            counts.append(sum('"record":"operation"' in line and '"done_s"' in line for line in lines))
        return min(counts)

    def strike(self) -> None:
        """Break what is to be broken."""
        one, lab = self.one, self.lab
        slow = f"{RATE / one.severity:g}mbit"
        if one.fault == "paused":
            lab.stop_host(one.victim)
        elif one.fault == "killed":
            lab.kill_host(one.victim)
        elif one.fault == "black hole":
            lab.cut(one.victim, one.other)
        elif one.fault == "slow link":
            # what a host can send goes to all its peers: a link of its own rate is slower than its share of that
            lab.set_link(one.victim, one.other, rate=f"{RATE / (one.hosts - 1) / one.severity:g}mbit")
        elif one.fault in ("slow sender", "slow receiver", "slow host"):
            down, up = one.fault != "slow sender", one.fault != "slow receiver"
            lab.set_rate(one.victim, f"{slow if down else f'{RATE}mbit'}/{slow if up else f'{RATE}mbit'}")
        elif one.fault == "slow work":
            self._steps[one.victim].write_text(str(STEP_S * one.severity))
        elif one.fault == "slow cpu":
            self._throttle()

    def _throttle(self) -> None:
        """Give a host's process a share of a core."""
        self._group = Path(f"/sys/fs/cgroup/cpu/thinwire-lab-{os.getpid()}")
        self._group.mkdir()
        (self._group / "cpu.cfs_period_us").write_text("20000")
        (self._group / "cpu.cfs_quota_us").write_text(str(max(1000, round(8000 / self.one.severity))))
        mark = str(self.folders[self.one.victim]).encode()
        for path in Path("/proc").iterdir():
            if path.name.isdecimal() and mark in _words(path):
                (self._group / "cgroup.procs").write_text(path.name)

    def close(self) -> None:
        """Take back what the lab does not."""
        self.lab.close()
        if self._group is not None:
            time.sleep(0.5)
            self._group.rmdir()


def _words(process: Path) -> list[bytes]:
    try:
        return (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def play(one: Scenario, folder: Path, *, data: Path) -> dict[str, Any]:
    """Play one scenario."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run = Run(one, Lab(hosts=one.hosts, rate=f"{RATE}mbit"), folder, data=data)
    try:
        begun_s = time.monotonic()
        while run.rounds() < 4:
            if time.monotonic() - begun_s > START_S or any(p.exit_code is not None for p in run.processes):
                return {**asdict(one), "verdict": "did not start"}
            time.sleep(LOOK_S)
        before = _watch(run, for_s=SETTLE_S)
        rounds, struck_s = run.rounds(), time.monotonic()
        if one.fault != "none":
            run.strike()
        after = _watch(run, for_s=WATCH_S)
        return {**asdict(one), **judged(one, before, after), "rounds_before": rounds, "rounds_after": run.rounds(),
                "struck_at_s": round(struck_s, 3)}  # fmt: skip
    finally:
        run.close()


Told = list[tuple[float, list[Finding]]]


def _watch(run: Run, *, for_s: float) -> Told:
    """Return what is told, and when, twice a second."""
    begun_s, told = time.monotonic(), []
    next_s = begun_s
    while time.monotonic() - begun_s < for_s:
        next_s += LOOK_S
        time.sleep(max(0.0, next_s - time.monotonic()))
        try:
            found = diagnose(read_files(run.folders))
        except DataError:
            continue
        told.append((time.monotonic() - begun_s, found))
    return told


def judged(one: Scenario, before: Told, after: Told) -> dict[str, Any]:
    """Return what was right of what was told before and after the fault."""
    false = sorted({(f.kind, _places(f, one)) for _, found in before for f in found})
    line: dict[str, Any] = {"false_alarms": [f"{kind}: {where}" for kind, where in false]}
    fresh = [(at_s, [f for f in found if (f.kind, _places(f, one)) not in false]) for at_s, found in after]
    told = [(at_s, found) for at_s, found in fresh if found]
    line["told"] = sorted({f"{f.kind}: {_places(f, one)}" for _, found in told for f in found})
    if one.fault == "none":
        line["false_alarms"] += line["told"]
        return {**line, "verdict": "false alarm" if line["false_alarms"] else "right"}
    marks = [(at_s, [_mark(f, one) for f in found]) for at_s, found in told]
    right = [at_s for at_s, own in marks if {"right", "ambiguous"} & set(own)]
    last = marks[-1][1] if marks else []
    order = ("right", "ambiguous", "wider place", "wrong place", "wrong kind")
    return {
        **line, "detected_s": round(told[0][0], 2) if told else None, "first": min(marks[0][1], key=order.index) if told
        else None, "right_s": round(right[0], 2) if right else None,
        "verdict": min(last, key=order.index) if last else "missed",
        "others_at_end": sum(mark not in ("right", "ambiguous") for mark in last),
        "text": told[-1][1][0].text if told else "", "sure_rounds": [f.seen_round for f in told[0][1]] if told else [],
    }  # fmt: skip


def _mark(finding: Finding, one: Scenario) -> str:
    if finding.kind not in KINDS[one.fault]:
        return "wrong kind"
    named = {_place(place, one) for place in finding.places}
    if not named & truth(one):
        # a host's wires both ways hold the direction that broke
        return "wider place" if named == {f"host {one.victim}"} else "wrong place"
    return "right" if len(named) == 1 else "ambiguous"


def _places(finding: Finding, one: Scenario) -> str:
    return " or ".join(_place(place, one) for place in finding.places)


def _place(place: Place, one: Scenario) -> str:
    """Return a place's name, with hosts by their number."""
    names = {f"10.77.0.{host + 1}": str(host) for host in range(one.hosts)}
    hosts = tuple(names.get(host.partition("(")[2].rstrip(")"), host) for host in place.hosts)
    return str(replace(place, hosts=hosts))


def prepare(data: Path) -> None:
    """Write a corpus, and train a step on it, so that it is tokenised before hosts share it."""
    (data / "text").mkdir(parents=True)
    for number in range(40):
        words = " ".join(f"word{(number * number + 7 * place) % 211}" for place in range(400))
        (data / "text" / f"{number}.txt").write_text(words)
    words = [
        "train", "--replicas", "1", "--model", "nano", "--data", str(data / "text"), "--tokenizer", "bytes", "--steps",
        "2", "--batch-size", "1", "--seq-len", "32", "--eval-every", "0", "--cache-dir", str(data / "cache"), "--out",
        str(data / "run"), "--quiet",
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "thinwire.cli.main", *words], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Read the command line, play, write and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scenarios", type=int, default=len(FAULTS))
    parser.add_argument("--begin", type=int, default=0, help="the first scenario's number")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--out", type=Path, default=None, help="keeps the runs' folders here")
    parser.add_argument("--report", action="store_true", help="only print the table of what is stored")
    options = parser.parse_args()
    faults = tuple(options.faults.split(","))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        if not options.report:
            prepare(data)
        for number in range(options.begin, options.begin + (0 if options.report else options.scenarios)):
            one = scenario(options.seed, number, faults)
            line = play(one, (options.out or Path(folder)) / f"run-{one.seed}", data=data)
            keep(line, RESULTS)
    print(report([json.loads(line) for line in RESULTS.read_text().splitlines()]))


if __name__ == "__main__":
    main()
