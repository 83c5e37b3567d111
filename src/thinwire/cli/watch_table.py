"""Table of `thinwire watch`: the replicas, and the newest findings below them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from thinwire.cli.tables import plain
from thinwire.units import format_bytes, format_count, format_moment, format_rate, format_seconds

_MOST_FINDINGS = 5
_MOST_REPLICAS = 32
_MARKS = {"trouble": ("▲", "bold red"), "good": ("✓", "green"), "unknown": ("?", "yellow")}
_STYLES = {"silent": "bold red", "failed": "bold red", "gone": "yellow", "paused": "yellow"}


def run_table(sections: Mapping[str, Any], *, width: int) -> RenderableType:
    """Return the run as what rich can print.

    Args:
        sections: Of `thinwire.monitor.dashboard.snapshot`.
        width: Columns of the terminal.
    """
    run, headline = sections["run"], sections["headline"]
    mark, style = _MARKS[headline["level"]]
    head = plain(f"{run['name']}: {run['state']}, {_steps(run)}")
    return Group(
        head, Text(f"{mark} ", style=style) + plain(headline["text"]), _replicas(sections["replicas"], width=width),
        *_below(sections),
    )  # fmt: skip


def news(sections: Mapping[str, Any]) -> list[str]:
    """Return what is worth a line each now, where nothing can stay in place."""
    run = sections["run"]
    said = [f"{run['name']}: {run['state']}, {_steps(run)}", f"{_mark(sections)} {sections['headline']['text']}"]
    for finding in reversed(sections["findings"]["findings"]):
        said.append(("over: " if finding["is_over"] else "") + _finding_line(finding))
    return said


def _below(sections: Mapping[str, Any]) -> list[Text]:
    findings = sections["findings"]["findings"]
    newest = sorted(findings, key=lambda finding: (finding["is_over"], -(finding.get("at") or 0.0)))[:_MOST_FINDINGS]
    lines = []
    for finding in newest:
        line = plain(("over: " if finding["is_over"] else "") + _finding_line(finding))
        line.stylize("dim" if finding["is_over"] else "bold red")
        lines.append(line)
        if not finding["is_over"]:
            lines += [plain(f"  {finding['text']}"), plain(f"  remedy: {finding['remedy']}")]
    left = len(findings) - len(newest)
    lines += [plain(f"{left} more findings; thinwire dashboard shows all")] if left else []
    missing = sections["notes"]["missing"].get("findings")
    return [*lines, *([plain(missing)] if missing else []), *(plain(f"not read: {one}") for one in _refused(sections))]


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
    heads = ["replica", "state", "step", "loss", "tokens/s", "computing", "sent", "rate now", "peak"]
    if width < 90:
        heads = heads[:7]
    for head in heads:
        table.add_column(head, justify="left" if head in ("replica", "state") else "right", no_wrap=True)
    for one in replicas[:_MOST_REPLICAS]:
        cells = [
            plain(str(one["replica"])), Text(one["state"], style=_STYLES.get(one["state"], "")),
            _told(one.get("step"), str),
            _told(one.get("loss"), lambda loss: f"{loss:.3f}"), _told(one.get("tokens_per_s"), format_count),
            _told(one.get("compute_fraction"), lambda share: f"{100 * share:.0f} %"),
            _told(one.get("sent_bytes"), format_bytes), _told(one.get("sent_bits_per_s"), format_rate),
            _told(one.get("peak_bits_per_s"), format_rate),
        ]  # fmt: skip
        table.add_row(*cells[: len(heads)])
    return table


def _told(value: Any, words: Any) -> Text:
    return plain("-" if value is None else words(value))


def _mark(sections: Mapping[str, Any]) -> str:
    return _MARKS[sections["headline"]["level"]][0]


def _steps(run: Mapping[str, Any]) -> str:
    steps = f"step {run['step']}" + (f" of {run['steps']}" if run["steps"] else "")
    if run["changed_at"] is not None and run["state"] == "silent":
        steps += f", last word {format_seconds(max(0.0, time.time() - run['changed_at']))} ago"
    return steps
