"""Flows of a recorded run: the bytes that each rank sent to each other one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from thinwire.errors import DataError, refusal
from thinwire.monitor.runlog.run_folder import read_files
from thinwire.traffic.fabric import Fabric, FabricFlow


def flows_of_run(run: Path, fabric: Fabric) -> list[FabricFlow]:
    """Return one flow for each pair of ranks, with all bytes of the run; rank n runs on the fabric's n-th host.

    Raises:
        DataError: The folder cannot be read or holds no sent messages.
        ValueError: A rank has no host.
    """
    if not run.exists():
        raise DataError(f"there is no run {run}; give the folder of `thinwire train --out`")
    sent: Counter[tuple[int, int]] = Counter()
    for end in read_files([run]).transfers:
        if end.direction == "sent" and end.rank != end.peer:
            sent[end.rank, end.peer] += end.num_bytes
    found = [(pair, size) for pair, size in sorted(sent.items()) if size]
    if not found:
        raise DataError(f"{run} records no sent messages; `thinwire train` writes them with two replicas or more")
    hosts = list(fabric.hosts)
    if (last := max(max(pair) for pair, _ in found)) >= len(hosts):
        raise refusal("a rank of the run has no host", got=f"rank {last} and {len(hosts)} hosts",
                      allowed=f"ranks 0 to {len(hosts) - 1}", remedy="a fabric of more hosts")  # fmt: skip
    return [FabricFlow(source=hosts[a], destination=hosts[b], num_bytes=size, job=run.name) for (a, b), size in found]
