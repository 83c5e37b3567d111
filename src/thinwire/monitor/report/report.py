"""The report of one finished run: what came out, four figures, the settings, and the command that does it again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from thinwire.monitor.report import figures
from thinwire.monitor.report.chart import escape
from thinwire.monitor.report.faults import trouble
from thinwire.monitor.report.page import code, facts, gallery, page, write_page
from thinwire.monitor.runlog.run_folder import RunRecord, Summary, read_run
from thinwire.units import format_bytes, format_count, format_rate, format_seconds

REPORT = "report.html"
_MOST_WARNINGS = 10


def write_report(run: Path, *, command: str) -> Path:
    """Write `report.html` into a finished run's folder and return its path.

    Args:
        run: The folder.
        command: The command that repeats the run.

    Raises:
        DataError: The folder is no run, or the run has not finished.
        OSError: The file cannot be written.
    """
    path = run / REPORT
    write_page(path, render_report(read_run(run), command=command))
    return path


def render_report(run: RunRecord, *, command: str) -> str:
    """Return the report as HTML.

    Raises:
        DataError: The run has not finished.
    """
    summary = run.finished()
    failed = [f"Replica {n} failed: {record.error}" for n, record in run.replicas.items() if record.error]
    drawn = [figures.loss_against_tokens(run), figures.loss_against_bytes(run)]
    drawn += [figures.wire_rate(run), figures.utilisation(run)]
    ending = {name: run.raw_summary.get(name) for name in ("machine", "global_parameters_sha256")}
    parts = [
        f'<p class="headline">{headline(summary)}</p>',
        *(f'<p class="note">{escape(note)}</p>' for note in [*failed, *warnings(run)]),
        facts(results(summary)),
        "<h2>Figures</h2>",
        gallery(drawn),
        *trouble(run.path),
        "<h2>Do it again</h2>",
        code(command),
        "<h2>Settings</h2>",
        facts([*flat(run.config), *flat(ending)], style="settings"),
    ]
    return page(f"thinwire train: {run.name}", parts=parts)


def warnings(run: RunRecord) -> list[str]:
    """Return what was warned of while the run went on, in order of steps; of many the last ones."""
    found = sorted({warning for record in run.replicas.values() for warning in record.warnings})
    said = [f"Warning after step {step:,}: {message}" for step, message in found[-_MOST_WARNINGS:]]
    return [*([f"{len(found):,} warnings; the last {_MOST_WARNINGS}:"] if len(found) > len(said) else []), *said]


def headline(summary: Summary) -> str:
    """Say what came out in one sentence, as HTML."""
    who = f"{summary.replicas} replicas" if summary.replicas != 1 else "1 replica"
    came = f"reached a validation loss of <b>{summary.val_loss:.3f}</b>"
    if not math.isfinite(summary.val_loss):
        came = "ended <b>without a finite validation loss</b>"
    if summary.wire_bytes_sent <= 0:
        return f"{who} {came} and sent nothing."
    sent = f"{who} {came} and sent <b>{escape(format_bytes(summary.wire_bytes_sent))}</b> each"
    times = times_fewer(summary)
    if times is None:
        return f"{sent}."
    if times < 1.05:
        return f"{sent}: no less than an all-reduce at every step, {format_bytes(summary.allreduce_bytes)}."
    return f"{sent}: <b>{_times(times)} times less</b> than an all-reduce at every step."


def results(summary: Summary) -> list[tuple[str, str]]:
    """Return the rows of the table of results: names and values."""
    times = times_fewer(summary)
    size = f" ({format_count(summary.parameters)} parameters)" if summary.parameters else ""
    return [
        ("method", summary.method),
        *([("model", f"{summary.model}{size}")] if summary.model else []),
        ("replicas", str(summary.replicas)),
        ("inner steps", f"{summary.steps:,}"),
        ("tokens, all replicas", f"{summary.tokens:,}"),
        ("validation loss of the global parameters", f"{summary.val_loss:.4f} nats per token"),
        ("wall time", format_seconds(summary.wall_s)),
        ("speed, all replicas", f"{summary.tokens_per_s:,.0f} tokens/s"),
        (
            "bytes on the wire, each replica",
            f"{format_bytes(summary.wire_bytes_sent)} sent, {format_bytes(summary.wire_bytes_received)} received",
        ),
        ("of these, payload sent", format_bytes(summary.payload_bytes)),
        ("peak rate in 100 ms", format_rate(summary.peak_bits_per_s)),
        ("an all-reduce at every step would have sent", format_bytes(summary.allreduce_bytes)),
        ("times less", _times(times) if times is not None else "-"),
        ("time spent computing", f"{100 * summary.compute_utilisation:.1f} %"),
    ]


def times_fewer(summary: Summary) -> float | None:
    """Return how many times fewer bytes were sent than with an all-reduce at every step; None if nothing was sent."""
    if summary.times_fewer_bytes is not None and math.isfinite(summary.times_fewer_bytes):
        return summary.times_fewer_bytes
    if summary.wire_bytes_sent <= 0 or summary.allreduce_bytes <= 0:
        return None
    return summary.allreduce_bytes / summary.wire_bytes_sent


def flat(config: Mapping[str, Any], *, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every setting as a dotted name and its value."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, prefix=f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", "default" if value is None else _plain(value)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _times(times: float) -> str:
    return f"{times:,.0f}" if times >= 20 else f"{times:.1f}"
