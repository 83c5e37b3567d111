"""How far Deep Gradient Compression shrinks what a convnet sends, and what it costs in accuracy.

    python benchmarks/methods/dgc_ratio.py

The digits of `compare.py` with a convnet twice as wide, since biases and norms travel whole and weigh less there, and
with two replicas, where a replica sends one payload, in float32 too. The ratio is between the bytes that the transport
counted in the last third of the steps, after the density's warm-up; the paper's is of gradients after it, too.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from compare import SEEDS, TASKS, entries, read, run

RESULTS = Path(__file__).parents[1] / "results" / "dgc_ratio.jsonl"
REFERENCE, NAME, WIDTH = "all-reduce, SGD with momentum", "dgc", 128


def main() -> None:
    for seed in SEEDS:
        for name in (REFERENCE, NAME):
            if any((line["name"], line["seed"]) == (name, seed) for line in read(RESULTS)):
                continue
            shape = TASKS["digits"] | {"replicas": 2, "width": WIDTH}
            settings = {"task": "digits", "name": name, "seed": seed, **shape, "inner": "sgd"} | entries("digits")[name]
            with RESULTS.open("a") as file:
                file.write(json.dumps(run(settings)) + "\n")
    lines = read(RESULTS)
    for name in (REFERENCE, NAME):
        found = [line for line in lines if line["name"] == name]
        ratio = 32 / statistics.median(line["late_bits"] for line in found)
        print(f"{name}: accuracy {spread([100 * line['accuracy'] for line in found])} %, {ratio:.0f} times fewer bytes")


def spread(values: list[Any]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
