"""Tables and figures of the quality ladder's stored results.

    python benchmarks/quality/report.py                          # one table a rung
    python benchmarks/quality/report.py --json                   # one JSON object a line
    python benchmarks/quality/report.py --bars                   # the bars of rung B with measured values
    python benchmarks/quality/report.py --figures docs/assets    # loss against bytes, tokens and simulated time

The gap is that of the validation loss to data-parallel training with the same seed, each side at its best learning
rate. The token lag says how many percent fewer tokens data-parallel training needs for the same loss; it is read from
runs of data-parallel training with other budgets, straight lines between them in logarithms.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from ladder import RESULTS, Side, key_of, read, sides
from rungs import BASELINE, ENTRIES, RUNGS, SEEDS, SYNC_INTERVAL, Rung

from thinwire import simulate
from thinwire.charts import Axis, Chart, ChartSeries, image_file, line_chart
from thinwire.codecs import by_name
from thinwire.methods import recipe
from thinwire.planning.predict import predict
from thinwire.planning.simulator_adapter import traffic_of
from thinwire.units import format_bytes
from thinwire.workloads.language.transformer import TransformerConfig, build_transformer

Lines = Mapping[str, dict[str, Any]]
# Of each number of replicas: the most that plain Streaming DiLoCo and the best recipe may lie above data-parallel
# training on rung B, in percent, and the aim of the recipe; and the fit of arXiv 2503.09799, table 7, at its size.
BARS = {2: (2.5, 0.0, -1.0, 1.4), 4: (5.0, 0.5, -0.5, 3.6), 8: (math.inf, 2.0, 1.0, 6.6)}
THIN_LINK_BITS_PER_S = 20e6
# Variants that the figure of all methods leaves out.
_NOT_DRAWN = ("tau", "blend", "momentum 0.8")
# Labels of figures have at most 16 characters.
# Methods that the figure of loss against bytes names beside those on its line, and the colour of all others.
_NAMED = (BASELINE, "streaming-diloco", "diloco", "iso-loco", "local-sgd", "power-sgd", "noloco", "pier", "sparse-loco")
_GREY = 7
_MOST_GAP = 0.15  # of the baseline's loss: points above it would press all others together
_SHORT = {
    "data-parallel, Muon, mean of 16 values": "DP Muon mean", "muloco, H 16, mean of 16 values": "muloco H16 mean",
    "streaming-sparse-loco": "stream sparse", "streaming-diloco": "stream", "iso-loco": "iso", "data-parallel": "DP",
    "Muon inside, 2 bits, ": "Muon, ", ", less momentum": "", "Muon inside": "Muon",
    "E3M0 with error feedback": "E3M0 + EF", "2 bits, H 120": "2 bits H120",
    "lazy start": "lazy", "preserved norm": "norm", "fragments and overlap": "frags",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One side of a rung.

    Attributes:
        seeds: Runs at the best learning rate.
        loss: Their median, in nats a token.
        gap_percent: Median over the seeds; `gap_low` and `gap_high` are the ends.
        token_lag_percent: Of the median gap; None where the baseline's budgets do not reach that far.
        bytes_per_replica: Payload that each replica sent, counted; of data-parallel training, computed for two.
        is_tuned: Whether the best learning rate lies inside its grid.
    """

    rung: str
    method: str
    replicas: int
    sync_interval: int
    lr: float
    loss: float
    baseline_loss: float
    gap_percent: float
    gap_low: float
    gap_high: float
    token_lag_percent: float | None
    seeds: int
    bytes_per_replica: int
    is_tuned: bool
    windows: int


def rows(rung: Rung, lines: Lines) -> Iterator[Row]:
    """Return the sides of a rung that have at least one finished grid."""
    losses = {key: line["loss"] for key, line in lines.items()}
    every = list(sides(rung, only=(), replicas=()))
    baseline = next((side for side in every if side.entry.name == BASELINE and _is_begun(side, losses)), None)
    if baseline is None:
        return
    base_by_seed = {line["seed"]: line["loss"] for line in _winners(baseline, lines)}
    base = statistics.median(base_by_seed.values())
    budgets = _budgets(baseline, lines)
    for side in every:
        if not _is_begun(side, losses):
            continue
        found = _winners(side, lines)
        gaps = [100 * (x["loss"] / base_by_seed[x["seed"]] - 1) for x in found if x["seed"] in base_by_seed]
        gap = statistics.median(gaps)
        grid, best = side.grid(losses), side.settled_lr(losses)
        assert best is not None
        yield Row(
            rung=rung.name, method=side.entry.name, replicas=side.share_of if side.share_of > 1 else side.replicas,
            sync_interval=side.entry.options.get("sync_interval", 1), lr=best,
            loss=statistics.median(x["loss"] for x in found),
            baseline_loss=base, gap_percent=gap, gap_low=min(gaps), gap_high=max(gaps),
            token_lag_percent=token_lag_percent(
                base_by_seed[0] * (1 + gap / 100), budgets, tokens=rung.tokens
            ), seeds=len(found),
            bytes_per_replica=_sent_bytes(side, found), is_tuned=_is_tuned(side, grid, best),
            windows=rung.windows // side.share_of,
        )  # fmt: skip


