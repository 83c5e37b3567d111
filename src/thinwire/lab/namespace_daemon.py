"""Namespace daemon, the first process of a lab: makes the hosts, starts commands on them, counts their bytes.

`python -m thinwire.lab.namespace_daemon FILE` talks to the lab over a socket. It is started as two processes: the outer
one only waits, the inner one is the first of a process namespace, so that the kernel ends every command when it ends.
The inner one ends when the lab closes the socket or dies.

A host has namespaces for network, host name, mounts and processes. They are held by open files of one process: when it
ends, the kernel removes them, their interfaces and every process in them. Nothing of a lab is left behind. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from thinwire.errors import LabError
from thinwire.lab import network_commands as commands
from thinwire.lab.counters import CounterSampler, parse_devices
from thinwire.lab.daemon_client import Channel
from thinwire.lab.settings import LabSettings

_NEW_MOUNTS, _NEW_NAMES, _NEW_IPC = 0x0002_0000, 0x0400_0000, 0x0800_0000
_NEW_USERS, _NEW_PIDS, _NEW_NETWORK = 0x1000_0000, 0x2000_0000, 0x4000_0000
_RECURSIVE, _PRIVATE, _BIND = 0x4000, 0x4_0000, 0x1000
_DIE_WITH_PARENT = 1
_KINDS = ("net", "uts", "mnt")


def enter_namespaces(*, as_user: bool) -> None:
    """Give this process namespaces of its own; its next child is the first process of a new process namespace.

    Args:
        as_user: Whether to become root in a user namespace first, where the real user is not root.
    """
    uid, gid = os.getuid(), os.getgid()
    if as_user:
        _call("unshare", _NEW_USERS, what="make a user namespace")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    kinds = _NEW_MOUNTS | _NEW_NAMES | _NEW_IPC | _NEW_PIDS | _NEW_NETWORK
    _call("unshare", kinds, what="make namespaces")
    # nothing that is mounted in here may be seen outside
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    _silence_ipv6("all")


def become_init_process() -> None:
    """Set up the first process of the new process namespace; everything in it dies with this process."""
    _call("prctl", _DIE_WITH_PARENT, 9, 0, 0, 0, what="bind this process to its parent")
    _mount("proc", "/proc", "proc", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNamespaces:
    """One host's namespaces, alive as long as these files are open.

    Attributes:
        network: File of the network namespace.
        name: File of the one that holds the hostname.
        mounts: File of the one that holds the mounts.
        device_counters: The host's `/proc/net/dev`, opened inside.
    """

    network: int
    name: int
    mounts: int
    device_counters: int

    def enter(self) -> None:
        """Move this process (of a single thread) onto the host."""
        for file in (self.network, self.name, self.mounts):
            _call("setns", file, 0, what="enter a host")


def make_host(hostname: str, *, hosts_file: Path) -> HostNamespaces:
    """Make a host and come back.

    Args:
        hostname: Its name.
        hosts_file: What it shall see as `/etc/hosts`.
    """
    here = Path.cwd()
    with _back_home():
        _call("unshare", _NEW_NETWORK | _NEW_NAMES | _NEW_MOUNTS, what="make a host")
        socket.sethostname(hostname)
        _mount(str(hosts_file), "/etc/hosts", None, _BIND)
        with contextlib.suppress(LabError):  # some containers forbid it; few programs look there
            _mount("sysfs", "/sys", "sysfs", 0)
        _silence_ipv6("default")
        network, name, mounts = (os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in _KINDS)
        device_counters = os.open("/proc/self/net/dev", os.O_RDONLY)
    os.chdir(here)
    return HostNamespaces(network=network, name=name, mounts=mounts, device_counters=device_counters)


def _silence_ipv6(which: str) -> None:
    switch = Path(f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6")
    if switch.exists():
        switch.write_text("1")  # its chatter would be counted


@contextlib.contextmanager
def _back_home() -> Iterator[None]:
    homes = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in _KINDS]
    try:
        yield
    finally:
        for home in homes:
            _call("setns", home, 0, what="come back from a host")
            os.close(home)


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    _call("mount", *encoded, ctypes.c_ulong(flags), None, what=f"mount {target}")


def _call(name: str, *arguments: object, what: str) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise LabError(f"the kernel does not let this user {what}: {reason}; {_REMEDY}")


_REMEDY = (
    "run as root, or allow user namespaces (sysctl user.max_user_namespaces, "
    "kernel.apparmor_restrict_unprivileged_userns=0); in a container, start it with --privileged; "
    "`thinwire lab doctor` says more"
)


_TUN = "/dev/net/tun"
_SET_INTERFACE, _TAP, _NO_PACKET_INFO = 0x4004_54CA, 0x0002, 0x1000
_TOOL_S = 30.0
Lines = Callable[[LabSettings, int], list[str]]


class LabNetwork:
    """The hosts and all cables between them.

    Args:
        settings: How it begins.
        folder: Takes the hosts' `/etc/hosts`.
        force_relay: Whether delays shall be possible later, though none is asked for now.

    Attributes:
        hosts: One a host.
        has_netem: Whether the kernel makes delays itself.
        relay_id: Process id of our relay, if there is one.
    """

    def __init__(self, settings: LabSettings, *, folder: Path, force_relay: bool) -> None:
        names = folder / "hosts"
        names.write_text(commands.hosts_file(settings.num_hosts))
        self._settings = settings
        self._done: dict[tuple[int, int], list[str]] = {}
        self.has_netem = can_netem()
        is_relayed = not self.has_netem and (settings.is_delayed or force_relay)
        self.hosts = [make_host(commands.name_of(host), hosts_file=names) for host in range(settings.num_hosts)]
        if settings.fabric is None:
            run("ip", commands.switch_lines())
        else:
            for name, value in commands.KERNEL_SETTINGS.items():
                Path("/proc/sys/net/ipv4", name).write_text(value)
            run("ip", ["link set lo up"])
        relayed = range(settings.num_hosts if is_relayed else 0)
        taps = [(open_tap(commands.tap_of(host)), open_tap(commands.port_of(host))) for host in relayed]
        for host, host_namespaces in enumerate(self.hosts):
            network_path = f"/proc/self/fd/{host_namespaces.network}"  # for a child with the same open files
            lines = commands.cable_lines(host, network_path=network_path, is_relayed=is_relayed)
            if settings.fabric is not None and settings.fabric.rails > 1:
                lines += commands.second_rail_lines(host, network_path=network_path)
            run("ip", lines, files=[host_namespaces.network])
            run("ip", commands.host_lines(settings, host), host_namespaces=host_namespaces)
            for place, (tool, make, on_host) in enumerate(self._shapes()):
                lines = self._done[host, place] = make(settings, host)
                run(tool, lines, host_namespaces=host_namespaces if on_host else None)
        if settings.fabric is not None:
            run("ip", commands.router_lines(settings))
            run("ip", commands.route_lines(settings))
            run("tc", commands.cable_bucket_lines(settings))
            for host, host_namespaces in enumerate(self.hosts):
                run("ip", commands.neighbour_lines(settings, host), host_namespaces=host_namespaces)
        self._control: int | None = None
        self.relay_id = self._start_relay(taps) if is_relayed else None

    def change(self, settings: LabSettings) -> None:
        """Take other settings; hosts for which nothing changes are not touched."""
        before, self._settings = self._settings, settings
        for host, host_namespaces in enumerate(self.hosts):
            for place, (tool, make, on_host) in enumerate(self._shapes()):
                wanted = lines = make(settings, host)
                if wanted == self._done.pop((host, place), None):
                    self._done[host, place] = wanted
                    continue
                if tool == "tc":
                    interface = commands.INTERFACE if on_host else commands.port_of(host)
                    # without --force the first error would end it, and there may be nothing to remove
                    lines = [f"qdisc replace dev {interface} root pfifo", f"qdisc del dev {interface} root", *lines]
                run(tool, lines, host_namespaces=host_namespaces if on_host else None)
                self._done[host, place] = wanted  # what was refused is tried again at the next change
        if settings.fabric is not None:
            run("ip", commands.route_lines(settings))
            run("tc", commands.cable_bucket_lines(settings, before=before))
        self._configure_relay()

    def cable_bytes(self) -> list[tuple[int, int, int, int]]:
        """Return leaf, spine, bytes sent up and bytes sent down of each cable."""
        fabric = self._settings.fabric
        if fabric is None:
            return []
        text = Path("/proc/net/dev").read_text()
        found = []
        for leaf, spine in product(range(fabric.leaves), range(fabric.spines)):
            up, down = commands.cable_interfaces(leaf, spine)
            up_bytes, down_bytes = (parse_devices(text, interface=end).sent_bytes for end in (up, down))
            found.append((leaf, spine, up_bytes, down_bytes))
        return found

    def _configure_relay(self) -> None:
        if self._control is not None:
            os.write(self._control, json.dumps(self._settings.to_json()).encode() + b"\n")

    def _shapes(self) -> list[tuple[str, Lines, bool]]:
        """Return what depends on settings that may change: tool, lines, and whether it is done on the host."""

        def upload(settings: LabSettings, host: int) -> list[str]:
            return commands.upload_lines(settings, host, has_netem=self.has_netem)

        return [
            ("ip", commands.attachment_lines, False),
            ("bridge", commands.table_lines, False),
            ("ip", commands.segment_lines, True),
            ("tc", upload, True),
            ("tc", commands.download_lines, False),
        ]

    def _start_relay(self, taps: Sequence[tuple[int, int]]) -> int:
        control, self._control = os.pipe()
        ports = [f"{host_file}:{switch_file}" for host_file, switch_file in taps]
        command = [sys.executable, "-m", "thinwire.lab.relay", str(control), *ports]
        files = [control, *(file for pair in taps for file in pair)]
        process = subprocess.Popen(command, pass_fds=files, stdin=subprocess.DEVNULL)
        process.returncode = 0  # the daemon waits for all its children
        for file in files:
            os.close(file)
        self._configure_relay()
        return process.pid


def can_netem() -> bool:
    """Return whether this kernel makes delays itself; leaves nothing behind."""
    tried = subprocess.run(
        ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"],
        check=False, capture_output=True, timeout=_TOOL_S,
    )  # fmt: skip
    if tried.returncode == 0:
        run("tc", ["qdisc del dev lo root"])
    return tried.returncode == 0


def open_tap(name: str) -> int:
    """Make a TAP device in the present network namespace; it exists as long as the file is open."""
    try:
        file = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise LabError(_why_no_tap(error)) from None
    try:
        request = struct.pack("16sH22x", name.encode(), _TAP | _NO_PACKET_INFO)
        fcntl.ioctl(file, _SET_INTERFACE, request)
    except OSError as error:
        os.close(file)
        raise LabError(_why_no_tap(error)) from None
    return file


def _why_no_tap(error: OSError) -> str:
    need = "delays, jitter and losses need netem or TAP devices"
    if isinstance(error, PermissionError):
        return (
            f"{need}; this kernel has no netem, and this user may not use {_TUN} ({error.strerror}); run as root where "
            f"that may, let the user open it (chmod 0666 {_TUN}), or load netem: modprobe sch_netem"
        )
    return (
        f"{need}, and this kernel refuses both ({_TUN}: {error.strerror}); load the module: modprobe tun, or modprobe "
        "sch_netem"
    )


def run(
    tool: str, lines: Sequence[str], *, host_namespaces: HostNamespaces | None = None, files: Sequence[int] = ()
) -> None:
    """Run a batch of `ip`, `bridge` or `tc` here or on a host."""
    if not lines:
        return
    done = subprocess.run(
        [tool, "-batch", "-"], check=False, input="\n".join(lines) + "\n", capture_output=True, text=True,
        timeout=_TOOL_S, pass_fds=files, preexec_fn=None if host_namespaces is None else host_namespaces.enter,
    )  # fmt: skip
    if done.returncode != 0:
        raise LabError(f"{tool} refused a part of the lab: {' '.join(done.stderr.split())}; lines: {'; '.join(lines)}")


class NamespaceDaemon:
    """Serves one lab."""

    def __init__(self, channel: Channel, *, lab_network: LabNetwork, sampler: CounterSampler) -> None:
        self._channel = channel
        self._lab_network = lab_network
        self._sampler = sampler
        self._commands: dict[int, int] = {}  # process id -> the lab's number for it
        self._relay_id = lab_network.relay_id
        self._handlers = {
            "start": self._on_start, "signal": self._on_signal, "signal_host": self._on_signal_host,
            "shape": self._on_shape, "count": self._on_count, "cables": self._on_cables,
        }  # fmt: skip
        self._wake_up, self._woken = socket.socketpair()
        for end in (self._wake_up, self._woken):
            end.setblocking(False)
        signal.set_wakeup_fd(self._woken.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Do what the lab asks until it is gone."""
        sources: list[Any] = [self._channel, self._wake_up]
        try:
            while True:
                ready = select.select(sources, [], [], self._sampler.wait_s(time.monotonic()))[0]
                self._sampler.take_if_due(time.monotonic())
                if self._wake_up in ready:
                    self._wake_up.recv(4096)
                self._reap()
                if self._channel in ready and not self._answer():
                    return
        finally:
            # the sockets close with this object; a child that ends later must not be reported through a closed file
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _answer(self) -> bool:
        received = self._channel.receive()
        if received is None or received[0]["ask"] == "close":
            return False
        request, files = received
        try:
            reply = self._handlers[request["ask"]](request, files)
        except (OSError, ValueError, LabError, subprocess.SubprocessError) as error:
            reply = {"error": _reason(error) if isinstance(error, OSError) else str(error)}
        finally:
            for file in files:
                os.close(file)
        self._channel.send({"reply": request["id"], **reply})
        return True

    def _on_start(self, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        host_namespaces, folder = self._lab_network.hosts[request["host"]], request["folder"]
        if not Path(folder).is_dir():
            raise ValueError(f"there is no folder {folder}; give one that is there")

        def enter() -> None:
            host_namespaces.enter()
            os.chdir(folder)  # entering another world of mounts leads to its root

        stdin, stdout, stderr = files
        process = subprocess.Popen(
            request["command"], stdin=stdin, stdout=stdout, stderr=stderr,
            env={**os.environ, **request["environment"]}, start_new_session=True,
            preexec_fn=enter,  # safe: this process has one thread
        )  # fmt: skip
        process.returncode = 0  # we wait for all children ourselves
        self._commands[process.pid] = request["number"]
        return {"pid": process.pid}

    def _on_signal(self, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        for pid, number in self._commands.items():
            if number == request["number"]:
                os.killpg(pid, request["signal"])
        return {}

    def _on_signal_host(self, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        """Signal every process on a host, also those that left their command's group."""
        host_namespaces = self._lab_network.hosts[request["host"]]
        signalled: set[int] = set()
        # one that was signalled may have started another just before
        while found := processes_on(host_namespaces) - signalled:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, request["signal"])
            signalled |= found
        return {"num_processes": len(signalled)}

    def _on_shape(self, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        self._lab_network.change(LabSettings.from_json(request["settings"]))
        return {}

    def _on_cables(self, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        return {"cables": self._lab_network.cable_bytes()}

    def _on_count(self, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        return {"counters": self._sampler.take()}

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid == self._relay_id:
                self._channel.send({"event": "fault", "text": f"the relay of delays ended with exit code {code}"})
            elif pid in self._commands:
                self._channel.send({"event": "exit", "number": self._commands.pop(pid), "code": code})


def processes_on(host_namespaces: HostNamespaces) -> set[int]:
    """Return the processes that live in a host's network namespace."""
    wanted, found = os.fstat(host_namespaces.network).st_ino, set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it ended meanwhile
                if (entry / "ns" / "net").stat().st_ino == wanted:
                    found.add(int(entry.name))
    return found


def main(arguments: Sequence[str]) -> int:
    """Start the daemon of one lab."""
    end = socket.socket(fileno=int(arguments[0]))
    os.set_inheritable(end.fileno(), False)
    channel = Channel(end)
    received = channel.receive()
    if received is None:
        return 1
    order = received[0]
    # the terminal's signals are for the lab, which closes this daemon
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        enter_namespaces(as_user=os.geteuid() != 0)
        folder = order["folder"] or _temporary_folder()
    except (LabError, OSError) as error:
        channel.send({"event": "failed", "text": str(error)})
        return 1
    inner = os.fork()
    if inner == 0:
        os._exit(_run(channel, {**order, "folder": str(Path(folder).resolve())}))
    channel.close()
    os.waitpid(inner, 0)
    if order["folder"] is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _temporary_folder() -> str:
    try:
        return tempfile.mkdtemp(prefix="thinwire-lab-")
    except OSError as error:
        raise LabError(
            f"the lab's folder cannot be made: {_reason(error)}; set TMPDIR to a folder that takes files, or give one "
            f"(folder=)"
        ) from None


def _reason(error: OSError) -> str:
    """Say what the system refused, and where it says so which file; without a usable folder there is no file."""
    return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)


def _run(channel: Channel, order: dict[str, Any]) -> int:
    folder = Path(order["folder"])
    try:
        become_init_process()
        settings = LabSettings.from_json(order["settings"])
        lab_network = LabNetwork(settings, folder=folder, force_relay=order["force_relay"])
        sampler = CounterSampler([host.device_counters for host in lab_network.hosts], path=folder / "counters.jsonl")
    except (LabError, OSError) as error:
        channel.send({"event": "failed", "text": str(error)})
        return 1
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # commands inherit what is ignored, and the first process ignores anyway
    with contextlib.suppress(OSError):  # the lab is gone
        is_relayed = lab_network.relay_id is not None
        channel.send({"event": "ready", "is_relayed": is_relayed, "has_netem": lab_network.has_netem,
                      "folder": order["folder"]})  # fmt: skip
        NamespaceDaemon(channel, lab_network=lab_network, sampler=sampler).serve()
    sampler.take()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
