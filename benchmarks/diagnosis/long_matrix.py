"""The fault matrix in long jobs of the lab: faults are struck one after the other, and taken back, while a job trains.

sudo python benchmarks/diagnosis/long_matrix.py --seed 1 --number 0 --hosts 4 --method diloco
python benchmarks/diagnosis/long_matrix.py --report

Real processes train a small model on hosts with shaped links. The live detector of every run (`LiveDetector`, fed by
`RecordTailer`) diagnoses their records twice a second. Each fault stays until it has been found for some seconds or
its time is over, and is then removed until no finding is open, or for 15 s. Between faults nothing is broken, and
whatever is told then is a false alarm. A line of JSON a scenario says what was told, when, and how right it was.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lab_matrix import Run, prepare
from long_faults import LASTS_S, MARKS, RATE, Part, Strikes, deal, lasts_s, mark, place_name
from long_report import report

from thinwire.lab import Lab
from thinwire.monitor.detect.live import LiveDetector, News
from thinwire.monitor.live_diagnosis import LOOK_S, SOON_S
from thinwire.runlog.records import Operation, Record
from thinwire.runlog.tailer import RecordTailer

RESULTS = Path(__file__).parents[1] / "results" / "diagnosis_long.jsonl"
START_S, FIRST_ROUNDS, FIRST_S = 120.0, 30, 60.0
USUAL_S, MOST_S, MOST_ROUNDS = 14.0, 30.0, 8
STAYS_S, HEAL_S, CLEAN_S = 4.0, 15.0, 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job of the lab.

    Attributes:
        seed: Of the faults.
        number: Which share of the deck of faults it has.
        method: Of the run.
        hosts: How many.
        rules: Which rules judge it, in a word, for the tables.
    """

    seed: int
    number: int
    method: str
    hosts: int
    rules: str

    @property
    def name(self) -> str:
        """Its folder."""
        return f"job-{self.seed}-{self.number}-{self.method}-{self.hosts}"


class Look:
    """Feeds the judge, and counts the rounds that all ranks have finished."""

    def __init__(self, judge: LiveDetector) -> None:
        self.judge = judge
        self.cost_s = 0.0
        self.count = 0
        self._done: dict[int, int] = {}

    def __call__(self, records: list[Record]) -> list[News]:
        """Take in what was written, and judge."""
        for one in records:
            if isinstance(one, Operation) and one.done_s is not None:
                self._done[one.rank] = self._done.get(one.rank, 0) + 1
        begun_s = time.process_time()
        self.judge.add(records)
        news = self.judge.update()
        self.cost_s += time.process_time() - begun_s
        self.count += 1
        return news

    @property
    def rounds(self) -> int:
        """How many rounds the slowest rank has finished."""
        return min(self._done.values(), default=0)


@dataclass(slots=True)
class Verdict:
    """What is told of a scenario while it lasts.

    Attributes:
        parts: The faults.
        stale: Causes that were told of before, and were not over.
        best: The best mark of each at the latest look.
        first: The mark of the first word of each, and when.
        placed: When each was first told rightly, and after how many rounds.
        cases: Every cause that was told of, by its number: when, what, and its marks.
    """

    parts: list[Part]
    stale: set[int]
    best: dict[Part, str] = field(default_factory=dict)
    first: dict[Part, tuple[float, str]] = field(default_factory=dict)
    placed: dict[Part, tuple[float, int]] = field(default_factory=dict)
    cases: dict[int, dict[str, Any]] = field(default_factory=dict)

    def see(self, after_s: float, rounds: int, told: list[News]) -> None:
        """Take in what is told some seconds and rounds after the strike."""
        for news in told:
            if news.case not in self.stale:
                case = self.cases.setdefault(news.case, {"after_s": round(after_s, 2)})
                case |= {"kind": news.finding.kind, "where": " or ".join(map(place_name, news.finding.places)),
                         "round": news.finding.seen_round, "text": news.finding.text,
                         "is_beside": is_beside(news, self.parts)}  # fmt: skip
        for part in self.parts:
            marks = [mark(news.finding, part) for news in told if news.case not in self.stale]
            if marks:
                best = min(marks, key=MARKS.index)
                self.best[part] = best
                self.first.setdefault(part, (after_s, best))
                if best in ("right", "ambiguous"):
                    self.placed.setdefault(part, (after_s, rounds))

    @property
    def is_right(self) -> bool:
        """Whether all is told rightly, and for long enough."""
        return all(self.best.get(part) == "right" for part in self.parts)

    def lines(self, told: list[News]) -> list[dict[str, Any]]:
        """Return what was told of each fault."""
        found = []
        for part in self.parts:
            marks = [mark(news.finding, part) for news in told if news.case not in self.stale]
            verdict = min(marks, key=MARKS.index, default="missed")
            at_s, word = self.first.get(part, (None, None))
            right_s, right_rounds = self.placed.get(part, (None, None))
            found.append({**asdict(part), "verdict": verdict, "first": word, "told_s": at_s and round(at_s, 2),
                          "right_s": right_s and round(right_s, 2), "right_rounds": right_rounds})  # fmt: skip
        return found

    def beside(self) -> list[str]:
        """Return what was told that is about no fault that there is."""
        return [f"{case['kind']}: {case['where']}" for case in self.cases.values() if case.get("is_beside")]


