"""Comparison of traffic plans: every method on the same flows, with figures over dead cables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from thinwire.files import write_whole
from thinwire.monitor.report.charts import Axis, Chart, ChartSeries, image_file, line_chart
from thinwire.traffic.fabric import Fabric, FabricFlow
from thinwire.traffic.planner import HASHED, METHODS, plan_traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """Numbers of one method; of a hashing method the mean over its seeds.

    Attributes:
        method: The method.
        max_congestion: Load of the fullest cable, in flows of the largest size.
        bound: What no method can go below.
        completion_s: Seconds until the last job is complete.
        fastest_job_s: Seconds until the first job is complete.
        pieces: Number of connections.
        num_seeds: Plans that the numbers are the mean of.
    """

    method: str
    max_congestion: float
    bound: float
    completion_s: float
    fastest_job_s: float
    pieces: int
    num_seeds: int = 1

    def to_json(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        return {name: getattr(self, name) for name in self.__slots__}


def compare_methods(
    fabric: Fabric, flows: Sequence[FabricFlow], *, methods: Sequence[str] = METHODS, failed: Sequence[str] = (),
    k: int = 4, seeds: int = 20,
) -> list[TrafficRow]:  # fmt: skip
    """Plan the same flows with several methods.

    Args:
        fabric: The fabric.
        flows: The flows.
        methods: Names of methods.
        failed: Names of dead cables.
        k: Connections into which `k-ecmp` splits each connection.
        seeds: Number of plans of a method that hashes.

    Raises:
        ValueError: As `plan_traffic`.
    """
    rows = []
    for method in methods:
        numbers = range(seeds if method in HASHED else 1)
        plans = [plan_traffic(fabric, flows, method=method, failed=failed, k=k, seed=seed) for seed in numbers]
        rows.append(
            TrafficRow(
                method=method, bound=float(plans[0].bound), pieces=plans[0].num_pieces, num_seeds=len(plans),
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
