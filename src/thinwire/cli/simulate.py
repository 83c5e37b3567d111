"""`thinwire simulate`: methods on machines and wires in virtual time, with stragglers and outages, in seconds."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.argument_parsing import command
from thinwire.cli.output import log
from thinwire.cli.plan_options import ClusterOptions, cluster_of
from thinwire.cli.tables import print_table
from thinwire.codec_specs import codec_key
from thinwire.errors import excluded, refusal
from thinwire.options import option
from thinwire.simulate import SimRecovery, SimReplica, simulate_training
from thinwire.training.config import TrainConfig, default_seq_len, method_problems, resolve
from thinwire.training.method_catalog import method_entry
from thinwire.units import format_bytes, format_rate, format_seconds, parse_seconds
from thinwire.workloads.cards import BATCH_SIZE
from thinwire.workloads.language.presets import check_model

if TYPE_CHECKING:
    from torch import nn

    from thinwire import simulate
    from thinwire.planning.cluster import Cluster

_METHODS = ("all-reduce", "diloco", "streaming-diloco")
_SETTINGS = ("sync_interval", "overlap_steps", "codec", "layers_per_fragment")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateOptions(ClusterOptions):
    """Simulate methods on machines and links: time per step, waiting time, bytes.

    Describe the machines with a cluster file (`thinwire probe` writes one), or as equal machines: --hosts 4 --rate
    20mbit --latency 20ms --step-time 400ms. The simulator uses the schedules and payloads of `thinwire train`.
    """

    method: tuple[str, ...] = ()
    """Method to simulate. Default: all-reduce, diloco, streaming-diloco. Repeatable."""
    memory: str | None = None
    """Memory of each machine's device, such as 80GB; a model that does not fit is refused. Default: not checked."""
    model: str = "nano"
    """nano, 35m, 150m, 400m, 1b, hf:PATH, or a size such as 7b."""
    steps: int = option(1000, least=1)
    """Inner steps of each replica."""
    step_time: str | None = None
    """Time per step of each replica, such as 400ms. Default: from FLOP/s and batch."""
    batch_size: int | None = option(None, least=1)
    """Sequences per step and replica. Default: 8."""
    seq_len: int | None = option(None, least=1)
    """Tokens per sequence. Default: 128 for nano, else 1024."""
    sync_interval: int | None = option(None, least=1)
    """H: inner steps between two exchanges of a fragment. Default: 30 for nano, else 100."""
    overlap_steps: int | None = option(None, least=0)
    """tau: inner steps during which an exchange travels. Default: by method."""
    codec: str | None = None
    """Codec of the payloads. Default: by method."""
    layers_per_fragment: int | None = option(None, least=1)
    """Blocks per fragment. Default: 3."""
    jitter: float = option(0.0, least=0)
    """Log-normal variation of step times; 0.1 is about 10 %."""
    slow: tuple[str, ...] = ()
    """Slower replica, such as 2=1.5 for replica 2. Repeatable."""
    outage: tuple[str, ...] = ()
    """Replica that dies and returns, such as 1=60s-300s; 1=60s never returns. Repeatable."""
    by_store: bool = False
    """Payloads travel through a store, as s3://: each is uploaded once and read by all."""
    detection: str = "10s"
    """Time until the others continue without a dead replica."""
    seed: int = 0
    """Random seed of the variation."""
    json: bool = False
    """Print one JSON object per method on stdout instead of a table."""


