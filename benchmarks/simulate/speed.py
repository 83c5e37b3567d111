"""How long the simulator takes for long trainings and many replicas.

`python benchmarks/simulate/speed.py` runs each case several times and stores medians with their spread. Seconds are
those of the process, which another load on the machine lengthens less than those of the wall.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.averaging.mixing import RandomPairs
from thinwire.simulate import (
    ExchangeModel,
    SimLink,
    SimReplica,
    SimRun,
    TwoPhaseMessages,
    simulate_training,
    star,
)
from thinwire.sync.schedule import Staggered

RESULTS = Path(__file__).parents[1] / "results" / "simulate_speed.json"
WIRE = SimLink(bandwidth_bits_per_s=1e9, latency_s=0.02)


def streaming(sigma: float) -> SimRun:
    return simulate_training(
        Staggered(sync_interval=100, overlap_steps=5), cluster=star([WIRE] * 64), num_steps=1000,
        replicas=[SimReplica(step_s=1.0, sigma=sigma)] * 64, payload_bytes=[(2e7,)] * 36,
        exchange=ExchangeModel(pattern=TwoPhaseMessages()),
    )  # fmt: skip


def gossip(sigma: float) -> SimRun:
    return simulate_training(
        Staggered(sync_interval=10), cluster=star([WIRE] * 10_000), num_steps=100,
        replicas=[SimReplica(step_s=1.0, sigma=sigma)] * 10_000, payload_bytes=[(2e7,)],
        exchange=ExchangeModel(topology=RandomPairs(seed=3)),
    )  # fmt: skip


CASES: dict[str, Callable[[], SimRun]] = {
    "1,000 steps of 64 replicas, 36 fragments": lambda: streaming(0.0),
    "the same, steps vary by 10 %": lambda: streaming(0.1),
    "100 steps of 10,000 replicas in random pairs, H 10": lambda: gossip(0.0),
    "the same pairs, steps vary by 10 %": lambda: gossip(0.1),
}


def measure(run: Callable[[], SimRun], *, repeats: int) -> dict[str, Any]:
    cpu_s, wall_s, simulated = [], [], None
    for _ in range(repeats):
        cpu, wall = time.process_time(), time.perf_counter()
        result = run()
        cpu_s.append(time.process_time() - cpu)
        wall_s.append(time.perf_counter() - wall)
        told = (result.total_s, result.compute_utilisation)
        assert simulated in (None, told), "two runs of one case differ"
        simulated = told
    assert simulated is not None
    return {"cpu_s": cpu_s, "wall_s": wall_s, "simulated_s": simulated[0], "compute_utilisation": simulated[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    settings = parser.parse_args()
    results: dict[str, Any] = {
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
        "cases": {},
    }
    print("| case | seconds of the process, median (range) | of the wall, median (range) | simulated |")
    print("| --- | --- | --- | --- |")
    for name, run in CASES.items():
        case = results["cases"][name] = measure(run, repeats=settings.repeats)
        columns = [
            f"{statistics.median(case[k]):.2f} ({min(case[k]):.2f} to {max(case[k]):.2f})" for k in ("cpu_s", "wall_s")
        ]
        print(f"| {name} | {columns[0]} | {columns[1]} | {case['simulated_s']:.0f} s |", flush=True)
        results["load_average"] = os.getloadavg()[0]
        settings.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
