"""The quality ladder: the loss of each method against data-parallel training, each side with its own tuned rate.

    python benchmarks/quality/ladder.py A                    # rung A on the CPU
    python benchmarks/quality/ladder.py B --only iso-loco --replicas 2
    python benchmarks/quality/ladder.py G1 --jobs 1 --minutes 9    # in pieces: call it again until it says "done"
    python benchmarks/quality/report.py                      # the tables of what is stored

Each entry (`rungs.py`) first runs over its grid of learning rates with seed 0. Where the best one is at an edge, the
grid is widened. Then two more seeds run at the best rate. Every run appends a line to the results; a run whose line is
there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rungs import ENTRIES, RUNGS, SEEDS, Entry, Rung

RESULTS = Path(__file__).parents[1] / "results" / "quality.jsonl"
_MOST_WIDENINGS = 4
_IDENTITY = ("rung", "name", "method", "options", "inner", "replicas", "windows", "lr", "seed", "steps")


@dataclass(frozen=True, slots=True)
class Side:
    """An entry with a number of replicas: what is tuned as one."""

    rung: Rung
    entry: Entry
    replicas: int
    share_of: int

    def settings(self, *, lr: float, seed: int, budget: float = 1.0) -> dict[str, Any]:
        """Return what identifies a run."""
        return {
            "rung": self.rung.name, "name": self.entry.name, "method": self.entry.method,
            "options": dict(self.entry.options), "inner": self.entry.inner, "replicas": self.replicas,
            "windows": self.rung.windows // self.share_of, "lr": lr, "seed": seed,
            "steps": round(budget * self.rung.steps),
            **({"mean_of": self.entry.mean_of} if self.entry.mean_of else {}),
        }  # fmt: skip

    def next_settings(self, losses: dict[str, float], *, num_seeds: int = len(SEEDS)) -> list[dict[str, Any]]:
        """Return the runs to do next, given the losses of those that are stored; none where the side is done."""
        if self.entry.follows:
            rate = self.leader().settled_lr(losses)
            wanted = [] if rate is None else [self.settings(lr=rate, seed=seed) for seed in range(self.entry.seeds)]
            return [one for one in wanted if key_of(one) not in losses]
        grid = self.grid(losses)
        missing = [one for lr in grid if key_of(one := self.settings(lr=lr, seed=0)) not in losses]
        if missing:
            return missing
        best = self.best_lr(losses)
        rest = [self.settings(lr=best, seed=seed) for seed in range(num_seeds)]
        rest += [self.settings(lr=best, seed=0, budget=budget) for budget in self.entry.budgets]
        return [one for one in rest if key_of(one) not in losses]

    def grid(self, losses: dict[str, float]) -> list[float]:
        """Return the learning rates to try: the rung's, and those added while the best one is at an edge."""
        grid = sorted(self.rung.lrs[self.entry.grid])
        if len(grid) < 3:  # rates from a paper's table: nothing is tuned
            return grid
        for _ in range(_MOST_WIDENINGS):
            found = [losses.get(key_of(self.settings(lr=lr, seed=0))) for lr in grid]
            known = [loss for loss in found if loss is not None]
            if len(known) < len(grid):
                break
            best = found.index(min(known))
            if 0 < best < len(grid) - 1:
                break
            factor = grid[1] / grid[0]
            grid = [round(grid[0] / factor, 6), *grid] if best == 0 else [*grid, round(grid[-1] * factor, 6)]
        return grid

    def leader(self) -> Side:
        """Return the side whose learning rate this one takes."""
        entry = next(entry for entry in ENTRIES if entry.name == self.entry.follows)
        replicas = self.replicas if self.replicas in entry.replicas else entry.replicas[0]
        return Side(self.rung, entry, replicas, self.share_of)

    def settled_lr(self, losses: dict[str, float]) -> float | None:
        """Return the best learning rate, or None before all of the grid have run."""
        if self.entry.follows:
            return self.leader().settled_lr(losses)
        is_known = all(key_of(self.settings(lr=lr, seed=0)) in losses for lr in self.grid(losses))
        return self.best_lr(losses) if is_known else None

    def best_lr(self, losses: dict[str, float]) -> float:
        """Return the learning rate with the lowest loss of seed 0."""
        return min(self.grid(losses), key=lambda lr: losses[key_of(self.settings(lr=lr, seed=0))])


def sides(rung: Rung, *, only: Sequence[str], replicas: Sequence[int]) -> Iterator[Side]:
    """Return the sides of a rung; the most important entries come first."""
    for entry in ENTRIES:
        if rung.name not in entry.rungs.split() or (only and entry.name not in only):
            continue
        for share in entry.share_of or (1,):
            for count in entry.replicas:
                if not replicas or count in replicas:
                    yield Side(rung, entry, count, share)


def key_of(line: dict[str, Any]) -> str:
    return json.dumps([line[name] for name in _IDENTITY], sort_keys=True)


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def climb(
    wanted: Sequence[Side], *, jobs: int, minutes: float | None, results: Path, num_seeds: int = len(SEEDS)
) -> bool:
    """Run what is missing; return whether everything is done."""
    ends_s = time.monotonic() + 60 * minutes if minutes else None
    while True:
        losses = {key_of(line): line["loss"] for line in read(results)}
        waiting = {key_of(one): one for side in wanted for one in side.next_settings(losses, num_seeds=num_seeds)}
        if not waiting:
            return True
        with ThreadPoolExecutor(jobs) as pool:
            done = list(pool.map(lambda one: _run(one, ends_s=ends_s, results=results), waiting.values()))
        if not all(done):
            return False


def _run(settings: dict[str, Any], *, ends_s: float | None, results: Path) -> bool:
    command = [sys.executable, str(Path(__file__).with_name("train.py")), json.dumps(settings)]
    if ends_s is not None:
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            return False
        command += ["--minutes", str(left_s / 60)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    if not output.strip():
        return False
    line = json.loads(output.splitlines()[-1])
    with results.open("a") as file:
        file.write(json.dumps(line) + "\n")
    told = ("name", "replicas", "lr", "seed", "steps", "loss", "cpu_s")
    print("  ".join(f"{name} {line[name]}" for name in told), flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rung", choices=RUNGS)
    parser.add_argument("--only", action="append", default=[], help="entry to run; all by default; repeatable")
    parser.add_argument("--replicas", type=int, action="append", default=[], help="number to run with; repeatable")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="seeds at the best rate; tables show the first 3")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, one core each")
    parser.add_argument("--minutes", type=float, help="stop after so many, with states of unfinished runs saved")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    wanted = list(sides(RUNGS[options.rung], only=options.only, replicas=options.replicas))
    is_done = climb(
        wanted, jobs=options.jobs, minutes=options.minutes, results=options.results, num_seeds=options.seeds
    )
    print("done" if is_done else "not done: call it again")


if __name__ == "__main__":
    main()
