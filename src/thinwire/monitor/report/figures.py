"""The figures of a report: which numbers of a run stand on which axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from thinwire.charts import Axis, Chart, ChartSeries, Lane, Point, lane_chart, line_chart
from thinwire.runlog.measures import per_sample, shown_metric
from thinwire.runlog.run_folder import EvaluationMetrics, RunRecord, StepMetrics
from thinwire.runlog.run_numbers import RATE_WINDOW_S
from thinwire.units import format_bytes, format_count, format_rate, format_seconds

_MOST_WINDOWS = 10_000  # a longer run gets wider ones
_MOST_LABELS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A drawn chart with its heading and the sentence below it."""

    heading: str
    svg: str
    caption: str


def _figure(chart: Chart, caption: str) -> Figure:
    return Figure(heading=chart.title, svg=line_chart(chart), caption=caption)


def trimmed(text: str) -> str:
    """Drop the zeros after the point that a round value does not need.

    Example:
        >>> trimmed("1.00 MB"), trimmed("2.50 kB"), trimmed("100 B"), trimmed("1:30 min")
        ('1 MB', '2.5 kB', '100 B', '1:30 min')
    """
    number, space, unit = text.partition(" ")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + space + unit


def samples_axis(unit: str) -> Axis:
    """Return the axis of all replicas' samples."""
    return Axis(label=f"{unit}, all replicas", write=lambda v: trimmed(format_count(v)), include=(0.0,))


def bytes_axis() -> Axis:
    """Bytes that one replica sent, on a logarithmic scale: what is compared differs by orders of magnitude."""
    return Axis(label="bytes sent by one replica (log scale)", write=lambda v: trimmed(format_bytes(v)), scale="log")


def time_axis() -> Axis:
    """Time since training began."""
    return Axis(label="time since the start", write=_time, scale="time", include=(0,))


def loss_axis(unit: str) -> Axis:
    """Return the axis of a loss."""
    return Axis(label=f"loss, {per_sample(unit)}", write=lambda v: f"{v:.4g}")


def loss_against_samples(run: RunRecord) -> Figure:
    """Draw every replica's training loss and the validation loss of the global parameters, against all samples."""
    count, unit = samples_per_step(run), run.finished().unit
    many = len(run.replicas) > _MOST_LABELS
    first = min(run.replicas, default=0)
    training = [
        ChartSeries(
            name=f"training, replica {replica}", points=tuple((line.step * count, line.loss) for line in record.steps),
            colour=7 if many else replica, is_faint=many, is_thin=True,
            label=f"replica {replica}" if not many else "training" if replica == first else "",
        )
        for replica, record in run.replicas.items()
    ]  # fmt: skip
    validation = _validation((e.step * count, e.val_loss) for e in evaluations(run))
    broken = sum(not math.isfinite(line.loss) for record in run.replicas.values() for line in record.steps)
    note = f" The training loss was not finite at {broken} of the log lines." if broken else ""
    chart = Chart(
        title=f"Loss against {unit}", x=samples_axis(unit), y=loss_axis(unit), series=(*training, validation)
    )  # fmt: skip
    caption = (
        f"Validation: loss of the global parameters on held-out {_held_out(unit)}. Replicas: training loss of each, "
        "mean of each log interval."
    )
    return _figure(chart, caption + note)


def metric_against_samples(run: RunRecord) -> list[Figure]:
    """Draw what the workload measures beside the loss, such as an accuracy; nothing where there is no such metric."""
    count, unit = samples_per_step(run), run.finished().unit
    found = [(e.step * count, e.metric) for e in evaluations(run) if e.metric is not None]
    if not found:
        return []
    name, of_metric, _ = found[-1][1]
    validation = _validation((place, metric[2]) for place, metric in found)
    y = Axis(label=name, write=lambda v: trimmed(shown_metric((name, of_metric, v))))
    chart = Chart(title=f"{name.capitalize()} against {unit}", x=samples_axis(unit), y=y, series=(validation,))
    caption = f"{name.capitalize()} of the global parameters on held-out {_held_out(unit)}."
    return [_figure(chart, caption)]


def _validation(points: Iterable[Point]) -> ChartSeries:
    return ChartSeries(name="validation", label="validation", is_main=True, has_dots=True, points=tuple(points))


def _held_out(unit: str) -> str:
    return "text" if unit == "tokens" else unit


def loss_against_bytes(run: RunRecord) -> Figure:
    """Draw the same losses against the bytes that one replica has sent, and where an all-reduce would end."""
    training = ChartSeries(
        name="training", label="training", colour=7, is_thin=True, points=mean_loss_against_bytes(run)
    )
    validation = _validation(validation_against_bytes(run))
    summary = run.finished()
    would, marker = summary.allreduce_bytes, None
    if would > 0 and summary.wire_bytes_sent > 0 and would > 1.2 * summary.wire_bytes_sent:
        marker = (would, f"all-reduce at every\nstep: {format_bytes(would)}")
    chart = Chart(
        title="Loss against bytes sent", x=bytes_axis(), y=loss_axis(summary.unit), series=(training, validation),
        marker=marker, empty="nothing was sent",
    )  # fmt: skip
    return _figure(chart, "Bytes sent, mean over replicas. Further left at the same loss is better.")


