"""What elasticity costs where nothing goes wrong: `thinwire train` with and without `--elastic`, in turns.

    python benchmarks/elastic_overhead.py --repeats 3 --steps 150 --json FILE

Two replicas of nano on this machine, the same method and settings, with a secret in both cases, so that both go over
the same wire. Tokens a second come from the runs' own metrics, from the end of the first quarter to the last line, so
that starting the processes does not count, nor that of the process that waits to take a dead one's place; of all
pairs of neighbouring runs the ratio is taken.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def rate(run: Path) -> float:
    """Return tokens a second of all replicas together, from the end of each one's first quarter to its last line."""
    total = 0.0
    for path in sorted(run.glob("metrics-replica-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [line for line in lines if line["kind"] == "step"]
        last = steps[-1]
        first = next(line for line in steps if line["step"] >= last["step"] / 4)
        total += (last["tokens"] - first["tokens"]) / (last["time_s"] - first["time_s"])
    return total


def train(folder: Path, name: str, *, steps: int, is_elastic: bool, secret: Path) -> float:
    """Run one of the two and return its rate."""
    run = folder / name
    words = (
        f"--replicas 2 --steps {steps} --eval-every 0 --final-eval-batches 1 --log-every 10 --checkpoint-every 0 "
        f"--threads 1 --quiet --secret {secret} --out {run}"
    ).split()
    more = ["--elastic", "--port", "0", "--address", "127.0.0.1"] if is_elastic else []
    subprocess.run([sys.executable, "-m", "thinwire.cli.main", "train", *words, *more], check=True)
    return rate(run)


def main() -> None:
    """Run all pairs and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--json", type=Path, default=None, help="file that the result is written to as well")
    options = parser.parse_args()
    ratios, rates, load = [], [], os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "job.secret"
        subprocess.run([sys.executable, "-m", "thinwire.cli.main", "secret", str(secret)], check=True)
        for repeat in range(options.repeats):
            # the order changes, so that a machine that slows down does not speak for one of them
            order = [False, True] if repeat % 2 == 0 else [True, False]
            found = {
                is_elastic: train(
                    Path(folder), f"{repeat}-{is_elastic}", steps=options.steps, is_elastic=is_elastic, secret=secret
                )
                for is_elastic in order
            }
            rates.append({"static": round(found[False], 1), "elastic": round(found[True], 1)})
            ratios.append(found[True] / found[False])
    result = {
        "tokens_per_s": rates,
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "steps": options.steps,
        # a ratio of two runs one after the other holds only where nothing else changes the load
        "load_average": [round(load, 2), round(os.getloadavg()[0], 2)],
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
    }
    print(json.dumps(result, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
