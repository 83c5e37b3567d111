"""Options of `thinwire plan`, and of the machines that a plan or a simulation is for."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from thinwire.errors import excluded, refusal
from thinwire.lab.settings import parse_access
from thinwire.options import option
from thinwire.planning.cluster import Cluster, Machine, load_cluster
from thinwire.units import parse_bytes, parse_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Machines of a plan or a simulation: a cluster file, or a number of equal machines."""

    cluster: Path | None = None
    """Cluster file (`thinwire probe` writes one)."""
    hosts: int | None = option(None, least=1)
    """Number of equal machines, instead of a cluster file."""
    rate: str | None = None
    """Access rate of each machine: 100mbit, or down/up as 100mbit/20mbit."""
    latency: str | None = None
    """One-way latency between machines. Default: 0ms."""
    flops: float | None = None
    """FLOP/s that training reaches on each machine, such as 4e13."""
    memory: str | None = None
    """Memory of each machine's device, such as 80GB. Default: 24GB."""


def cluster_of(options: ClusterOptions, *, needs_flops: bool = True) -> Cluster:
    """Return the machines that the options name.

    Args:
        options: The options.
        needs_flops: Whether their compute speed is needed.
    """
    alike = {name: getattr(options, name) for name in ("hosts", "rate", "latency", "flops", "memory")}
    given = [f"--{name}" for name, value in alike.items() if value is not None]
    if options.cluster is not None:
        if given:
            why = "the file names the machines"
            raise excluded("--cluster", ", ".join(given), why=why, remedy=f"to leave {', '.join(given)} out")
        return load_cluster(options.cluster)
    if options.hosts is None or options.rate is None or (needs_flops and options.flops is None):
        raise refusal(
            "the machines are missing", got=", ".join(given) or "nothing",
            allowed="--cluster FILE, which thinwire probe writes, or machines that are alike",
            remedy="--hosts 2 --rate 100mbit --latency 20ms --flops 4e13",
        )  # fmt: skip
    if options.flops is not None and not 0 < options.flops < math.inf:
        raise refusal(
            "--flops is not above 0 and finite", got=options.flops,
            allowed="operations a second that training reaches", remedy="--flops 4e13, of a good GPU",
        )  # fmt: skip
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(ClusterOptions):
    """Find the fastest method and settings for these machines and links, by simulation.

    Describe the machines with a cluster file (`thinwire probe` writes one), or as equal machines: --hosts 2 --rate
    100mbit --latency 20ms --flops 4e13. `thinwire train --plan plan.json` runs the plan.

    With --inside it plans one replica on the devices of one site instead: degrees of pipeline, data, context and tensor
    parallelism; `thinwire train --plan plan.json` runs it inside each replica. With several sites it plans both: each
    site is a replica, and --rate and --latency, or --cluster, say how they are joined.
    """

    model: str = "nano"
    """nano, 35m, 150m, 400m, 1b, a size such as 7b, or hf:PATH."""
    inside: tuple[Path, ...] = ()
    """Site file: plan one replica on its devices. Repeated: a replica in each site, and the method between them; one
    replica over all sites if a site does not hold the model."""
    links: Path | None = None
    """With --inside: measured links, a cluster.json of thinwire probe or the output of mpiGraph."""
    profile: Path | None = None
    """With --inside: JSON of thinwire bench profile on one device; its speed replaces that of the site's devices."""
    lengths: Path | None = None
    """With --inside: histogram of sequence lengths; the output says what sharing them by length saves."""
    activation_code: str = "auto"
    """With --inside: code of activations between sites, such as block-int8/block-int4 (auto), or none."""
    tokens: float = option(1e9, least=1)
    """Training tokens of all replicas together, such as 25e9."""
    seq_len: int | None = option(None, least=1)
    """Tokens per sequence. Default: 128 for nano, else 1024."""
    batch_size: int | None = option(None, least=1)
    """Sequences per step and replica. Default: by --global-batch."""
    global_batch: float | None = option(None, least=1)
    """Tokens per step of all replicas together. Default: the best published one for the model's size."""
    method: tuple[str, ...] = ()
    """Candidate method. Default: all-reduce, diloco, iso-loco. Repeatable."""
    interval: tuple[int, ...] = option((), least=1)
    """Candidate sync interval H. Default: 10, 20, 30, 50, 100, 200, 300, 500. Repeatable."""
    codec: tuple[str, ...] = ()
    """Candidate codec, such as bfloat16. Default: all that fit the method. Repeatable."""
    min_utilisation: float = 0.0
    """Smallest share of the time spent computing, such as 0.95."""
    max_penalty: float = 0.05
    """Largest predicted excess over the loss of data-parallel training, as a share."""
    min_replicas: int = option(1, least=1)
    """Smallest number of machines."""
    via: str | None = None
    """Store through which payloads travel, such as s3://bucket/run (r2:// for R2's prices): each is uploaded once and
    read by all. The output says what all-gather and two-phase exchange cost there."""
    explain: bool = False
    """Show the calculation."""
    out: Path = Path("plan.json")
    """File of the plan."""
    figure: Path | None = None
    """Also write a figure as SVG: time against loss of all candidates; with --inside, memory against time."""
    torchtitan: Path | None = None
    """Also write the plan inside a site as sections of torchtitan's configuration, as TOML."""
    json: bool = False
    """Print the plan as JSON on stdout instead of tables."""