def paired_differences(rung: Rung, lines: Lines, entry: str, other: str, *, replicas: int) -> dict[int, float]:
    """Return by how many percent an entry's loss lies above another's, by seed, each at its best rate."""
    losses = {key: line["loss"] for key, line in lines.items()}
    seeds = sorted({line["seed"] for line in lines.values()})

    def by_seed(name: str) -> dict[int, float]:
        for side in sides(rung, only=[name], replicas=[replicas]):
            if (rate := side.settled_lr(losses)) is not None:
                keys = {seed: key_of(side.settings(lr=rate, seed=seed)) for seed in seeds}
                return {seed: losses[key] for seed, key in keys.items() if key in losses}
        return {}

    first, second = by_seed(entry), by_seed(other)
    return {seed: 100 * (first[seed] / second[seed] - 1) for seed in first if seed in second}


def print_comparison(rung: Rung, lines: Lines, entry: str, other: str, *, replicas: int) -> None:
    """Print the differences by seed, their mean, and its standard error."""
    found = paired_differences(rung, lines, entry, other, replicas=replicas)
    if not found:
        print(f"rung {rung.name}, {replicas} replicas: no seed of both is stored at their best rates")
        return
    listed = ", ".join(f"{one:+.2f}" for one in found.values())
    error = f", standard error {statistics.stdev(found.values()) / math.sqrt(len(found)):.2f}" if len(found) > 1 else ""
    print(f"rung {rung.name}, {replicas} replicas, {entry} against {other}, percent by seed: {listed}")
    print(f"mean {statistics.mean(found.values()):+.2f} %{error}")


def token_lag_percent(loss: float, budgets: Sequence[tuple[int, float]], *, tokens: int) -> float | None:
    """Return how many percent fewer tokens the baseline needs for a loss.

    Args:
        loss: In nats.
        budgets: Tokens and loss of the baseline's runs, fewest tokens first.
        tokens: Of the run that reached the loss.

    Returns:
        Below 0 where the baseline needs more tokens; None outside of its budgets.

    Example:
        >>> token_lag_percent(2.0, [(50, 4.0), (100, 1.0)], tokens=100)
        29.28...
    """
    for (fewer, high), (more, low) in itertools.pairwise(budgets):
        if low <= loss <= high and low < high:
            share = math.log(high / loss) / math.log(high / low)
            needed = fewer * (more / fewer) ** share
            return 100 * (1 - needed / tokens)
    return None


def _is_tuned(side: Side, grid: Sequence[float], best: float) -> bool:
    return bool(side.entry.follows) or len(grid) < 3 or grid[0] < best < grid[-1]


def _is_begun(side: Side, losses: Mapping[str, float]) -> bool:
    rate = side.settled_lr(losses)
    return rate is not None and key_of(side.settings(lr=rate, seed=0)) in losses


def _winners(side: Side, lines: Lines) -> list[dict[str, Any]]:
    best = side.settled_lr({key: line["loss"] for key, line in lines.items()})
    assert best is not None
    keys = [key_of(side.settings(lr=best, seed=seed)) for seed in SEEDS]
    return [lines[key] for key in keys if key in lines]


def _budgets(baseline: Side, lines: Lines) -> list[tuple[int, float]]:
    best = baseline.best_lr({key: line["loss"] for key, line in lines.items()})
    keys = [key_of(baseline.settings(lr=best, seed=0, budget=share)) for share in baseline.entry.budgets]
    return sorted((lines[key]["tokens"], lines[key]["loss"]) for key in keys if key in lines)


