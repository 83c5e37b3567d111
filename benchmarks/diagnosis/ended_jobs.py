"""Faults that end a plain torch job: what `thinwire.watch` and the diagnosis say of them, and when.

python benchmarks/diagnosis/ended_jobs.py --seed 1 --times 6

Three ranks over gloo on one machine train with DDP and all-reduce, see `peers.py`; at the sixth step a rank that is
drawn breaks. The job's folder is diagnosed every 0.1 s until something is told. Two faults have a rank of their own by
nature: of two ranks that bring different shapes, or of whom one skips a collective, the third tells who is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from lab_report import keep
from peers import play

RESULTS = Path(__file__).parents[1] / "results" / "diagnosis_ended.jsonl"
KINDS = {
    "skips a collective": "desync", "sends a wrong shape": "desync", "stops": "non-communication hang",
    "is killed": "non-communication hang", "hangs in its own code": "non-communication hang",
}  # fmt: skip


def judged(fault: str, victim: int) -> dict[str, Any]:
    """Break a job, and return what was said."""
    load = os.getloadavg()[0]
    told = play(fault, "thinwire", victim=victim)
    is_kind, is_place = told["said"].startswith(KINDS[fault]), told["names"] == f"rank {victim}"
    is_among = f"rank {victim}" in told["names"]
    verdict = "wrong kind" if not is_kind else "right" if is_place else "ambiguous" if is_among else "wrong place"
    return {**told, "victim": victim, "verdict": verdict if told["names"] else "missed", "load": round(load, 1)}


def report(lines: list[dict[str, Any]]) -> str:
    """Return the table of all that is stored."""
    rows = ["| fault | jobs | right kind and rank | else | seconds: median, longest |", "| --- " * 5 + "|"]
    for fault in KINDS:
        own = [line for line in lines if line["fault"] == fault]
        counts, seconds = Counter(line["verdict"] for line in own), [line["after_s"] for line in own]
        others = ", ".join(f"{name}: {count}" for name, count in counts.items() if name != "right") or "-"
        if own:
            rows.append(f"| {fault} | {len(own)} | {counts['right']} | {others} | {statistics.median(seconds):.1f}, "
                        f"{max(seconds):.1f} |")  # fmt: skip
    return "\n".join(rows)


def main() -> None:
    """Read the command line, play, write and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=int, default=6, help="jobs of each fault")
    parser.add_argument("--report", action="store_true", help="only print the table of what is stored")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    for fault in [] if options.report else list(KINDS) * options.times:
        line = {"seed": options.seed, **judged(fault, draw.randrange(3))}
        keep(line, RESULTS)
    print(report([json.loads(line) for line in RESULTS.read_text().splitlines()]))


if __name__ == "__main__":
    main()
