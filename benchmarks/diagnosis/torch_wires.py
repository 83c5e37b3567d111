"""Wires of plain torch jobs over gloo, in the lab: which slow and dead ones are named, and after how long.

    sudo python benchmarks/diagnosis/torch_wires.py --seed 1 --number 24              # eleven minutes
    sudo python benchmarks/diagnosis/torch_wires.py --seed 1 --number 24 --no-probes  # without bursts between the hosts
    sudo python benchmarks/diagnosis/torch_wires.py --seed 1 --number 9 --rooted      # broadcasts, gathers and scatters
    sudo python benchmarks/diagnosis/torch_wires.py --seed 1 --clean-minutes 8        # a job in which nothing breaks
    sudo python benchmarks/diagnosis/torch_wires.py --cost 8   # what bursts cost: jobs with and without them, in turns
    python benchmarks/diagnosis/torch_wires.py --report                               # the table of what is stored

Each scenario is a job of its own: 3 to 5 hosts of one rank, 100 Mbit/s, a pattern of collectives, a size and a time of
work that are drawn by the seed. After `GOOD_S` seconds one place breaks, or nothing does. The records are judged every
half second as `thinwire watch` judges them, until `WAIT_S` have gone by. Told are the first word, what is known at the
end, and when the place was named rightly first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lab_report import keep

from thinwire.lab import Lab, rank_environment
from thinwire.monitor.detect.live import LiveDetector
from thinwire.monitor.findings import Finding
from thinwire.runlog.run_folder import read_files
from thinwire.runlog.tailer import RecordTailer

RESULTS = Path(__file__).parents[1] / "results" / "diagnosis_torch_wires.jsonl"
JOB = Path(__file__).with_name("torch_wires_job.py")
FAULTS = ("slow link", "slow sender", "slow receiver", "slow host", "black hole", "nothing")
PATTERNS = ("all_reduce", "buckets", "sharded", "all_gather")
# one rank sends to all others or receives from them, itself or by way of some
ROOTED = ("broadcast", "rooted")
ROOTED_FAULTS = ("slow sender", "slow receiver", "slow host", "nothing")
TIMES = (3, 5, 10)
RATE = 100  # Mbit/s
GOOD_S, WAIT_S, LOOK_S, START_S = 12.0, 12.0, 0.5, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A job, and what breaks in it.

    Attributes:
        fault: What breaks.
        times: How many times slower a wire becomes.
        hosts: How many there are.
        host: Whose wires break.
        other: The other end of a link.
        pattern: What a step calls.
        numel: Elements that a rank brings.
        work_s: What a step works before it calls.
        has_probes: Whether hosts send each other bursts.
        wait_s: For how long it is looked at after it broke.
    """

    fault: str
    times: float
    hosts: int
    host: int
    other: int
    pattern: str
    numel: int
    work_s: float
    has_probes: bool
    wait_s: float = WAIT_S

    @property
    def place(self) -> str:
        """What a finding should name."""
        low, high = sorted((self.host, self.other))
        return {
            "slow link": f"link {low} <-> {high}", "black hole": f"link {low} <-> {high}",
            "slow sender": f"sender rank {self.host}", "slow receiver": f"receiver rank {self.host}",
            "slow host": f"host host-{self.host}", "nothing": "",
        }[self.fault]  # fmt: skip


def draw(random_: random.Random, *, has_probes: bool, times: float | None = None) -> Scenario:
    """Return a scenario; the same ones with and without probes, and for any number of times."""
    hosts = random_.choice((3, 4, 5))
    host = random_.randrange(hosts)
    drawn = Scenario(
        # gloo's rings go from a rank to the one before it: another link carries nothing
        fault=random_.choice(FAULTS), times=random_.choice(TIMES), hosts=hosts, host=host, other=(host + 1) % hosts,
        pattern=random_.choice(PATTERNS), numel=random_.choice((60_000, 120_000, 240_000)),
        work_s=random_.choice((0.03, 0.06, 0.12)), has_probes=has_probes,
    )  # fmt: skip
    return drawn if times is None else replace(drawn, times=times)


def rooted(drawn: Scenario, random_: random.Random) -> Scenario:
    """Return a scenario whose collectives have a root, rank 0, which is what breaks."""
    return replace(
        drawn, pattern=random_.choice(ROOTED), fault=random_.choice(ROOTED_FAULTS), host=0, other=1
    )  # fmt: skip


