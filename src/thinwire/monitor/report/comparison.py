"""Several finished runs beside each other: one row a run, the gaps to the first, and what makes them incomparable."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire.monitor.report.charts import escape
from thinwire.monitor.report.figures import figures_of_runs
from thinwire.monitor.report.report import gallery, grid, page, times_fewer, write_page
from thinwire.monitor.runlog.run_folder import RunRecord, read_run, setting
from thinwire.units import format_bytes, format_count, format_rate, format_seconds

HEAD = (
    "run", "method", "replicas", "steps", "tokens", "val loss", "gap", "wall time", "tokens/s", "sent each",
    "times less", "peak rate", "computing",
)  # fmt: skip
_TOKENS_TOLERANCE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run of a comparison; `gap_percent` is its validation loss against the first run's."""

    name: str
    path: str
    method: str
    replicas: int
    steps: int
    tokens: int
    val_loss: float
    gap_percent: float | None
    wall_s: float
    tokens_per_s: float
    wire_bytes_sent: float
    times_fewer_bytes: float | None
    peak_bits_per_s: float
    compute_utilisation: float

    def cells(self) -> tuple[str, ...]:
        """Return the row as text, in the order of `HEAD`."""
        return (
            self.name,
            self.method,
            str(self.replicas),
            f"{self.steps:,}",
            format_count(self.tokens),
            f"{self.val_loss:.4f}",
            "-" if self.gap_percent is None else f"{self.gap_percent:+.2f} %",
            format_seconds(self.wall_s),
            format_count(self.tokens_per_s),
            format_bytes(self.wire_bytes_sent),
            "-" if self.times_fewer_bytes is None else f"{self.times_fewer_bytes:,.1f}",
            format_rate(self.peak_bits_per_s),
            f"{100 * self.compute_utilisation:.1f} %",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Rows in the order that was asked for, and notes on what differs besides the method."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    runs: Mapping[str, RunRecord]

    def to_json(self) -> dict[str, Any]:
        """Return the rows and notes as an object for JSON; a number that is not finite becomes null."""
        return {"runs": [_finite(asdict(row)) for row in self.rows], "notes": list(self.notes)}


def compare_runs(paths: Sequence[Path]) -> Comparison:
    """Read finished runs and set them beside each other.

    Args:
        paths: Folders of runs; the first is what the others are compared with.

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
    rows = tuple(_row(name, record, first.val_loss) for name, record in zip(names, records, strict=True))
    runs = dict(zip(names, records, strict=True))
    return Comparison(rows=rows, notes=tuple(_remarks(runs)), runs=runs)


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Write the table, the notes and the figures as one self-contained page.

    Raises:
        OSError: The file cannot be written.
    """
    parts = [
        f'<p class="headline">{_headline(comparison)}</p>',
        *(f'<p class="note">{escape(note)}</p>' for note in comparison.notes),
        grid(HEAD, [row.cells() for row in comparison.rows]),
        "<h2>Figures</h2>",
        gallery(figures_of_runs(comparison.runs)),
    ]
    write_page(path, page("thinwire compare", parts=parts))


def _row(name: str, run: RunRecord, reference: float) -> Row:
    summary = run.finished()
    gap = 100 * (summary.val_loss / reference - 1) if reference else math.nan
    return Row(
        name=name,
        path=str(run.path),
        method=summary.method,
        replicas=summary.replicas,
        steps=summary.steps,
        tokens=summary.tokens,
        val_loss=summary.val_loss,
        gap_percent=gap if math.isfinite(gap) else None,
        wall_s=summary.wall_s,
        tokens_per_s=summary.tokens_per_s,
        wire_bytes_sent=summary.wire_bytes_sent,
        times_fewer_bytes=times_fewer(summary),
        peak_bits_per_s=summary.peak_bits_per_s,
        compute_utilisation=summary.compute_utilisation,
    )


def _remarks(runs: Mapping[str, RunRecord]) -> list[str]:
    """Name what differs besides the method, so that a gap is not taken for the method's."""
    (first, reference), *others = runs.items()
    notes = []
    for name, run in others:
        differences = [
            f"{what} ({mine} against {yours})" for what, mine, yours in _subjects(run, reference) if mine != yours
        ]
        mine, yours = run.finished().tokens, reference.finished().tokens
        if abs(mine - yours) > _TOKENS_TOLERANCE * yours:
            differences.append(f"tokens ({format_count(mine)} against {format_count(yours)})")
        if differences:
            notes.append(f"{name} is not comparable with {first} like for like: other {', '.join(differences)}.")
    return notes


def _subjects(run: RunRecord, reference: RunRecord) -> list[tuple[str, str, str]]:
    data, other_data = (str(setting(record.config, "data", "source") or "") for record in (run, reference))
    model, other = (
        record.finished().model or str(setting(record.config, "model", "name") or "") for record in (run, reference)
    )
    return [("data", data, other_data), ("model", model, other)]


def _headline(comparison: Comparison) -> str:
    finite = [row for row in comparison.rows if math.isfinite(row.val_loss)]
    if not finite:
        return "No run ended with a finite validation loss."
    best = min(finite, key=lambda row: row.val_loss)
    fewest = min(comparison.rows, key=lambda row: row.wire_bytes_sent)
    words = f"<b>{escape(best.name)}</b> has the lowest validation loss, <b>{best.val_loss:.3f}</b>"
    if len(comparison.rows) == 1:
        return f"{escape(best.name)} reached a validation loss of <b>{best.val_loss:.3f}</b>."
    if fewest is best:
        return f"{words}, and sent the fewest bytes, {escape(format_bytes(best.wire_bytes_sent))} each replica."
    return (
        f"{words}; <b>{escape(fewest.name)}</b> sent the fewest bytes, "
        f"{escape(format_bytes(fewest.wire_bytes_sent))} each replica, and ended at {fewest.val_loss:.3f}."
    )


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
