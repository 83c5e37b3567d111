"""Report of a run, `report.html`: key numbers, figures, faults and configuration on one page that loads nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.files import write_whole
from thinwire.monitor.dashboard.findings_reader import Actions, Findings, downtime_rows
from thinwire.monitor.dashboard.sources import ObjectFile, RejectedLines
from thinwire.monitor.report import figures
from thinwire.monitor.report.charts import CHART, PAGE, escape
from thinwire.monitor.report.figures import Figure
from thinwire.monitor.runlog.reader import parse_object
from thinwire.monitor.runlog.run_folder import RunRecord, Summary, read_run
from thinwire.monitor.runlog.tailer import JsonlTailer
from thinwire.units import format_bytes, format_count, format_moment, format_rate, format_seconds
from thinwire.version import __version__

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'"  # the browser itself refuses whatever would come from elsewhere
)


def page(title: str, *, parts: Sequence[str]) -> str:
    """Put parts, which are HTML already, under a title, which is plain text."""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>',
            f"<title>{escape(title)}</title>",
            f"<style>{CHART}{PAGE}</style></head><body><main>",
            f"<h1>{escape(title)}</h1>",
            *parts,
            f"<footer>Written by thinwire {escape(__version__)}. This page is one file and loads nothing.</footer>",
            "</main></body></html>",
            "",
        ]
    )


def facts(rows: Sequence[tuple[str, str]], *, style: str = "") -> str:
    """Return a table of names and values, both plain text."""
    cells = "\n".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows)
    return f'<div class="card"><table class="{style}"><tbody>{cells}</tbody></table></div>'


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a head, plain text everywhere; the first two columns are words, the others numbers."""
    kind = ["", "", *[' class="number"'] * len(head)]
    top = "".join(f'<th scope="col"{kind[i]}>{escape(cell)}</th>' for i, cell in enumerate(head))
    lines = []
    for first, *others in rows:
        cells = "".join(f"<td{kind[i + 1]}>{escape(cell)}</td>" for i, cell in enumerate(others))
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    body = "\n".join(lines)
    name = escape(", ".join(head))
    return (
        f'<div class="card scroll" tabindex="0" role="group" aria-label="{name}">'
        f'<table class="many"><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def gallery(figures: Sequence[Figure]) -> str:
    """Put figures beside each other where there is room."""
    cards = "\n".join(
        f'<figure class="card"><h3>{escape(f.heading)}</h3>{f.svg}<figcaption>{escape(f.caption)}</figcaption></figure>'
        for f in figures
    )
    return f'<div class="cards">{cards}</div>'


def code(command: str) -> str:
    """Show a command to copy, its lines broken between options and never inside one."""
    first, *options = command.split(" --")
    words = " ".join([escape(first), *(f"<span>--{escape(option)}</span>" for option in options)])
    return f'<div class="card"><pre>{words}</pre></div>'


def write_page(path: Path, content: str) -> None:
    """Write a page whole or not at all.

    Raises:
        OSError: It cannot be written there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)


_NOTHING = "No finding was written: nothing broke, or the run had no live diagnosis."
_ROWS = {
    "post_checkpoint_s": "work done again since the last checkpoint",
    "detection_s": "until the fault was noticed",
    "diagnosis_s": "until its place was known",
    "reinitialisation_s": "until training went on",
}


def trouble(folder: Path) -> list[str]:
    """Return a section on faults as parts of HTML; the files are untrusted, and rejected lines are listed.

    Args:
        folder: The run's folder, with `findings.jsonl`, `actions.jsonl` and `downtime.json` where they were written.
    """
    refused, findings, actions = RejectedLines(), Findings(), Actions()
    _read(folder / "findings.jsonl", findings, refused)
    _read(folder / "actions.jsonl", actions, refused)
    found, done = findings.to_json(), actions.to_json()
    parts = ["<h2>What broke</h2>", *(_finding(one) for one in sorted(found, key=lambda one: one["at"] or 0.0))]
    if not found:
        parts.append(f"<p>{_NOTHING}</p>")
    if done:
        head = ("when", "what was done", "why", "to whom and with which result")
        rows = [
            (format_moment(one["at"]), f"{one['action']}{' (dry run: not done)' if one['is_dry_run'] else ''}",
             one["why"], ": ".join(filter(None, (one["target"], one["result"]))))
            for one in reversed(done)
        ]  # fmt: skip
        parts += ["<h3>What was done</h3>", grid(head, rows)]
    parts += _lost(folder / "downtime.json", refused)
    return [*parts, *(f'<p class="note">{escape(f"Not read: {words}")}</p>' for words in refused.quoted())]


def _read(path: Path, receiver: Findings | Actions, refused: RejectedLines) -> None:
    file = JsonlTailer(path)
    while True:
        _, lines = file.poll()
        for number, line in lines:
            try:
                receiver.take(parse_object(line))
            except ValueError as error:
                refused.add(f"{path.name}:{number}", str(error))
        if not file.is_behind:
            return


def _finding(one: Mapping[str, Any]) -> str:
    over = f"over at {format_moment(one['over_at'])}" if one["is_over"] else "open at the end"
    since = f", since round {one['since_round']}" if one["since_round"] >= 0 else ""
    rows = [
        ("when", f"reported at {format_moment(one['at'])}{since}; {over}"),
        ("what", one["text"]),
        ("evidence", "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in one["evidence"])),
        ("confidence", f"{100 * one['confidence']:.0f} %"),
        ("what to do", one["remedy"]),
        ("test that separates the places", one["probe"]),
    ]
    return f"<h3>{escape(one['kind'])}: {escape(one['where'])}</h3>{facts([row for row in rows if row[1]])}"


def _lost(path: Path, refused: RejectedLines) -> list[str]:
    file = ObjectFile(path, refused)
    file.poll()
    if file.value is None:
        return []
    try:
        lost = downtime_rows(file.value)
    except ValueError as error:
        refused.add(path.name, str(error))
        return []
    rows = [(label, f"{lost[name]:.1f} s") for name, label in _ROWS.items() if name in lost]
    total_s, run_s = lost.get("total_s"), lost.get("run_s")
    if total_s is not None:
        share = f" of {run_s:.1f} s, {100 * total_s / run_s:.1f} %" if run_s else ""
        rows.append(("together", f"{total_s:.1f} s{share}"))
    return ["<h3>Time lost</h3>", facts(rows)] if rows else []


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
