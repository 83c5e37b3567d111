"""`thinwire lab`: runs a command on every host of a lab of thin wires."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tyro

from thinwire.cli.argument_parsing import parse_options
from thinwire.cli.lab_output import Outputs, show_summary
from thinwire.errors import LabError
from thinwire.lab import Access, HostProcess, Lab, LabSettings, Link
from thinwire.lab.settings import parse_access, parse_host, parse_link, parse_loss
from thinwire.units import parse_seconds

USAGE, FAILED = 2, 1
_STOP_S = 15.0
_BEAT_S = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabOptions:
    """Run a command on every host of a lab: `thinwire lab --hosts 4 --rate 5mbit -- thinwire train ...`.

    Rank and rendezvous are in each host's environment: `thinwire train`, torchrun, scripts just work.

    Host 0's output is the command's; the others' goes to logs and, with their names, to stderr.

    `thinwire lab doctor` says what this machine can shape.
    """

    hosts: int = 2
    """Number of hosts."""

    rate: str | None = None
    """Every host's access: 5mbit, or down and up as 50mbit/10mbit; no limit by default."""

    host: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """One host's own access, such as 1=50mbit/10mbit; may be repeated."""

    latency: str = "0ms"
    """One-way time between any two hosts; ping shows twice as much."""

    jitter: str = "0ms"
    """How far the latency varies, up and down; packets keep their order."""

    loss: str = "0%"
    """Share of packets that are lost, one way."""

    link: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Between two hosts: 0-1=1mbit, 0-1=20mbit,40ms,5ms,0.1%, 0-1=cut, or 0>1=1mbit for one way; may be repeated."""

    seed: int = 0
    """Of jitter and losses."""

    grace: str = "30s"
    """How long the others may go on after the command failed on one host."""

    out: Path | None = None
    """Folder for logs and the kernel's byte counts; runs/lab-DATE-TIME by default."""

    quiet: bool = False
    """Leave out the other hosts' lines and the table at the end; the logs have them."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; see `thinwire lab --help`.

    Returns:
        The exit code of the first host whose command failed, else 0; 1 where the lab broke, 2 for wrong options,
        128 + N for signal N.
    """
    if arguments and arguments[0] == "doctor":
        return _doctor(arguments[1:])
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    try:
        options = parse_options(LabOptions, words[:cut], prog="thinwire lab")
        command = words[cut + 1 :]
        if not command:
            raise ValueError("there is no command; put it behind --, as in: thinwire lab --hosts 2 -- thinwire train")
        settings, grace_s = settings_of(options), parse_seconds(options.grace)
        folder = _folder(options)
    except ValueError as error:
        return _fail(USAGE, error)
    try:
        with _Interrupts() as interrupts, Lab.of(settings, folder=folder) as lab:
            return _Session(lab, command, options=options, grace_s=grace_s, interrupts=interrupts).run()
    except ValueError as error:  # no such command
        return _fail(USAGE, error)
    except LabError as error:
        return _fail(FAILED, error)


def settings_of(options: LabOptions) -> LabSettings:
    """Turn options into a lab's settings.

    Raises:
        ValueError: One of them cannot be read, or is out of range.
    """
    link = Link(
        latency_s=parse_seconds(options.latency), jitter_s=parse_seconds(options.jitter), loss=parse_loss(options.loss)
    )
    links = {}
    for text in options.link:
        links.update(parse_link(text, base=link))
    usual = Access() if options.rate is None else parse_access(options.rate)
    settings = LabSettings.alike(options.hosts, usual, link=link, links=MappingProxyType(links), seed=options.seed)
    for text in options.host:
        settings = settings.with_access(*parse_host(text))
    return settings


class _Interrupts:
    """Notes SIGINT and SIGTERM for the time of a lab."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self.number = number


class _Session:
    """One command on all hosts, from start to table."""

    def __init__(
        self, lab: Lab, command: list[str], *, options: LabOptions, grace_s: float, interrupts: _Interrupts
    ) -> None:
        self._lab = lab
        self._command = command
        self._options = options
        self._grace_s = grace_s
        self._interrupts = interrupts
        self._failed: HostProcess | None = None

    def run(self) -> int:
        """Run it; return the exit code."""
        began_s = time.monotonic()
        with Outputs(self._lab, is_quiet=self._options.quiet) as outputs:
            threads = str(max(1, (os.cpu_count() or 1) // self._lab.num_hosts))
            shared = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": threads}
            processes = outputs.start(self._command, environment=shared)
            self._wait(processes)
        seconds = time.monotonic() - began_s
        summary = show_summary(self._lab, processes, seconds=seconds, is_quiet=self._options.quiet)
        (self._lab.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        if self._interrupts.number:
            return 128 + self._interrupts.number
        return 0 if self._failed is None else _shell_code(self._failed.exit_code or 0)

    def _wait(self, processes: list[HostProcess]) -> None:
        deadline_s: float | None = None
        is_told = False
        while any(process.exit_code is None for process in processes):
            time.sleep(_BEAT_S)
            self._lab.check()
            now_s = time.monotonic()
            if self._interrupts.number and not is_told:
                is_told = True
                deadline_s = now_s + _STOP_S
                for process in processes:
                    process.send_signal(self._interrupts.number)
            if self._find_failed(processes) and not is_told:
                deadline_s = now_s + self._grace_s
            if deadline_s is not None and now_s > deadline_s:
                for process in processes:
                    process.kill()
        self._find_failed(processes)

    def _find_failed(self, processes: list[HostProcess]) -> bool:
        if self._failed is not None:
            return False
        self._failed = next((process for process in processes if process.exit_code), None)
        if self._failed is None:
            return False
        if not self._interrupts.number:
            code = self._failed.exit_code or 0
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            waits = any(process.exit_code is None for process in processes)
            rest = f"; the others have {self._grace_s:g} s to end (--grace)" if waits else ""
            _say(f"host-{self._failed.host} {how}{rest}")
        return True


def _folder(options: LabOptions) -> Path:
    folder = options.out or Path("runs") / f"lab-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    if (folder / "counters.jsonl").exists():
        raise ValueError(f"{folder} holds another lab's counts; give another folder by --out")
    return folder


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
        print(json.dumps([check.to_json() for check in checks]))
    return 0 if all(check.is_ok for check in checks) else FAILED


def _shell_code(exit_code: int) -> int:
    return 128 - exit_code if exit_code < 0 else exit_code


def _fail(code: int, error: object) -> int:
    _say(str(error))
    return code


def _say(text: str) -> None:
    print(f"thinwire lab: {text}", file=sys.stderr, flush=True)
