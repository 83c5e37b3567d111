"""How long a step of each method takes on a thin wire: `thinwire train` on two hosts of a lab at 20 Mbit/s.

    sudo python benchmarks/methods/lab_times.py            # all methods that `thinwire train` takes, some 20 minutes
    sudo python benchmarks/methods/lab_times.py --method dgc --method demo

The model, the data and the methods' arguments are those of `compare.py language`, the steps fewer. Each run appends one
JSON line; what is stored is left out. The machine must be quiet: the hosts share its cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compare import entries, read

from thinwire.lab import Lab

RESULTS = Path(__file__).parents[1] / "results" / "method_times.jsonl"
STEPS = 40
# Fewer of what sends whole gradients, since a step takes seconds there.
STEPS_OF = {"all-reduce": 8, "robust": 8, "one-bit-adam": 20, "zero-one-adam": 20, "one-bit-lamb": 50}
KEPT = (
    "tokens_per_s", "wall_s", "compute_utilisation", "wire_bytes_sent", "peak_bits_per_s", "machine",
    "thinwire_version",
)  # fmt: skip
# Those whose replicas would not end with one model without it.
NEED_A_FINAL_EXCHANGE = ("noloco", "eager", "dimat")
# Beside the table's: what waits for less.
MORE = {"noloco, tau 5": {"method": "noloco", "arguments": {"sync_interval": 10, "overlap_steps": 5}}}
# Options of the command line of their own; the rest goes by --method-option.
OPTIONS = {"sync_interval": "--sync-interval", "overlap_steps": "--overlap-steps"}


def command(entry: Mapping[str, Any], *, out: Path) -> list[str]:
    """Return `thinwire train` with what an entry of `compare.py` says."""
    steps = STEPS_OF.get(entry["method"], STEPS)
    words = [
        sys.executable, "-m", "thinwire.cli.main", "train", "--method", entry["method"], "--steps", str(steps),
        "--batch-size", "4", "--eval-every", "0", "--final-eval-batches", "1", "--checkpoint-every", "0",
        "--threads", "1", "--out", str(out), "--json", "--quiet",
        *([] if entry["method"] in NEED_A_FINAL_EXCHANGE else ["--no-final-exchange"]),
    ]  # fmt: skip
    if "inner" in entry:
        words += ["--inner-optimizer", entry["inner"]]
    if "codec" in entry:
        words += ["--codec", entry["codec"]]
    for name, value in entry.get("arguments", {}).items():
        # a warm-up of the method must be as long as that of the learning rate, and short beside these few steps
        value = steps // 5 if name == "warmup_steps" else value
        words += [OPTIONS[name], str(value)] if name in OPTIONS else ["--method-option", f"{name}={value}"]
    return words


def measure(name: str, entry: Mapping[str, Any], *, rate: str) -> dict[str, Any]:
    """Train on two hosts and return replica 0's summary, in short."""
    with tempfile.TemporaryDirectory() as folder, Lab(hosts=2, rate=rate) as lab:
        words = command(entry, out=Path(folder) / "run")
        results = lab.run(words, deadline_s=1200, environment={"OMP_NUM_THREADS": "1"})
        if any(result.exit_code for result in results):
            raise SystemExit(f"{name} failed: {results[0].stderr[-1000:]}")
        found = json.loads(results[0].stdout.splitlines()[-1])
    kept = {key: found[key] for key in KEPT}
    return {"name": name, "rate": rate, "steps": STEPS_OF.get(entry["method"], STEPS), **kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", action="append", help="a name of compare.py's table, or one of MORE")
    parser.add_argument("--rate", default="20mbit")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    done = {(line["name"], line["rate"]) for line in read(options.results)}
    for name, entry in (entries("language") | MORE).items():
        if (options.method and name not in options.method) or (name, options.rate) in done:
            continue
        line = json.dumps(measure(name, entry, rate=options.rate))
        with options.results.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)


if __name__ == "__main__":
    main()
