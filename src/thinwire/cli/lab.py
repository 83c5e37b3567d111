"""`thinwire lab`: runs a command on every host of a lab of thin wires."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table

from thinwire.cli.argument_parsing import FAILED, USAGE, command, parse_options
from thinwire.cli.output import log
from thinwire.errors import refusal
from thinwire.lab import Access, HostProcess, Lab, LabSettings, Link, rank_environment
from thinwire.lab.counters import peak_rate, sent_by
from thinwire.lab.settings import parse_access, parse_fabric, parse_host, parse_link, parse_loss
from thinwire.units import format_bytes, format_rate, format_seconds, parse_rate, parse_seconds

_STOP_S = 15.0
_BEAT_S = 0.05
_LAST_LINES_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabOptions:
    """Run a command on hosts with slow links, all on this machine: `thinwire lab --rate 5mbit -- thinwire train`.

    Each host has rank and rendezvous in its environment, as under torchrun. Output of host 0 goes to stdout; output of
    the others goes to logs and, with the host's name, to stderr.

    `thinwire lab doctor` checks whether this machine can shape traffic.
    """

    hosts: int = 2
    """Number of hosts."""
    rate: str | None = None
    """Access rate of every host: 5mbit, or down/up as 50mbit/10mbit. Default: no limit."""
    host: tuple[str, ...] = ()
    """Access rate of one host, such as 1=50mbit/10mbit. Repeatable."""
    fabric: str | None = None
    """Leaves and spines between the hosts, such as 2x4, with hashed paths. Default: one switch."""
    uplink_rate: str | None = None
    """Rate of each cable between a leaf and a spine, such as 10mbit. Default: no limit."""
    rails: int = 1
    """Ports of each host in a fabric, 1 or 2; the second one is on the next leaf."""
    latency: str = "0ms"
    """One-way latency between hosts; ping shows twice as much."""
    jitter: str = "0ms"
    """Variation of the latency, up and down; packets keep their order."""
    loss: str = "0%"
    """Share of packets that are lost, per direction."""
    link: tuple[str, ...] = ()
    """Link between two hosts: 0-1=1mbit, 0-1=20mbit,40ms,5ms,0.1%, 0-1=cut, or 0>1=1mbit one way. Repeatable."""
    seed: int = 0
    """Random seed of jitter and losses."""
    grace: str = "30s"
    """Time that other hosts may continue after the command fails on one host."""
    out: Path | None = None
    """Folder of logs and the kernel's byte counts. Default: runs/lab-DATE-TIME."""
    quiet: bool = False
    """Hide other hosts' output and the table at the end; the logs keep them."""


