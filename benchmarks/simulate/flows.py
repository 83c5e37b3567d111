"""CPU seconds of many flows on single paths over a leaf/spine fabric.

`python benchmarks/simulate/flows.py` prints a table. Each flow takes one random spine between two random leaves.
"""

from __future__ import annotations

import time
from random import Random

from thinwire.simulate import FluidFlow, FluidNetwork, SimLink, VirtualClock, fluid_network

NUM_FLOWS, MANY = 4096, 10**9


def run(*, leaves: int, spines: int) -> tuple[float, float]:
    """Return CPU seconds and the virtual time of the last end."""
    random, clock = Random(1), VirtualClock()
    network = FluidNetwork([SimLink(bandwidth_bits_per_s=1e9)] * (2 * leaves * spines), clock=clock)
    for _ in range(NUM_FLOWS):
        (source, to), spine = random.sample(range(leaves), 2), random.randrange(spines)
        loads = ((source * spines + spine, 1.0), ((leaves + to) * spines + spine, 1.0))
        network.start(FluidFlow(size_bits=1e9 * random.uniform(0.5, 1.5), loads=loads), lambda: None)
    began = time.process_time()
    clock.run()
    return time.process_time() - began, clock.now_s


def main() -> None:
    print("| fabric, 4,096 flows | solved at an event | CPU seconds | simulated |")
    print("| --- | --- | --- | --- |")
    few = fluid_network._MOST_SOLVED_WHOLE
    for name, most in (("flows around it", few), ("all flows that share links", MANY)):
        fluid_network._MOST_SOLVED_WHOLE = most
        for leaves, spines in ((64, 64), (64, 16), (16, 16)):
            cpu_s, now_s = run(leaves=leaves, spines=spines)
            print(f"| {leaves} leaves, {spines} spines | {name} | {cpu_s:.2f} | {now_s:.1f} s |", flush=True)


if __name__ == "__main__":
    main()
