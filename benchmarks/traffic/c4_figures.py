"""C4's figures of traffic planning (arXiv 2406.04594), in simulation, beside those of the paper.

`python benchmarks/traffic/c4_figures.py` prints the tables of docs/benchmarks/traffic.md.
"""

from __future__ import annotations

import dataclasses
from statistics import fmean

from thinwire.traffic import Fabric, FabricFlow, TrafficPlan, plan_traffic
from thinwire.traffic.comparison import after_failure, balanced_rounds

CEILING, JOBS, SPINES, SEEDS, ROUNDS = 362.0, 8, 8, 20, 40
BYTES = 10**9


def bonded(num_ports: int) -> Fabric:
    """Return two groups of 8 hosts; each port has a leaf of its own in each group, and 8 uplinks a leaf, 1:1."""
    rate = CEILING / num_ports * 1e9
    hosts = {
        f"{side}{job}": tuple(range(place * num_ports, (place + 1) * num_ports))
        for place, side in enumerate("ab")
        for job in range(JOBS)
    }
    return Fabric(spines=SPINES, uplink_bits_per_s=rate, port_bits_per_s=rate, hosts=hosts)


def all_reduces(connections: int) -> list[FabricFlow]:
    """Return 8 jobs of two hosts each, which send to each other all the time."""
    return [
        FabricFlow(source=f"{a}{job}", destination=f"{b}{job}", num_bytes=BYTES, job=str(job), connections=connections)
        for job in range(JOBS)
        for a, b in ("ab", "ba")
    ]


def rates(plan: TrafficPlan) -> list[float]:
    """Return the Gbit/s of each job."""
    return [8e-9 * BYTES / seconds for seconds in plan.completion_s.values()]


def moved_to_one_uplink(plan: TrafficPlan, dead: TrafficPlan) -> TrafficPlan:
    """Return the plan after a failover that sends all connections of the dead uplink over the next one."""
    pieces = [
        [
            dataclasses.replace(piece, spine=1) if piece.spine == 0 and 0 in (a, b) else piece
            for piece in row
            for a, b in [(plan.paths.fabric.hosts[flow.source][piece.rail],
                          plan.paths.fabric.hosts[flow.destination][piece.destination_rail])]
        ]
        for flow, row in zip(plan.flows, plan.pieces, strict=True)
    ]  # fmt: skip
    return dataclasses.replace(dead, pieces=pieces)


def speed_up(f: float, g: float) -> float:
    """Return the throughput of a job that communicates for a share f of its time, if that gets g times as fast."""
    return 1 / (1 - f + f / g)


def main() -> None:
    print("| 8 jobs, Gbit/s a job | slowest | mean | fastest |\n| --- | --- | --- | --- |")
    hashed = {}
    for connections in (1, 2, 4, 8, 16):
        found = [
            rates(plan_traffic(bonded(2), all_reduces(connections), method="ecmp", seed=seed)) for seed in range(SEEDS)
        ]
        low, mean, high = (fmean(map(of, found)) for of in (min, fmean, max))
        hashed[connections] = mean
        print(f"| hashed, {connections} connections a flow | {low:.0f} | {mean:.0f} | {high:.0f} |")
    planned = rates(plan_traffic(bonded(2), all_reduces(16), method="c4p"))
    print(f"| planned (c4p), 16 connections | {min(planned):.0f} | {fmean(planned):.0f} | {max(planned):.0f} |")

    print("\n| one dead uplink of 8, Gbit/s, mean of the jobs | ours |\n| --- | --- |")
    healthy = plan_traffic(bonded(1), all_reduces(SPINES), method="c4p")
    dead = [after_failure(healthy, ["leaf-0/spine-0"], seed=seed) for seed in range(SEEDS)]
    static = fmean(fmean(rates(plan)) for plan in dead)
    slowest = fmean(min(rates(plan)) for plan in dead)
    rounds = [balanced_rounds(plan, num_rounds=ROUNDS)[-1] for plan in dead]
    dynamic = fmean(fmean(8e-9 * BYTES / s for s in one.values()) for one in rounds)
    print(f"| static: flows of the dead uplink take another by hash | {static:.0f} (slowest job {slowest:.0f}) |")
    one = rates(moved_to_one_uplink(healthy, dead[0]))
    print(f"| static: flows of the dead uplink all take the next one | {fmean(one):.0f} (slowest job {min(one):.0f}) |")
    print(f"| dynamic: shares follow measured rates, after {ROUNDS} rounds | {dynamic:.0f} |")
    print(f"| ideal: 7/8 | {CEILING * 7 / 8:.0f} |")

    print("\n| share of communication f | gain at the paper's g = 1.703 | gain at ours |\n| --- | --- | --- |")
    ours = fmean(planned) / hashed[16]
    for f in (1 / 3, 0.3, 0.02):
        print(f"| {f:.0%} | {speed_up(f, 1.703) - 1:+.2%} | {speed_up(f, ours) - 1:+.2%} (g = {ours:.2f}) |")


if __name__ == "__main__":
    main()