def is_beside(news: News, parts: list[Part]) -> bool:
    """Return whether what is told is about no fault that there is: of another kind, and in a place without one."""
    marks = [mark(news.finding, part) for part in parts]
    return not {"right", "ambiguous", "wider place"} & set(marks)


class LongRun:
    """One long job."""

    def __init__(self, job: Job, folder: Path, *, data: Path) -> None:
        self.job, self.folder = job, folder
        self.lab = Lab(hosts=job.hosts, rate=f"{RATE}mbit")
        self.run = Run(job, self.lab, folder, data=data)
        self.strikes = Strikes(self.lab, [folder / f"step-{host}" for host in range(job.hosts)], self.run.folders)
        self.tails: dict[Path, RecordTailer] = {}
        for host in range(job.hosts):
            self.strikes.set_step(host)
        self.look = Look(LiveDetector())
        self._next_s, self._was_soon = time.monotonic(), False

    def step(self) -> list[News]:
        """Wait for the next look, and look."""
        self._was_soon = self.look.judge.is_unsure and not self._was_soon
        self._next_s = max(self._next_s + (SOON_S if self._was_soon else LOOK_S), time.monotonic())
        time.sleep(max(0.0, self._next_s - time.monotonic()))
        for path in (path for out in self.run.folders for path in out.glob("records-rank-*.jsonl")):
            self.tails.setdefault(path, RecordTailer(path))
        return self.look([record for tail in self.tails.values() for record in tail.new_records()])

    @property
    def has_ended(self) -> bool:
        """Whether a host's process has."""
        return any(process.exit_code is not None for process in self.run.processes)

    def settle(self) -> dict[str, Any]:
        """Let it train until there is a history; return what was told meanwhile."""
        begun_s = time.monotonic()
        while self.look.rounds < 1 and time.monotonic() - begun_s < START_S and not self.has_ended:
            self.step()
        return self.quiet(FIRST_S, rounds=FIRST_ROUNDS)

    def quiet(self, for_s: float, *, rounds: int = 0) -> dict[str, Any]:
        """Look on while nothing is broken; everything new is a false alarm."""
        begun_s, begun, alarms = time.monotonic(), self.look.rounds, []
        while (after_s := time.monotonic() - begun_s) < for_s and not (rounds and self.look.rounds - begun >= rounds):
            alarms += [f"{news.finding.kind}: {' or '.join(map(place_name, news.finding.places))}"
                       for news in self.step() if news.state == "new"]  # fmt: skip
        return {"clean_rounds": self.look.rounds - begun, "clean_s": round(after_s, 1), "false_alarms": alarms}

    def scenario(self, parts: list[Part]) -> dict[str, Any]:
        """Strike, look on, heal, look on."""
        begun_s, begun = time.monotonic(), self.look.rounds
        load = os.getloadavg()[0]
        told = self.look.judge.open_findings()
        verdict = Verdict(parts=parts, stale={news.case for news in told})
        for part in parts:
            self.strikes.strike(part)
        least_s, right_since_s = max(lasts_s(part, USUAL_S) for part in parts), None
        most_s = max(MOST_S, least_s)
        is_hung = any(part.fault in LASTS_S for part in parts)
        while (after_s := time.monotonic() - begun_s) < most_s and not self.has_ended:
            # a wire that is very slow needs some rounds, whatever time they take
            if after_s >= least_s and (is_hung or self.look.rounds - begun >= MOST_ROUNDS):
                break
            for part in parts:
                self.strikes.tick(part, after_s)
            self.step()
            after_s, told = time.monotonic() - begun_s, self.look.judge.open_findings()
            verdict.see(after_s, self.look.rounds - begun, told)
            right_since_s = (right_since_s or after_s) if verdict.is_right else None
            if right_since_s is not None and after_s - right_since_s >= STAYS_S:
                break
        self.strikes.heal(parts)
        line = {"parts": verdict.lines(told), "cases": [*verdict.cases.values()], "stale": len(verdict.stale),
                "beside": verdict.beside(), "lasted_s": round(after_s, 2), "rounds": self.look.rounds - begun,
                "load": round(load, 1), "struck_at_s": round(begun_s, 3),
                "healed_at_s": round(time.monotonic(), 3)}  # fmt: skip
        return {**line, **self._healed()}

    def _healed(self) -> dict[str, Any]:
        begun_s, fresh = time.monotonic(), []
        while (after_s := time.monotonic() - begun_s) < HEAL_S and not self.has_ended:
            fresh += [f"{news.finding.kind}: {' or '.join(map(place_name, news.finding.places))}"
                      for news in self.step() if news.state == "new"]  # fmt: skip
            if not self.look.judge.open_findings() and after_s > 2 * LOOK_S:
                return {"over_s": round(time.monotonic() - begun_s, 2), "after": fresh}
        return {"over_s": None, "after": fresh}