def strike(lab: Lab, scenario: Scenario) -> None:
    """Break what the scenario says."""
    slow = f"{RATE / scenario.times:g}mbit"
    if scenario.fault == "slow link":
        lab.set_link(scenario.host, scenario.other, rate=slow)
    elif scenario.fault == "black hole":
        lab.cut(scenario.host, scenario.other)
    elif scenario.fault != "nothing":
        down = slow if scenario.fault in ("slow receiver", "slow host") else f"{RATE}mbit"
        up = slow if scenario.fault in ("slow sender", "slow host") else f"{RATE}mbit"
        lab.set_rate(scenario.host, f"{down}/{up}")


def verdict_of(finding: Finding, scenario: Scenario) -> str:
    """Return how right a finding is."""
    kind = "communication hang" if scenario.fault == "black hole" else "communication slow"
    places = [str(place).split(" (")[0] for place in finding.places]
    if finding.kind != kind:
        return "wrong kind"
    low, high = sorted((scenario.host, scenario.other))
    ways = {f"link {low} -> {high}", f"link {high} -> {low}"} if scenario.fault == "slow link" else set()
    if places == [scenario.place]:
        return "right"
    if places == ["communicator"]:
        return "no place"
    if scenario.place in places:
        return "ambiguous"
    # a collective may use one way of a link only, and so one side of a host
    sides = {f"sender rank {scenario.host}", f"receiver rank {scenario.host}"}
    side = sides if scenario.fault == "slow host" else set()
    if len(places) == 1 and places[0] in ways | side:
        return "one way of it"
    if places == [f"host host-{scenario.host}"] and scenario.place in sides:
        return "its host"
    return "ambiguous" if (ways | side) & set(places) else "wrong place"


def play(scenario: Scenario, *, keep_in: Path | None = None) -> dict[str, Any]:
    """Run a job, break it, and return what was said."""
    with tempfile.TemporaryDirectory() as name, Lab(hosts=scenario.hosts, rate=f"{RATE}mbit") as lab:
        folder = name if keep_in is None else str(keep_in)
        words = [scenario.pattern, str(scenario.numel), str(scenario.work_s), str(scenario.has_probes)]
        for host in range(scenario.hosts):
            variables = {**rank_environment(host, scenario.hosts), "OMP_NUM_THREADS": "1"}
            lab.start([sys.executable, str(JOB), folder, *words], host=host, environment=variables)
        tails = [RecordTailer(Path(folder) / f"records-rank-{rank}.jsonl") for rank in range(scenario.hosts)]
        judge, told = LiveDetector(), _Told(scenario)
        until_s = time.monotonic() + START_S
        while not all((Path(folder) / f"records-rank-{rank}.jsonl").exists() for rank in range(scenario.hosts)):
            if time.monotonic() > until_s:
                raise RuntimeError("the job has not begun")
            time.sleep(LOOK_S)
        broken_s = time.monotonic() + GOOD_S
        is_broken = False
        while time.monotonic() < broken_s + scenario.wait_s:
            time.sleep(LOOK_S)
            if not is_broken and time.monotonic() >= broken_s:
                strike(lab, scenario)
                is_broken, broken_s = True, time.monotonic()
            for tail in tails:
                judge.add(tail.new_records())
            judge.update()
            told.note(
                [news.finding for news in judge.open_findings()], time.monotonic() - broken_s, is_broken=is_broken
            )
        return told.to_json()


