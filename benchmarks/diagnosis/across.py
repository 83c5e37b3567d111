"""Break hosts of an elastic run, and read what the first host says of it: no folder is shared.

sudo python benchmarks/diagnosis/across.py --hosts 3 --times 2

Real processes on hosts of the lab, each with a folder of its own; every replica's records go to the coordinator's host.
By turns a replica that joined is stopped (SIGSTOP) for 8 s, a joined host's link is cut for 8 s, and has a tenth of its
rate for 30 s; 25 s of calm between them. Told are the seconds from the fault to the first finding in the first host's
`findings.jsonl` that names the host or its replica, all that was told, and what the records took of the wires.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))
from chaos_job import ChaosJob

from thinwire.lab import Lab

RESULTS = Path(__file__).parents[1] / "results" / "diagnosis_across.jsonl"
RATE = "50mbit"
FAULTS = (("paused", 8.0), ("cut", 8.0), ("slow host 10x", 30.0))
_CALM_S, _LOOK_S, _BEGIN_S = 25.0, 0.25, 120.0


def words(hosts: int) -> list[str]:
    return [
        "--replicas", "1", "--begin-with", str(hosts), "--model", "nano", "--steps", "1000000", "--batch-size", "1",
        "--seq-len", "64", "--sync-interval", "30", "--overlap-steps", "5", "--threads", "1", "--eval-every", "0",
        "--log-every", "5", "--checkpoint-every", "0",
    ]  # fmt: skip


@contextlib.contextmanager
def broken(lab: Lab, job: ChaosJob, fault: str, host: int) -> Iterator[None]:
    if fault == "paused":
        with job.stopped(host):
            yield
        return
    if fault == "cut":
        lab.cut(host)
    else:
        lab.set_rate(host, f"{float(RATE.removesuffix('mbit')) / 10:g}mbit")
    try:
        yield
    finally:
        if fault == "cut":
            lab.mend(host)
        else:
            lab.set_rate(host, RATE)


def wait(job: ChaosJob, seconds: float, *, until: Callable[[], bool] = lambda: False) -> bool:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s and not until():
        job.look()
        time.sleep(_LOOK_S)
    return until()


def findings(folder: Path) -> list[dict[str, Any]]:
    path = folder / "findings.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def told(folder: Path, *, since_s: float, replica: int, host: int) -> list[dict[str, Any]]:
    """Return what is new since a time: after how long, what, where, and whether it names a replica."""
    found = []
    for line in findings(folder):
        if line["state"] == "new" and line["at"] > since_s:
            finding = line["finding"]
            ranks = {rank for place in finding["places"] for rank in place["ranks"]}
            found.append({
                "after_s": round(line["at"] - since_s, 1), "kind": finding["kind"], "text": finding["text"],
                "ranks": sorted(ranks), "names_it": replica in ranks or f"host-{host} " in finding["text"],
            })  # fmt: skip
    return found


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    folder = options.out
    with Lab(hosts=options.hosts, rates=dict.fromkeys(range(options.hosts), RATE)) as lab:
        job = ChaosJob(lab, folder, step_s=0.3, words=words(options.hosts))
        job.start_first()
        for host in range(1, options.hosts):
            job.join(host)
        first = job.hosts[0].folder
        if not wait(job, _BEGIN_S, until=lambda: all(h.lives and h.lives[-1].live_s for h in job.hosts)):
            raise RuntimeError(f"the run did not begin; see {folder}")
        began_s = time.time()
        wait(job, options.calm_s)
        yield {"fault": "none", "for_s": options.calm_s, "told": told(first, since_s=began_s, replica=-1, host=-1)}
        for number in range(options.times * len(FAULTS)):
            fault, for_s = FAULTS[number % len(FAULTS)]
            host = 1 + number % (options.hosts - 1)
            replica, at_s = job.hosts[host].lives[-1].replica, time.time()
            with broken(lab, job, fault, host):
                wait(job, for_s)
            wait(job, _CALM_S)
            assert replica is not None
            found = told(first, since_s=at_s, replica=replica, host=host)
            right_s = next((one["after_s"] for one in found if one["names_it"]), None)
            yield {"fault": fault, "for_s": for_s, "replica": replica, "named_s": right_s, "told": found}
        yield {"bytes": _bytes(job), "wall_s": round(time.time() - began_s, 1)}


def _bytes(job: ChaosJob) -> dict[str, Any]:
    """Return, by replica, the bytes of its records and of all its messages."""
    found: dict[str, Any] = {}
    for host in job.hosts[1:]:
        for path in sorted(host.folder.glob("records-rank-*.jsonl")):
            rank = path.stem.rpartition("-")[2]
            arrived = job.hosts[0].folder / path.name
            metrics = (host.folder / f"metrics-replica-{rank}.jsonl").read_text().splitlines()
            steps = [line for line in map(json.loads, metrics[:-1]) if line["kind"] == "step"]
            found[rank] = {
                "records": path.stat().st_size, "arrived": arrived.stat().st_size if arrived.exists() else 0,
                "sent": steps[-1]["sent_bytes"] if steps else 0,
            }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--calm-s", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=Path("runs/across"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    for line in run(options):
        print(json.dumps(line))
        with options.results.open("a") as results:
            results.write(json.dumps({"hosts": options.hosts, **line}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
