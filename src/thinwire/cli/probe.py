"""`thinwire probe`: measures the wires between hosts and what each computes, and writes cluster.json."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.argument_parsing import command
from thinwire.cli.output import log, print_line
from thinwire.cli.tables import print_table
from thinwire.cli.train_options import adopt_launcher, world_size
from thinwire.errors import refusal
from thinwire.training.config import TrainConfig, resolve, validate
from thinwire.units import format_bytes, format_rate, format_seconds, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from thinwire.planning.cluster import Machine
    from thinwire.planning.probe import WireMeasurements


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Measure all links between the hosts, and each host's step time, memory and codec speed.

    Start it on every host with torchrun, or in a lab: `thinwire lab --hosts 2 -- thinwire probe`.
    """

    out: Path = Path("cluster.json")
    """Cluster file that replica 0 writes; you can edit it."""
    model: str = "nano"
    """Model whose step is timed."""
    batch_size: int | None = None
    """Sequences per step. Default: 8."""
    seq_len: int | None = None
    """Tokens per sequence. Default: 128 for nano, else 1024."""
    device: str = "cpu"
    """cpu or cuda."""
    threads: int | None = None
    """Threads of torch. Default: the host's cores."""
    budget: str = "60s"
    """Approximate time for all links together."""
    step_time: str = "5s"
    """Approximate time for timing steps."""
    most: str = "32MiB"
    """Size of the largest transfer."""
    secret: Path | None = None
    """File of the job's secret, the same on all hosts; links are measured with encryption."""
    interface: str | None = None
    """Network interface that other hosts can reach, such as eth0."""
    address: str | None = None
    """Address of this host that other hosts can reach."""
    deadline: str = "60s"
    """Longest wait for a host or a message."""
    json: bool = False
    """Print the cluster as JSON on stdout instead of tables."""


@command("probe", ProbeOptions, remedy="give another file with --out", basic="out model device secret budget")
def main(options: ProbeOptions) -> int:
    """Run `thinwire probe`."""
    adopt_launcher()
    if world_size() in (None, 1):
        raise refusal(
            "a probe measures the wires between hosts", got="one host", allowed="torchrun on 2 or more, or a lab",
            remedy="thinwire lab --hosts 2 --rate 20mbit -- thinwire probe",
        )  # fmt: skip
    budget_s, most_bytes = parse_seconds(options.budget), int(parse_bytes(options.most))
    step_s, deadline_s = parse_seconds(options.step_time), parse_seconds(options.deadline)
    wanted = TrainConfig.of(
        model=options.model, batch_size=options.batch_size, seq_len=options.seq_len, device=options.device,
        threads=os.cpu_count() if options.threads is None else options.threads, interface=options.interface,
        address=options.address, secret=options.secret, join_deadline_s=deadline_s,
    )  # fmt: skip
    config = resolve(wanted, world_size=1, cores=os.cpu_count() or 1, home=Path.home())
    validate(config)
    # torch, which takes seconds: what shows without it has been refused by now
    from thinwire.planning.cluster import save_cluster
    from thinwire.planning.probe import ProbeBudget
    from thinwire.training.build import check_device
    from thinwire.training.probe_hosts import probe_hosts

    budget = ProbeBudget(seconds=budget_s, most_bytes=most_bytes)
    check_device(config.model.device)
    found = probe_hosts(config, budget=budget, step_s=step_s)
    if found.replica != 0:
        return 0
    save_cluster(found.cluster, options.out)
    if options.json:
        print(json.dumps(found.cluster.to_json()))
    else:
        _show(found.wires, found.machines)
    log(f"written to {options.out}", command="probe")
    return 0


def _show(wires: WireMeasurements, machines: Sequence[Machine]) -> None:
    rows = (
        (machines[source].name, machines[destination].name, format_rate(fit.bandwidth_bits_per_s),
         f"{format_rate(fit.low_bits_per_s)} to {format_rate(fit.high_bits_per_s)}",
         format_seconds(wires.latencies_s[source, destination]),
         format_rate(wires.together_bits_per_s[source, destination]))
        for (source, destination), fit in wires.fits.items()
    )  # fmt: skip
    heads = ("from", "to", "bandwidth", "95 % interval", "latency", "while all send")
    print_table(heads, rows, left=("from", "to"))
    print_line()

    def shown(value: float | None, form: Callable[[float], str]) -> str:
        return "-" if value is None else form(value)

    abilities = (
        (machine.name, shown(machine.step_s, format_seconds), shown(machine.step_tokens, "{:,.0f}".format),
         shown(machine.flops_per_s, "{:.2e}".format), shown(machine.memory_bytes, format_bytes),
         shown(machine.encode_bytes_per_s, lambda size: f"{format_bytes(size)}/s"))
        for machine in machines
    )  # fmt: skip
    print_table(("replica", "inner step", "tokens", "FLOP/s", "free memory", "E3M0"), abilities, left=("replica",))
    for line in wires.shared():
        print_line(f"note: {line}")
