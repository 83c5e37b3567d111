"""Comparison of traffic plans: every method on the same flows, over dead cables, and balanced by measured rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from thinwire.charts import Axis, Chart, ChartSeries, image_file, line_chart
from thinwire.files import write_whole
from thinwire.traffic.fabric import Fabric, FabricFlow
from thinwire.traffic.planner import HASHED, METHODS, PathPiece, TrafficPlan, plan_traffic
from thinwire.transport.wire.path_balance import BalanceRules, PathBalancer


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """Numbers of one method; of a hashing method the mean over its seeds."""

    method: str
    max_congestion: float  # load of the fullest cable, in flows of the largest size
    bound: float  # what no method can go below
    completion_s: float  # seconds until the last job is complete
    fastest_job_s: float  # seconds until the first job is complete
    pieces: int  # number of connections
    num_seeds: int = 1  # plans that the numbers are the mean of

    def to_json(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        return {name: getattr(self, name) for name in self.__slots__}


def compare_methods(
    fabric: Fabric, flows: Sequence[FabricFlow], *, methods: Sequence[str] = METHODS, failed: Sequence[str] = (),
    k: int = 4, seeds: int = 20,
) -> list[TrafficRow]:  # fmt: skip
    """Plan the same flows with several methods, and with so many seeds where a method hashes.

    Raises:
        ValueError: As `plan_traffic`.
    """
    rows = []
    bound = None
    for method in methods:
        numbers = range(seeds if method in HASHED else 1)
        plans = [plan_traffic(fabric, flows, method=method, failed=failed, k=k, seed=seed) for seed in numbers]
        bound = float(plans[0].bound) if bound is None else bound  # the same for all methods
        rows.append(
            TrafficRow(
                method=method, bound=bound, pieces=plans[0].num_pieces, num_seeds=len(plans),
                max_congestion=fmean(float(plan.max_congestion) for plan in plans),
                completion_s=fmean(max(plan.completion_s.values()) for plan in plans),
                fastest_job_s=fmean(min(plan.completion_s.values()) for plan in plans),
            )
        )  # fmt: skip
    return rows


def failure_chart(
    fabric: Fabric, flows: Sequence[FabricFlow], *, methods: Sequence[str], k: int, seeds: int, most_failed: int
) -> Chart:
    """Return a chart of the completion time over the number of dead uplinks of leaf 0, a line for each method."""
    points: dict[str, list[tuple[float, float]]] = {method: [] for method in methods}
    for count in range(most_failed + 1):
        failed = [f"leaf-0/spine-{spine}" for spine in range(count)]
        for row in compare_methods(fabric, flows, methods=methods, failed=failed, k=k, seeds=seeds):
            points[row.method].append((float(count), row.completion_s))
    series = tuple(
        ChartSeries(name=method, label=method, points=tuple(found), colour=number, has_dots=True)
        for number, (method, found) in enumerate(points.items())
    )
    return Chart(
        title="Completion time over dead uplinks", x=Axis(label="dead uplinks of leaf-0"),
        y=Axis(label="completion time, s", include=(0.0,)), series=series,
    )  # fmt: skip


def write_failure_figure(chart: Chart, path: Path) -> None:
    """Write the chart as a picture of its own.

    Raises:
        OSError: The place cannot be written.
    """
    write_whole(path, image_file(line_chart(chart)))


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
