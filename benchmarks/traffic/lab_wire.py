"""Rates of thinwire's own wire over planned paths of the lab's fabric, and after one cable dies.

`python benchmarks/traffic/lab_wire.py` prints the table of docs/benchmarks/traffic.md. It needs what a lab needs
(`thinwire lab doctor`).

The four pairs of hosts of two leaves keep messages of 200 kB in flight both ways, over four spines of 10 Mbit/s. Rates
are those of the uplinks of leaf 0, by the kernel's byte counts in windows of 2 s, of what the uplinks that work can
carry. A cable is cut in two ways: routes leave it out at once, or packets are lost and no route notices.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from lab_training import make_plans, write_inputs

from thinwire.lab import Access, FabricShape, Lab, LabSettings
from thinwire.lab.lab import rank_environment
from thinwire.transport.secret import make_secret

RANK = Path(__file__).resolve().parents[2] / "tests" / "lab" / "planned_wire.py"
RATE, SPINES = 10e6, 4
WINDOW_S, BEFORE_S, RECOVERY_S, AFTER_S = 2.0, 20.0, 5.0, 10.0
# Until the processes have started and their receive windows have grown.
WARM_UP_BYTES = 20_000_000


def share(lab: Lab, *, seconds: float, spines: int) -> float:
    """Return the median share, over windows, of what so many uplinks of leaf 0 carry."""
    found = []
    for _ in range(round(seconds / WINDOW_S)):
        before, began_s = lab.cable_bytes(), time.monotonic()
        time.sleep(WINDOW_S)
        after, elapsed_s = lab.cable_bytes(), time.monotonic() - began_s
        sent = sum(after[0, spine][0] - before[0, spine][0] for spine in range(SPINES))
        found.append(8 * sent / elapsed_s / RATE / spines)
    return median(found)


def measure(plan_name: str, *, silently: bool, congestion: str) -> tuple[float, float]:
    """Return the share before a cable is cut, and from `RECOVERY_S` after it."""
    shape = FabricShape(leaves=2, spines=SPINES, uplink_bits_per_s=RATE)
    with (
        tempfile.TemporaryDirectory() as text,
        Lab.of(LabSettings.alike(4, Access(), fabric=shape)) as lab,
    ):
        lab.set_congestion_control(congestion)
        folder = Path(text)
        write_inputs(folder, SPINES, RATE)
        make_secret(folder / "secret")
        plan = make_plans(lab, folder, ())[plan_name]
        command = [sys.executable, str(RANK), str(folder / "secret"), "10000", str(plan)]
        start = sum(up for up, _ in lab.cable_bytes().values())
        for host in range(4):
            lab.start(command, host=host, environment=rank_environment(host, 4))
        while sum(up for up, _ in lab.cable_bytes().values()) - start < WARM_UP_BYTES:
            time.sleep(0.2)
        before = share(lab, seconds=BEFORE_S, spines=SPINES)
        lab.cut_cable(0, 1, silently=silently)
        time.sleep(RECOVERY_S)
        return before, share(lab, seconds=AFTER_S, spines=SPINES - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--congestion", default="cubic", help="the hosts' TCP congestion control")
    options = parser.parse_args()
    print("| connections a pair | cut | share of 4 spines before | share of 3 spines, 5 s after and on |")
    print("| --- | --- | --- | --- |")
    for name, connections, silently in (
        ("planned", 1, False), ("planned, 4 connections", 4, False), ("planned, 4 connections", 4, True),
    ):  # fmt: skip
        before, after = measure(name, silently=silently, congestion=options.congestion)
        print(f"| {connections} | {'silent' if silently else 'routed around'} | {before:.1%} | {after:.1%} |")


if __name__ == "__main__":
    main()
