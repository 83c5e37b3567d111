"""Print medians and spreads of what the other programs of this folder measured.

python benchmarks/elastic_engine/summary.py benchmarks/results/elastic_engine.jsonl
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

KEYS = ("what", "fault", "lost", "limit_s", "away_s", "quorum_retries", "rate", "state_bytes")
TEXTS = ("errors", "lost_one_said", "raised", "kill")


def groups(path: Path) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    found: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["what"] == "torchft_faults":
            row.setdefault("limit_s", 60)  # as the first runs had it
        found[tuple(f"{key} {row[key]}" for key in KEYS if key in row)].append(row)
    return found


def told(values: list[Any]) -> str:
    known = [float(value) for value in values if value is not None]
    if not known:
        return f"never in {len(values)}"
    never = f", never in {len(values) - len(known)}" if len(known) < len(values) else ""
    return f"{statistics.median(known):.2f} ({min(known):.2f} to {max(known):.2f}; n = {len(known)}{never})"


def main(path: Path) -> None:
    for group, rows in sorted(groups(path).items()):
        print(", ".join(group))
        for key in rows[0]:
            if key not in (*KEYS, *TEXTS):
                print(f"    {key}: {told([row.get(key) for row in rows])}")
        for key in TEXTS:
            texts = {str(text)[:110] for row in rows for text in _listed(row.get(key))}
            if texts:
                print(f"    {key}: {' | '.join(sorted(texts)[:3])}")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
