"""A heat map of work (MegaScale, arXiv 2402.15627): each rank's times in each window of steps, against all ranks'."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median_low
from typing import Any

from thinwire.monitor.detect.slow_compute import work_of
from thinwire.monitor.detect.timeline import Job
from thinwire.units import format_seconds

MOST_WINDOWS = 16
MOST_RANKS = 32
# A file may name whatever it likes.
_MOST_KINDS = 8
# A whole step holds the waiting for others, so that all ranks show the same.
_WITH_WAITING = "step"
_COMPUTE, _FORWARD, _BACKWARD = "compute", "forward", "backward"
_FIRST = (_COMPUTE, _FORWARD, _BACKWARD)
_Times = dict[int, list[tuple[int, float]]]  # steps and their seconds, by rank


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Times of one kind of work."""

    kind: str  # what was timed, such as `compute`, `forward` or `backward`
    windows: tuple[tuple[int, int], ...]  # the first and the last step of each window, in order
    # the median of each rank's times in each window, in seconds; none where it has none there
    times_s: Mapping[int, tuple[float | None, ...]]
    times_longer: Mapping[int, tuple[float | None, ...]]  # the same against the median of all ranks in the window
    num_left_out: int = 0  # ranks that are not there, since too many are; those that are furthest above the others are

    @property
    def hottest(self) -> tuple[int, int, float] | None:
        """Rank, window and ratio of the highest cell; none where nothing can be compared.

        Example:
            >>> times = {0: (1.0,), 1: (1.0,), 2: (3.0,)}
            >>> HeatMap(kind="compute", windows=((0, 9),), times_s=times, times_longer=times).hottest
            (2, 0, 3.0)
        """
        cells = [
            (ratio, -rank, window)
            for rank, row in self.times_longer.items()
            for window, ratio in enumerate(row)
            if ratio is not None
        ]
        if len(self.times_longer) < 2 or not cells:
            return None
        ratio, negative, window = max(cells)
        return -negative, window, ratio

    def to_json(self) -> dict[str, Any]:
        """Return the map as what JSON can hold, a row a rank."""
        return {
            "kind": self.kind,
            "windows": [list(window) for window in self.windows],
            "rows": [
                {"rank": rank, "times_s": _rounded(row), "times_longer": _rounded(self.times_longer[rank])}
                for rank, row in self.times_s.items()
            ],
            "num_left_out": self.num_left_out,
        }


def heat_maps(job: Job, *, most_windows: int = MOST_WINDOWS, most_ranks: int = MOST_RANKS) -> list[HeatMap]:
    """Return a map for each kind of work that the ranks timed, or of what lay between operations where they timed none.

    The whole work, `compute`, comes first, then the forward and the backward passes in it, where they were timed. Ranks
    whose clock was set are left out. With an even number of ranks the lower of the two middle ones is the median,
    so that of two ranks the slower one stands out.

    Raises:
        ValueError: There would be no window or no row.
    """
    if min(most_windows, most_ranks) < 1:
        raise ValueError(
            f"a map needs at least one window and one rank, got most_windows={most_windows}, most_ranks={most_ranks}"
        )
    kinds: dict[str, _Times] = defaultdict(lambda: defaultdict(list))
    for span in job.spans:
        if span.kind not in (_WITH_WAITING, _COMPUTE):
            _note(kinds[span.kind], span.rank, span.step, span.done_s - span.started_s)
        for kind, time_s in ((_FORWARD, span.forward_s), (_BACKWARD, span.backward_s)):
            if time_s is not None:
                _note(kinds[kind], span.rank, span.step, time_s)
    for rank, works in work_of(job).items():
        for work in works:
            _note(kinds[_COMPUTE], rank, work.step, work.time_s)
    maps = [
        _map(kind, {rank: own for rank, own in kinds[kind].items() if rank not in job.unsteady},
             most_windows=most_windows, most_ranks=most_ranks)
        for kind in sorted(kinds, key=lambda kind: (
            _FIRST.index(kind) if kind in _FIRST else len(_FIRST), -len(kinds[kind]), kind))[:_MOST_KINDS]
    ]  # fmt: skip
    return [one for one in maps if one.windows]


def _note(times: _Times, rank: int, step: int, time_s: float) -> None:
    if math.isfinite(time_s) and time_s >= 0:
        times[rank].append((step, time_s))


def _map(kind: str, times: _Times, *, most_windows: int, most_ranks: int) -> HeatMap:
    steps = sorted({step for own in times.values() for step, _ in own})
    size = max(1, math.ceil(len(steps) / most_windows))
    groups = [steps[begin : begin + size] for begin in range(0, len(steps), size)]
    window_of = {step: number for number, group in enumerate(groups) for step in group}
    rows = {rank: _row(own, window_of, len(groups)) for rank, own in sorted(times.items())}
    columns = [[time_s for time_s in column if time_s is not None] for column in zip(*rows.values(), strict=True)]
    middles = [median_low(column) for column in columns]  # a window is of steps that somebody timed
    ratios = {
        rank: tuple(own / all_s if own is not None and all_s else None for own, all_s in zip(row, middles, strict=True))
        for rank, row in rows.items()
    }
    order = sorted(rows, key=lambda rank: (-max([ratio or 0.0 for ratio in ratios[rank]], default=0.0), rank))
    shown = sorted(order[:most_ranks])
    return HeatMap(
        kind=kind, windows=tuple((group[0], group[-1]) for group in groups),
        times_s={rank: rows[rank] for rank in shown}, times_longer={rank: ratios[rank] for rank in shown},
        num_left_out=len(rows) - len(shown),
    )  # fmt: skip


def _row(own: Sequence[tuple[int, float]], window_of: Mapping[int, int], number: int) -> tuple[float | None, ...]:
    found: list[list[float]] = [[] for _ in range(number)]
    for step, time_s in own:
        found[window_of[step]].append(time_s)
    return tuple(median_low(times) if times else None for times in found)


def _rounded(row: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.5g}") for value in row]


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

    Example:
        >>> "No rank wrote down what it computed" in to_page([])
        True
    """
    legend = (f'<li><span class="l{number}"></span>{bound:g}× and more</li>' for number, bound in enumerate(BOUNDS, 1))
    return "\n".join([
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>Work of each rank</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n<h1>Work of each rank against all ranks</h1>",
        *(part for number, one in enumerate(maps) for part in _section(one, number)),
        *([] if maps else ["<p>No rank wrote down what it computed.</p>"]),
        *([f"<ul>{''.join(legend)}</ul>"] if maps else []),
        "</main>\n</body>\n</html>\n",
    ])  # fmt: skip


def level(times_longer: float | None) -> int:
    """Return how hot a cell is, from 0.

    Example:
        >>> level(1.0), level(2.0), level(8.0)
        (0, 2, 4)
    """
    return 0 if times_longer is None else sum(times_longer >= bound for bound in BOUNDS)


def summary_sentence(one: HeatMap) -> str:
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
    yield f'<section aria-labelledby="kind-{number}">\n<h2 id="kind-{number}">{kind}</h2>'
    yield f"<p>{summary_sentence(one)}</p>"
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
    times = "–" if ratio is None else f"{ratio:.1f}×"
    # three figures, as far as that can be read
    text = f"{time_s:.3g} s" if time_s >= 0.9995 else f"{1000 * time_s:.3g} ms"
    text = format_seconds(time_s) if time_s >= 59.95 else text
    return f'<td class="l{level(ratio)}">{times}<small>{text}</small></td>'
