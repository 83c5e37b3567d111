"""Kernel namespaces of the hosts: network, host name, mounts and processes.

All of them are held by open files and by one process only: when it ends, however it ends, the kernel removes the
namespaces, their interfaces and every process in them. So nothing of a lab can be left behind. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import LabError

_NEW_MOUNTS, _NEW_NAMES, _NEW_IPC = 0x0002_0000, 0x0400_0000, 0x0800_0000
_NEW_USERS, _NEW_PIDS, _NEW_NETWORK = 0x1000_0000, 0x2000_0000, 0x4000_0000
_RECURSIVE, _PRIVATE, _BIND = 0x4000, 0x4_0000, 0x1000
_DIE_WITH_PARENT = 1
_KINDS = ("net", "uts", "mnt")


def enter_namespaces(*, as_user: bool) -> None:
    """Give this process namespaces of its own; its next child is the first process of a new process namespace.

    Args:
        as_user: Whether to become root in a user namespace first, where the real user is not root.

    Raises:
        LabError: The kernel refuses; names the remedy.
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

    @property
    def network_path(self) -> str:
        """A path that a child process with the same open files may use."""
        return f"/proc/self/fd/{self.network}"

    def network_id(self) -> int:
        """Return the number of the network namespace, as `/proc/PID/ns/net` shows it."""
        return os.fstat(self.network).st_ino

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