def wire_rate(run: RunRecord) -> Figure:
    """Draw the rate at which each replica sent, mean of each log interval."""
    span_s = max((record.steps[-1].time_s for record in run.replicas.values() if record.steps), default=0.0)
    window_s = max(RATE_WINDOW_S, span_s / _MOST_WINDOWS)
    lanes = []
    for replica, record in run.replicas.items():
        points, before_s = [], 0.0
        for line in record.steps:
            first, last = math.ceil(before_s / window_s), math.ceil(line.time_s / window_s)
            points += [(number * window_s, line.sent_bits_per_s) for number in range(first, last)]
            before_s = line.time_s
        peak = record.steps[-1].peak_bits_per_s if record.steps else 0.0
        lanes.append(
            Lane(name=f"replica {replica}", points=tuple(points), note=f"peak {format_rate(peak)}", colour=replica)
        )
    highest = max((rate for lane in lanes for _, rate in lane.points), default=0.0)
    y = Axis(label="sent, each replica", write=lambda v: trimmed(format_rate(v)) if v else "0")
    svg = lane_chart(
        "Rate on the wire", lanes, x=time_axis(), y=y, width=window_s, until=span_s, empty="nothing was sent"
    )
    caption = (
        "Rate of sending, mean of each log interval, by the counts of each replica's kernel. All replicas share one "
        f"scale: the tallest bar is {format_rate(highest)}. Peak: the replica's highest rate over 1 s."
    )
    return Figure(heading="Rate on the wire", svg=svg, caption=caption)


def utilisation(run: RunRecord) -> Figure:
    """Draw the share of time in which each replica computed."""
    many = len(run.replicas) > _MOST_LABELS
    lines = tuple(
        ChartSeries(
            name=f"replica {replica}", label="" if many else f"replica {replica}", colour=7 if many else replica,
            points=tuple((line.time_s, line.compute_fraction) for line in record.steps),
        )
        for replica, record in run.replicas.items()
    )  # fmt: skip
    y = Axis(label="share of time", write=lambda v: f"{100 * v:.3g} %", include=(0.0, 1.0))
    chart = Chart(title="Time spent computing", x=time_axis(), y=y, series=lines)
    shares = [record.steps[-1].computing for record in run.replicas.values() if record.steps]
    whole = f"; {100 * sum(shares) / len(shares):.1f} % of the whole run" if shares else ""
    caption = f"Between two log lines{whole}. In the rest of the time a replica waited for the network."
    return _figure(chart, caption)


def evaluations(run: RunRecord) -> list[EvaluationMetrics]:
    """Return the evaluations, with the summary's as the last one where the metrics lack it."""
    found, summary = list(run.evaluations), run.finished()
    if not found or found[-1].step < summary.steps:
        found.append(EvaluationMetrics(
            step=summary.steps, time_s=summary.wall_s, samples=summary.samples, val_loss=summary.val_loss,
            unit=summary.unit, metric=summary.metric,
        ))  # fmt: skip
    return found


def samples_per_step(run: RunRecord) -> float:
    """Return the samples of all replicas in one inner step."""
    summary = run.finished()
    return summary.samples / summary.steps if summary.steps else 0.0


def validation_against_bytes(run: RunRecord) -> tuple[Point, ...]:
    """Return (mean bytes that one replica had sent, validation loss)."""
    sent = mean_bytes(run)
    summary = run.finished()
    sent[summary.steps] = summary.wire_bytes_sent
    steps = sorted(sent)
    points = []
    for evaluation in evaluations(run):
        before = [step for step in steps if step <= evaluation.step]
        points.append((sent[before[-1]] if before else 0.0, evaluation.val_loss))
    return tuple(points)


def mean_loss_against_bytes(run: RunRecord) -> tuple[Point, ...]:
    """Return (mean bytes that one replica had sent, mean training loss) where all replicas wrote a line."""
    sent, losses = mean_bytes(run), _means(run, lambda line: line.loss)
    return tuple((sent[step], losses[step]) for step in sorted(sent))


def mean_bytes(run: RunRecord) -> dict[int, float]:
    """Return the mean bytes sent so far by step, where all replicas wrote a line."""
    return _means(run, lambda line: line.sent_bytes)


def _means(run: RunRecord, value: Callable[[StepMetrics], float]) -> dict[int, float]:
    values: dict[int, list[float]] = {}
    for record in run.replicas.values():
        for line in record.steps:
            values.setdefault(line.step, []).append(value(line))
    return {step: sum(found) / len(found) for step, found in values.items() if len(found) == len(run.replicas)}


def figures_of_runs(runs: Mapping[str, RunRecord]) -> Sequence[Figure]:
    """Draw the validation losses of several runs against samples and against bytes sent, one line a run."""
    by_samples, by_bytes = [], []
    unit = next(iter(runs.values())).finished().unit
    for colour, (name, run) in enumerate(runs.items()):
        count = samples_per_step(run)
        samples = tuple((e.step * count, e.val_loss) for e in evaluations(run))
        by_samples.append(ChartSeries(name=name, label=name, colour=colour, has_dots=True, points=samples))
        by_bytes.append(
            ChartSeries(name=name, label=name, colour=colour, has_dots=True, points=validation_against_bytes(run))
        )
    first = Chart(
        title=f"Validation loss against {unit}", x=samples_axis(unit), y=loss_axis(unit), series=tuple(by_samples)
    )  # fmt: skip
    second = Chart(
        title="Validation loss against bytes sent", x=bytes_axis(), y=loss_axis(unit), series=tuple(by_bytes),
        empty="nothing was sent",
    )  # fmt: skip
    return [
        _figure(first, f"Loss of the global parameters on held-out {_held_out(unit)}."),
        _figure(second, "Bytes sent, mean over replicas."),
    ]


def _time(seconds: float) -> str:
    """Write a round time shortly: `5 min` and not `5:00 min`."""
    if seconds == 0:
        return "0"
    if 60 <= seconds < 3600 and seconds % 60 == 0:
        return f"{seconds / 60:.0f} min"
    return trimmed(format_seconds(seconds))
