"""Options that name the machines of a plan or a simulation: a cluster file, or a number of equal machines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from thinwire.lab.settings import parse_access
from thinwire.planning.cluster import Cluster, Machine, load_cluster
from thinwire.units import parse_bytes, parse_seconds


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The options of both commands."""

    cluster: Path | None = None
    """The cluster file, which thinwire probe writes."""

    hosts: int | None = None
    """Instead of a file: so many machines that are alike."""

    rate: str | None = None
    """Their access: 100mbit, or down and up as 100mbit/20mbit."""

    latency: str | None = None
    """One-way time between any two of them. Default: 0ms."""

    flops: float | None = None
    """Floating-point operations a second that training reaches on each, such as 4e13."""

    memory: str | None = None
    """Memory of each one's device, such as 24GB. Default: enough."""


def cluster_of(options: ClusterOptions, *, needs_flops: bool = True) -> Cluster:
    """Return the machines that the options name.

    Args:
        options: The words.
        needs_flops: Whether it matters how fast they compute.

    Raises:
        ValueError: The options contradict each other, or do not say enough.
        DataError: The file is no cluster.
    """
    alike = {name: getattr(options, name) for name in ("hosts", "rate", "latency", "flops", "memory")}
    given = [f"--{name}" for name, value in alike.items() if value is not None]
    if options.cluster is not None:
        if given:
            raise ValueError(f"--cluster says what the machines are; leave {', '.join(given)} out, or change the file")
        return load_cluster(options.cluster)
    if options.hosts is None or options.rate is None or (needs_flops and options.flops is None):
        raise ValueError(
            "give --cluster cluster.json, which thinwire probe writes, or machines that are alike: --hosts 2 --rate "
            "100mbit --latency 20ms --flops 4e13 (operations a second that training reaches)"
        )
    if options.hosts < 1:
        raise ValueError(f"--hosts must be at least 1, got {options.hosts}")
    if options.flops is not None and not 0 < options.flops < float("inf"):
        raise ValueError(f"--flops must be above 0, got {options.flops}; a good GPU reaches 1e13 to 4e14")
    access = parse_access(options.rate)
    latency_s = 0.0 if options.latency is None else parse_seconds(options.latency)
    memory_bytes = None if options.memory is None else parse_bytes(options.memory)
    machines = tuple(
        Machine(
            name=f"host-{number}", flops_per_s=options.flops, memory_bytes=memory_bytes,
            up_bits_per_s=access.up_bits_per_s, down_bits_per_s=access.down_bits_per_s, latency_s=latency_s / 2,
        )
        for number in range(options.hosts)
    )  # fmt: skip
    return Cluster(machines=machines)
