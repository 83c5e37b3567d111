"""Result table and figure of the wire benchmark. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.charts import Axis, Chart, ChartSeries, image_file, line_chart
from thinwire.units import format_bytes, format_rate, format_seconds
from thinwire.wire_benchmark.contenders import CONTENDERS
from thinwire.wire_benchmark.runner import BenchWire

HEAD = (
    "hosts", "wire", "contender", "runs", "tokens/s", "share of its own unshaped", "sent a step", "peak in 100 ms",
    "stalled", "bytes / payload", "val loss",
)  # fmt: skip
# Of thinwire's contenders, what the figure shows; the others are in the table.
_FIGURE = ("all-reduce", "diloco", "streaming-dense", "streaming-e3m0")
_PACED = " (paced)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """One contender on one wire, over its repeats.

    Attributes:
        contender: Its name, with `(paced)` where it was.
        tokens_per_s: Of all hosts together, one value a repeat.
        shares: Of its own throughput on a wire without limits in the same repeat; empty where that was not run.
        sent_bytes_per_step: Of one host, by the kernel.
        peak_bits_per_s: The highest of any host.
        stalled_share: Of the measured time; empty for references.
        bytes_over_payload: Kernel's bytes over payload; empty for references.
        val_loss: Of the global parameters; of runs with as many steps as the unshaped one only.
    """

    num_hosts: int
    wire: BenchWire
    contender: str
    runs: int
    tokens_per_s: tuple[float, ...]
    shares: tuple[float, ...]
    sent_bytes_per_step: tuple[float, ...]
    peak_bits_per_s: tuple[float, ...]
    stalled_share: tuple[float, ...]
    bytes_over_payload: tuple[float, ...]
    val_loss: tuple[float, ...]

    def cells(self) -> tuple[str, ...]:
        """Return the row as text, in the order of `HEAD`."""
        return (
            str(self.num_hosts), describe(self.wire), self.contender, str(self.runs),
            spread(self.tokens_per_s, "{:,.0f}"), spread(self.shares, "{:.3f}"),
            format_bytes(statistics.median(self.sent_bytes_per_step)),
            format_rate(statistics.median(self.peak_bits_per_s)), spread(self.stalled_share, "{:.1%}"),
            spread(self.bytes_over_payload, "{:.3f}"), spread(self.val_loss, "{:.4f}"),
        )  # fmt: skip


def rows(summaries: Iterable[Mapping[str, Any]]) -> list[ResultRow]:
    """Group runs by hosts, wire and contender, and hold each against its own unshaped run of the same repeat."""
    runs = list(summaries)
    unshaped = {(run["num_hosts"], _label(run), run["repeat"]): run for run in runs if run["wire"] == BenchWire()}
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for run in runs:
        wire, name = run["wire"], run["contender"]
        rate = math.inf if wire.rate_bits_per_s is None else wire.rate_bits_per_s
        # of another program, perhaps, which is not known here
        place = list(CONTENDERS).index(name) if name in CONTENDERS else len(CONTENDERS)
        key = run["num_hosts"], rate, wire.latency_s, wire.jitter_s, wire.loss, place, name, run["pace"]
        groups.setdefault(key, []).append(run)
    return [_row(group, unshaped) for _, group in sorted(groups.items())]


def describe(wire: BenchWire) -> str:
    """Return a wire as text.

    Example:
        >>> describe(BenchWire(rate_bits_per_s=5e6)), describe(BenchWire())
        ('5.00 Mbit/s', 'no limit')
    """
    words = ["no limit" if wire.rate_bits_per_s is None else format_rate(wire.rate_bits_per_s)]
    if wire.is_delayed:
        words.append(f"{format_seconds(wire.latency_s)} +- {format_seconds(wire.jitter_s)}, {wire.loss:.1%} lost")
    return ", ".join(words)


def spread(values: Sequence[float], form: str) -> str:
    """Return the median, and the range where there are several.

    Example:
        >>> spread([1.0, 3.0, 2.0], "{:.0f}"), spread([], "{}")
        ('2 (1 to 3)', '')
    """
    if not values:
        return ""
    middle = form.format(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({form.format(min(values))} to {form.format(max(values))})"


def markdown(found: Sequence[ResultRow]) -> str:
    """Return the table for the docs."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in found]
    return "\n".join(lines) + "\n"


def figure(found: Sequence[ResultRow], *, num_hosts: int) -> str:
    """Return the figure as SVG: the share of unshaped throughput against the wire's rate."""
    own = {name for name, known in CONTENDERS.items() if not known.is_reference}
    others = {row.contender for row in found if row.contender.removesuffix(_PACED) not in own}
    series = []
    for colour, name in enumerate((*_FIGURE, *sorted(others))):
        points = [
            (row.wire.rate_bits_per_s / 1e6, statistics.median(row.shares))
            for row in found
            if row.contender == name and row.num_hosts == num_hosts and row.shares
            and row.wire.rate_bits_per_s is not None and not row.wire.is_delayed
        ]  # fmt: skip
        if points:
            line = ChartSeries(name=name, points=tuple(sorted(points)), colour=colour, label=name, has_dots=True)
            series.append(line)
    chart = Chart(
        title=f"Share of its own unshaped throughput that a method keeps, {num_hosts} hosts",
        x=Axis(label="Mbit/s of each host's access, both ways", scale="log"),
        y=Axis(label="share of unshaped throughput", include=(0.0, 1.0)),
        series=tuple(series),
    )
    return image_file(line_chart(chart))


def _row(group: Sequence[Mapping[str, Any]], unshaped: Mapping[tuple[Any, ...], Mapping[str, Any]]) -> ResultRow:
    first = group[0]
    shares, losses = [], []
    for run in group:
        whole = unshaped.get((run["num_hosts"], _label(run), run["repeat"]))
        if whole is None:
            continue
        if run is not whole:
            shares.append(run["tokens_per_s"] / whole["tokens_per_s"])
        if run["measured_steps"] == whole["measured_steps"] and run["val_loss"] is not None:
            losses.append(run["val_loss"])
    return ResultRow(
        num_hosts=first["num_hosts"], wire=first["wire"], contender=_label(first), runs=len(group),
        tokens_per_s=tuple(run["tokens_per_s"] for run in group), shares=tuple(shares), val_loss=tuple(losses),
        sent_bytes_per_step=tuple(run["sent_bytes_per_step"] for run in group),
        peak_bits_per_s=tuple(run["peak_bits_per_s"] for run in group),
        stalled_share=tuple(run["stalled_s"] / run["wall_s"] for run in group if run["stalled_s"] is not None),
        bytes_over_payload=tuple(r["bytes_over_payload"] for r in group if r["bytes_over_payload"] is not None),
    )  # fmt: skip


def _label(run: Mapping[str, Any]) -> str:
    return str(run["contender"]) + (_PACED if run["pace"] else "")
