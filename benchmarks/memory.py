"""Peak memory of a replica: what each method needs on top of the model, its gradients and the inner optimizer.

`python benchmarks/memory.py --json benchmarks/results/memory.json` trains two replicas in two processes for a few steps
with each method and reads the processes' peak resident size from the kernel. Each method runs in processes of its own,
several times; the table gives the median and the spread over repeats and replicas, and the difference to `all-reduce`
in copies of the parameters (float32). Without `--json` the numbers are only printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

METHODS: dict[str, dict[str, Any]] = {
    "inner optimizer alone": {"method": "none"},
    "all-reduce": {"method": "all-reduce"},
    "diloco": {"method": "diloco", "sync_interval": 4},
    "streaming-diloco, dense": {
        "method": "streaming-diloco", "sync_interval": 4, "overlap_steps": 1, "codec": "float32",
    },
    "streaming-diloco": {"method": "streaming-diloco", "sync_interval": 4, "overlap_steps": 1},
}  # fmt: skip


def replica(settings: dict[str, Any], *, model_name: str, steps: int) -> dict[str, Any]:
    import torch

    import thinwire
    from thinwire.codecs import by_name
    from thinwire.methods import recipe
    from thinwire.workloads.language import build_model

    torch.set_num_threads(1)
    options = {name: value for name, value in settings.items() if name != "method"}
    if "codec" in options:
        options["codec"] = by_name(options["codec"])
    transport = thinwire.connect(deadline_s=120)
    model = build_model(model_name, seed=0)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    optimizer: Any = inner
    if settings["method"] != "none":
        method = recipe(settings["method"])(**options)
        optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step * 2 + transport.replica)
        tokens = torch.randint(0, 1000, (1, 33), generator=generator)
        model.loss(tokens[:, :-1], tokens[:, 1:])[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    transport.close()
    parameters = sum(p.numel() for p in model.parameters())
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak_bytes": peak_bytes, "parameter_bytes": 4 * parameters}


def measure(name: str, *, model_name: str, steps: int) -> list[dict[str, Any]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, __file__, "--replica", name, "--model", model_name, "--steps", str(steps)]
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            command, env={**common, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE, text=True
        )
        for r in range(2)
    ]
    return [json.loads(process.communicate(timeout=600)[0].splitlines()[-1]) for process in processes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="35m")
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--replica", choices=METHODS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica:
        print(json.dumps(replica(METHODS[options.replica], model_name=options.model, steps=options.steps)))
        return
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in METHODS}
    for _ in range(options.repeats):
        for name in METHODS:
            found[name] += measure(name, model_name=options.model, steps=options.steps)
    table = summarise(found)
    print(f"{options.model}, two replicas, {options.repeats} repeats; a copy is the parameters in float32\n")
    print("| method | peak, median (MB) | spread (MB) | copies over all-reduce | over the inner optimizer alone |")
    print("| --- | --- | --- | --- | --- |")
    for row in table:
        print(
            f"| {row['method']} | {row['median_bytes'] / 1e6:.0f} | {row['min_bytes'] / 1e6:.0f} to "
            f"{row['max_bytes'] / 1e6:.0f} | {row['copies_over_all_reduce']:+.2f} | {row['copies_over_inner']:+.2f} |"
        )
    if options.json:
        machine = {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()}
        options.json.write_text(json.dumps({"model": options.model, "machine": machine, "rows": table}, indent=1))


def summarise(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    medians = {name: statistics.median(run["peak_bytes"] for run in runs) for name, runs in found.items()}
    copy_bytes = found["all-reduce"][0]["parameter_bytes"]
    return [
        {
            "method": name,
            "median_bytes": medians[name],
            "min_bytes": min(run["peak_bytes"] for run in runs),
            "max_bytes": max(run["peak_bytes"] for run in runs),
            "copies_over_all_reduce": (medians[name] - medians["all-reduce"]) / copy_bytes,
            "copies_over_inner": (medians[name] - medians["inner optimizer alone"]) / copy_bytes,
        }
        for name, runs in found.items()
    ]


if __name__ == "__main__":
    main()
