"""Lab of hosts with links of their own on one machine, for commands, tests and notebooks."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from thinwire.errors import LabError
from thinwire.lab import network_commands as commands
from thinwire.lab.counters import Counters, Sample, read_samples
from thinwire.lab.daemon_client import DaemonClient
from thinwire.lab.settings import Access, LabSettings, Link, Pair, parse_access
from thinwire.units import parse_rate

FIRST_PORT = 29_500
NUM_PORTS = 1_000
TOOLS = {"ip": "iproute2", "bridge": "iproute2", "tc": "iproute2"}


def rank_environment(host: int, num_hosts: int, *, port: int = FIRST_PORT, rails: int = 1) -> dict[str, str]:
    """Return the variables by which `torchrun`, `thinwire train` or a plain script on a host finds the others.

    A plain script is one rank a host; `torchrun` reads the variables that begin with PET_ and starts ranks of its own.
    gloo and NCCL get the interfaces of all rails.
    """
    first, rank, size = commands.address_of(0), str(host), str(num_hosts)
    ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": rank}
    torchrun = {"PET_NNODES": size, "PET_NODE_RANK": rank, "PET_MASTER_ADDR": first, "PET_MASTER_PORT": str(port)}
    every = ",".join(commands.interface_of(rail) for rail in range(rails))
    interfaces = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), every)
    interfaces["TP_SOCKET_IFNAME"] = commands.INTERFACE
    meeting = {"MASTER_ADDR": first, "MASTER_PORT": str(port), "THINWIRE_LAB_HOST": rank}
    return {**ranks, **torchrun, **interfaces, **meeting}


def check_machine() -> None:
    """Refuse a machine that cannot hold a lab.

    Raises:
        LabError: Names what is missing, and the remedy.
    """
    if sys.platform != "linux":
        raise LabError(f"a lab is made of Linux network namespaces, and this is {sys.platform}; use a Linux machine")
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            raise LabError(f"a lab needs the program {tool!r}, which is not here; install it: apt install {package}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostResult:
    """Result of a command on one host.

    Attributes:
        host: The host.
        exit_code: Its exit code; -N where signal N ended it.
        stdout: What it wrote to stdout.
        stderr: What it wrote to stderr.
    """

    host: int
    exit_code: int
    stdout: str
    stderr: str


class HostProcess:
    """A command that runs, or ran, on a host. Made by `Lab.start`.

    Attributes:
        host: The host.
        command: Program and arguments.
        pid: Its process id inside the lab.
    """

    def __init__(self, lab: Lab, *, host: int, command: list[str], number: int) -> None:
        self.host = host
        self.command = command
        self.pid = 0
        self._lab = lab
        self._number = number
        self._ended = threading.Event()
        self._exit_code: int | None = None

    @property
    def exit_code(self) -> int | None:
        """Its exit code, -N where signal N ended it; None while it runs."""
        return self._exit_code

    def wait(self, *, deadline_s: float) -> int:
        """Wait until it ends, and return its exit code.

        Args:
            deadline_s: Seconds at most.

        Raises:
            TimeoutError: It still runs.
            LabError: The lab itself broke, or was closed meanwhile.
        """
        ended = self._ended.wait(timeout=deadline_s)
        self._lab.check()
        if ended and self._exit_code is None:
            raise LabError(f"{self.command[0]} on host {self.host} ended with its lab, which was closed")
        if self._exit_code is None:
            raise TimeoutError(f"{self.command[0]} on host {self.host} has not ended within {deadline_s:g} s")
        return self._exit_code

    def send_signal(self, number: int) -> None:
        """Send a signal to the command and all it started in its group; one that has ended is left alone."""
        self._lab.signal_process(self._number, number)

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it (SIGKILL)."""
        self.send_signal(signal.SIGKILL)

    def end(self, exit_code: int | None) -> None:
        """Note that it ended; None where the lab broke before that was known."""
        self._exit_code = exit_code
        self._ended.set()


File = int | IO[Any]


