"""Faults of a run for its report: the findings, the actions taken and the time lost."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from thinwire.monitor.dashboard.findings_reader import Actions, Findings, downtime_told
from thinwire.monitor.dashboard.json_file import ObjectFile
from thinwire.monitor.dashboard.rejected_lines import Refused
from thinwire.monitor.report.page import facts, grid
from thinwire.monitor.runlog.reader import parse_object
from thinwire.monitor.runlog.tailer import GrowingFile
from thinwire.units import format_moment

_NOTHING = "Nobody wrote down a finding: nothing broke, or nobody judged the run while it went on."
_ROWS = {
    "post_checkpoint_s": "work done again since the last checkpoint",
    "detection_s": "until the fault was noticed",
    "diagnosis_s": "until its place was known",
    "reinitialisation_s": "until training went on",
}


def trouble(folder: Path) -> list[str]:
    """Return a section on what broke as parts of HTML; the files are untrusted, and what cannot be read is told.

    Args:
        folder: The run's folder, with `findings.jsonl`, `actions.jsonl` and `downtime.json` where they were written.
    """
    refused, findings, actions = Refused(), Findings(), Actions()
    _read(folder / "findings.jsonl", findings, refused)
    _read(folder / "actions.jsonl", actions, refused)
    found, done = findings.to_json(), actions.to_json()
    parts = ["<h2>What broke</h2>", *(_finding(one) for one in sorted(found, key=lambda one: one["at"] or 0.0))]
    if not found:
        parts.append(f"<p>{_NOTHING}</p>")
    if done:
        head = ("when", "what was done", "why", "to whom and with which result")
        rows = [
            (format_moment(one["at"]), f"{one['action']}{' (dry run: not done)' if one['is_dry_run'] else ''}",
             one["why"], ": ".join(filter(None, (one["target"], one["result"]))))
            for one in reversed(done)
        ]  # fmt: skip
        parts += ["<h3>What was done</h3>", grid(head, rows)]
    parts += _lost(folder / "downtime.json", refused)
    return [*parts, *(f'<p class="note">{escape(f"Not read: {words}")}</p>' for words in refused.told())]


def _read(path: Path, told: Findings | Actions, refused: Refused) -> None:
    file = GrowingFile(path)
    while True:
        _, lines = file.look()
        for number, line in lines:
            try:
                told.take(parse_object(line))
            except ValueError as error:
                refused.add(f"{path.name}:{number}", str(error))
        if not file.is_behind:
            return


def _finding(one: Mapping[str, Any]) -> str:
    over = f"over at {format_moment(one['over_at'])}" if one["is_over"] else "not over at the end"
    since = f", since round {one['since_round']}" if one["since_round"] >= 0 else ""
    rows = [
        ("when", f"told at {format_moment(one['at'])}{since}; {over}"),
        ("what", one["text"]),
        ("evidence", "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in one["evidence"])),
        ("how sure", f"{100 * one['confidence']:.0f} %"),
        ("what to do", one["remedy"]),
        ("what would tell the places apart", one["probe"]),
    ]
    return f"<h3>{escape(one['kind'])}: {escape(one['where'])}</h3>{facts([row for row in rows if row[1]])}"


def _lost(path: Path, refused: Refused) -> list[str]:
    file = ObjectFile(path, refused)
    file.look()
    if file.value is None:
        return []
    try:
        told = downtime_told(file.value)
    except ValueError as error:
        refused.add(path.name, str(error))
        return []
    rows = [(words, f"{told[name]:.1f} s") for name, words in _ROWS.items() if name in told]
    total_s, run_s = told.get("total_s"), told.get("run_s")
    if total_s is not None:
        share = f" of {run_s:.1f} s, {100 * total_s / run_s:.1f} %" if run_s else ""
        rows.append(("together", f"{total_s:.1f} s{share}"))
    return ["<h3>Time lost</h3>", facts(rows)] if rows else []
