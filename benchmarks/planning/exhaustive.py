"""The plan against everything: each candidate of a small grid is run in the lab, and the plan's choice is among them.

    sudo python benchmarks/planning/exhaustive.py           # ten minutes; what is stored is left out
    python benchmarks/planning/exhaustive.py --report         # the table of what is stored

The planner is told the lab's rates (payload's share), latencies and the time of a step, nothing of any run. In the lab
each host runs the real optimizer and sleeps where it would compute, as in `benchmarks/simulate/lab_check.py`. Measured
and planned times to the token budget are both multiplied by what the published loss penalty is worth in compute: it is
the same on both sides, and so the comparison is about time alone. The machine must be quiet.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "simulate"))

import torch
from lab_check import cluster_of, control, run
from lab_configurations import Configuration
from lab_worker import Model

from thinwire.lab import Lab
from thinwire.lab.settings import Link
from thinwire.planning.candidates import Candidate, candidates, machine_sets, step_times
from thinwire.planning.cluster import Cluster
from thinwire.planning.loss_penalty import compute_worth, loss_penalty
from thinwire.planning.plan import Plan
from thinwire.planning.predict import FLOPS_PER_PARAMETER
from thinwire.planning.search import PlanConstraints, make_plan
from thinwire.planning.training_task import TrainingTask

RESULTS = Path(__file__).parents[1] / "results" / "plan_exhaustive.jsonl"
SEQ_LEN, TOKENS, WIDTH = 64, 1e7, 256
WISHES = PlanConstraints(
    methods=("diloco", "streaming-diloco"), intervals=(10, 30), overlaps=(1, 5), layers=(3,), codecs=("e3m0",),
    max_penalty=1.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Hosts and wires to plan for: each one's access, and the seconds that a step sleeps there."""

    rates: tuple[str, ...]
    sleep_s: tuple[float, ...]
    latency_s: float = 0.0


SITES = {
    "3 hosts, one on a thinner wire": Site(rates=("8mbit", "8mbit", "3mbit"), sleep_s=(0.06, 0.06, 0.06)),
    "3 hosts, one slower, 10 ms": Site(rates=("20mbit",) * 3, sleep_s=(0.05, 0.05, 0.12), latency_s=0.01),
    "2 hosts at 2 Mbit/s": Site(rates=("2mbit", "2mbit"), sleep_s=(0.08, 0.08)),
}


def workload() -> TrainingTask:
    """Return the model of the lab's workers."""
    with torch.device("meta"):
        return TrainingTask(name="lab", model=Model(WIDTH), tokens=TOKENS, seq_len=SEQ_LEN, batch_size=1)


def planned(site: Site) -> tuple[Plan, Cluster]:
    """Plan for a site; machines compute as fast as the sleeps say."""
    from dataclasses import replace

    wires = cluster_of(
        Configuration(method="", rates=site.rates, sleep_s=0.0, steps=0, warm_steps=0, latency_s=site.latency_s)
    )
    work = FLOPS_PER_PARAMETER * workload().num_parameters * SEQ_LEN
    machines = [replace(m, flops_per_s=work / s) for m, s in zip(wires.machines, site.sleep_s, strict=True)]
    cluster = Cluster(machines=tuple(machines), wires=wires.wires)
    return make_plan(workload(), cluster, WISHES), cluster


def grid(cluster: Cluster) -> list[Candidate]:
    """Return all candidates that the planner looked at, but for machines alone, whose time needs no lab."""
    names = [machine.name for machine in cluster.machines]
    times = step_times(cluster, workload(), names, num_replicas=len(names))
    found = candidates(
        workload(), machine_sets(cluster, names, step_s=times), names=WISHES.methods, intervals=WISHES.intervals,
        overlaps=WISHES.overlaps, layers=WISHES.layers, codec_names=WISHES.codecs,
    )  # fmt: skip
    return [candidate for candidate in found if candidate.num_replicas > 1]


