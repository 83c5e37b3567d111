"""Comparison of finished runs: a row a run, gaps to the first one, and notes on other differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.charts import escape
from thinwire.monitor.report.figures import figures_of_runs
from thinwire.monitor.report.report import gallery, grid, page, write_page
from thinwire.runlog.measures import shown_metric
from thinwire.runlog.run_folder import RunRecord, Summary, read_run, setting
from thinwire.runlog.run_numbers import RunNumbers
from thinwire.units import format_bytes, format_count

_SAMPLES_TOLERANCE = 0.01


_COMPARED = (
    "method", "replicas", "steps", "val_loss", "wall_s", "wire_bytes_sent", "peak_bits_per_s", "compute_utilisation",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One run of a comparison; `gap_percent` is its validation loss against the first run's."""

    name: str
    path: str
    summary: Summary
    gap_percent: float | None

    @property
    def numbers(self) -> RunNumbers:
        """Numbers of the run, defined in `thinwire.runlog.run_numbers`."""
        return RunNumbers.of_summary(self.summary)

    def cells(self) -> dict[str, str]:
        """Return the row as text, by the heads of its columns."""
        one, text = self.summary, self.numbers.texts()
        metric = {} if one.metric is None else {one.metric[0]: shown_metric(one.metric)}
        return {
            "run": self.name, "method": one.method, "replicas": str(one.replicas), "steps": f"{one.steps:,}",
            one.unit: format_count(one.samples), **metric, "val loss": f"{one.val_loss:.4f}",
            "gap": "-" if self.gap_percent is None else f"{self.gap_percent:+.2f} %",
            "wall time": text["wall_s"], f"{one.unit}/s": format_count(one.samples_per_s),
            "sent each": text["sent_bytes"], "times fewer": text["times_fewer_bytes"],
            "mean rate": text["mean_bits_per_s"], "peak rate": text["peak_bits_per_s"], "waiting": text["waiting"],
        }  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the row as an object for JSON; a number that is not finite becomes null."""
        values = {name: getattr(self.summary, name) for name in _COMPARED}
        one = self.summary
        values |= {one.unit: one.samples, f"{one.unit}_per_s": one.samples_per_s}
        values |= {} if one.metric is None else {one.metric[0]: one.metric[2]}
        values |= {"gap_percent": self.gap_percent, **self.numbers.to_json()}
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        return {"name": self.name, "path": self.path, **finite}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Runs in the order of the request, and notes on differences besides the method."""

    rows: tuple[ComparedRun, ...]
    notes: tuple[str, ...]
    runs: Mapping[str, RunRecord]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the heads of all columns, and the cells of each row; runs on other subjects have other columns."""
        rows = [row.cells() for row in self.rows]
        heads = list(rows[0])
        for row in rows[1:]:
            heads += [head for head in row if head not in heads]
        return heads, [[row.get(head, "-") for head in heads] for row in rows]

    def to_json(self) -> dict[str, Any]:
        """Return the rows and notes as an object for JSON."""
        return {"runs": [row.to_json() for row in self.rows], "notes": list(self.notes)}


def compare_runs(paths: Sequence[Path]) -> Comparison:
    """Read finished runs and compare them.

    Args:
        paths: Folders of runs; the first is the reference.

    Raises:
        ValueError: No folder is given, or one twice.
        DataError: A folder is no run, or its run has not finished.
    """
    if not paths:
        raise ValueError("compare needs the folders of at least one run, got none; try: thinwire compare runs/a runs/b")
    resolved = [path.resolve() for path in paths]
    for path, other in zip(paths, resolved, strict=True):
        if resolved.count(other) > 1:
            raise ValueError(f"every run must be given once, got {path} {resolved.count(other)} times")
    records = [read_run(path) for path in paths]
    plain = [record.name for record in records]
    names = [name if plain.count(name) == 1 else str(record.path) for name, record in zip(plain, records, strict=True)]
    first = records[0].finished()
    runs = dict(zip(names, records, strict=True))
    rows = []
    for name, run in runs.items():
        summary = run.finished()
        gap = 100 * (summary.val_loss / first.val_loss - 1) if first.val_loss else math.nan
        rows.append(ComparedRun(
            name=name, path=str(run.path), summary=summary, gap_percent=gap if math.isfinite(gap) else None,
        ))  # fmt: skip
    return Comparison(rows=tuple(rows), notes=tuple(_remarks(runs)), runs=runs)


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Write the table, the notes and the figures as one self-contained page, or raise an OSError."""
    parts = [
        f'<p class="headline">{_headline(comparison)}</p>',
        *(f'<p class="note">{escape(note)}</p>' for note in comparison.notes),
        grid(*comparison.table()),
        "<h2>Figures</h2>",
        gallery(figures_of_runs(comparison.runs)),
    ]
    write_page(path, page("thinwire compare", parts=parts))


def _remarks(runs: Mapping[str, RunRecord]) -> list[str]:
    """Return notes on differences besides the method, which a gap may come from."""
    (first, reference), *others = runs.items()
    notes = []
    for name, run in others:
        differences = []
        for what, place in (("data", ("data", "source")), ("model", ("model", "name"))):
            own, other = (
                (record.finished().model if what == "model" else "") or str(setting(record.config, *place) or "")
                for record in (run, reference)
            )
            if own != other:
                differences.append(f"{what} ({own} against {other})")
        mine, yours, unit = run.finished().samples, reference.finished().samples, reference.finished().unit
        if abs(mine - yours) > _SAMPLES_TOLERANCE * yours:
            differences.append(f"{unit} ({format_count(mine)} against {format_count(yours)})")
        if differences:
            notes.append(f"{name} is not comparable with {first} like for like: other {', '.join(differences)}.")
    return notes


def _headline(comparison: Comparison) -> str:
    finite = [row for row in comparison.rows if math.isfinite(row.summary.val_loss)]
    if not finite:
        return "No run ended with a finite validation loss."
    best = min(finite, key=lambda row: row.summary.val_loss)
    fewest = min(comparison.rows, key=lambda row: row.summary.wire_bytes_sent)
    name, loss = escape(best.name), f"<b>{best.summary.val_loss:.3f}</b>"
    sent = escape(format_bytes(fewest.summary.wire_bytes_sent))
    if len(comparison.rows) == 1:
        return f"{name} reached a validation loss of {loss}."
    if fewest is best:
        return f"<b>{name}</b> has the lowest validation loss, {loss}, and sent the fewest bytes, {sent} each replica."
    return (
        f"<b>{name}</b> has the lowest validation loss, {loss}; <b>{escape(fewest.name)}</b> sent the fewest bytes, "
        f"{sent} each replica, and ended at {fewest.summary.val_loss:.3f}."
    )
