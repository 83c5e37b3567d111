"""One self-contained HTML page: headings, tables, figures and code; no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.files import write_whole
from thinwire.monitor.report.chart import escape
from thinwire.monitor.report.figures import Figure
from thinwire.monitor.report.style import CHART, PAGE
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
