"""Makes a lab's network by `ip`, `bridge` and `tc`, and changes it while commands run. Lives in the keeper."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from thinwire.errors import LabError
from thinwire.lab import network_commands as commands
from thinwire.lab.namespaces import HostNamespaces, make_host
from thinwire.lab.settings import LabSettings

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
        worlds: One a host.
        has_netem: Whether the kernel makes delays itself.
        relay_id: Process id of our relay, if there is one.

    Raises:
        LabError: One of the tools refused.
    """

    def __init__(self, settings: LabSettings, *, folder: Path, force_relay: bool) -> None:
        names = folder / "hosts"
        names.write_text(commands.hosts_file(settings.num_hosts))
        self._settings = settings
        self._done: dict[tuple[int, int], list[str]] = {}
        self.has_netem = can_netem()
        is_relayed = not self.has_netem and (settings.is_delayed or force_relay)
        self.worlds = [make_host(commands.name_of(host), hosts_file=names) for host in range(settings.num_hosts)]
        run("ip", commands.switch_lines())
        taps = (
            [(open_tap(commands.tap_of(h)), open_tap(commands.port_of(h))) for h in self._hosts] if is_relayed else []
        )
        for host, world in enumerate(self.worlds):
            lines = commands.cable_lines(host, network_path=world.network_path, is_relayed=is_relayed)
            run("ip", lines, files=[world.network])
            run("ip", commands.host_lines(settings, host), world=world)
            for place, (tool, make, on_host) in enumerate(self._shapes()):
                lines = self._done[host, place] = make(settings, host)
                run(tool, lines, world=world if on_host else None)
        self._control: int | None = None
        self.relay_id = self._start_relay(taps) if is_relayed else None

    def change(self, settings: LabSettings) -> None:
        """Take other settings; hosts for which nothing changes are not touched.

        Raises:
            LabError: One of the tools refused.
        """
        self._settings = settings
        for host, world in enumerate(self.worlds):
            for place, (tool, make, on_host) in enumerate(self._shapes()):
                wanted = lines = make(settings, host)
                if wanted == self._done.pop((host, place), None):
                    self._done[host, place] = wanted
                    continue
                if tool == "tc":
                    interface = commands.INTERFACE if on_host else commands.port_of(host)
                    # without --force the first error would end it, and there may be nothing to remove
                    lines = [f"qdisc replace dev {interface} root pfifo", f"qdisc del dev {interface} root", *lines]
                run(tool, lines, world=world if on_host else None)
                self._done[host, place] = wanted  # what was refused is tried again at the next change
        self._tell_relay()

    def _tell_relay(self) -> None:
        if self._control is not None:
            os.write(self._control, json.dumps(self._settings.to_json()).encode() + b"\n")

    @property
    def _hosts(self) -> range:
        return range(self._settings.num_hosts)

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
        process.returncode = 0  # the keeper waits for all its children
        for file in files:
            os.close(file)
        self._tell_relay()
        return process.pid


def can_netem() -> bool:
    """Tell whether this kernel makes delays itself; leaves nothing behind."""
    tried = subprocess.run(
        ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"],
        check=False, capture_output=True, timeout=_TOOL_S,
    )  # fmt: skip
    if tried.returncode == 0:
        run("tc", ["qdisc del dev lo root"])
    return tried.returncode == 0


def open_tap(name: str) -> int:
    """Make a TAP device in the present network namespace; it exists as long as the file is open.

    Raises:
        LabError: The kernel has none, or this user may not use them.
    """
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


def run(tool: str, lines: Sequence[str], *, world: HostNamespaces | None = None, files: Sequence[int] = ()) -> None:
    """Run a batch of `ip`, `bridge` or `tc` here or on a host.

    Raises:
        LabError: It refused; names the line.
    """
    if not lines:
        return
    done = subprocess.run(
        [tool, "-batch", "-"], check=False, input="\n".join(lines) + "\n", capture_output=True, text=True,
        timeout=_TOOL_S, pass_fds=files, preexec_fn=None if world is None else world.enter,
    )  # fmt: skip
    if done.returncode != 0:
        raise LabError(f"{tool} refused a part of the lab: {' '.join(done.stderr.split())}; lines: {'; '.join(lines)}")
