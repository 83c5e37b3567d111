"""Hashed and planned paths over a real leaf/spine fabric of the lab: 4 flows over 4 spines of 10 Mbit/s.

`python benchmarks/traffic/lab_paths.py` prints the table of docs/benchmarks/traffic.md. It needs what a lab needs
(`thinwire lab doctor`). Shares are those of the four uplinks together, by the kernel's byte counts.
"""

from __future__ import annotations

import argparse
import time
from random import Random
from statistics import fmean, stdev

from thinwire.lab import Access, FabricShape, Lab, LabSettings
from thinwire.lab.path_probe import PortTransfer, Transfers, probe_paths

RATE, SPINES = 10e6, 4
PAIRS = [(0, 2), (0, 3), (1, 2), (1, 3)]
WARM_UP_S, MEASURED_S = 1.5, 2.0


def share(lab: Lab, transfers: Transfers, planned: list[PortTransfer]) -> float:
    """Return the share of the four uplinks that the transfers fill."""
    running = [transfers.send(one, seconds=WARM_UP_S + MEASURED_S + 1.0)[0] for one in planned]
    time.sleep(WARM_UP_S)
    before, began_s = lab.cable_bytes(), time.monotonic()
    time.sleep(MEASURED_S)
    after, elapsed_s = lab.cable_bytes(), time.monotonic() - began_s
    for process in running:
        process.wait(deadline_s=60)
    sent = sum(after[0, spine][0] - before[0, spine][0] for spine in range(SPINES))
    return 8 * sent / elapsed_s / RATE / SPINES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    shape = FabricShape(leaves=2, spines=SPINES, uplink_bits_per_s=RATE)
    with Lab.of(LabSettings.alike(4, Access(), fabric=shape)) as lab:
        transfers = Transfers(lab)
        planned = []
        for number, (source, destination) in enumerate(PAIRS):
            ports = range(20_000 + 100 * number, 20_060 + 100 * number)
            found = probe_paths(lab, transfers, source=source, destination=destination, ports=ports, enough=SPINES)
            port = next(port for port, spine in found.items() if spine == number)
            planned.append(PortTransfer(source=source, destination=destination, port=port))
        best = [share(lab, transfers, planned) for _ in range(3)]
        hashed = []
        for seed in range(options.seeds):
            random = Random(seed)
            ports = random.sample(range(30_000, 60_000), len(PAIRS))
            chosen = [
                PortTransfer(source=source, destination=destination, port=port)
                for (source, destination), port in zip(PAIRS, ports, strict=True)
            ]
            hashed.append(share(lab, transfers, chosen))
    print("| 4 flows over 4 spines | share of the uplinks, lab | simulated |\n| --- | --- | --- |")
    print(f"| planned source ports, 3 runs | {min(best):.1%} to {max(best):.1%} | 100.0% |")
    print(
        f"| random source ports, {options.seeds} seeds | mean {fmean(hashed):.1%}, standard deviation "
        f"{stdev(hashed):.1%} | {1 - (1 - 1 / SPINES) ** len(PAIRS):.1%} |"
    )


if __name__ == "__main__":
    main()
