"""`thinwire simulate`: methods on machines and wires in virtual time, with stragglers and outages, in seconds."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from thinwire.cli.argument_parsing import command, parse_options
from thinwire.cli.output import log
from thinwire.cli.plan import ClusterOptions, cluster_of
from thinwire.cli.tables import plain, print_wide
from thinwire.units import format_bytes, format_rate, format_seconds, parse_seconds

if TYPE_CHECKING:
    from thinwire import simulate
    from thinwire.planning.cluster import Cluster
    from thinwire.sync.method import Method

_METHODS = ("all-reduce", "diloco", "streaming-diloco")
_SETTINGS = ("sync_interval", "overlap_steps", "codec", "layers_per_fragment")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateOptions(ClusterOptions):
    """Simulate methods on machines and links: time per step, waiting time, bytes.

    Describe the machines with a cluster file (`thinwire probe` writes one), or as equal machines: --hosts 4 --rate
    20mbit --latency 20ms --step-time 400ms. The simulator uses the schedules and payloads of `thinwire train`.
    """

    method: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Method to simulate. Default: all-reduce, diloco, streaming-diloco. Repeatable."""

    model: str = "nano"
    """nano, 35m, 150m, 400m, 1b, hf:PATH, or a size such as 7b."""

    steps: int = 1000
    """Inner steps of each replica."""

    step_time: str | None = None
    """Time per step of each replica, such as 400ms. Default: from FLOP/s and batch."""

    batch_size: int | None = None
    """Sequences per step and replica. Default: 8."""

    seq_len: int | None = None
    """Tokens per sequence. Default: 128 for nano, else 1024."""

    sync_interval: int | None = None
    """H: inner steps between two exchanges of a fragment. Default: 30 for nano, else 100."""

    overlap_steps: int | None = None
    """tau: inner steps during which an exchange travels. Default: by method."""

    codec: str | None = None
    """Codec of the payloads. Default: by method."""

    layers_per_fragment: int | None = None
    """Blocks per fragment. Default: 3."""

    jitter: float = 0.0
    """Log-normal variation of step times; 0.1 is about 10 %."""

    slow: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Slower replica, such as 2=1.5 for replica 2. Repeatable."""

    outage: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Replica that dies and returns, such as 1=60s-300s; 1=60s never returns. Repeatable."""

    detection: str = "10s"
    """Time until the others continue without a dead replica."""

    seed: int = 0
    """Random seed of the variation."""

    json: bool = False
    """Print one JSON object per method on stdout instead of a table."""


@command("simulate")
def main(arguments: Sequence[str]) -> int:
    """Run the command; see `thinwire simulate --help`.

    Returns:
        0, 1 where a file cannot be read, 2 for wrong options.
    """
    basic = ("cluster", "hosts", "rate", "latency", "step_time", "method", "model", "steps")
    options = parse_options(SimulateOptions, arguments, prog="thinwire simulate", basic=basic)
    from thinwire.planning.simulator_adapter import simulated_cluster, traffic_of
    from thinwire.simulate import simulate_training
    from thinwire.training.config import BATCH_SIZE, default_seq_len
    from thinwire.training.models import build_model

    cluster = cluster_of(options, needs_flops=options.step_time is None)
    if cluster.num_replicas < 2:
        raise ValueError("a simulation needs at least 2 machines, got 1; one alone exchanges nothing")
    seq_len = default_seq_len(options.model) if options.seq_len is None else options.seq_len
    batch_size = BATCH_SIZE if options.batch_size is None else options.batch_size
    if batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {batch_size}")
    model = build_model(options.model, max_seq_len=seq_len, device="meta")
    links = simulated_cluster(cluster)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    replicas = _replicas(options, cluster, num_parameters=parameters, tokens=batch_size * seq_len)
    names = options.method or _METHODS
    _check_taken(names, options)
    found = {}
    for name in names:
        method = _method(name, options)
        traffic = traffic_of(method, model, num_replicas=cluster.num_replicas)
        run = simulate_training(
            method.schedule, cluster=links, replicas=replicas, payload_bytes=traffic.payload_bytes,
            num_steps=options.steps, exchange=traffic.exchange, detection_s=parse_seconds(options.detection),
            rejoin_bytes=4 * parameters, seed=options.seed,
        )  # fmt: skip
        found[name] = _numbers(run, links)
        if max(run.last_step) < options.steps:
            log(f"{name}: no replica was left after step {max(run.last_step)} of {options.steps}", command="simulate")
    if options.json:
        for name, numbers in found.items():
            print(json.dumps({"method": name, **numbers}))
    else:
        _show(found, cluster)
    return 0


