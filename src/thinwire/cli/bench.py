"""`thinwire bench wire` and `thinwire bench profile`.

The first compares methods of thinwire on real sockets over thin wires, by kernel byte counts. The second
says where the time and the memory of one machine's step go.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.argument_parsing import FAILED, command
from thinwire.cli.output import log, print_error, print_line
from thinwire.cli.tables import print_table
from thinwire.errors import DataError, ThinwireError, unknown_name
from thinwire.options import option
from thinwire.training.config import TrainConfig, resolve, validate
from thinwire.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from thinwire.training.step_profile import StepProfile


_REMEDY = "give another folder with --out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchWireOptions:
    """Compare methods on real sockets: train nano on real text over slow links made in a lab.

    Every run appends one JSON line to --out. Runs that are there already are skipped, so the same command continues an
    interrupted benchmark.
    """

    hosts: tuple[int, ...] = ()
    """Number of hosts. Default: 2. Repeatable."""
    rate: tuple[str, ...] = ()
    """Access rate of each host, or none. Default: 1mbit, 5mbit, 20mbit, 100mbit. Repeatable."""
    contender: tuple[str, ...] = ()
    """Method to measure. Default: all. Repeatable."""
    latency: str = "0ms"
    """One-way latency between hosts on links with a rate."""
    jitter: str = "0ms"
    """Variation of the latency, up and down."""
    loss: str = "0%"
    """Share of packets that are lost."""
    repeats: int = 3
    """Repeats of the whole grid."""
    sync_interval: int = 30
    """H: inner steps between two exchanges of a fragment."""
    overlap_steps: int = 6
    """tau: inner steps during which an exchange travels."""
    intervals: int = 2
    """Measured sync intervals."""
    budget: str = "120s"
    """Approximate time limit of a run that exchanges at every step; it then runs fewer steps."""
    pace: bool = False
    """Spread each transfer over the overlap; only for methods of thinwire that overlap."""
    out: Path = Path("runs/bench-wire")
    """Folder of wire.jsonl, wire.md and wire.svg."""
    cache_dir: Path | None = None
    """Folder of the tokenised text. Default: ~/.cache/thinwire."""
    report: bool = False
    """Run nothing; write table and figure of the runs in --out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchProfileOptions:
    """Profile an inner step on this machine: time by module and phase, memory by kind.

    The last line gives the FLOP/s that training reaches, for thinwire plan --flops and the files of clusters and sites.
    """

    model: str = "nano"
    """nano, 35m, 150m, 400m, 1b, a size such as 7b, or hf:PATH."""
    batch_size: int | None = None
    """Sequences per step. Default: 8."""
    seq_len: int | None = None
    """Tokens per sequence. Default: 128 for nano, else 1024."""
    method: str = "iso-loco"
    """Method whose coding and outer step count, for two replicas."""
    device: str = "cpu"
    """cpu or cuda."""
    threads: int | None = None
    """CPU threads. Default: all cores."""
    steps: int = option(5, least=1)
    """Timed steps."""
    json: bool = False
    """Print the numbers as JSON on stdout instead of tables."""


@command("bench")
def main(arguments: Sequence[str]) -> int:
    """Run `thinwire bench wire`."""
    name = arguments[0] if arguments else ""
    if name == "profile":
        return profile(arguments[1:])
    if name not in ("wire", "-h", "--help"):
        raise unknown_name("benchmark", name, ("wire", "profile"))
    return wire(arguments[name == "wire" :])


@command("bench", BenchWireOptions, prog="thinwire bench wire", remedy=_REMEDY,
         basic="hosts rate contender repeats out")  # fmt: skip
def wire(options: BenchWireOptions) -> int:
    """Run `thinwire bench wire`."""
    wanted = list(_cells(options))
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        code = 0 if options.report else _run_all(wanted, options)
    except KeyboardInterrupt:
        log(f"stopped; finished runs are in {options.out / 'wire.jsonl'}; the same command continues", command="bench")
        code = 130
    _write_report(options)
    return code


@command("bench", BenchProfileOptions, prog="thinwire bench profile", remedy=_REMEDY,
         basic="model batch_size method device steps")  # fmt: skip
def profile(options: BenchProfileOptions) -> int:
    """Run `thinwire bench profile`."""
    cores = os.cpu_count() or 1
    wanted = TrainConfig.of(
        model=options.model, batch_size=options.batch_size, seq_len=options.seq_len, device=options.device,
        threads=cores if options.threads is None else options.threads, method=options.method,
    )  # fmt: skip
    config = resolve(wanted, world_size=1, cores=cores, home=Path.home())
    validate(config)
    # torch, which takes seconds: what shows without it has been refused by now
    from thinwire.training.build import check_device
    from thinwire.training.step_profile import profile_step

    check_device(config.model.device)
    found = profile_step(config, steps=options.steps)
    if options.json:
        print(json.dumps(found.to_json()))
    else:
        _show_profile(found)
    return 0


