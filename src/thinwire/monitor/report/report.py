"""Report of a run, `report.html`: key numbers, figures, faults and configuration on one page that loads nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.charts import CHART, PAGE, escape
from thinwire.errors import DataError
from thinwire.files import open_regular, write_whole
from thinwire.monitor.dashboard.findings_reader import Findings, LatestRows, downtime_rows, latest_actions
from thinwire.monitor.dashboard.sources import ObjectFile, RejectedLines
from thinwire.monitor.report import figures
from thinwire.monitor.report.figures import Figure
from thinwire.runlog.measures import per_sample, shown_metric
from thinwire.runlog.reader import converted, parse_object
from thinwire.runlog.run_folder import SUMMARY, RunRecord, Summary, read_outcome, read_run, setting
from thinwire.runlog.run_numbers import LABELS, RunNumbers, format_times
from thinwire.runlog.tailer import JsonlTailer
from thinwire.units import format_bytes, format_count, format_moment
from thinwire.version import __version__

# the browser itself refuses whatever would come from elsewhere
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(title: str, *, parts: Sequence[str]) -> str:
    """Put parts, which are HTML already, under a title, which is plain text."""
    return "\n".join([
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>',
        f"<title>{escape(title)}</title>",
        f"<style>{CHART}{PAGE}</style></head><body><main>",
        f"<h1>{escape(title)}</h1>",
        *parts,
        f"<footer>Written by thinwire {escape(__version__)}. This page is one file and loads nothing.</footer>",
        "</main></body></html>\n",
    ])  # fmt: skip


def facts(rows: Sequence[tuple[str, str]], *, style: str = "") -> str:
    """Return a table of names and values, both plain text."""
    cells = "\n".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows)
    return f'<div class="card"><table class="{f"facts {style}".rstrip()}"><tbody>{cells}</tbody></table></div>'


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a head, plain text everywhere; the first two columns are words, the others numbers."""
    kind = ["", "", *[' class="number"'] * len(head)]
    top = "".join(f'<th scope="col"{kind[i]}>{escape(cell)}</th>' for i, cell in enumerate(head))
    lines = []
    for first, *others in rows:
        cells = "".join(f"<td{kind[i + 1]}>{escape(cell)}</td>" for i, cell in enumerate(others))
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    body = "\n".join(lines)
    return (
        f'<div class="card scroll" tabindex="0" role="group" aria-label="{escape(", ".join(head))}">'
        f'<table class="many"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
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
    """Write a page whole, or not at all with an OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)


_NO_FINDINGS = "No findings."
_NO_DIAGNOSIS = "No findings: the run had no live diagnosis (--on-finding off)."
_ROWS = {
    "post_checkpoint_s": "steps repeated since the last checkpoint",
    "detection_s": "from the fault to its detection",
    "diagnosis_s": "from detection to diagnosis",
    "reinitialisation_s": "restart, until training went on",
}


def trouble(folder: Path, *, is_diagnosed: bool = True) -> list[str]:
    """Return a section on findings as parts of HTML; the files are untrusted, and rejected lines are listed."""
    refused, findings, actions = RejectedLines(), Findings(), latest_actions()
    _read(folder / "findings.jsonl", findings, refused)
    _read(folder / "actions.jsonl", actions, refused)
    found, done = findings.to_json(), actions.to_json()
    parts = ["<h2>Findings</h2>", *(_finding(one) for one in sorted(found, key=lambda one: one["at"] or 0.0))]
    if not found:
        parts.append(f"<p>{_NO_FINDINGS if is_diagnosed else _NO_DIAGNOSIS}</p>")
    if done:
        head = ("when", "action", "reason", "target and result")
        rows = [
            (format_moment(one["at"]), f"{one['action']}{' (dry run: not done)' if one['is_dry_run'] else ''}",
             one["why"], ": ".join(filter(None, (one["target"], one["result"]))))
            for one in reversed(done)
        ]  # fmt: skip
        parts += ["<h3>Actions</h3>", grid(head, rows)]
    parts += _lost(folder / "downtime.json", refused)
    return [*parts, *(f'<p class="note">{escape(f"Not read: {words}")}</p>' for words in refused.quoted())]


def _read(path: Path, receiver: Findings | LatestRows, refused: RejectedLines) -> None:
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
    if (lost := downtime_rows(file.value, refused.add)) is None:
        return []
    rows = [(label, f"{lost[name]:.1f} s") for name, label in _ROWS.items() if name in lost]
    total_s, run_s = lost.get("total_s"), lost.get("run_s")
    if total_s == 0:
        return [f"<p>No time was lost to faults and restarts{f' in {run_s:.1f} s' if run_s else ''}.</p>"]
    if total_s is not None:
        share = f" of {run_s:.1f} s, {100 * total_s / run_s:.1f} %" if run_s else ""
        rows.append(("total", f"{total_s:.1f} s{share}"))
    return ["<h3>Time lost</h3>", facts(rows)] if rows else []


REPORT, SAMPLES, MODEL = "report.html", "samples.json", "model"
BASELINE = "all-reduce"
_MOST_WARNINGS = 10
_MOST_SAMPLES, _MOST_SAMPLE_TEXT, _MOST_SAMPLE_BYTES = 12, 4000, 256 * 1024
# Folders beside the run's that are searched for a baseline.
_MOST_FOLDERS = 1000
# Below this ratio of bytes, and this gap of the loss in percent, there is no difference to report.
_NO_GAIN, _NO_GAP_PERCENT = 1.05, 0.05
_ALL_REDUCE = '<span class="whole">all-reduce</span>'


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSample:
    """A prompt, and the text that followed it before and after training."""

    prompt: str
    before: str = ""
    after: str = ""


def write_report(run: Path, *, command: str) -> Path:
    """Write `report.html` into a finished run's folder and return its path.

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
    drawn = [figures.loss_against_samples(run), *figures.metric_against_samples(run), figures.loss_against_bytes(run)]
    drawn += [figures.wire_rate(run), figures.utilisation(run)]
    ending = {name: run.raw_summary.get(name) for name in ("machine", "global_parameters_sha256")}
    parts = [
        f'<p class="headline">{headline(summary, find_baseline(run))}</p>',
        *(f'<p class="note">{escape(note)}</p>' for note in [*failed, *warnings(run)]),
        "<h2>Figures</h2>",
        gallery(drawn),
        "<h2>Numbers</h2>",
        facts(results(summary)),
        *(
            [f'<p>The trained model is in the folder <a href="{MODEL}/">{MODEL}</a> beside this page.</p>']
            if (run.path / MODEL).is_dir()
            else []
        ),
        *samples(run.path),
        *trouble(run.path, is_diagnosed=setting(run.config, "run", "on_finding") != "off"),
        "<h2>Repeat this run</h2>",
        code(command),
        "<details><summary>Settings</summary>",
        facts([*flat(run.config), *flat(ending)], style="settings"),
        "</details>",
    ]
    return page(f"thinwire train: {run.name}", parts=parts)


def samples(folder: Path) -> list[str]:
    """Return a section on texts that the model wrote before and after training; the file is untrusted."""
    try:
        with open_regular(folder / SAMPLES) as file:
            content = file.read(_MOST_SAMPLE_BYTES + 1)
    except OSError:
        return []
    try:
        if len(content) > _MOST_SAMPLE_BYTES:
            raise ValueError(f"larger than {format_bytes(_MOST_SAMPLE_BYTES)}")
        found = json.loads(content)
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise ValueError("no list of objects with prompt, before and after")
        entries = [converted(one, TextSample) for one in found[:_MOST_SAMPLES]]
    except (ValueError, RecursionError) as error:
        return [f'<p class="note">{escape(f"Not read: {SAMPLES}: {error}")}</p>']
    parts = []
    for one in entries:
        columns = "".join(
            f"<div><h4>{when} training</h4><pre>{escape(text[:_MOST_SAMPLE_TEXT]) or '(empty)'}</pre></div>"
            for when, text in (("before", one.before), ("after", one.after))
        )
        prompt = escape(one.prompt[:_MOST_SAMPLE_TEXT])
        parts.append(f'<div class="card sample"><h3>Prompt: {prompt}</h3><div class="pair">{columns}</div></div>')
    return ["<h2>Text samples</h2>", *parts] if parts else []


def warnings(run: RunRecord) -> list[str]:
    """Return what was warned of while the run went on, in order of steps; of many the last ones."""
    found = sorted({warning for record in run.replicas.values() for warning in record.warnings})
    said = [f"Warning after step {step:,}: {message}" for step, message in found[-_MOST_WARNINGS:]]
    return [*([f"{len(found):,} warnings; the last {_MOST_WARNINGS}:"] if len(found) > len(said) else []), *said]


BaselineRun = tuple[str, Summary]  # a finished all-reduce run of the same training: its folder's name and summary


def find_baseline(run: RunRecord) -> BaselineRun | None:
    """Return the baseline among the folders beside a run's; None without one.

    A baseline exchanges gradients by an all-reduce at every step, and has the run's model, data, replicas and samples.
    """
    own = run.finished()
    for folder in sorted(run.path.resolve().parent.iterdir())[:_MOST_FOLDERS]:
        if folder == run.path.resolve() or not (folder / SUMMARY).is_file():
            continue
        try:
            other, config = read_outcome(folder)
        except DataError:
            continue
        is_same = (other.model, other.replicas, other.samples) == (own.model, own.replicas, own.samples)
        is_same = is_same and setting(config, "data", "source") == setting(run.config, "data", "source")
        if is_same and other.method == BASELINE and math.isfinite(other.val_loss) and other.val_loss > 0:
            return folder.name, other
    return None


def headline(summary: Summary, baseline: BaselineRun | None = None) -> str:
    """Return the result in one sentence, as HTML: the bytes, and the loss against the baseline run."""
    replicas = f"{summary.replicas} replicas" if summary.replicas != 1 else "1 replica"
    loss = f"reached a validation loss of <b>{summary.val_loss:.3f}</b>"
    if summary.metric is not None:
        name, value = escape(summary.metric[0]), escape(shown_metric(summary.metric))
        loss = f"reached a validation {name} of <b>{value}</b> at a loss of {summary.val_loss:.3f}"
    if not math.isfinite(summary.val_loss):
        loss = "ended <b>without a finite validation loss</b>"
    numbers = RunNumbers.of_summary(summary)
    times = numbers.times_fewer_bytes
    if summary.wire_bytes_sent <= 0:
        return f"{replicas} sent nothing and {loss}."
    sent = f"{replicas} sent <b>{escape(numbers.texts()['sent_bytes'])}</b> each"
    if times is not None:
        sent += f", <b>{format_times(times)} times fewer bytes</b> than an {_ALL_REDUCE} at every step,"
        if times < _NO_GAIN:
            sent = f"{sent.partition(',')[0]}, no fewer bytes than an {_ALL_REDUCE} at every step,"
    return f"{sent} and {loss}{_against(summary, baseline)}."


def _against(summary: Summary, baseline: BaselineRun | None) -> str:
    if summary.method == BASELINE:
        return "; this is a baseline run"
    if baseline is None or not math.isfinite(summary.val_loss):
        return "; no baseline run"
    name, other = baseline
    gap = 100 * (summary.val_loss / other.val_loss - 1)
    side = f"{'' if summary.metric is None else 'loss '}{abs(gap):.1f} % {'above' if gap > 0 else 'below'}"
    if abs(gap) < _NO_GAP_PERCENT:
        side = "equal to"
    return f", <b>{side}</b> the baseline run {escape(name)} ({other.val_loss:.3f})"


def results(summary: Summary) -> list[tuple[str, str]]:
    """Return the rows of the table of results: names and values."""
    size = f" ({format_count(summary.parameters)} parameters)" if summary.parameters else ""
    text, metric = RunNumbers.of_summary(summary).texts(), summary.metric
    return [
        # what a run is judged by comes first
        *([] if metric is None else [(f"validation {metric[0]} of the global parameters", shown_metric(metric))]),
        ("validation loss of the global parameters", f"{summary.val_loss:.4f} {per_sample(summary.unit)}"),
        *((LABELS[name], text[name]) for name in ("times_fewer_bytes", "sent_bytes", "waiting", "wall_s")),
        ("method", summary.method),
        *([("model", f"{summary.model}{size}")] if summary.model else []),
        ("replicas", str(summary.replicas)),
        ("inner steps", f"{summary.steps:,}"),
        (f"{summary.unit}, all replicas", f"{summary.samples:,}"),
        (LABELS["step_s"], text["step_s"]),
        (LABELS["samples_per_s"], text[f"{summary.unit}_per_s"]),
        ("payload among the bytes sent, without message headers", format_bytes(summary.payload_bytes)),
        *((LABELS[name], text[name]) for name in ("received_bytes", "mean_bits_per_s", "peak_bits_per_s")),
        ("an all-reduce at every step would send", format_bytes(summary.allreduce_bytes)),
    ]


def flat(config: Mapping[str, Any], *, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every setting as a dotted name and its value."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, prefix=f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield f"{prefix}{key}", "default" if value is None else text
