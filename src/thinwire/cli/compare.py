"""`thinwire compare`: one table and one figure of several runs."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from thinwire.cli.argument_parsing import command, parse_options
from thinwire.cli.tables import comparison_table, plain
from thinwire.monitor.report.comparison import Comparison, compare_runs, write_comparison

_WIDTH_OF_A_PIPE = 200  # columns where stdout is no terminal: nothing is folded there


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Compare finished runs: validation loss, bytes on the wire, speed."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of finished runs; the first is the reference."""
    out: Path | None = None
    """Also write table and figures as one HTML page, such as compare.html."""
    json: bool = False
    """Print one JSON object on stdout instead of the table."""


@command("compare", remedy="give another place with --out")
def main(arguments: Sequence[str]) -> int:
    """Run the command; see `thinwire compare --help`.

    Returns:
        0, 1 for an error while running, 2 for wrong options.
    """
    options = parse_options(CompareOptions, arguments, prog="thinwire compare")
    compare(options.runs, out=options.out, json=options.json)
    return 0


def compare(runs: tuple[Path, ...], *, out: Path | None, json: bool) -> Comparison:
    """Print a comparison on stdout, and write it as a page.

    Args:
        runs: Folders of finished runs; the first is the reference.
        out: The page, or None for none.
        json: One object on stdout instead of a table.

    Raises:
        ValueError: No run is given, or one twice.
        DataError: A folder is no run, or its run has not finished.
        OSError: The page cannot be written.
    """
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