def play(job: Job, folder: Path, *, data: Path, scenarios: int, most_s: float, clean_s: float) -> None:
    """Play a job's scenarios, and write a line of each as it ends."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    begun_s = time.monotonic()
    long_run = LongRun(job, folder, data=data)
    try:
        first = long_run.settle()
        if clean_s:
            _add(first, long_run.quiet(clean_s))
        _write(
            {
                **asdict(job),
                "rate_mbit": RATE,
                "scenario": -1,
                "parts": [],
                **first,
                "load": round(os.getloadavg()[0], 1),
            },
            folder,
        )
        for number, parts in enumerate(deal(job.seed, job.number, job.hosts, scenarios)):
            if time.monotonic() - begun_s > most_s or long_run.has_ended:
                break
            line = long_run.scenario(parts)
            line |= long_run.quiet(CLEAN_S)
            look = long_run.look
            line |= {"look_s": round(look.cost_s / look.count, 3), "failed_looks": look.judge.num_failed}
            _write(
                {**asdict(job), "rate_mbit": RATE, "scenario": number, **line, "has_ended": long_run.has_ended}, folder
            )
    finally:
        long_run.run.close()


def _add(line: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        line[name] += value


def _write(line: dict[str, Any], folder: Path) -> None:
    print(json.dumps(line), flush=True)
    for path in (RESULTS, folder / "told.jsonl"):
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    """Read the command line, play, write and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=0, help="which share of the faults")
    parser.add_argument("--scenarios", type=int, default=14, help="faults a share")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--method", default="diloco")
    parser.add_argument("--rules", default="now", help="a word for the rules as they are, for the tables")
    parser.add_argument("--minutes", type=float, default=7.5, help="no fault is struck later")
    parser.add_argument("--clean-minutes", type=float, default=0.0, help="nothing is broken for so long at first")
    parser.add_argument("--out", type=Path, default=None, help="keeps the runs' folders here")
    parser.add_argument("--report", action="store_true", help="only print the table of what is stored")
    parser.add_argument("--short", action="store_true", help="in the table, all severities from 3 on in one line")
    options = parser.parse_args()
    if not options.report:
        job = Job(seed=options.seed, number=options.number, method=options.method, hosts=options.hosts,
                  rules=options.rules)  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            prepare(Path(folder) / "data")
            out = (options.out or Path(folder)) / job.name
            play(job, out, data=Path(folder) / "data", scenarios=options.scenarios, most_s=60 * options.minutes,
                 clean_s=60 * options.clean_minutes)  # fmt: skip
    print(report([json.loads(line) for line in RESULTS.read_text().splitlines()], is_short=options.short))


if __name__ == "__main__":
    main()