def _show_profile(found: StepProfile) -> None:
    print_line(
        f"{found.model}, {format_count(found.num_parameters)} parameters, {found.tokens:,} tokens a step on "
        f"{found.device} with {found.threads} threads, median of {found.steps} steps"
    )
    print_line()
    rows = [(one.name, one.parameters, one.forward_s, one.backward_s) for one in found.modules]
    rows.append(("whole passes", found.num_parameters, found.forward_s, found.backward_s))
    whole_s = found.forward_s + found.backward_s
    cells = (
        (name, format_count(count), format_seconds(forward_s), format_seconds(backward_s),
         f"{(forward_s + backward_s) / whole_s:.1%}")
        for name, count, forward_s, backward_s in rows
    )  # fmt: skip
    print_table(("module", "parameters", "forward", "backward", "both"), cells, left=("module",))
    print_line()
    phases = {
        "forward": found.forward_s, "backward": found.backward_s, "optimizer": found.optimizer_s,
        f"coding and outer steps of {found.method}": found.exchange_s,
    }  # fmt: skip
    parts = ", ".join(f"{name} {seconds / found.step_s:.1%}" for name, seconds in phases.items())
    print_line(f"step: {format_seconds(found.step_s)}: {parts}")
    memory = {
        "parameters": found.parameters_bytes, "gradients": found.gradients_bytes,
        "optimizer": found.optimizer_bytes, "activations": found.activations_bytes,
    }  # fmt: skip
    print_line("memory: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.items()))
    print_line(f"training reaches {found.flops_per_s:.2e} FLOP/s: thinwire plan --flops {found.flops_per_s:.2e}")


def _cells(options: BenchWireOptions) -> Any:
    from thinwire.lab.settings import parse_loss
    from thinwire.units import parse_rate, parse_seconds
    from thinwire.wire_benchmark.contenders import CONTENDERS, contender
    from thinwire.wire_benchmark.runner import BenchWire, cells, check_numbers, paced

    names = options.contender or tuple(CONTENDERS)
    for name in names:
        contender(name)
    check_numbers(
        num_hosts=options.hosts, repeats=options.repeats, sync_interval=options.sync_interval,
        overlap_steps=options.overlap_steps, intervals=options.intervals,
    )  # fmt: skip
    if options.pace:
        names = paced(names)
    rates = options.rate or ("1mbit", "5mbit", "20mbit", "100mbit")
    delays = {"latency_s": parse_seconds(options.latency), "jitter_s": parse_seconds(options.jitter)}
    shaped = [
        BenchWire(rate_bits_per_s=None if rate == "none" else parse_rate(rate), loss=parse_loss(options.loss), **delays)
        for rate in rates
    ]
    for wire in shaped:
        wire.settings(2)  # refuses what no lab can do
    wires = [BenchWire(), *(wire for wire in shaped if wire != BenchWire())]
    for cell in cells(
        contenders=names,
        num_hosts=options.hosts or (2,), wires=wires, repeats=range(options.repeats),
        sync_interval=options.sync_interval, overlap_steps=options.overlap_steps, intervals=options.intervals,
        budget_s=parse_seconds(options.budget),
    ):  # fmt: skip
        yield dataclasses.replace(cell, pace=options.pace)


def _run_all(wanted: Sequence[Any], options: BenchWireOptions) -> int:
    from thinwire.wire_benchmark.result_table import describe
    from thinwire.wire_benchmark.runner import run_cell
    from thinwire.workloads.language import PRESETS, open_corpus

    path, cache_dir = options.out / "wire.jsonl", options.cache_dir or Path.home() / ".cache" / "thinwire"
    done = [json.dumps(line["cell"], sort_keys=True) for line in _read(path)]
    open_corpus("stdlib", cache=cache_dir, vocab_size=PRESETS["nano"].vocab_size)  # before the hosts want it
    code = 0
    for number, cell in enumerate(wanted, start=1):
        name = f"{cell.contender}, {cell.num_hosts} hosts, {describe(cell.wire)}, repeat {cell.repeat}"
        if json.dumps(cell.to_json(), sort_keys=True) in done:
            continue
        began_s = time.monotonic()
        try:
            result = run_cell(cell, cache_dir=cache_dir)
        except (ThinwireError, TimeoutError) as error:
            print_error("bench", f"{name} failed: {error}")
            code = FAILED
            continue
        result["machine"] = _machine()
        with path.open("a") as file:
            file.write(json.dumps(result) + "\n")
        log(f"{number}/{len(wanted)}  {name}: {time.monotonic() - began_s:.0f} s", command="bench")
    return code


def _write_report(options: BenchWireOptions) -> None:
    from thinwire.wire_benchmark.result_table import figure, markdown, rows
    from thinwire.wire_benchmark.runner import summary

    found = rows(summary(line) for line in _read(options.out / "wire.jsonl"))
    if not found:
        log("nothing has run yet", command="bench")
        return
    text = markdown(found)
    (options.out / "wire.md").write_text(text)
    for num_hosts in sorted({row.num_hosts for row in found}):
        (options.out / f"wire-{num_hosts}-hosts.svg").write_text(figure(found, num_hosts=num_hosts))
    print(text)


def _read(path: Path) -> list[dict[str, Any]]:
    found = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], start=1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            raise DataError(
                f"line {number} of {path} is no JSON; a run that was cut off while it wrote leaves such a line; delete "
                f"it, and its run is repeated"
            ) from None
    return found


def _machine() -> dict[str, Any]:
    import torch

    load = os.getloadavg()[0]
    return {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__, "load": round(load, 1)}
