"""C4's figures of traffic planning (arXiv 2406.04594), in simulation, beside those of the paper.

`python benchmarks/traffic/c4_figures.py` prints the tables of docs/benchmarks/traffic.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction
from random import Random
from statistics import fmean

from thinwire.traffic import Fabric, FabricFlow, PathPiece, TrafficPlan, plan_traffic
from thinwire.transport.wire.path_balance import BalanceRules, PathBalancer

CEILING, JOBS, SPINES, SEEDS, ROUNDS = 362.0, 8, 8, 20, 40
BYTES = 10**9


def balanced_rounds(
    plan: TrafficPlan, *, num_rounds: int, rules: BalanceRules | None = None
) -> list[Mapping[str, float]]:
    """Repeat the flows of a plan, with shares that follow the measured rates of their pieces.

    Returns:
        For each round, the seconds until each job was complete.
    """
    balancers = [PathBalancer(len(pieces), rules=rules) for pieces in plan.pieces]
    found: list[Mapping[str, float]] = []
    for _ in range(num_rounds):
        pieces = [
            [
                dataclasses.replace(piece, share=Fraction(share).limit_denominator(10**6))
                for piece, share in zip(row, balancer.shares, strict=True)
            ]
            for row, balancer in zip(plan.pieces, balancers, strict=True)
        ]
        round_plan = dataclasses.replace(plan, pieces=pieces)
        found.append(round_plan.completion_s)
        for flow, row, ends, balancer in zip(plan.flows, pieces, round_plan.piece_completion_s, balancers, strict=True):
            rates = [float(piece.share) * flow.num_bytes / end_s for piece, end_s in zip(row, ends, strict=True)]
            balancer.observe(rates)
    return found


def after_failure(plan: TrafficPlan, failed: Sequence[str], *, seed: int = 0) -> TrafficPlan:
    """Return a plan after cables have failed: pieces on them take a path by hash, all others stay.

    Raises:
        ValueError: Two leaves have no path left, or a name is no cable.
    """
    fabric = plan.paths.fabric
    paths = dataclasses.replace(plan.paths, failed=plan.paths.failed | fabric.cables(failed))
    random = Random(seed)

    def moved(source: str, destination: str, piece: PathPiece) -> PathPiece:
        ends = fabric.hosts[source][piece.rail], fabric.hosts[destination][piece.destination_rail]
        if piece.spine is None or piece.spine in (healthy := paths.healthy(*ends)):
            return piece
        return dataclasses.replace(piece, spine=random.choice(healthy))

    pieces = [
        [moved(flow.source, flow.destination, piece) for piece in row]
        for flow, row in zip(plan.flows, plan.pieces, strict=True)
    ]
    return dataclasses.replace(plan, paths=paths, pieces=pieces)


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
