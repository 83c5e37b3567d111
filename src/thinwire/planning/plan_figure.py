"""A plan as a figure: time against loss of all that was simulated, and the line of those that nothing beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.files import write_whole
from thinwire.monitor.report.charts import Axis, Chart, ChartSeries, Point, image_file, line_chart
from thinwire.planning.plan import Outlook, Plan, pareto


def write_plan_figure(plan: Plan, path: Path) -> None:
    """Write the figure as a picture of its own.

    Raises:
        OSError: The place cannot be written.
    """
    write_whole(path, image_file(line_chart(plan_chart(plan))))


def plan_chart(plan: Plan) -> Chart:
    """Return time on a logarithmic axis against the loss penalty; what has no published loss is left out."""
    front = pareto(plan.outlooks)
    known = [one for one in plan.outlooks if one.penalty is not None and one is not plan.best]
    series = [ChartSeries(name="nothing is better in both", points=_points(front), colour=0)]
    named: list[str] = []
    for one in known:
        name = "alone" if one.candidate.num_replicas == 1 else one.candidate.method
        label = "" if name in named else name
        named += [name] if label else []
        series.append(
            ChartSeries(
                name=one.candidate.describe(),
                points=_points([one]),
                colour=2 + named.index(name),
                label=label,
                has_dots=True,
            )
        )
    if plan.best.penalty is not None:
        words = plan.best.candidate.describe()
        series.append(ChartSeries(name=words, points=_points([plan.best]), colour=1, label="the plan", has_dots=True))
    return Chart(
        title=f"{plan.model}: time to {plan.tokens:.3g} tokens against loss",
        x=Axis(label="hours (log scale)", scale="log"),
        y=Axis(label="loss against data-parallel training, %"),
        series=tuple(series),
    )


def _points(outlooks: Sequence[Outlook]) -> tuple[Point, ...]:
    return tuple(
        (one.prediction.total_s / 3600, 100 * one.penalty.share) for one in outlooks if one.penalty is not None
    )
