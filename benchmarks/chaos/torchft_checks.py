"""What the files of torchft's replicas say, in the words of `chaos_checks`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chaos_checks import applied

Lines = dict[int, list[dict[str, Any]]]


def committed(folder: Path) -> Lines:
    """Return each replica's committed outer steps."""
    return applied(folder)


def said(folder: Path) -> Lines:
    """Return each replica's events; half a line that a killed process left is passed over."""
    found = {}
    for path in sorted(folder.glob("host-*/events-replica-*.jsonl")):
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[int(path.stem.rpartition("-")[2])] = [json.loads(line) for line in lines]
    return found


def in_eras(rounds: Lines) -> tuple[Lines, int]:
    """Return the outer steps numbered on where a job began again from nothing, and how many beginnings there were.

    Where all replicas end, those that a supervisor starts begin with outer step 0: with other members than any era
    before them had, after later steps than it.
    """
    ordered = sorted(((line["at_s"], replica, line) for replica, lines in rounds.items() for line in lines),
                     key=lambda item: item[:2])  # fmt: skip
    found: Lines = {}
    offset, most, num_eras, seen = 0, -1, 1, set[int]()
    for _, replica, line in ordered:
        if line["round"] == 0 and most > offset and not seen.intersection(line["members"]):
            offset, num_eras = most + 1, num_eras + 1
        seen.update(line["members"])
        found.setdefault(replica, []).append(line | {"round": line["round"] + offset})
        most = max(most, line["round"] + offset)
    return found, num_eras
