"""Tables on the terminal: the result of a run, and the comparison of several."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from thinwire.cli.output import printable
from thinwire.monitor.report.comparison import Comparison
from thinwire.monitor.report.report import results
from thinwire.runlog.run_folder import SUMMARY, Summary, parse

_NO_LIMIT = 10_000
# Keys of a sample, and what they are called; of one width, so that the texts stand below each other.
_MOMENTS = {"before": "sample before training", "after": "sample after training "}
_SAMPLE_WIDTH = 100
_NUM_TEXT_COLUMNS = 2  # the first columns of a comparison hold text, the others numbers


def plain(text: object) -> Text:
    """Return a text as it is: no markup, and no control characters."""
    return Text(printable(text))


def make_table(
    heads: Sequence[str], rows: Iterable[Iterable[object]], *, left: Collection[str] = (), style: str = "dim"
) -> Table:
    """Return a table without lines; texts are shown as they are, columns named in `left` begin on the left."""
    table = Table(box=None, pad_edge=False, header_style=style)
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else plain(cell) for cell in row))
    return table


def print_table(heads: Sequence[str], rows: Iterable[Iterable[object]], *, left: Collection[str] = ()) -> None:
    """Print a table without folding its cells: a narrow terminal folds whole lines itself."""
    table = make_table(heads, rows, left=left)
    console = Console(highlight=False)
    needed = Measurement.get(console, console.options.update(width=_NO_LIMIT), table).maximum
    Console(highlight=False, soft_wrap=True, width=max(console.width, needed)).print(table)


def final_table(summary: Summary | Mapping[str, Any]) -> Table:
    """Return what `thinwire train` shows at the end of a run.

    Args:
        summary: The content of `summary.json`.
    """
    known = summary if isinstance(summary, Summary) else parse(Summary, summary, source=SUMMARY)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in results(known):
        table.add_row(plain(name), plain(value))
    table.add_row(plain("global parameters (SHA-256)"), plain(known.global_parameters_sha256 or "-"))
    return table


def sample_lines(run_dir: Path) -> list[str]:
    """Return the first sample of a run in two short lines, before and after training; none without samples."""
    try:
        first = json.loads((run_dir / "samples.json").read_text(encoding="utf-8"))[0]
        lines = [f"{name}  {first['prompt']} | {first[key]}" for key, name in _MOMENTS.items()]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    lines = [re.sub(r"\s*[\r\n]\s*", " ", line).rstrip() for line in lines]
    return [line if len(line) <= _SAMPLE_WIDTH else f"{line[: _SAMPLE_WIDTH - 3]}..." for line in lines]


def comparison_table(comparison: Comparison, console: Console) -> Table:
    """Return one row a run, or one column a run where rows are too long for the console."""
    heads, rows = comparison.table()
    wide = Table(box=None, pad_edge=False, header_style="dim")
    for index, name in enumerate(heads):
        wide.add_column(name, justify="left" if index < _NUM_TEXT_COLUMNS else "right", overflow="fold")
    for row in rows:
        wide.add_row(*map(plain, row))
    needed = Measurement.get(console, console.options.update(width=_NO_LIMIT), wide).maximum
    if needed <= console.width:
        return wide
    tall = Table(box=None, pad_edge=False, header_style="bold")
    tall.add_column(heads[0], style="dim", no_wrap=True)
    for name, *_ in rows:
        tall.add_column(plain(name), justify="right", overflow="fold")
    for index, name in enumerate(heads[1:], start=1):
        tall.add_row(plain(name), *(plain(row[index]) for row in rows))
    return tall
