"""`thinwire compare`: one table and one figure of several runs."""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from thinwire.cli.argument_parsing import argument, command
from thinwire.cli.tables import comparison_table, plain
from thinwire.monitor.report.comparison import Comparison, compare_runs, write_comparison

_WIDTH_OF_A_PIPE = 200  # columns where stdout is no terminal: nothing is folded there


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Compare finished runs: validation loss, bytes on the wire, speed."""

    runs: tuple[Path, ...] = argument("RUNS")
    """Folders of finished runs; the first is the reference."""
    out: Path | None = None
    """Also write table and figures as one HTML page, such as compare.html."""
    json: bool = False
    """Print one JSON object on stdout instead of the table."""


@command("compare", CompareOptions, remedy="give another place with --out")
def main(options: CompareOptions) -> int:
    """Run `thinwire compare`."""
    compare(options.runs, out=options.out, json=options.json)
    return 0


def compare(runs: tuple[Path, ...], *, out: Path | None, json: bool) -> Comparison:
    """Print a comparison as a table or one JSON object, and write it as a page; the first run is the reference."""
    comparison = compare_runs(runs)
    if out is not None:
        write_comparison(comparison, out)
    if json:
        print(json_format.dumps({**comparison.to_json(), "page": None if out is None else str(out)}), flush=True)
        return comparison
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE)
    console.print(comparison_table(comparison, console))
    for note in comparison.notes:
        console.print(plain(f"note: {note}"), soft_wrap=True)
    if out is not None:
        print(f"Figures: {out}", file=sys.stderr)
    return comparison