def _sent_bytes(side: Side, found: Sequence[Mapping[str, Any]]) -> int:
    if not side.entry.name.startswith(BASELINE):
        return int(statistics.median(line["sent_bytes"] for line in found))
    numel = int(found[0]["num_parameters"])
    exchange = recipe("all-reduce")().exchanges(2)[0]
    return side.rung.steps * exchange.bind([[torch.Size([numel])]], replica=0, num_replicas=2).sent_bytes(
        numel, num_replicas=2
    )


def table(found: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    parts = [
        "| method | replicas | lr | seeds | loss | gap | token lag | sent by a replica |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        lag = "" if row.token_lag_percent is None else f"{row.token_lag_percent:+.0f} %"
        spread = f" ({row.gap_low:+.2f} to {row.gap_high:+.2f})" if row.seeds > 1 else ""
        rate = f"{row.lr:g}" + ("" if row.is_tuned else ", at the edge")
        parts.append(
            f"| {row.method} | {row.replicas} | {rate} | {row.seeds} | {row.loss:.4f} "
            f"| {row.gap_percent:+.2f} %{spread} | {lag} | {format_bytes(row.bytes_per_replica)} |"
        )
    return "\n".join(parts)


def print_rung(found: Sequence[Row], rung: Rung, lines: Lines) -> None:
    runs = [line for line in lines.values() if line["rung"] == rung.name]
    if not runs:
        print(f"rung {rung.name}: not run")
        return
    per_parameter = rung.tokens / runs[0]["num_parameters"]
    print(
        f"rung {rung.name}: {runs[0]['num_parameters']:,} parameters, {per_parameter:.1f} tokens a parameter, "
        f"{rung.steps // SYNC_INTERVAL} rounds at H {SYNC_INTERVAL}, beta2 {rung.beta2}, {len(runs)} runs on "
        f"{'; '.join(sorted({line['machine'] for line in runs}))}\n"
    )
    print(table(found))


def print_bars(found: Sequence[Row]) -> None:
    """Print each side's best rate of those tried, also of the outer step."""
    recipes = {"streaming-diloco": ("streaming-diloco",), "iso-loco": ("iso-loco", "iso-loco, outer rate 2.4")}
    print("| replicas | published fit | Streaming DiLoCo | limit | IsoLoCo | limit | aim |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for count, (plain, best, aim, fit) in BARS.items():
        cells = []
        for name, limit in (("streaming-diloco", plain), ("iso-loco", best)):
            rows = [row for row in found if row.method in recipes[name] and row.replicas == count]
            row = min(rows, key=lambda row: row.gap_percent, default=None)
            cells += ["not run" if row is None else f"{row.gap_percent:+.2f} %, {row.seeds} seeds"]
            cells += ["reported" if limit == math.inf else f"{limit:+.1f} %"]
        print(f"| {count} | {fit:+.1f} % | {' | '.join(cells)} | {aim:+.1f} % |")


def write_figures(rung: Rung, lines: Lines, folder: Path, *, replicas: int) -> None:
    """Write the losses of some sides against bytes, tokens and simulated time, as SVG."""
    names = {BASELINE: "data-parallel", "streaming-diloco": "Streaming DiLoCo", "iso-loco": "IsoLoCo"}
    losses = {key: line["loss"] for key, line in lines.items()}
    loss = Axis(label="validation loss, nats", write="{:.2f}".format)
    axes = {
        "bytes": Axis(label="MB sent by a replica", scale="log"),
        "tokens": Axis(label="million tokens"),
        "time": Axis(label="minutes on a link of 20 Mbit/s, simulated", scale="log"),
    }
    series: dict[str, list[ChartSeries]] = {kind: [] for kind in axes}
    for colour, (name, label) in enumerate(names.items()):
        count = 1 if name == BASELINE else replicas
        side = next(x for x in sides(rung, only=[name], replicas=[count]))
        if not _is_begun(side, losses):
            continue
        line = _winners(side, lines)[0]
        a_step = {
            "bytes": _sent_bytes(side, [line]) / line["steps"] / 1e6,
            "tokens": line["tokens"] / line["steps"] / 1e6,
            "time": _step_s(side, line, replicas=replicas) / 60,
        }
        for kind, size in a_step.items():
            points = tuple((step * size, value) for step, value in line["curve"])
            series[kind].append(ChartSeries(name=label, label=label, colour=colour, has_dots=True, points=points))
    for kind, axis in axes.items():
        title = f"Validation loss on rung {rung.name} against {axis.label}, {replicas} replicas"
        chart = Chart(title=title, x=axis, y=loss, series=tuple(series[kind]))
        path = folder / f"quality-{rung.name}-{kind}.svg"
        path.write_text(image_file(line_chart(chart)))
        print(path)


def write_pareto_figure(rung: Rung, found: Sequence[Row], folder: Path, *, replicas: int) -> None:
    """Write the loss of the tuned rows with some replicas against their bytes, and the line that nothing beats."""
    sending = [
        x for x in found if x.method.startswith(BASELINE) or (x.replicas == replicas and x.windows == rung.windows)
    ]
    sending = [x for x in sending if not any(word in x.method for word in _NOT_DRAWN)]
    most = (1 + _MOST_GAP) * min(x.loss for x in found if x.method == BASELINE)
    points = {
        x.method: (x.bytes_per_replica / 1e6, x.loss)
        for x in sending if x.bytes_per_replica and x.is_tuned and x.loss <= most
    }  # fmt: skip
    front = [point for point in points.values() if not any(_beats(other, point) for other in points.values())]
    named = [name for name, point in points.items() if point in front or name in _NAMED]
    chart = Chart(
        title=f"Validation loss on rung {rung.name} against MB sent, {replicas} replicas",
        x=Axis(label="MB sent by a replica", scale="log"),
        y=Axis(label="validation loss, nats", write="{:.3f}".format),
        series=(
            ChartSeries(name="nothing has fewer bytes and less loss", points=tuple(sorted(front)), is_main=True),
            *(
                ChartSeries(name=name, colour=_GREY, has_dots=True, points=(point,))
                for name, point in points.items() if name not in named
            ),
            *(
                ChartSeries(name=name, label=_label(name), colour=number % _GREY, has_dots=True, points=(points[name],))
                for number, name in enumerate(named)
            ),
        ),
    )  # fmt: skip
    path = folder / f"quality-{rung.name}-pareto.svg"
    path.write_text(image_file(line_chart(chart)))
    print(path)


def _label(name: str) -> str:
    for long, short in _SHORT.items():
        name = name.replace(long, short)
    return name


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def _step_s(side: Side, line: Mapping[str, Any], *, replicas: int) -> float:
    """Return the simulated seconds of a step on thin links, computing as fast as the stored run's core."""
    options = {k: by_name(v) if k == "codec" else v for k, v in side.entry.options.items()}
    method = recipe(side.entry.method)(**options)
    shape = TransformerConfig(
        vocab_size=side.rung.vocab_size, dim=side.rung.dim, layers=side.rung.layers, heads=side.rung.heads,
        max_seq_len=side.rung.seq_len,
    )  # fmt: skip
    model = build_transformer(shape, device="meta")
    compute_s = line["cpu_s"] / line["steps"] / replicas
    found = predict(
        method.schedule, traffic_of(method, model, num_replicas=replicas),
        links=simulate.star([simulate.SimLink(bandwidth_bits_per_s=THIN_LINK_BITS_PER_S)] * replicas),
        replicas=[simulate.SimReplica(step_s=compute_s)] * replicas, num_steps=line["steps"],
    )  # fmt: skip
    return found.total_s / line["steps"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rung", choices=RUNGS, action="append", help="all by default")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--bars", action="store_true", help="bars and measured values")
    parser.add_argument("--compare", nargs=2, metavar=("ENTRY", "OTHER"), help="their losses, seed by seed")
    parser.add_argument("--figures", type=Path, help="folder for figures")
    parser.add_argument("--replicas", type=int, default=2, help="of the figures' and compared methods")
    options = parser.parse_args()
    known = {entry.name for entry in ENTRIES}
    if unknown := [name for name in options.compare or () if name not in known]:
        parser.error(f"unknown entry {unknown[0]!r}; allowed are those of rungs.py, such as {BASELINE!r}")
    lines = {key_of(line): line for line in read(options.results)}
    for name in options.rung or RUNGS:
        rung = RUNGS[name]
        found = list(rows(rung, lines))
        if options.compare:
            print_comparison(rung, lines, *options.compare, replicas=options.replicas)
        elif options.json:
            for row in found:
                print(json.dumps(asdict(row)))
        elif options.bars:
            if name == "B" or options.rung:
                print_bars(found)
        elif options.figures:
            if found:
                write_figures(rung, lines, options.figures, replicas=options.replicas)
                write_pareto_figure(rung, found, options.figures, replicas=options.replicas)
        else:
            print_rung(found, rung, lines)
            print()


if __name__ == "__main__":
    main()
