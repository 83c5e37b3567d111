"""Training of four hosts over a real leaf/spine fabric of the lab: hashed against planned paths.

`python benchmarks/traffic/lab_training.py` runs every case, stores the runs in
benchmarks/results/traffic_training.jsonl and prints the table of docs/benchmarks/traffic.md; `--show` prints it from
the stored runs. It needs what a lab needs (`thinwire lab doctor`).

Two hosts on each of two leaves, uplinks of 10 Mbit/s. All runs go over thinwire's own wire. Hashed runs take a random
source port for each connection, as a kernel does; planned ones those of `thinwire traffic plan --probe`. The control
has one spine of 40 Mbit/s, so that a plan has nothing to choose.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

from thinwire.lab import Access, FabricShape, Lab, LabSettings
from thinwire.lab.lab import rank_environment
from thinwire.transport.secret import make_secret

RESULTS = Path(__file__).resolve().parents[1] / "results" / "traffic_training.jsonl"
THINWIRE = [sys.executable, "-m", "thinwire.cli.main"]
METHODS = {
    "all-reduce": ["--method", "all-reduce", "--steps", "3"],
    "streaming DiLoCo": [
        "--method", "streaming-diloco", "--codec", "bfloat16", "--sync-interval", "4", "--overlap-steps", "1",
        "--steps", "8",
    ],
}  # fmt: skip
FABRICS = {"2x4": (4, 10e6), "2x1": (1, 40e6)}
PORT = 29_600


def write_inputs(folder: Path, spines: int, rate: float) -> None:
    """Write the fabric and the flows of each plan: one connection a pair of hosts, and four."""
    fabric = {
        "format": "thinwire-fabric", "version": 1, "spines": spines, "uplink_bits_per_s": rate,
        "port_bits_per_s": 1e9, "hosts": {f"host-{host}": [host // 2] for host in range(4)},
        "spine_addresses": [[f"10.80.0.{spine + 1}"] for spine in range(spines)],
    }  # fmt: skip
    (folder / "fabric.json").write_text(json.dumps(fabric))
    for connections in (1, 4):
        flows = [
            {"source": f"host-{a}", "destination": f"host-{b}", "bytes": 10**6, "connections": connections}
            for a in (2, 3)
            for b in (0, 1)
        ]
        text = json.dumps({"format": "thinwire-flows", "version": 1, "flows": flows})
        (folder / f"flows-{connections}.json").write_text(text)


def make_plans(lab: Lab, folder: Path, seeds: Iterable[int]) -> dict[str, Path]:
    """Probe the fabric; return the file of each plan, by its name in the table."""
    probe = [*THINWIRE, "traffic", "probe", "--fabric", str(folder / "fabric.json"), "--out", str(folder / "probe")]
    if any(one.exit_code for one in lab.run(probe, deadline_s=120)):
        raise SystemExit("the fabric could not be probed")
    found = {}
    for connections in (1, 4):
        name = "planned" if connections == 1 else "planned, 4 connections"
        found[name] = folder / f"plan-{connections}.json"
        subprocess.run(
            [*THINWIRE, "traffic", "plan", "--method", "c4p", "--fabric", str(folder / "fabric.json"), "--flows",
             str(folder / f"flows-{connections}.json"), "--probe", str(folder / "probe"), "--out", str(found[name])],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    for seed in seeds:
        random = Random(seed)
        plan = json.loads(found["planned"].read_text())
        for flow in plan["assignment"]:
            flow["pieces"][0] |= {"source_port": random.randrange(16_000, 28_000), "spare_source_ports": []}
        found[f"hashed {seed}"] = folder / f"hashed-{seed}.json"
        found[f"hashed {seed}"].write_text(json.dumps(plan))
    return found


def train(lab: Lab, folder: Path, plan: Path, options: list[str]) -> dict[str, Any]:
    """Train once; return the seconds of the loop and the bytes that leaf 0 sent up to each spine."""
    run = Path(tempfile.mkdtemp(dir=folder))
    common = [
        *THINWIRE, "train", *options, "--secret", str(folder / "secret"), "--port-range", f"{PORT}-{PORT}",
        "--traffic-plan", str(plan), "--threads", "1", "--batch-size", "1", "--seq-len", "32", "--quiet", "--out",
        str(run / "run"),
    ]  # fmt: skip
    before = lab.cable_bytes()
    outputs = [run / f"host-{host}.txt" for host in range(4)]
    processes = []
    for host, output in enumerate(outputs):
        with output.open("wb") as file:
            environment = rank_environment(host, 4)
            processes.append(lab.start(common, host=host, environment=environment, stdout=file, stderr=file))
    for process, output in zip(processes, outputs, strict=True):
        if process.wait(deadline_s=500):
            raise SystemExit(output.read_text())
    after = lab.cable_bytes()
    sent = [after[cable][0] - before[cable][0] for cable in sorted(after) if cable[0] == 0]
    summary = json.loads(next((run / "run").rglob("summary.json")).read_text())
    return {"bytes": sent, "summary": summary}


def measure(fabrics: Iterable[str], num_seeds: int) -> None:
    """Run every case once, and append the results; the control has one hashed run and no choice of connections."""
    with tempfile.TemporaryDirectory() as text:
        for fabric in fabrics:
            spines, rate = FABRICS[fabric]
            folder = Path(text) / fabric
            folder.mkdir()
            write_inputs(folder, spines, rate)
            make_secret(folder / "secret")
            shape = FabricShape(leaves=2, spines=spines, uplink_bits_per_s=rate)
            with Lab.of(LabSettings.alike(4, Access(), fabric=shape)) as lab:
                plans = make_plans(lab, folder, range(num_seeds if spines > 1 else 1))
                if spines == 1:
                    del plans["planned, 4 connections"]
                for method, options in METHODS.items():
                    for name, plan in plans.items():
                        found = train(lab, folder, plan, options)
                        summary = found["summary"]
                        row = {
                            "fabric": fabric, "method": method, "paths": name, "bytes": found["bytes"],
                            "seconds": summary["wall_s"], "sha256": summary["global_parameters_sha256"],
                        }  # fmt: skip
                        with RESULTS.open("a") as file:
                            file.write(json.dumps(row) + "\n")
                        print(json.dumps(row), file=sys.stderr)


def show() -> None:
    """Print the table of the stored runs."""
    rows: defaultdict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in RESULTS.read_text().splitlines():
        row = json.loads(line)
        paths = "hashed" if row["paths"].startswith("hashed") else row["paths"]
        rows[row["fabric"], row["method"], paths].append(row)
    print("| fabric | method | paths | runs | seconds, median | busiest spine's part of the bytes |")
    print("| --- | --- | --- | --- | --- | --- |")
    for (fabric, method, paths), found in rows.items():
        busiest = fmean(max(row["bytes"]) / sum(row["bytes"]) for row in found)
        seconds = median(row["seconds"] for row in found)
        print(f"| {fabric} | {method} | {paths} | {len(found)} | {seconds:.1f} | {busiest:.0%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--fabric", choices=FABRICS, action="append", help="default: all, which replaces what is stored"
    )
    parser.add_argument("--seeds", type=int, default=4, help="hashed runs of each case")
    parser.add_argument("--show", action="store_true", help="print the table of the stored runs")
    options = parser.parse_args()
    if not options.show:
        if options.fabric is None:
            RESULTS.unlink(missing_ok=True)
        measure(options.fabric or FABRICS, options.seeds)
    show()


if __name__ == "__main__":
    main()