@command("simulate", SimulateOptions, basic="cluster hosts rate latency step_time method model steps")
def main(options: SimulateOptions) -> int:
    """Run `thinwire simulate`."""
    cluster = cluster_of(options, needs_flops=options.step_time is None)
    names = options.method or _METHODS
    _check(options, names, cluster)
    # torch, which takes seconds: what shows without it has been refused by now
    from thinwire.planning.simulator_adapter import simulated_cluster, through_store, traffic_of
    from thinwire.training.build import make_method
    from thinwire.workloads.language import build_model

    seq_len = default_seq_len(options.model) if options.seq_len is None else options.seq_len
    batch_size = BATCH_SIZE if options.batch_size is None else options.batch_size
    model = build_model(options.model, max_seq_len=seq_len, device="meta")
    _check_memory(model, cluster, name=options.model, seq_len=seq_len)
    links = simulated_cluster(cluster)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    replicas = _replicas(options, cluster, num_parameters=parameters, tokens=batch_size * seq_len)
    recovery = SimRecovery(detection_s=parse_seconds(options.detection), rejoin_bytes=4 * parameters)
    found = {}
    for name in names:
        method = make_method(_config(name, options))
        traffic = traffic_of(method, model, num_replicas=cluster.num_replicas)
        if options.by_store:
            traffic = through_store(traffic, num_members=cluster.num_replicas)
        run = simulate_training(
            method.schedule, cluster=links, replicas=replicas, payload_bytes=traffic.payload_bytes,
            num_steps=options.steps, exchange=traffic.exchange, recovery=recovery, seed=options.seed,
        )  # fmt: skip
        found[name] = _numbers(run, links, sync_interval=method.schedule.sync_interval)
        if found[name]["steady_step_s"] is None and not options.outage:
            log(f"{name}: the steady state takes --steps {3 * method.schedule.sync_interval} or more",
                command="simulate")  # fmt: skip
        if max(run.last_step) < options.steps:
            log(f"{name}: no replica was left after step {max(run.last_step)} of {options.steps}", command="simulate")
    if options.json:
        for name, numbers in found.items():
            print(json.dumps({"method": name, **numbers}))
    else:
        heads = ("method", "steady", "mean", "all steps", "computing", "waits most", "sent a step", "peak rate")
        print_table(heads, (_cells(name, numbers, cluster) for name, numbers in found.items()), left=("method",))
    return 0


def _taken_by(name: str) -> set[str]:
    """Return the options of a method's settings that it takes."""
    return set(_SETTINGS) & method_entry(name).takes


def _check(options: SimulateOptions, names: Sequence[str], cluster: Cluster) -> None:
    """Check what is to be simulated, as far as it shows without torch."""
    if cluster.num_replicas < 2:
        raise refusal("one machine alone exchanges nothing", got="1 machine", allowed="2 or more machines",
                      remedy="--hosts 2")  # fmt: skip
    check_model(options.model)
    if options.codec is not None:
        codec_key(options.codec, what="--codec")
    taken = set().union(*map(_taken_by, names))
    for name in _SETTINGS:
        if name not in taken and getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            why = "none of these has such an option"
            raise excluded(flag, f"--method {', '.join(names)}", why=why, remedy=f"to leave {flag} out")
    for name in names:
        if problems := method_problems(_config(name, options)):
            raise ValueError(problems[0])
    parse_seconds(options.detection)
    for factor, spans in zip(*_factors_and_outages(options, count=cluster.num_replicas), strict=True):
        SimReplica(step_s=factor, sigma=options.jitter, outages=tuple(sorted(spans)))


def _check_memory(model: nn.Module, cluster: Cluster, *, name: str, seq_len: int) -> None:
    """Check that each machine that states its memory holds a replica, with one sequence in a forward pass.

    Activations may be computed again in the backward pass (`thinwire train --recompute`).
    """
    from thinwire.planning.training_task import BYTES_PER_PARAMETER, activation_bytes

    parameters = sum(parameter.numel() for parameter in model.parameters())
    needed = BYTES_PER_PARAMETER * parameters + activation_bytes(model, tokens=seq_len, recompute=True)
    for machine in cluster.machines:
        if machine.memory_bytes is not None and needed > machine.memory_bytes:
            raise refusal(
                f"--model {name} does not fit the memory of {machine.name}",
                got=f"about {format_bytes(needed)}, with one sequence in a forward pass and --recompute",
                allowed=f"{format_bytes(machine.memory_bytes)} or less",
                remedy="a smaller --model or --seq-len, or more --memory",
            )


def _config(name: str, options: SimulateOptions) -> TrainConfig:
    """Return a run with the settings that a method takes: of several methods, not all take all."""
    takes = _taken_by(name)
    settings: dict[str, Any] = {option: getattr(options, option) for option in takes}
    if settings.get("overlap_steps") is not None:
        settings["overlap_steps"] = str(settings["overlap_steps"])
    config = TrainConfig.of(method=name, model=options.model, **settings)
    return resolve(config, world_size=None, cores=os.cpu_count() or 1, home=Path.home())