class Lab:
    """Hosts on one machine, joined by links as thin as you like, made from the kernel's namespaces.

    Every host has an address (10.77.0.1 and on), a name (`host-0` and on), and an interface `eth0`. All ends with the
    `with` block, or with this process, however it ends: no interface, namespace or process is left. Hosts reach each
    other and nothing else. Needs Linux, and root or user namespaces; `thinwire lab doctor` checks it.

    Args:
        hosts: How many.
        rate: Each host's access, both ways (`"5mbit"`) or down and up (`"50mbit/10mbit"`); None is no limit.
        rates: Other accesses by host.
        link: What lies between any two hosts, one way: latency, jitter, loss, a rate of each pair's own.
        links: Other links by (source, destination).
        seed: Of jitter and losses.
        folder: Takes `counters.jsonl`, and is made; by default a folder that goes with the lab.
        can_delay: Whether a latency, jitter or loss may be set later, where none is asked for at first.

    Raises:
        ValueError: A bad argument.
        LabError: This machine cannot make a lab; names the remedy.

    Example:
        ```python
        with thinwire.lab.Lab(hosts=2, rate="5mbit") as lab:
            results = lab.run(["python", "train.py"], deadline_s=600)
            lab.counters()[0].sent_bytes
        ```
    """

    def __init__(
        self, *, hosts: int, rate: str | None = None, rates: Mapping[int, str] | None = None, link: Link | None = None,
        links: Mapping[Pair, Link] | None = None, seed: int = 0, folder: Path | str | None = None,
        can_delay: bool = False,
    ) -> None:  # fmt: skip
        usual = Access() if rate is None else parse_access(rate)
        settings = LabSettings.alike(
            hosts, usual, link=link or Link(), links=MappingProxyType(dict(links or {})), seed=seed
        )
        for host, text in (rates or {}).items():
            settings = settings.with_access(host, parse_access(text))
        self._make(settings, folder=folder, can_delay=can_delay)

    @classmethod
    def of(cls, settings: LabSettings, *, folder: Path | str | None = None, can_delay: bool = False) -> Lab:
        """Make a lab of settings that are there already; see `Lab`."""
        lab = cls.__new__(cls)
        lab._make(settings, folder=folder, can_delay=can_delay)
        return lab

    def _make(self, settings: LabSettings, *, folder: Path | str | None, can_delay: bool) -> None:
        check_machine()
        self.settings = settings
        self._is_temporary = folder is None
        self._runs = itertools.count()
        self._processes: dict[int, HostProcess] = {}
        if folder is not None:
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LabError(
                    f"the lab's folder {error.filename} cannot be made: {error.strerror}; give another one (--out, "
                    f"folder=)"
                ) from None
        order = {
            "settings": settings.to_json(), "force_relay": can_delay,
            # the daemon makes a temporary one: it outlives us, wherever we may be killed
            "folder": None if folder is None else str(Path(folder).resolve()),
        }  # fmt: skip
        self._daemon = DaemonClient(order, on_exit=self._note_exit)
        self.folder = Path(self._daemon.ready["folder"])

    def __enter__(self) -> Lab:
        """Return the lab, which runs already."""
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return self.settings.num_hosts

    @property
    def rails(self) -> int:
        """Interfaces of each host."""
        return 1 if self.settings.fabric is None else self.settings.fabric.rails

    @property
    def delays_by(self) -> str:
        """Source of delays: `netem`, `relay`, or an empty text if delays are impossible."""
        ready = self._daemon.ready
        return "netem" if ready.get("has_netem") else "relay" if ready.get("is_relayed") else ""

    def address(self, host: int) -> str:
        """Return a host's IPv4 address."""
        self.settings.check_host(host)
        return commands.address_of(host)

    def start(
        self, command: Sequence[str], *, host: int, environment: Mapping[str, str] | None = None,
        stdin: File = subprocess.DEVNULL, stdout: File = subprocess.DEVNULL, stderr: File = subprocess.DEVNULL,
        folder: Path | str | None = None,
    ) -> HostProcess:  # fmt: skip
        """Start a command on one host; it inherits this process's environment.

        Args:
            command: Program and arguments.
            host: Where.
            environment: Further variables.
            stdin: An open file, or `subprocess.DEVNULL`.
            stdout: Likewise.
            stderr: Likewise.
            folder: Where it starts; this process's folder by default.

        Raises:
            ValueError: There is no such host, or no such command.
            LabError: The lab broke.
        """
        self.settings.check_host(host)
        if not command:
            raise ValueError("a command needs at least one word, got none")
        number = self._daemon.next_number()
        process = HostProcess(self, host=host, command=list(command), number=number)
        self._processes[number] = process
        request = {
            "host": host, "command": list(command), "number": number, "environment": dict(environment or {}),
            "folder": str(Path(folder or Path.cwd()).resolve()),
        }  # fmt: skip
        try:
            with Path(os.devnull).open("r+b", buffering=0) as nothing:
                files = [nothing if file == subprocess.DEVNULL else file for file in (stdin, stdout, stderr)]
                numbers = [file if isinstance(file, int) else file.fileno() for file in files]
                reply = self._daemon.ask("start", request, files=numbers)
        except (ValueError, LabError):
            self._processes.pop(number, None)
            raise
        process.pid = reply["pid"]
        return process

    def start_all(self, command: Sequence[str], **options: Any) -> list[HostProcess]:
        """Start the same command on every host, each with its rank and the rendezvous in its environment."""
        more = options.pop("environment", None) or {}
        ranks = self._rank_environments()
        return [
            self.start(command, host=host, environment={**own, **more}, **options) for host, own in enumerate(ranks)
        ]

    def _rank_environments(self) -> list[dict[str, str]]:
        """Return each host's variables for one job, which meets at a port of its own."""
        port = FIRST_PORT + next(self._runs) % NUM_PORTS
        return [rank_environment(host, self.num_hosts, port=port, rails=self.rails) for host in range(self.num_hosts)]

    def run(
        self, command: Sequence[str], *, deadline_s: float, environment: Mapping[str, str] | None = None
    ) -> list[HostResult]:
        """Run a command on every host and wait for all.

        Args:
            command: Program and arguments; `torchrun` and `thinwire train` find their rank in the environment.
            deadline_s: Seconds at most.
            environment: Further variables.

        Returns:
            One result a host, with what it wrote.

        Raises:
            TimeoutError: A command still ran; all have been ended.
            LabError: The lab broke.
        """
        with contextlib.ExitStack() as stack:
            outputs = [[stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)] for _ in range(self.num_hosts)]
            processes = [
                self.start(command, host=host, environment={**own, **(environment or {})}, stdout=out, stderr=err)
                for host, (own, (out, err)) in enumerate(zip(self._rank_environments(), outputs, strict=True))
            ]
            end_s = time.monotonic() + deadline_s
            try:
                for process in processes:
                    process.wait(deadline_s=max(0.0, end_s - time.monotonic()))
            except BaseException as error:
                for process in processes:
                    with contextlib.suppress(LabError):
                        process.kill()
                if isinstance(error, TimeoutError):
                    text = f"{command[0]} has not ended on every host within {deadline_s:g} s; all have been ended"
                    raise TimeoutError(text) from None
                raise
            texts = [[_text(file) for file in files] for files in outputs]
        return [
            HostResult(host=process.host, exit_code=process.exit_code or 0, stdout=out, stderr=err)
            for process, (out, err) in zip(processes, texts, strict=True)
        ]

    def set_rate(self, host: int, rate: str | None) -> None:
        """Change a host's access while commands run: `"5mbit"`, `"50mbit/10mbit"` or None."""
        access = Access() if rate is None else parse_access(rate)
        self.settings.check_host(host)
        self.shape(self.settings.with_access(host, replace(access, is_cut=self.settings.accesses[host].is_cut)))

    def set_link(self, source: int, destination: int, **changes: Any) -> None:
        """Change what lies between two hosts, both ways, while commands run.

        Args:
            source: One host.
            destination: The other.
            changes: Fields of `Link`, or `rate="1mbit"`.

        Raises:
            ValueError: A bad value, or a delay in a lab that cannot delay.
        """
        if "rate" in changes:
            rate = changes.pop("rate")
            changes["rate_bits_per_s"] = None if rate is None else parse_rate(rate)
        settings = self.settings
        for pair in ((source, destination), (destination, source)):
            settings = settings.with_link(*pair, replace(settings.between(*pair), **changes))
        self.shape(settings)

    def cut(self, host: int, other: int | None = None) -> None:
        """Pull a host's cable, or cut the link between two hosts: packets are lost silently."""
        self._set_cut(host, other, is_cut=True)

    def mend(self, host: int, other: int | None = None) -> None:
        """Undo `cut`."""
        self._set_cut(host, other, is_cut=False)

    def stop_host(self, host: int) -> int:
        """Stop every process of a host (SIGSTOP); return how many there are."""
        return self._signal_host(host, signal.SIGSTOP)

    def continue_host(self, host: int) -> int:
        """Let a stopped host's processes go on (SIGCONT)."""
        return self._signal_host(host, signal.SIGCONT)

    def kill_host(self, host: int) -> int:
        """End every process of a host (SIGKILL); the host stays, and can start others."""
        return self._signal_host(host, signal.SIGKILL)

    def set_congestion_control(self, name: str) -> None:
        """Set how TCP on all hosts reacts to congestion, for connections to come; by default as this machine does.

        Rates of several flows on one link depend on it, so measurements should name it.

        Raises:
            LabError: This kernel has no such congestion control.
        """
        for host in range(self.num_hosts):
            for rail in range(self.rails):
                if self.start(commands.congestion_command(host, rail, name), host=host).wait(deadline_s=10):
                    raise LabError(
                        f"this kernel has no congestion control {name!r}; cat "
                        f"/proc/sys/net/ipv4/tcp_available_congestion_control lists what it has"
                    )

    def cut_cable(self, leaf: int, spine: int, *, silently: bool = False) -> None:
        """Pull a cable of the fabric, while commands run; routes then leave it out.

        Args:
            leaf: Its leaf.
            spine: Its spine.
            silently: Lose its packets instead, while routes still lead there, as a faulty switch does.
        """
        cable = frozenset({(leaf, spine)})
        self._set_cables(cut=frozenset() if silently else cable, silent=cable if silently else frozenset())

    def join_cable(self, leaf: int, spine: int) -> None:
        """Plug a cable of the fabric in again."""
        self._set_cables(joined=frozenset({(leaf, spine)}))

    def cable_bytes(self) -> dict[Pair, tuple[int, int]]:
        """Return the bytes that the kernel counted on each cable, by (leaf, spine): sent up, and sent down."""
        return {(leaf, spine): (up, down) for leaf, spine, up, down in self._daemon.ask("cables", {})["cables"]}

    def _set_cables(
        self, *, cut: frozenset[Pair] = frozenset(), silent: frozenset[Pair] = frozenset(),
        joined: frozenset[Pair] = frozenset(),
    ) -> None:  # fmt: skip
        fabric = self.settings.fabric
        if fabric is None:
            raise ValueError("this lab has one switch and no cables; make it with Lab.of(LabSettings(fabric=...))")
        fabric = replace(fabric, cut=(fabric.cut | cut) - joined, silent=(fabric.silent | silent) - joined)
        self.shape(replace(self.settings, fabric=fabric))

    def counters(self) -> list[Counters]:
        """Return what the kernel counted on each host's interface since the lab began."""
        return [Counters(*counts) for counts in self._daemon.ask("count", {})["counters"]]

    def samples(self) -> list[Sample]:
        """Return the counts over time, sampled 50 times a second where they changed, and now."""
        if not self._daemon.is_closed:
            self.counters()
        return read_samples(self.folder / "counters.jsonl")

    def check(self) -> None:
        """Raise where the lab itself broke.

        Raises:
            LabError: Says how.
        """
        self._daemon.check()

    def close(self) -> None:
        """End every command and take the lab away; may be called again."""
        self._daemon.close()
        if self._is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def signal_process(self, number: int, signal_number: int) -> None:
        """Send a signal to a command by its number in the lab."""
        self._daemon.ask("signal", {"number": number, "signal": int(signal_number)})

    def _signal_host(self, host: int, number: int) -> int:
        self.settings.check_host(host)
        return int(self._daemon.ask("signal_host", {"host": host, "signal": int(number)})["num_processes"])

    def _set_cut(self, host: int, other: int | None, *, is_cut: bool) -> None:
        self.settings.check_host(host)
        if other is None:
            self.shape(self.settings.with_access(host, replace(self.settings.accesses[host], is_cut=is_cut)))
        else:
            self.set_link(host, other, is_cut=is_cut)

    def shape(self, settings: LabSettings) -> None:
        """Change everything at once, to a whole lab's settings, while commands run.

        Raises:
            ValueError: Another number of hosts, or a delay in a lab that cannot delay.
        """
        if settings.num_hosts != self.num_hosts:
            raise ValueError(f"this lab has {self.num_hosts} hosts, got settings for {settings.num_hosts}")
        if settings.is_delayed and not self.delays_by:
            raise ValueError("this lab was made without delays; make it with Lab(..., can_delay=True)")
        self._daemon.ask("shape", {"settings": settings.to_json()})
        self.settings = settings

    def _note_exit(self, number: int, exit_code: int | None) -> None:
        process = self._processes.pop(number, None)
        if process is not None:
            process.end(exit_code)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
