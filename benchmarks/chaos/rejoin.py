"""Measure how long a replica that was killed takes to come back, where nothing else goes wrong.

sudo python benchmarks/chaos/rejoin.py --times 4 --out RESULT.json

Hosts of the lab with equal links train together; the last host's replica is killed (SIGKILL) again and again, by turns
with its own state kept on its disk, and with that taken away, so that it must fetch one. Each time is from the end of
the old process to the first round that counts the new one, beside what the state's bytes take at the link's rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos_checks import applied, desyncs, rejoins
from chaos_job import ChaosJob

from thinwire.lab import Lab

_LOOK_S = 0.1


def words(options: argparse.Namespace) -> list[str]:
    return [
        "--replicas", "1", "--begin-with", str(options.hosts), "--model", options.model, "--steps", "1000000",
        "--batch-size", "1", "--seq-len", "64", "--sync-interval", str(options.sync_interval), "--overlap-steps", "5",
        "--threads", "1", "--eval-every", "0", "--log-every", "5", "--checkpoint-every", "0",
    ]  # fmt: skip


class Play:
    """The job, and what is waited for in it."""

    def __init__(self, job: ChaosJob, *, folder: Path, most_s: float) -> None:
        self.job = job
        self.folder = folder
        self.most_s = most_s
        self.victim = job.hosts[-1]

    def wait(self, what: Callable[[], bool]) -> None:
        until_s = time.monotonic() + self.most_s
        while not what():
            self.job.look()
            if time.monotonic() > until_s:
                raise RuntimeError(f"nothing came in {self.most_s:g} s; see {self.folder}")
            time.sleep(_LOOK_S)

    def is_counted(self) -> bool:
        """Tell whether a round has counted the victim's present life."""
        life = self.victim.lives[-1] if self.victim.lives else None
        if life is None or life.replica is None or life.ended_s is not None:
            return False
        return any(life.replica in line["members"] for line in applied(self.folder).get(0, []))

    def state_since(self, began_s: float) -> bool:
        """Tell whether the victim has written its own state since a time, and a process waits to take its place."""
        path = self.victim.folder / "kept" / "replica-process-0.state"
        return path.exists() and path.stat().st_mtime > began_s and time.time() > began_s + 15

    def kill(self, *, with_own: bool) -> None:
        lives, since_s = len(self.victim.lives), self.victim.lives[-1].live_s or time.time()
        self.wait(lambda: self.state_since(since_s))
        if not with_own:
            (self.victim.folder / "kept" / "replica-process-0.state").unlink()
        self.job.kill(self.victim.number)
        self.wait(lambda: len(self.victim.lives) > lives)
        self.wait(self.is_counted)
        # a state's last bytes may come later than the first round that counts
        self.wait(lambda: self.victim.lives[-1].has_own or self.victim.lives[-1].state_bytes > 0)


def run(options: argparse.Namespace) -> dict[str, Any]:
    folder = options.out / "run"
    with Lab(hosts=options.hosts, rates=dict.fromkeys(range(options.hosts), options.rate)) as lab:
        job = ChaosJob(lab, folder, step_s=options.step_s, words=words(options))
        job.start_first()
        for host in range(1, options.hosts):
            job.join(host)
        play = Play(job, folder=folder, most_s=options.most_s)
        play.wait(play.is_counted)
        for number in range(2 * options.times):
            play.kill(with_own=number % 2 == 0)
        rounds = applied(folder)
        lives = [life for life in play.victim.lives if life.replica is not None]
        back = rejoins(lives, rounds, rates=[options.rate] * options.hosts)
    found: dict[str, Any] = {"desyncs": desyncs(rounds)[1], "rejoins": back}
    for name, has_own in (("own", True), ("fetched", False)):
        of_kind = [row for row in back if row["has_own"] is has_own]
        took = [row["took_s"] for row in of_kind]
        if took:
            found[name] = {
                "n": len(took), "median_s": round(statistics.median(took), 2), "least_s": min(took),
                "most_s": max(took), "live_median_s": statistics.median(row["live_s"] for row in of_kind),
                "limit_s": round(1.5 * of_kind[0]["transfer_s"] + 5, 2),
                "in_time": sum(row["is_in_time"] for row in of_kind),
            }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--rate", default="20mbit")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--sync-interval", type=int, default=60)
    parser.add_argument("--step-s", type=float, default=0.5)
    parser.add_argument("--most-s", type=float, default=300.0, help="longest wait for one thing, such as a state")
    parser.add_argument("--out", type=Path, default=Path("runs/rejoin"))
    options = parser.parse_args()
    shape = {name: getattr(options, name) for name in ("hosts", "rate", "model", "sync_interval", "step_s")}
    found = {"benchmark": "rejoin", **shape, **run(options)}
    (options.out / "result.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key != "rejoins"}))


if __name__ == "__main__":
    main()