@command("lab")
def main(arguments: Sequence[str]) -> int:
    """Run `thinwire lab`.

    Returns:
        The exit code of the first host whose command failed, else 0; 1 where the lab broke, 128 + N for signal N.
    """
    if arguments and arguments[0] == "doctor":
        return _doctor(arguments[1:])
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parse_options(LabOptions, arguments[:cut], prog="thinwire lab", basic="hosts rate latency out")
    run_everywhere = list(arguments[cut + 1 :])
    if not run_everywhere:
        raise refusal("the command is missing", got="nothing behind --", allowed="any command, behind --",
                      remedy="thinwire lab --hosts 2 -- thinwire train")  # fmt: skip
    settings, grace_s = settings_of(options), parse_seconds(options.grace)
    folder = options.out or Path("runs") / f"lab-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    if (folder / "counters.jsonl").exists():
        raise refusal("--out holds another lab's counts", got=folder, allowed="a folder without a lab",
                      remedy=f"--out {folder}-2")  # fmt: skip
    with _noted_signals() as received, Lab.of(settings, folder=folder) as lab:
        began_s = time.monotonic()
        with Outputs(lab, is_quiet=options.quiet) as outputs:
            threads = str(max(1, (os.cpu_count() or 1) // lab.num_hosts))
            shared = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": threads}
            processes = outputs.start(run_everywhere, environment=shared)
            failed = _wait(lab, processes, grace_s=grace_s, received=received)
        summary = _summary(lab, processes, seconds=time.monotonic() - began_s, is_quiet=options.quiet)
        (lab.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if received:
        return 128 + received[-1]
    code = 0 if failed is None else failed.exit_code or 0
    return 128 - code if code < 0 else code


def settings_of(options: LabOptions) -> LabSettings:
    """Turn options into a lab's settings."""
    link = Link(
        latency_s=parse_seconds(options.latency), jitter_s=parse_seconds(options.jitter), loss=parse_loss(options.loss)
    )
    links = {}
    for text in options.link:
        links.update(parse_link(text, base=link))
    usual = Access() if options.rate is None else parse_access(options.rate)
    if options.uplink_rate is not None and options.fabric is None:
        raise refusal("--uplink-rate has no use without --fabric", got=options.uplink_rate, allowed="both or neither",
                      remedy="--fabric 2x4")  # fmt: skip
    uplink = None if options.uplink_rate is None else parse_rate(options.uplink_rate)
    if options.rails != 1 and options.fabric is None:
        raise refusal("--rails has no use without --fabric", got=options.rails, allowed="both or neither",
                      remedy=f"--fabric 2x4 --rails {options.rails}")  # fmt: skip
    fabric = None
    if options.fabric is not None:
        fabric = parse_fabric(options.fabric, uplink_bits_per_s=uplink, rails=options.rails)
    settings = LabSettings.alike(
        options.hosts, usual, link=link, links=MappingProxyType(links), seed=options.seed, fabric=fabric
    )
    for text in options.host:
        settings = settings.with_access(*parse_host(text))
    return settings


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Note SIGINT, SIGTERM and SIGHUP for the time of a lab, and do nothing else on them."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda number, _: received.append(number)) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _wait(lab: Lab, processes: Sequence[HostProcess], *, grace_s: float, received: Sequence[int]) -> HostProcess | None:
    """Wait until all commands have ended; return the first that failed, after which the others have some time left."""
    failed: HostProcess | None = None
    deadline_s, is_passed_on = math.inf, False
    while True:
        is_running = any(process.exit_code is None for process in processes)
        if failed is None:
            failed = next((process for process in processes if process.exit_code), None)
            if failed is not None and not received:
                code = failed.exit_code or 0
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                rest = f"; the others have {grace_s:g} s to end (--grace)" if is_running else ""
                log(f"host-{failed.host} {how}{rest}", command="lab")
                deadline_s = time.monotonic() + grace_s
        if not is_running:
            return failed
        if received and not is_passed_on:
            is_passed_on, deadline_s = True, time.monotonic() + _STOP_S
            for process in processes:
                process.send_signal(received[-1])
        if time.monotonic() > deadline_s:
            for process in processes:
                process.kill()
        time.sleep(_BEAT_S)
        lab.check()


class Outputs:
    """Output of the hosts: host 0 has our stdout and stderr, the others have logs and, with their names, stderr."""

    def __init__(self, lab: Lab, *, is_quiet: bool) -> None:
        self._lab = lab
        self._is_quiet = is_quiet
        self._threads: list[threading.Thread] = []
        self._ends: list[int] = []

    def __enter__(self) -> Outputs:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for the last lines, but not for a process that outlives its command and keeps a pipe open."""
        for end in self._ends:
            os.close(end)
        for thread in self._threads:
            thread.join(timeout=_LAST_LINES_S)

    def start(self, command: Sequence[str], *, environment: Mapping[str, str]) -> list[HostProcess]:
        """Start the command on all hosts."""
        processes = []
        for host in range(self._lab.num_hosts):
            variables = {**rank_environment(host, self._lab.num_hosts, rails=self._lab.rails), **environment}
            stdin, stdout, stderr = (0, 1, 2) if host == 0 else (subprocess.DEVNULL, *self._pipes(host))
            process = self._lab.start(
                command, host=host, environment=variables, stdin=stdin, stdout=stdout, stderr=stderr
            )
            processes.append(process)
        return processes

    def _pipes(self, host: int) -> tuple[int, int]:
        ends = []
        for kind in ("out", "err"):
            reading, writing = os.pipe()
            ends.append(writing)
            self._ends.append(writing)
            path = self._lab.folder / f"host-{host}.{kind}"
            thread = threading.Thread(target=self._pump, args=(reading, path, f"host-{host} | "), daemon=True)
            thread.start()
            self._threads.append(thread)
        return ends[0], ends[1]

    def _pump(self, reading: int, path: Path, prefix: str) -> None:
        with open(reading, "rb") as lines, path.open("wb", buffering=0) as log:
            for line in lines:
                log.write(line)
                if not self._is_quiet:
                    text = line.decode(errors="replace").rstrip("\n")
                    with contextlib.suppress(OSError):  # stderr has gone; the log goes on
                        print(prefix + text, file=sys.stderr, flush=True)


def _summary(lab: Lab, processes: Sequence[HostProcess], *, seconds: float, is_quiet: bool) -> dict[str, Any]:
    """Show on stderr what each host sent, and return it."""
    samples = lab.samples()
    hosts: list[dict[str, Any]] = [
        {
            "host": process.host, "exit_code": process.exit_code, "sent_bytes": count.sent_bytes,
            "received_bytes": count.received_bytes,
            "peak_sent_bits_per_s": round(peak_rate(sent_by(samples, host=process.host))),
        }
        for process, count in zip(processes, lab.counters(), strict=True)
    ]  # fmt: skip
    if not is_quiet:
        table = Table(title=f"{format_seconds(seconds)}, bytes as the kernel counted them", title_justify="left")
        for column in ("host", "exit code", "sent", "received", "peak sent in 100 ms"):
            table.add_column(column, justify="left" if column == "host" else "right")
        for row in hosts:
            sent, received = format_bytes(row["sent_bytes"]), format_bytes(row["received_bytes"])
            peak = format_rate(row["peak_sent_bits_per_s"])
            table.add_row(f"host-{row['host']}", str(row["exit_code"]), sent, received, peak)
        console = Console(stderr=True)
        console.print(table)
        console.print(f"logs and counts: {lab.folder}", soft_wrap=True, highlight=False)
    return {"seconds": seconds, "settings": lab.settings.to_json(), "hosts": hosts}


def _doctor(arguments: Sequence[str]) -> int:
    if arguments and arguments != ["--json"]:
        is_help = arguments[0] in ("-h", "--help")
        text = "usage: thinwire lab doctor [--json]\n\nTry what this machine can shape, and say what is missing."
        unknown = f"thinwire lab doctor: unknown option {arguments[0]!r}; there is --json"
        print(text if is_help else unknown, file=sys.stdout if is_help else sys.stderr)
        return 0 if is_help else USAGE
    from thinwire.lab.doctor import examine

    checks = []
    for check in examine():
        checks.append(check)
        if not arguments:
            print(f"{'ok     ' if check.is_ok else 'MISSING'}  {check.name}: {check.detail}", flush=True)
            if check.remedy:
                print(f"         {check.remedy}")
    if arguments:
        print(json.dumps([dataclasses.asdict(check) for check in checks]))
    return 0 if all(check.is_ok for check in checks) else FAILED
