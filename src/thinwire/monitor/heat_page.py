"""Heat maps of work as one HTML file: tables that a screen reader reads, light and dark, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from thinwire.monitor.heat import HeatMap
from thinwire.units import format_seconds

# From so many times the median on a cell is one level hotter; the dashboard's page has the same.
BOUNDS = (1.25, 1.5, 3.0, 6.0)
_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --text: #18212d; --quiet: #566172; --cool: #f4f6f8; --link: #0b63a5;
  --h1: #fdf0d5; --h2: #fbd38a; --h3: #f49a52; --h4: #b3261e; --h3-text: #18212d; --h4-text: #fff; }
@media (prefers-color-scheme: dark) { :root { --paper: #182029; --text: #e7ecf2; --quiet: #9fabba; --cool: #10151b;
  --link: #74bff5; --h1: #3a301a; --h2: #6b4a14; --h3: #9a4a18; --h4: #f0857b; --h3-text: #fff; --h4-text: #140503; } }
body { margin: 24px; background: var(--paper); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 20px; } h2 { font-size: 17px; margin-top: 28px; }
div { overflow-x: auto; } :focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
table { border-collapse: separate; border-spacing: 3px; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--quiet); } th { font-weight: 600; white-space: nowrap; padding: 3px 5px; }
td { background: var(--cool); border-radius: 5px; padding: 3px 8px; text-align: center; white-space: nowrap; }
small { display: block; font-size: 12px; } .l1 { background: var(--h1); } .l2 { background: var(--h2); }
.l3 { background: var(--h3); color: var(--h3-text); font-weight: 700; }
.l4 { background: var(--h4); color: var(--h4-text); font-weight: 700; }
ul { list-style: none; padding: 0; } li { display: inline-block; margin-right: 16px; }
li span { display: inline-block; width: 1em; height: 1em; border-radius: 3px; vertical-align: -2px;
  border: 1px solid var(--quiet); margin-right: 6px; }
"""


def to_page(maps: Sequence[HeatMap]) -> str:
    """Return one HTML document that shows the maps.

    Args:
        maps: From `heat_maps`.

    Example:
        >>> "No rank wrote down what it computed" in to_page([])
        True
    """
    return "\n".join([
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>Work of each rank</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n<h1>Work of each rank against all ranks</h1>",
        *(part for number, one in enumerate(maps) for part in _section(one, number)),
        *([] if maps else ["<p>No rank wrote down what it computed.</p>"]),
        *([_legend()] if maps else []),
        "</main>\n</body>\n</html>\n",
    ])  # fmt: skip


def level(times_longer: float | None) -> int:
    """Return how hot a cell is, from 0.

    Example:
        >>> level(1.0), level(2.0), level(8.0)
        (0, 2, 4)
    """
    return 0 if times_longer is None else sum(times_longer >= bound for bound in BOUNDS)


def words(one: HeatMap) -> str:
    """Return in a sentence where the map is hottest."""
    if one.hottest is None:
        return "Only one rank is known, so that there is nothing to compare it with."
    rank, window, ratio = one.hottest
    if not level(ratio):
        return "All ranks take about as long as each other."
    first, last = one.windows[window]
    return f"Rank {rank} stands out most: {ratio:.1f} times the median of all ranks in steps {first} to {last}."


def _section(one: HeatMap, number: int) -> Iterator[str]:
    kind = escape(one.kind.encode("utf-8", "replace").decode("utf-8"))  # JSON may hold halves of letters
    left = f" {one.num_left_out} ranks that stand out less are left out." if one.num_left_out else ""
    yield f'<section aria-labelledby="kind-{number}">\n<h2 id="kind-{number}">{kind}</h2>\n<p>{words(one)}</p>'
    yield f'<div tabindex="0" role="group" aria-labelledby="kind-{number}"><table>'
    yield (
        "<caption>Rows are ranks, columns steps. Each cell: how many times the median of all ranks in these steps a "
        f"rank takes, and its own time.{left}</caption>"
    )
    heads = "".join(f'<th scope="col">{first}–{last}</th>' for first, last in one.windows)
    yield f'<thead><tr><th scope="col">steps</th>{heads}</tr></thead>\n<tbody>'
    for rank, times_s in one.times_s.items():
        cells = "".join(map(_cell, times_s, one.times_longer[rank]))
        yield f'<tr><th scope="row">rank {rank}</th>{cells}</tr>'
    yield "</tbody></table></div>\n</section>"


def _cell(time_s: float | None, ratio: float | None) -> str:
    if time_s is None:
        return "<td>none</td>"
    told = "–" if ratio is None else f"{ratio:.1f}×"
    return f'<td class="l{level(ratio)}">{told}<small>{_length(time_s)}</small></td>'


def _length(time_s: float) -> str:
    """Return a time with three figures, as far as that can be read."""
    if time_s >= 59.95:
        return format_seconds(time_s)
    return f"{time_s:.3g} s" if time_s >= 0.9995 else f"{1000 * time_s:.3g} ms"


def _legend() -> str:
    steps = "".join(
        f'<li><span class="l{number}"></span>{bound:g}× and more</li>' for number, bound in enumerate(BOUNDS, 1)
    )
    return f"<ul>{steps}</ul>"