def measure(candidate: Candidate, site: Site) -> float:
    """Run a candidate in the lab and return the seconds of a step of the slowest host."""
    hosts = [int(name.removeprefix("host-")) for name in candidate.replicas]
    arguments = {key: value for key, value in candidate.settings().items() if key != "batch_size"}
    interval = candidate.sync_interval or 1
    warm = 2 * interval if interval > 1 else 3
    steps = warm + (2 * interval if interval > 1 else 12)
    configuration = Configuration(
        method=candidate.method, rates=tuple(site.rates[host] for host in hosts),
        sleep_s=tuple(site.sleep_s[host] for host in hosts), steps=steps, warm_steps=warm, arguments=arguments,
        latency_s=site.latency_s, width=WIDTH,
    )  # fmt: skip
    rates, link = dict(enumerate(configuration.rates)), Link(latency_s=site.latency_s)
    with Lab(hosts=len(hosts), rates=rates, link=link) as lab:
        control(lab, "cubic")  # what the simulator was held against
        return max(host["step_s"] for host in run(lab, configuration, steps=steps))


def to_equal_loss_s(candidate: Candidate, step_s: float) -> float:
    """Return the seconds to the token budget, times what the published penalty is worth."""
    penalty = loss_penalty(
        candidate.method, num_parameters=workload().num_parameters, num_replicas=candidate.num_replicas,
        sync_interval=candidate.sync_interval or 1, overlap_steps=candidate.overlap_steps or 0, codec=candidate.codec,
    )  # fmt: skip
    assert penalty is not None
    return workload().num_steps(candidate.num_replicas) * step_s * compute_worth(penalty.share)


def read(results: Path) -> list[dict[str, Any]]:
    """Return what is stored."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def report(lines: list[dict[str, Any]]) -> str:
    """Return a table a site: the plan's choice among the measured ones."""
    parts = []
    for name, site in SITES.items():
        measured = {line["candidate"]: line for line in lines if line["site"] == name}
        plan, cluster = planned(site)
        alone = plan.alone
        found: dict[str, float] = {key: line["to_equal_loss_s"] for key, line in measured.items()}
        if alone is not None:
            found[alone.candidate.describe()] = alone.equal_loss_s
        missing = [c for c in grid(cluster) if key_of(c) not in measured]
        chosen = plan.best.candidate
        own = found.get(key_of(chosen) if chosen.num_replicas > 1 else chosen.describe())
        if own is None or missing:
            parts.append(f"{name}: {len(missing)} candidates are not measured yet")
            continue
        best = min(found, key=found.__getitem__)
        parts.append(
            f"| {name} | {len(found)} | {key_of(chosen)} | {own:,.0f} | {plan.best.equal_loss_s:,.0f} | {best} | "
            f"{found[best]:,.0f} | {100 * (own / found[best] - 1):+.1f} % |"
        )
    head = "| site | candidates | the plan | measured, s | planned, s | best measured | its s | the plan is slower by |"
    return "\n".join([head, "| --- " * 8 + "|", *parts])


def key_of(candidate: Candidate) -> str:
    """Return a candidate's name in the results: its settings and its hosts."""
    return f"{candidate.describe()} ({', '.join(candidate.replicas)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="print the table, and run nothing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    lines = read(options.results)
    done = {(line["site"], line["candidate"]) for line in lines}
    for name, site in {} if options.report else SITES.items():
        _, cluster = planned(site)
        for candidate in grid(cluster):
            if (name, key_of(candidate)) in done:
                continue
            step_s = measure(candidate, site)
            line: Mapping[str, Any] = {
                "site": name, "candidate": key_of(candidate), "measured_step_s": round(step_s, 6),
                "to_equal_loss_s": round(to_equal_loss_s(candidate, step_s), 3),
            }  # fmt: skip
            with options.results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
    print(report(read(options.results)))


if __name__ == "__main__":
    main()
