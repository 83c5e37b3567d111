"""Arithmetic behind a plan, one line a step, so that it can be repeated on paper; and the figure of its candidates."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path

from thinwire.charts import Axis, Chart, ChartSeries, Point, image_file, line_chart
from thinwire.files import write_whole
from thinwire.planning.cluster import Cluster
from thinwire.planning.loss_penalty import compute_worth, optimal_batch_tokens
from thinwire.planning.plan import Outlook, Plan, pareto
from thinwire.planning.predict import (
    FLOPS_PER_PARAMETER,
    RECOMPUTE_FACTOR,
    inner_step_s,
    interval_coding_s,
    interval_outer_s,
)
from thinwire.planning.simulator_adapter import simulated_cluster, stages_of, traffic_of
from thinwire.planning.training_task import BYTES_PER_PARAMETER, TrainingTask
from thinwire.units import format_bytes, format_count, format_rate, format_seconds


def explain(plan: Plan, workload: TrainingTask, cluster: Cluster) -> list[str]:
    """Return the lines that lead to what the plan says of its best candidate."""
    best = plan.best
    rounds = _rounds(best, workload, cluster) if best.candidate.num_replicas > 1 else []
    return [*_steps(best, workload, cluster), *rounds, *_total(best)]


def _steps(best: Outlook, workload: TrainingTask, cluster: Cluster) -> list[str]:
    chosen = best.candidate
    tokens = workload.step_tokens(chosen.num_replicas)
    slowest = min((cluster.machine(name) for name in chosen.replicas), key=lambda m: m.flops_per_s or inf)
    step_s = inner_step_s(slowest, num_parameters=workload.num_parameters, tokens=tokens)
    flops, again = FLOPS_PER_PARAMETER, ""
    if chosen.recompute:
        step_s, flops = step_s * RECOMPUTE_FACTOR, round(flops * RECOMPUTE_FACTOR)
        again = ", computed again in the backward pass"
    at_once = chosen.micro_batch or chosen.batch_size
    needed = workload.memory_bytes(micro_batch=at_once, recompute=chosen.recompute)
    activations = needed - BYTES_PER_PARAMETER * workload.num_parameters
    together = chosen.num_replicas * tokens
    best_tokens = optimal_batch_tokens(num_parameters=workload.num_parameters, num_replicas=chosen.num_replicas)
    return [
        f"steps: {format_count(workload.tokens)} tokens / ({chosen.num_replicas} replicas x {chosen.batch_size} "
        f"sequences x {workload.seq_len} tokens) = {best.prediction.num_steps:,}",
        f"batch: {format_count(together)} tokens a step of all together; the best for this size and these replicas is "
        f"about {format_count(best_tokens)} (arXiv 2503.09799, table 10); the loss below is that of such a batch",
        f"computing: {flops} x {format_count(workload.num_parameters)} parameters x {tokens:,} tokens / "
        f"{slowest.flops_per_s:.3g} FLOP/s of {slowest.name}, the slowest = {format_seconds(step_s)} a step",
        f"memory: {BYTES_PER_PARAMETER} bytes a parameter (itself, gradient, Adam's moments) and about "
        f"{format_bytes(activations)} of activations{again}, {at_once} sequences at a time = "
        f"{format_bytes(needed)} a replica",
    ]


def _rounds(best: Outlook, workload: TrainingTask, cluster: Cluster) -> list[str]:
    chosen, method = best.candidate, best.candidate.make()
    traffic = traffic_of(method, workload.model, num_replicas=chosen.num_replicas)
    sizes = [channels[traffic.last_channel] for channels in traffic.payload_bytes]
    links = simulated_cluster(cluster, names=chosen.replicas)
    stages = stages_of(traffic.exchange, links, num_replicas=chosen.num_replicas)
    # of the link that bounds each stage: its rate, and the bits on it for one bit of a replica's payload
    bounds: list[tuple[float, float]] = []
    for stage in stages:
        limited = [(links.links[link].bandwidth_bits_per_s, bits) for link, bits in stage.loads]
        bounds.append(max(limited, key=lambda load: load[1] / load[0], default=(inf, 0.0)))

    def latency_s(size: float) -> float:
        return sum(traffic.exchange.flow(stage, payload_bits=8 * size).latency_s for stage in stages)

    def round_s(size: float) -> float:
        return sum(8 * size * bits / rate for rate, bits in bounds) + latency_s(size)

    interval, overlap = method.schedule.sync_interval, chosen.overlap_steps or 0
    pattern = traffic.exchange.pattern.name
    lines = [
        f"payload: {format_bytes(sum(sizes))} for the whole model in {len(sizes)} fragments, the largest "
        f"{format_bytes(max(sizes))}: {8 * sum(sizes) / workload.num_parameters:.3g} bits a parameter",
        f"a round ({pattern}): {sum(bits for _, bits in bounds):.3g} payloads over the busiest link of "
        f"{format_rate(min(rate for rate, _ in bounds))}, and {format_seconds(latency_s(max(sizes)))} of latency, "
        f"with the messages before a transfer: the largest fragment takes {format_seconds(round_s(max(sizes)))}",
        f"every {interval} steps each fragment once: {interval} steps compute for "
        f"{format_seconds(interval * best.prediction.compute_s)}, all rounds take "
        f"{format_seconds(sum(map(round_s, sizes)))} of the wire, and {overlap} steps, "
        f"{format_seconds(overlap * best.prediction.compute_s)}, hide a round",
    ]
    coding = [interval_coding_s(cluster.machine(name), traffic) / interval for name in chosen.replicas]
    if max(coding):
        lines.append(f"coding: {format_seconds(max(coding))} a step at the slowest, in the computing time")
    outer = [interval_outer_s(cluster.machine(name), traffic) / interval for name in chosen.replicas]
    if max(outer):
        is_measured = all(cluster.machine(name).float64_flops_per_s for name in chosen.replicas)
        how = "" if is_measured else "; float64 assumed at a sixth of the FLOP/s, thinwire probe measures it"
        lines.append(f"outer steps: {format_seconds(max(outer))} a step at the slowest, in the computing time{how}")
    return lines


def _total(best: Outlook) -> list[str]:
    found = best.prediction
    lines = [
        f"simulated: {found.simulated_steps:,} of {found.num_steps:,} steps; in the end a step takes "
        f"{format_seconds(found.step_s)}, {format_seconds(found.stall_s)} of it waiting: "
        f"{found.compute_utilisation:.1%} of the time is computing",
        f"time: {found.num_steps:,} steps x {format_seconds(found.step_s)} = {format_seconds(found.total_s)}",
    ]
    penalty = best.penalty
    if penalty is None:
        return [*lines, "loss: no published loss of this method, so no time to equal loss"]
    parts = ", ".join(f"{name} {share:+.2%}" for name, share in penalty.parts)
    lines.append(f"loss against data-parallel training: {penalty.share:+.2%} ({parts}; arXiv 2503.09799, 2501.18512)")
    lines.append(
        f"to make that up takes {compute_worth(penalty.share):.3g} times the compute (loss falls as compute to the "
        f"-0.049, arXiv 2503.09799): {format_seconds(best.equal_loss_s)} to equal loss"
    )
    return [*lines, *(f"beyond what is published: {note}" for note in penalty.notes)]


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
        series.append(ChartSeries(
            name=one.candidate.describe(), points=_points([one]), colour=2 + named.index(name), label=label,
            has_dots=True,
        ))  # fmt: skip
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