def _taken_by(name: str) -> set[str]:
    """Return the options of a method's settings that it takes."""
    import inspect

    from thinwire import methods

    return set(_SETTINGS) & set(inspect.signature(methods.recipe(name)).parameters)


def _check_taken(names: Sequence[str], options: SimulateOptions) -> None:
    """Refuse an option that none of the methods has a use for."""
    taken = set().union(*map(_taken_by, names))
    for option in _SETTINGS:
        if option not in taken and getattr(options, option) is not None:
            raise ValueError(f"--{option.replace('_', '-')} does not go with --method {', '.join(names)}; leave it out")


def _method(name: str, options: SimulateOptions) -> Method:
    """Return a method with the settings that it takes: of several methods, not all take all."""
    from thinwire.training.build import make_method
    from thinwire.training.config import TrainConfig, resolve

    takes = _taken_by(name)
    settings: dict[str, Any] = {option: getattr(options, option) for option in takes}
    if settings.get("overlap_steps") is not None:
        settings["overlap_steps"] = str(settings["overlap_steps"])
    config = TrainConfig.of(method=name, model=options.model, **settings)
    resolved = resolve(config, world_size=None, cores=os.cpu_count() or 1, home=Path.home())
    return make_method(resolved)


def _replicas(
    options: SimulateOptions, cluster: Cluster, *, num_parameters: int, tokens: int
) -> list[simulate.SimReplica]:
    from thinwire.planning.predict import inner_step_s
    from thinwire.simulate import SimReplica

    count = cluster.num_replicas
    if options.step_time is not None:
        times = [parse_seconds(options.step_time)] * count
    else:
        times = [inner_step_s(machine, num_parameters=num_parameters, tokens=tokens) for machine in cluster.machines]
    for text in options.slow:
        number, factor = _numbered(text, count=count, what="--slow", form="2=1.5")
        times[number] *= _above_zero(factor, text)
    outages: list[list[tuple[float, float]]] = [[] for _ in range(count)]
    for text in options.outage:
        number, span = _numbered(text, count=count, what="--outage", form="1=60s-300s")
        start, dash, end = span.partition("-")
        outages[number].append((parse_seconds(start), parse_seconds(end) if dash else float("inf")))
    return [
        SimReplica(step_s=time_s, sigma=options.jitter, outages=tuple(sorted(outages[number])))
        for number, time_s in enumerate(times)
    ]


def _numbered(text: str, *, count: int, what: str, form: str) -> tuple[int, str]:
    match = re.fullmatch(r"\s*(\d+)\s*=\s*(\S+)\s*", text)
    if match is None:
        raise ValueError(f"{what} must look like {form} (replica=value), got {text!r}")
    number = int(match.group(1))
    if number >= count:
        raise ValueError(f"{what} names replica {number}, but there are {count}, from 0 on")
    return number, match.group(2)


def _above_zero(factor: str, text: str) -> float:
    try:
        value = float(factor)
    except ValueError:
        raise ValueError(f"--slow must name a factor such as 1.5, got {text!r}") from None
    if not 0 < value < float("inf"):
        raise ValueError(f"--slow must name a factor above 0, got {text!r}")
    return value


def _numbers(run: simulate.SimRun, links: simulate.SimCluster) -> dict[str, Any]:
    from thinwire.planning.predict import LinkUsage

    num_steps = max(1, *run.last_step)  # fewer than asked for where all have died
    busy = LinkUsage(links, run)
    return {
        "steps": num_steps, "total_s": run.total_s, "step_s": run.total_s / num_steps,
        "compute_utilisation": run.compute_utilisation, "stall_s": list(run.stall_s), "last_step": list(run.last_step),
        "sent_bytes_per_step": busy.most_bytes / num_steps, "peak_bits_per_s": busy.peak_bits_per_s,
    }  # fmt: skip


def _show(found: dict[str, dict[str, Any]], cluster: Cluster) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("method", "a step", "all steps", "computing", "waits most", "sent a step", "peak rate"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for name, numbers in found.items():
        stalls = numbers["stall_s"]
        longest = max(range(len(stalls)), key=stalls.__getitem__)
        cells = (
            name, format_seconds(numbers["step_s"]), format_seconds(numbers["total_s"]),
            f"{numbers['compute_utilisation']:.1%}",
            f"{cluster.machines[longest].name} {stalls[longest] / numbers['total_s']:.1%}",
            format_bytes(numbers["sent_bytes_per_step"]), format_rate(numbers["peak_bits_per_s"]),
        )  # fmt: skip
        table.add_row(*map(plain, cells))
    print_wide(table)
