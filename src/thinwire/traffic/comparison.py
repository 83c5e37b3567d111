"""Comparison of traffic plans: every method on the same flows, also over dead cables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from thinwire.charts import Axis, Chart, ChartSeries, image_file, line_chart
from thinwire.files import write_whole
from thinwire.traffic.fabric import Fabric, FabricFlow
from thinwire.traffic.planner import HASHED, METHODS, plan_traffic


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