class _Told:
    """What was said of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._before: list[str] = []
        self._first: tuple[float, Finding] | None = None
        self._last: Finding | None = None
        self._right_s: float | None = None

    def note(self, findings: list[Finding], after_s: float, *, is_broken: bool) -> None:
        fresh = [one for one in findings if f"{one.kind}: {one.where}" not in self._before]
        if not is_broken or self._scenario.fault == "nothing":
            self._before += [f"{one.kind}: {one.where}" for one in fresh]
            return
        self._last = fresh[0] if fresh else self._last
        if fresh and self._first is None:
            self._first = (after_s, fresh[0])
        if fresh and self._right_s is None and verdict_of(fresh[0], self._scenario) == "right":
            self._right_s = after_s

    def to_json(self) -> dict[str, Any]:
        known: dict[str, Any] = {"scenario": asdict(self._scenario), "place": self._scenario.place,
                                 "before": self._before, "load": round(os.getloadavg()[0], 1)}  # fmt: skip
        if self._first is None or self._last is None:
            return {**known, "verdict": "missed" if self._scenario.fault != "nothing" else "nothing said"}
        first_s, first = self._first
        return {
            **known, "first_s": round(first_s, 2), "first": f"{first.kind}: {first.where}",
            "first_verdict": verdict_of(first, self._scenario), "last": f"{self._last.kind}: {self._last.where}",
            "verdict": verdict_of(self._last, self._scenario), "text": self._last.text,
            "right_s": None if self._right_s is None else round(self._right_s, 2),
        }  # fmt: skip


def cost(pairs: int) -> str:
    """Run jobs in which nothing breaks, with bursts and without in turns, and return how long a call took more."""
    random_, ratios = random.Random(0), []
    for number in range(pairs):
        one = draw(random_, has_probes=True)
        took: dict[bool, float] = {}
        for has_probes in (True, False) if number % 2 else (False, True):
            with tempfile.TemporaryDirectory() as name:
                play(replace(one, fault="nothing", has_probes=has_probes), keep_in=Path(name))
                calls = [op.posted_s for op in read_files([Path(name)]).operations if op.rank == 0]
            begun = sorted(set(calls))[len(set(calls)) // 8 :]
            took[has_probes] = (begun[-1] - begun[0]) / (len(begun) - 1)
        ratios.append(took[True] / took[False])
        print(f"{one.hosts} hosts, {one.pattern}, {one.numel}, {one.work_s} s: {ratios[-1]:.4f}", flush=True)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return (
        f"with bursts a call takes {middle:.4f} times as long in the median of {pairs} pairs ({low:.4f} to {high:.4f})"
    )


def report(lines: list[dict[str, Any]]) -> str:
    """Return the table of all that is stored."""
    rows = ["| probes | times | fault | jobs | at the end | first word: median, longest (s) | rightly (s) |",
            "| --- " * 7 + "|"]  # fmt: skip
    groups: dict[tuple[bool, str, str], list[dict[str, Any]]] = defaultdict(list)
    quiet_s = sum(GOOD_S + one["scenario"].get("wait_s", WAIT_S) * (one["place"] == "") for one in lines)
    for line in lines:
        one = line["scenario"]
        is_slow = one["fault"].startswith("slow")
        times = "-" if not is_slow else "3 to 10" if one["times"] >= TIMES[0] else f"{one['times']:g}"
        name = f"{one['fault']}, a root" if one["pattern"] in ROOTED else one["fault"]
        groups[one["has_probes"], times, name].append(line)
    for (has_probes, times, fault), own in sorted(groups.items(), reverse=True):
        verdicts = Counter(one["verdict"] for one in own).most_common()
        counts = ", ".join(f"{name}: {count}" for name, count in verdicts)
        first = [one["first_s"] for one in own if "first_s" in one]
        right = [one["right_s"] for one in own if one.get("right_s") is not None]
        told = [f"{statistics.median(found):.1f}, {max(found):.1f}" if found else "-" for found in (first, right)]
        probes = "yes" if has_probes else "no"
        rows.append(f"| {probes} | {times} | {fault} | {len(own)} | {counts} | {told[0]} | {told[1]} |")
    before = [said for one in lines for said in one["before"]]
    minutes = f"{len(lines)} jobs and {quiet_s / 60:.0f} minutes"
    rows += ["", f"{len(before)} findings where nothing was broken (yet), in {minutes}."]
    return "\n".join(rows)


def main() -> None:
    """Read the command line, play, write and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=24)
    parser.add_argument("--no-probes", action="store_true", help="no bursts between the hosts")
    parser.add_argument("--rooted", action="store_true", help="only broadcasts, gathers and scatters")
    parser.add_argument("--clean-minutes", type=float, help="one job in which nothing breaks for so long")
    parser.add_argument("--times", type=float, help="how many times slower wires become, instead of 3, 5 or 10")
    parser.add_argument("--records", type=Path, help="keep the records of each job in a folder here")
    parser.add_argument("--cost", type=int, metavar="PAIRS", help="only measure what bursts cost")
    parser.add_argument("--report", action="store_true", help="only print the table of what is stored")
    options = parser.parse_args()
    if options.cost is not None:
        print(cost(options.cost))
        return
    if not options.report:
        random_ = random.Random(options.seed)
        for number in range(1 if options.clean_minutes else options.number):
            scenario = draw(random_, has_probes=not options.no_probes, times=options.times)
            scenario = rooted(scenario, random_) if options.rooted else scenario
            if options.clean_minutes:
                scenario = replace(scenario, fault="nothing", wait_s=60 * options.clean_minutes)
            folder = None if options.records is None else options.records / f"{options.seed}-{number}"
            if folder is not None:
                folder.mkdir(parents=True)
            line = {"seed": options.seed, "number": number, **play(scenario, keep_in=folder)}
            keep(line, RESULTS)
    print(report([json.loads(text) for text in RESULTS.read_text().splitlines()]))


if __name__ == "__main__":
    main()
