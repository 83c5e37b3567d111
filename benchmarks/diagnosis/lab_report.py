"""The table of what the lab's fault matrix found."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def report(lines: list[dict[str, Any]]) -> str:
    """Return the results as a table of Markdown."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["fault"]].append(line)
    rows = ["| fault | runs | right | ambiguous | wider | wrong | missed | seconds until told |", "| --- " * 8 + "|"]
    for fault, own in groups.items():
        if fault == "none":
            continue
        counts = Counter(line["verdict"] for line in own)
        is_placed = [line for line in own if line["verdict"] in ("right", "ambiguous", "wider place")]
        seconds = sorted(line["right_s"] or line["detected_s"] for line in is_placed)
        told = f"{statistics.median(seconds):.1f} ({seconds[0]:.1f} to {seconds[-1]:.1f})" if seconds else "-"
        wrong = counts["wrong place"] + counts["wrong kind"]
        rows.append(
            f"| {fault} | {len(own)} | {counts['right']} | {counts['ambiguous']} | {counts['wider place']} | {wrong} | "
            f"{counts['missed']} | {told} |"
        )
    alarmed = sum(bool(line.get("false_alarms")) for line in lines)
    rounds = sum(line.get("rounds_before", 0) for line in lines)
    rows += ["", f"False alarms before anything was broken, or in runs without a fault: in {alarmed} of {len(lines)} "
             f"runs, {rounds} rounds."]  # fmt: skip
    return "\n".join(rows)


def keep(line: Mapping[str, Any], results: Path) -> None:
    """Print a result and append it to a file."""
    text = json.dumps(line)
    print(text, flush=True)
    with results.open("a") as file:
        file.write(text + "\n")
