"""How long a plan takes: 2 to 64 machines, each with a speed of its own, and a wire for each pair.

    python benchmarks/planning/speed.py     # into benchmarks/results/plan_speed.json

Seconds of the process and of the wall, median and range of the repeats, without the start of Python and torch. The
first plan of the process is left out: it loads what later ones share.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path

import torch

from thinwire.planning.cluster import Cluster, Machine, Wire
from thinwire.planning.search import make_plan
from thinwire.planning.training_task import TrainingTask
from thinwire.training.summary import describe_machine
from thinwire.workloads.language import build_model

RESULTS = Path(__file__).parents[1] / "results" / "plan_speed.json"
CASES = ((2, "1b"), (8, "1b"), (64, "1b"), (64, "7b"))


def cluster_of(count: int) -> Cluster:
    """Return machines and wires that all differ, the same ones every time."""
    draw = random.Random(count)
    machines = tuple(
        Machine(
            name=f"host-{n}", flops_per_s=draw.uniform(3e13, 5e13), encode_bytes_per_s=1e9, memory_bytes=2e11,
            up_bits_per_s=draw.uniform(5e7, 2e8), down_bits_per_s=draw.uniform(5e7, 2e8),
        )
        for n in range(count)
    )  # fmt: skip
    wires = tuple(
        Wire(
            source=one.name, destination=other.name, bandwidth_bits_per_s=draw.uniform(4e7, 2e8),
            latency_s=draw.uniform(0.005, 0.08),
        )
        for one in machines
        for other in machines
        if one is not other
    )  # fmt: skip
    return Cluster(machines=machines, wires=wires)


def timed(count: int, model: str) -> tuple[float, float, str]:
    """Return the seconds of the process and of the wall for one plan, and what it says."""
    shapes = build_model(model, max_seq_len=1024, device="meta")
    workload = TrainingTask(name=model, model=shapes, tokens=25e9, seq_len=1024, batch_size=8)
    cluster = cluster_of(count)
    process_s, wall_s = time.process_time(), time.perf_counter()
    plan = make_plan(workload, cluster)
    return time.process_time() - process_s, time.perf_counter() - wall_s, plan.best.candidate.describe()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    timed(2, "1b")
    found = []
    for count, model in CASES:
        runs = [timed(count, model) for _ in range(options.repeats)]
        line = {"replicas": count, "model": model, "plan": runs[0][2]}
        for name, place in (("process_s", 0), ("wall_s", 1)):
            values = sorted(run[place] for run in runs)
            line[name] = {"median": round(statistics.median(values), 3), "least": round(values[0], 3),
                          "most": round(values[-1], 3)}  # fmt: skip
        found.append(line)
        print(json.dumps(line), flush=True)
    circumstances = {"machine": describe_machine("cpu"), "load_average": os.getloadavg()[0]}
    options.results.write_text(json.dumps({"plans": found, **circumstances}, indent=2) + "\n")


if __name__ == "__main__":
    main()
