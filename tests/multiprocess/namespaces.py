"""Hosts for a test: network namespaces with a name of their own, joined by a virtual cable.

Each host has its own interfaces, loopback, routes and hostname, so that what two machines do wrong can be done here.
Needs root; tests that use it take the fixture `hosts`, which skips with the reason where that is missing.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.77.0.1", "10.77.0.2")
NAMES = ("ada", "bob")
CABLE = "tw-cable"
_NEW_MOUNTS, _NEW_NAMES, _NEW_NETWORK = 0x0002_0000, 0x0400_0000, 0x4000_0000
_RECURSIVE, _SLAVE, _DETACH = 0x4000, 0x8_0000, 2


class Hosts:
    """Two hosts, `ada` (10.77.0.1) and `bob` (10.77.0.2), with the interface `tw-cable` each."""

    def __init__(self) -> None:
        # Names are seen by the whole machine: the process id keeps two test runs apart.
        self.namespaces = [f"tw{os.getpid()}{name}" for name in NAMES]

    def on(self, host: int, *command: str) -> str:
        """Run a command on a host and return what it printed."""
        return _run("ip", "netns", "exec", self.namespaces[host], *command)

    def place(self, host: int) -> tuple[str, str]:
        """Return where a process shall live, for `Processes`: the host's namespace, and its own name."""
        return f"/var/run/netns/{self.namespaces[host]}", NAMES[host]


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make the hosts, and take them away whatever happens."""
    hosts = Hosts()
    try:
        for namespace in hosts.namespaces:
            _run("ip", "netns", "add", namespace)
        left, right = hosts.namespaces
        _run("ip", "-n", left, "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", right)
        for namespace, address in zip(hosts.namespaces, ADDRESSES, strict=True):
            _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", CABLE)
            for interface in ("lo", CABLE):
                _run("ip", "-n", namespace, "link", "set", interface, "up")
        yield hosts
    finally:
        for namespace in hosts.namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True, timeout=10)


def missing() -> str:
    """Say what this machine lacks for hosts of its own, or return an empty text."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need ip"
    name = f"tw{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, timeout=10, text=True)
    subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=10)
    return f"network namespaces are not allowed here: {made.stderr.strip()}" if made.returncode else ""


def move_to(namespace: str, name: str) -> None:
    """Move this process, of one thread, onto a host: its network with what `/sys` tells of it, and its name.

    Args:
        namespace: File of the network namespace.
        name: The host's name.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *arguments: object) -> None:
        if getattr(libc, function)(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{function}: {os.strerror(number)}", namespace)

    network = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    call("setns", network, _NEW_NETWORK)
    os.close(network)
    call("unshare", _NEW_MOUNTS | _NEW_NAMES)
    # what is mounted from here on is not seen outside; /sys shows the network of the process that mounts it
    call("mount", b"", b"/", None, _RECURSIVE | _SLAVE, None)
    call("umount2", b"/sys", _DETACH)
    call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)
    socket.sethostname(name)


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, timeout=10, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
