"""Two replicas, each over two sites of two ranks: one plan, 200 steps of text, the loss of a whole replica, a resume.

    python benchmarks/planning/border_run.py     # into benchmarks/results/border_run.jsonl

The memory in the site files holds the model on no single site, so `thinwire plan` lays one replica over both. Eight
processes on loopback run the plan as eight devices would under torchrun, with IsoLoCo between the two replicas.
The same run is done again: all four ranks of a replica are killed on the way, and all eight are started with --resume.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from thinwire.training.summary import describe_machine

RESULTS = Path(__file__).parents[1] / "results" / "border_run.jsonl"
COMMAND = [sys.executable, "-m", "thinwire.cli.main"]
RANKS, REPLICAS = 4, 2
NODE = {"devices": 2, "memory_bytes": "22 MB", "flops_per_s": 1e10, "bandwidth_bits_per_s": "10gbit",
        "latency_s": "10us"}  # fmt: skip
MODEL = ["--model", "nano", "--seq-len", "64", "--batch-size", "4"]
END_S = 300.0


def plan(folder: Path) -> dict[str, Any]:
    """Plan one replica over two sites that do not hold the model."""
    words = []
    for name in ("north", "south"):
        path = folder / f"{name}.json"
        path.write_text(json.dumps({"format": "thinwire-site", "version": 1, "nodes": [{"name": name, **NODE}]}))
        words += ["--inside", str(path)]
    words += ["--rate", "100mbit", "--latency", "5ms", *MODEL, "--out", str(folder / "plan.json")]
    said = subprocess.run([*COMMAND, "plan", *words], check=True, capture_output=True, text=True)
    assert "no single site holds the model: this is one replica over north, south" in said.stderr, said.stderr
    return json.loads((folder / "plan.json").read_text())


def start(arguments: list[str], logs: Path) -> list[subprocess.Popen[bytes]]:
    """Start a process for each rank of both replicas, as torchrun does on each host; no agent watches them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    logs.mkdir(parents=True, exist_ok=True)
    size, found = str(RANKS * REPLICAS), []
    for rank in map(str, range(RANKS * REPLICAS)):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        with (logs / f"{rank}.out").open("w") as out, (logs / f"{rank}.err").open("w") as err:
            found.append(subprocess.Popen([*COMMAND, "train", *arguments], env={**os.environ, **own}, stdout=out,
                                          stderr=err))  # fmt: skip
    return found


def ended(processes: list[subprocess.Popen[bytes]], *, within_s: float | None = None) -> list[int]:
    """Wait for processes to end, and return their exit codes."""
    end_s = None if within_s is None else time.monotonic() + within_s
    return [one.wait(None if end_s is None else max(0.0, end_s - time.monotonic())) for one in processes]


def whole_run(arguments: list[str], out: Path) -> dict[str, Any]:
    """Run to the end, and return the summary."""
    codes = ended(start(arguments, out.with_name(f"{out.name}-logs")))
    assert not any(codes), codes
    return json.loads((out / "summary.json").read_text())


def main() -> None:
    """Run the plan once whole, and once with the loss of a replica."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="for the runs; by default one that is removed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="thinwire-border-run-"))
    folder.mkdir(parents=True, exist_ok=True)
    found = plan(folder)
    degrees = {name: degree for name, degree in found["degrees"].items() if degree > 1}
    print(f"plan: {degrees}, stages at sites {found['stage_sites']}, {found['activation_code']}, at most "
          f"{max(found['peak_bytes_per_stage']) / 1e6:.1f} MB of 22 MB a device", flush=True)  # fmt: skip
    every = max(1, options.steps // 10)
    more = ["--plan", str(folder / "plan.json"), "--method", "iso-loco", "--steps", str(options.steps),
            "--sync-interval", str(every), "--checkpoint-every", str(every), "--eval-every", "0", "--no-samples",
            "--threads", "1", "--quiet"]  # fmt: skip
    whole = whole_run([*more, "--out", str(folder / "whole")], folder / "whole")
    print(f"whole run: {whole['wall_s']:.0f} s, validation loss {whole['val_loss']:.4f}", flush=True)
    lost = folder / "lost"
    processes = start([*more, "--out", str(lost)], folder / "lost-logs")
    folders = [lost / "ranks" / str(rank) if rank else lost for rank in range(RANKS)]
    saved = [folder / "checkpoints" / f"step-{5 * every:08d}" / f"replica-{replica}.json"
             for folder in folders for replica in range(REPLICAS)]  # fmt: skip
    while not all(path.exists() for path in saved):
        assert all(one.poll() is None for one in processes), "a rank ended before it was killed"
        time.sleep(0.1)
    for process in processes[RANKS:]:  # the second replica
        process.send_signal(signal.SIGKILL)
    began_s = time.monotonic()
    codes = ended(processes, within_s=END_S)
    errors = [(folder / "lost-logs" / f"{rank}.err").read_text().strip().splitlines() for rank in range(RANKS)]
    print(f"after the kill: exit codes {codes} within {time.monotonic() - began_s:.1f} s; rank 0: {errors[0][-1]}")
    assert codes == [1] * RANKS + [-signal.SIGKILL] * RANKS
    resumed = whole_run(["--resume", str(lost), "--quiet"], lost)
    is_same = resumed["global_parameters_sha256"] == whole["global_parameters_sha256"]
    print(f"resumed: validation loss {resumed['val_loss']:.4f}, parameters {'equal' if is_same else 'DIFFERENT'}")
    line = {"steps": options.steps, "degrees": degrees, "sites": found["stage_sites"], "code": found["activation_code"],
            "wall_s": whole["wall_s"], "val_loss": whole["val_loss"], "error": errors[0][-1], "is_same": is_same,
            "machine": describe_machine(torch.device("cpu"))}  # fmt: skip
    options.results.write_text(json.dumps(line) + "\n")
    assert is_same
    if options.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
