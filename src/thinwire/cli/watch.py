"""`thinwire watch RUN`: progress and findings of a run in the terminal."""

from __future__ import annotations

import contextlib
import json as json_format
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from thinwire.cli.argument_parsing import argument, command
from thinwire.cli.tables import plain
from thinwire.errors import refusal
from thinwire.units import format_bytes, format_count, format_moment, format_rate, format_seconds

if TYPE_CHECKING:
    from thinwire.monitor.dashboard.snapshot import RunFollower

FOUND = 3
_MOST_FINDINGS = 5
_MOST_REPLICAS = 32
_MARKS = {"trouble": ("▲", "bold red"), "healthy": ("✓", "green"), "starting": ("…", "cyan")}
_STYLES = {"silent": "bold red", "failed": "bold red", "gone": "yellow", "paused": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """Show replicas and findings of a run of `thinwire train` in the terminal.

    It only reads the run's folder, and ends with the run or with Ctrl-C. Without a terminal it prints a line
    per change. With --once the exit code is 3 if something is wrong.
    """

    run: Path = argument("RUN")
    """Folder of the run."""
    once: bool = False
    """Print the state once."""
    json: bool = False
    """Print the state once, as one JSON object on stdout."""
    period_s: float = 0.5
    """Seconds between two updates."""


@command("watch", WatchOptions)
def main(options: WatchOptions) -> int:
    """Run `thinwire watch`.

    Returns:
        0, 3 where --once finds something wrong, 1 for a folder that cannot be read, 2 for wrong options.
    """
    from thinwire.monitor.dashboard.snapshot import RunFollower, snapshot

    if not 0.05 <= options.period_s <= 60:
        raise refusal("--period-s is out of its range", got=f"{options.period_s:g}", allowed="0.05 to 60",
                      remedy="--period-s 0.5")  # fmt: skip
    console = Console(highlight=False)
    if options.json or options.once:
        sections = snapshot(options.run, diagnoses_all=True)
        if options.json:
            print(json_format.dumps(sections))
        else:
            console.print(run_table(sections, width=console.width))
        return FOUND if sections["headline"]["level"] == "trouble" else 0
    follower = RunFollower(options.run)
    with contextlib.suppress(KeyboardInterrupt):
        if console.is_terminal:
            _watch_table(follower, console, period_s=options.period_s)
        else:
            _watch_lines(follower, console, period_s=options.period_s)
    return 0


def _watch_table(follower: RunFollower, console: Console, *, period_s: float) -> None:
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        while True:
            is_behind = follower.poll()
            sections = follower.sections()
            live.update(run_table(sections, width=console.width), refresh=True)
            if not is_behind and sections["run"]["state"] == "finished":
                return
            time.sleep(0 if is_behind else period_s)


def _watch_lines(follower: RunFollower, console: Console, *, period_s: float) -> None:
    """Print a line where the run's headline or a finding is new, and at each step that replica 0 has logged."""
    printed: list[str] = []
    while True:
        is_behind = follower.poll()
        sections = follower.sections()
        lines = news(sections)
        for line in [line for line in lines if line not in printed]:
            console.print(plain(line), soft_wrap=True)
        printed = lines
        if not is_behind and sections["run"]["state"] == "finished":
            return
        time.sleep(0 if is_behind else period_s)


def run_table(sections: Mapping[str, Any], *, width: int) -> RenderableType:
    """Return the run as what rich can print.

    Args:
        sections: Of `thinwire.monitor.dashboard.snapshot`.
        width: Columns of the terminal.
    """
    mark, style = _MARKS[sections["headline"]["level"]]
    first, *more = map(plain, _head(sections))
    replicas = sections["replicas"]
    table = [_replicas(replicas, width=width)] if replicas else []
    return Group(Text(f"{mark} ", style=style) + first, *more, *table, *_below(sections))


def news(sections: Mapping[str, Any]) -> list[str]:
    """Return the lines to print where no table can stay in place."""
    first, *more = _head(sections)
    lines = [f"{_MARKS[sections['headline']['level']][0]} {first}", *more]
    for finding in reversed(sections["findings"]["findings"]):
        lines.append(("resolved: " if finding["is_over"] else "") + _finding_line(finding))
    return lines


def _head(sections: Mapping[str, Any]) -> list[str]:
    """Return the headline, with the run's numbers beside it where the run is healthy and below it elsewhere."""
    run, headline = sections["run"], sections["headline"]
    head = f"{run['name']}: {headline['text']}"
    if headline["level"] == "healthy":
        return [", ".join(filter(None, (head, _progress(run)))), headline["detail"]]
    return [head, headline["detail"]] if headline["level"] == "starting" else [head, _progress(run)]


def _below(sections: Mapping[str, Any]) -> list[Text]:
    findings = sections["findings"]["findings"]
    newest = sorted(findings, key=lambda finding: (finding["is_over"], -(finding.get("at") or 0.0)))[:_MOST_FINDINGS]
    lines = []
    for finding in newest:
        line = plain(("resolved: " if finding["is_over"] else "") + _finding_line(finding))
        line.stylize("dim" if finding["is_over"] else "bold red")
        lines.append(line)
        if not finding["is_over"]:
            lines += [plain(f"  {finding['text']}"), plain(f"  remedy: {finding['remedy']}")]
    left = len(findings) - len(newest)
    lines += [plain(f"{left} more findings; thinwire dashboard shows all")] if left else []
    return [*lines, *(plain(f"not read: {one}") for one in _refused(sections))]


def _refused(sections: Mapping[str, Any]) -> list[str]:
    return list(sections["notes"]["refused"])[-3:]


def _finding_line(finding: Mapping[str, Any]) -> str:
    at = finding.get("at")
    when = [] if at is None else [format_moment(at)]
    when += [f"since round {finding['since_round']}"] if finding["since_round"] >= 0 else []
    when += [f"{100 * finding['confidence']:.0f} % sure"]
    return f"{finding['kind']}: {finding['where']} ({', '.join(when)})"


def _replicas(replicas: list[Mapping[str, Any]], *, width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    unit = next((one["unit"] for one in replicas if "unit" in one), "tokens")
    heads = ["replica", "state", "step", "loss", f"{unit}/s", "computing", "sent", "rate now", "peak"]
    if width < 90:
        heads = heads[:7]
    for head in heads:
        table.add_column(head, justify="left" if head in ("replica", "state") else "right", no_wrap=True)
    for one in replicas[:_MOST_REPLICAS]:
        cells = [
            plain(str(one["replica"])), Text(one["state"], style=_STYLES.get(one["state"], "")),
            _cell(one.get("step"), str),
            _cell(one.get("loss"), lambda loss: f"{loss:.3f}"), _cell(one.get(f"{unit}_per_s"), format_count),
            _cell(one.get("computing"), lambda share: f"{100 * share:.0f} %"),
            _cell(one.get("sent_bytes"), format_bytes), _cell(one.get("sent_bits_per_s"), format_rate),
            _cell(one.get("peak_bits_per_s"), format_rate),
        ]  # fmt: skip
        table.add_row(*cells[: len(heads)])
    return table


def _cell(value: Any, form: Callable[[Any], str]) -> Text:
    return plain("-" if value is None else form(value))


def _progress(run: Mapping[str, Any]) -> str:
    """Return the run's numbers in a line that stays the same until a replica writes."""
    steps = f"step {run['step']}" + (f" of {run['steps']}" if run["steps"] else "")
    parts = [steps] if run["step"] or run["steps"] else []
    parts += [] if run["loss"] is None else [f"loss {run['loss']:.3f}"]
    parts += [row["text"] for row in run["numbers"] if row["name"] == f"{run['unit']}_per_s"]
    if run["state"] == "silent":
        parts.append(f"last data {format_moment(run['changed_at'])}")
    elif run["time_left_s"] is not None:
        parts.append(f"{format_seconds(run['time_left_s'])} left")
    return ", ".join(parts)
