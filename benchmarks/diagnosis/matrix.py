"""The fault matrix in rehearsed jobs: which faults are found, of which kind, in which place, after how many rounds.

    python benchmarks/diagnosis/matrix.py              # plays all scenes, a minute or two, and writes the results
    python benchmarks/diagnosis/matrix.py --report     # the table of what is stored

Nothing runs here but a generator of records and the rules that read them. The numbers say that the rules fit together
on jobs that we have thought of, and nothing of how often they are right on a cluster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from thinwire.monitor.detect.diagnose import diagnose
from thinwire.runlog.reader import from_records

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.fault_matrix import clean_scenes, compare, pairs_of_faults, scenes
from tests.synthetic_jobs import NOISES, synthesize

RESULTS = Path(__file__).parents[1] / "results" / "diagnosis.jsonl"
VERDICTS = ("right", "ambiguous", "wrong place", "wrong kind", "missed")


def play(*, seed: int, per_cell: int, clean_rounds: int) -> list[dict[str, Any]]:
    """Play all scenes and return a line for each fault, and one for each clean scene."""
    lines = []
    for scene in [*scenes(seed=seed, per_cell=per_cell), *pairs_of_faults(seed=seed, count=10 * per_cell)]:
        judgements, left = compare(scene, diagnose(from_records(synthesize(scene))))
        noise = next(name for name, noise in NOISES.items() if noise == scene.noise)
        for one in judgements:
            lines.append({
                "fault": one.fault.kind, "place": str(one.fault.place), "severity": one.fault.severity,
                "faults": len(scene.faults), "ranks": len(scene.hosts), "hosts": len(set(scene.hosts)),
                "pattern": scene.pattern, "noise": noise, "seed": scene.seed, "verdict": one.verdict,
                "rounds": one.rounds, "other_findings": len(left),
            })  # fmt: skip
    for number in range(max(1, clean_rounds // 1000)):
        for scene in clean_scenes(seed=seed + number, rounds=250):
            found = diagnose(from_records(synthesize(scene)))
            noise = next(name for name, noise in NOISES.items() if noise == scene.noise)
            lines.append({"fault": "none", "rounds": scene.rounds, "noise": noise, "pattern": scene.pattern,
                          "ranks": len(scene.hosts), "seed": scene.seed, "false_alarms": len(found)})  # fmt: skip
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    """Return the results as a table of Markdown."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if line["fault"] != "none":
            severity = "-" if line["severity"] == 1.0 else f"{line['severity']:g} x"
            name = line["fault"] + (" (two at once)" if line["faults"] > 1 else "")
            groups[name, severity].append(line)
    rows = [
        "| fault | severity | scenes | right | ambiguous | wrong | missed | rounds until sure |",
        "| --- " * 8 + "|",
    ]
    for (name, severity), own in sorted(groups.items(), key=lambda item: (item[0][0], item[1][0]["severity"])):
        counts = Counter(line["verdict"] for line in own)
        rounds = sorted(line["rounds"] for line in own if line["rounds"] >= 0)
        told = f"{statistics.median(rounds):g} (at most {rounds[-1]})" if rounds and severity != "-" else "-"
        wrong = counts["wrong place"] + counts["wrong kind"]
        rows.append(
            f"| {name} | {severity} | {len(own)} | {counts['right']} | {counts['ambiguous']} | {wrong} | "
            f"{counts['missed']} | {told} |"
        )
    clean = [line for line in lines if line["fault"] == "none"]
    alarms = sum(line["false_alarms"] for line in clean)
    rows += ["", f"{alarms} false alarms in {sum(line['rounds'] for line in clean):,} clean rounds."]
    others = sum(line["other_findings"] for line in lines if line["fault"] != "none" and line["faults"] == 1)
    rows.append(
        f"{others} findings beside the fault in {sum(line.get('faults') == 1 for line in lines)} scenes of one."
    )
    return "\n".join(rows)


def main() -> None:
    """Read the command line, play, write and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--per-cell", type=int, default=10, help="scenes of each fault, place and severity")
    parser.add_argument("--clean-rounds", type=int, default=10_000)
    parser.add_argument("--report", action="store_true", help="only print the table of what is stored")
    options = parser.parse_args()
    if not options.report:
        lines = play(seed=options.seed, per_cell=options.per_cell, clean_rounds=options.clean_rounds)
        RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(table([json.loads(line) for line in RESULTS.read_text().splitlines()]))


if __name__ == "__main__":
    main()
