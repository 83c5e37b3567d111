"""What replicas of different speeds do to each other, with and without an own pace, in virtual time.

    python benchmarks/elastic_own_pace.py

The real coordinator, sessions, paces and the engine's order of rounds (tests/elastic/paced_town.py); a step takes
the fastest 1 s, with a standard deviation of 10 %, a word 5 ms and a part 20 ms. Each line is one setting: of how many
means after the first interval the slowest replica is a part, how many steps of an interval it does, and how much longer
the first, fast replica takes than among equals. Nothing in it depends on this machine.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "membership"))

from paced_town import PacedTown  # noqa: E402
from test_own_pace import INTERVALS, SPEEDS, setting_of  # noqa: E402

METHODS = [("plain", 10), ("plain", 30), ("plain", 60), ("streaming", 10), ("streaming", 30), ("streaming", 60)]


def measure(name: str, interval: int, speeds: tuple[float, ...]) -> dict[str, object]:
    """Return one line."""
    setting = setting_of(name, interval, speeds)
    alike = PacedTown(setting_of(name, interval, (1.0,) * len(speeds))).run()
    line: dict[str, object] = {"method": name, "sync_interval": interval, "speeds": speeds}
    for what, has_own_pace in (("without", False), ("with", True)):
        found = PacedTown(replace(setting, has_own_pace=has_own_pace)).run()
        line[what] = {
            "share": round(found.own_share[-1], 3), "steps": round(found.trained[-1] / INTERVALS, 1),
            "slowdown": round(found.seconds[0] / alike.seconds[0] - 1, 4),
        }  # fmt: skip
    return line


def main() -> None:
    """Print all lines, and write them down."""
    with (HERE / "results" / "elastic_own_pace.jsonl").open("w") as file:
        for name, interval in METHODS:
            for speeds in SPEEDS:
                line = json.dumps(measure(name, interval, speeds))
                print(line, flush=True)
                file.write(line + "\n")


if __name__ == "__main__":
    main()