def _replicas(
    options: SimulateOptions, cluster: Cluster, *, num_parameters: int, tokens: int
) -> list[simulate.SimReplica]:
    from thinwire.planning.predict import inner_step_s

    count = cluster.num_replicas
    if options.step_time is not None:
        times = [parse_seconds(options.step_time)] * count
    else:
        times = [inner_step_s(machine, num_parameters=num_parameters, tokens=tokens) for machine in cluster.machines]
    factors, outages = _factors_and_outages(options, count=count)
    return [
        SimReplica(step_s=time_s * factor, sigma=options.jitter, outages=tuple(sorted(spans)))
        for time_s, factor, spans in zip(times, factors, outages, strict=True)
    ]


def _factors_and_outages(
    options: SimulateOptions, *, count: int
) -> tuple[list[float], list[list[tuple[float, float]]]]:
    """Return how many times as long each replica's steps take, and the times of its outages."""
    if options.step_time is not None:
        parse_seconds(options.step_time)
    factors = [1.0] * count
    for text in options.slow:
        number, factor = _numbered(text, count=count, what="--slow", form="2=1.5")
        factors[number] *= _above_zero(factor, text)
    outages: list[list[tuple[float, float]]] = [[] for _ in range(count)]
    for text in options.outage:
        number, span = _numbered(text, count=count, what="--outage", form="1=60s-300s")
        start, dash, end = span.partition("-")
        outages[number].append((parse_seconds(start), parse_seconds(end) if dash else float("inf")))
    return factors, outages


def _numbered(text: str, *, count: int, what: str, form: str) -> tuple[int, str]:
    match = re.fullmatch(r"\s*(\d+)\s*=\s*(\S+)\s*", text)
    if match is None:
        raise refusal(f"{what} cannot be read", got=repr(text), allowed="REPLICA=VALUE", remedy=f"{what} {form}")
    number = int(match.group(1))
    if number >= count:
        raise refusal(
            f"{what} names no replica", got=number, allowed=f"0 to {count - 1}", remedy=f"--hosts {number + 1}"
        )
    return number, match.group(2)


def _above_zero(factor: str, text: str) -> float:
    try:
        value = float(factor)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise refusal("--slow names no factor", got=repr(text), allowed="REPLICA=FACTOR, above 0",
                      remedy="--slow 1=1.5")  # fmt: skip
    return value


def _steady_step_s(run: simulate.SimRun, *, sync_interval: int) -> float | None:
    """Return the seconds of a step over whole intervals after the first two; None for a shorter run or with deaths.

    In the first interval fragments have fewer rounds, and links are empty when it begins.
    """
    num_steps = len(run.step_ends_s[0])
    if any(len(ends) != num_steps for ends in run.step_ends_s) or num_steps < 3 * sync_interval:
        return None
    start = 2 * sync_interval
    stop = num_steps - (num_steps - start) % sync_interval
    began_s, ended_s = (max(ends[step - 1] for ends in run.step_ends_s) for step in (start, stop))
    return (ended_s - began_s) / (stop - start)


def _numbers(run: simulate.SimRun, links: simulate.SimCluster, *, sync_interval: int) -> dict[str, Any]:
    from thinwire.planning.predict import LinkUsage

    num_steps = max(1, *run.last_step)  # fewer than asked for where all have died
    busy = LinkUsage(links, run)
    return {
        "steps": num_steps, "total_s": run.total_s, "step_s": run.total_s / num_steps,
        "steady_step_s": _steady_step_s(run, sync_interval=sync_interval),
        "compute_utilisation": run.compute_utilisation, "stall_s": list(run.stall_s), "last_step": list(run.last_step),
        "sent_bytes_per_step": busy.most_bytes / num_steps, "peak_bits_per_s": busy.peak_bits_per_s,
    }  # fmt: skip


def _cells(name: str, numbers: dict[str, Any], cluster: Cluster) -> tuple[str, ...]:
    stalls, steady_s = numbers["stall_s"], numbers["steady_step_s"]
    longest = max(range(len(stalls)), key=stalls.__getitem__)
    return (
        name, "-" if steady_s is None else format_seconds(steady_s), format_seconds(numbers["step_s"]),
        format_seconds(numbers["total_s"]), f"{numbers['compute_utilisation']:.1%}",
        f"{cluster.machines[longest].name} {stalls[longest] / numbers['total_s']:.1%}",
        format_bytes(numbers["sent_bytes_per_step"]), format_rate(numbers["peak_bits_per_s"]),
    )  # fmt: skip
