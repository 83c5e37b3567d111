"""Hosts for a test: network namespaces with a name of their own, joined by a virtual cable.

Each host has its own interfaces, loopback, routes and hostname, so that what two machines do wrong can be done here.
Needs root; tests that use it take the fixture `hosts`, which skips with the reason where that is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

ADDRESSES = ("10.77.0.1", "10.77.0.2")
NAMES = ("ada", "bob")
CABLE = "tw-cable"


class Hosts:
    """Two hosts, `ada` (10.77.0.1) and `bob` (10.77.0.2), with the interface `tw-cable` each."""

    def __init__(self) -> None:
        # Names are seen by the whole machine: the process id keeps two test runs apart.
        self.namespaces = [f"tw{os.getpid()}{name}" for name in NAMES]

    def on(self, host: int, *command: str) -> str:
        """Run a command on a host and return what it printed."""
        return _run("ip", "netns", "exec", self.namespaces[host], *command)

    def prefix(self, host: int) -> Sequence[str]:
        """Return the words that put a command on a host, with the host's own name."""
        rename = f'hostname {NAMES[host]} && exec "$@"'
        return ["ip", "netns", "exec", self.namespaces[host], "unshare", "--uts", "sh", "-c", rename, "sh"]


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
    lacking = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if lacking:
        return f"network namespaces need {', '.join(lacking)}"
    name = f"tw{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, timeout=10, text=True)
    subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=10)
    return f"network namespaces are not allowed here: {made.stderr.strip()}" if made.returncode else ""


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, timeout=10, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
