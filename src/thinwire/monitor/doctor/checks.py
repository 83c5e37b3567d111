"""Checks of this host: versions, devices, folders, limits, speed, names, addresses, ports, firewall and MTU."""

from __future__ import annotations

import importlib.metadata
import ipaddress
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import psutil
import torch

from thinwire.errors import ConnectError
from thinwire.transport.addresses import (
    ANYWHERE,
    address_of,
    address_towards,
    firewall_hint,
    interface_of,
    listen,
    local_addresses,
    resolve,
)
from thinwire.transport.process_group import available_backends
from thinwire.transport.secret import read_secret
from thinwire.units import format_bytes, format_seconds
from thinwire.version import __version__


class Verdict(StrEnum):
    """Result of a check; only `WRONG` makes the command fail."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at.

    Example:
        >>> Check(name="memory", verdict=Verdict.OK, found="8.00 GB are free").to_json()["verdict"]
        'ok'
    """

    name: str  # what
    verdict: Verdict  # how it is
    found: str  # what was found, with numbers; for a skipped check the reason
    remedy: str = ""  # what to do, empty where there is nothing to do

    def to_json(self) -> dict[str, str]:
        """Write it as plain values."""
        return {**asdict(self), "verdict": self.verdict.value}


def ok(name: str, found: str) -> Check:
    """Say that a thing is well."""
    return Check(name=name, verdict=Verdict.OK, found=found)


def warning(name: str, found: str, *, remedy: str) -> Check:
    """Say that a thing works, and may hurt."""
    return Check(name=name, verdict=Verdict.WARNING, found=found, remedy=remedy)


def wrong(name: str, found: str, *, remedy: str) -> Check:
    """Say that a thing does not work."""
    return Check(name=name, verdict=Verdict.WRONG, found=found, remedy=remedy)


def skipped(name: str, reason: str) -> Check:
    """Say that a thing could not be looked at, and why."""
    return Check(name=name, verdict=Verdict.SKIPPED, found=reason)


def wrong_by(name: str, error: Exception) -> Check:
    """Turn an error of the library, which ends with a remedy, into a check."""
    found, sign, remedy = str(error).rpartition("; try ")
    if not sign:
        found, _, remedy = str(error).partition("; ")
    return wrong(name, found, remedy=remedy or "see the text")


def _enough(name: str, found: str, amount: float, *, least: float, scarce: float, remedy: str) -> Check:
    """Judge an amount: below `least` nothing works, below `scarce` it may end."""
    if amount < least:
        return wrong(name, found, remedy=remedy)
    return warning(name, found, remedy=remedy) if amount < scarce else ok(name, found)


LEAST_DISK_BYTES, SCARCE_DISK_BYTES = 100e6, 2e9
LEAST_MEMORY_BYTES, SCARCE_MEMORY_BYTES = 500e6, 2e9
LEAST_FILES, SCARCE_FILES = 256, 1024
_SIZE = 512
_TIMINGS = 5
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_NVIDIA = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Builds:
    """Installed versions and backends."""

    python: str  # its version
    torch: str  # its version
    cuda: str  # the CUDA version that torch was built for, empty for a build without
    num_gpus: int  # GPUs that torch sees
    has_gpu: bool  # whether the machine has an NVIDIA driver
    pyzmq: str  # its version, empty where it is not installed
    backends: Mapping[str, bool]  # whether torch.distributed has gloo and nccl


def installed() -> Builds:
    """Ask this process."""
    return Builds(
        python=platform.python_version(), torch=torch.__version__, cuda=torch.version.cuda or "",
        num_gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0, has_gpu=_NVIDIA.exists(),
        pyzmq=_version_of("pyzmq"), backends=available_backends(),
    )  # fmt: skip


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_versions(builds: Builds, *, needs_pyzmq: bool) -> Check:
    """Say what is installed, and whether a secret can be used."""
    found = f"thinwire {__version__}, Python {builds.python}, torch {builds.torch}, pyzmq {builds.pyzmq or '-'}"
    if builds.pyzmq:
        return ok("versions", found)
    remedy = "install it: pip install 'thinwire[wire]'"
    if needs_pyzmq:
        return wrong("versions", f"{found}: a secret needs pyzmq", remedy=remedy)
    return warning("versions", f"{found}: without pyzmq there is no secret (--secret)", remedy=remedy)


def check_devices(builds: Builds) -> Check:
    """Say whether torch uses the GPU that is here."""
    if not builds.cuda:
        if not builds.has_gpu:
            return ok("devices", "torch is built without CUDA, and no NVIDIA driver is here: training on the CPU")
        remedy = "install a torch with CUDA (pytorch.org), or train on the CPU"
        return warning("devices", "this machine has an NVIDIA driver, and torch is built without CUDA", remedy=remedy)
    if builds.num_gpus:
        return ok("devices", f"torch with CUDA {builds.cuda} sees {builds.num_gpus} GPUs")
    what = "no GPU is visible" if builds.has_gpu else "no NVIDIA driver is here"
    return warning(
        "devices", f"torch is built for CUDA {builds.cuda}, and {what}",
        remedy="see nvidia-smi and CUDA_VISIBLE_DEVICES; a container needs --gpus all; or train on the CPU",
    )  # fmt: skip


def check_backends(builds: Builds) -> Check:
    """Say whether torch.distributed can join replicas."""
    found = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in builds.backends.items())
    if not builds.backends.get("gloo"):
        return wrong(
            "torch.distributed", f"{found}: replicas without a secret meet over gloo",
            remedy="install a torch whose torch.distributed has gloo, as the wheels for Linux have",
        )  # fmt: skip
    if builds.num_gpus and not builds.backends.get("nccl"):
        return warning(
            "torch.distributed", f"{found}: a replica over several GPUs needs nccl",
            remedy="install a torch with nccl, or use one GPU a replica",
        )  # fmt: skip
    return ok("torch.distributed", found)


def check_secret(path: Path | None) -> Check:
    """Read the secret, if one is given."""
    if path is None:
        return skipped("secret", "no --secret FILE was given")
    try:
        secret = read_secret(path)
    except ValueError as error:
        return wrong_by("secret", error)
    return ok("secret", f"{path} is a secret; its fingerprint {secret.fingerprint} must be the same on all hosts")


def check_folder(name: str, folder: Path, *, free_bytes: Callable[[Path], int] | None = None) -> Check:
    """Write a file into a folder, or into the nearest one above it that exists, and look at the free space."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
        free = shutil.disk_usage(place).free if free_bytes is None else free_bytes(place)
    except OSError as error:
        return wrong(
            name, f"{folder} cannot be written: {error.strerror} ({place})",
            remedy="give another folder (--out, --cache-dir), or the right to write there",
        )  # fmt: skip
    found = f"{format_bytes(free)} are free for {folder}"
    remedy = "make room, or give a folder on another disk (--out, --cache-dir)"
    return _enough(name, found, free, least=LEAST_DISK_BYTES, scarce=SCARCE_DISK_BYTES, remedy=remedy)


def check_open_files(limit: int | None = None) -> Check:
    """Look at how many files and sockets this process may open."""
    if limit is None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return ok("open files", "no limit")
    found = f"{limit:,} files and sockets may be open"
    remedy = "raise it: ulimit -n 65536, or LimitNOFILE= of the service"
    return _enough("open files", found, limit, least=LEAST_FILES, scarce=SCARCE_FILES, remedy=remedy)


def check_memory(available: int | None = None, total: int | None = None) -> Check:
    """Look at the free memory."""
    memory = psutil.virtual_memory()
    available = memory.available if available is None else available
    found = f"{format_bytes(available)} of {format_bytes(memory.total if total is None else total)} are free"
    remedy = "end what else runs here, or take a smaller model or batch; thinwire plan says what a model needs"
    return _enough("memory", found, available, least=LEAST_MEMORY_BYTES, scarce=SCARCE_MEMORY_BYTES, remedy=remedy)


def check_speed(
    *, threads: int | None = None, cores: float | None = None, product_s: Callable[[int], float] | None = None
) -> Check:
    """Time a product of two float32 matrices `(512, 512)` with torch's threads and with one: many may be slower."""
    threads = torch.get_num_threads() if threads is None else threads
    cores = usable_cores() if cores is None else cores
    measure = product_s or _product_s
    many_s = measure(threads)
    one_s = many_s if threads == 1 else measure(1)
    rate = 2 * _SIZE**3 / many_s / 1e9
    found = f"{rate:.0f} GFLOP/s with {threads} threads on {cores:g} cores, {format_seconds(many_s)} a product"
    if threads > cores:
        return warning(
            "speed", f"{found}: more threads than cores",
            remedy=f"set OMP_NUM_THREADS={max(1, int(cores))}, or thinwire train --threads",
        )  # fmt: skip
    if many_s > 1.1 * one_s:
        return warning(
            "speed", f"{found}, and {format_seconds(one_s)} with one thread: the threads hinder each other",
            remedy="end what else computes here, or set OMP_NUM_THREADS lower",
        )  # fmt: skip
    return ok("speed", found)


def usable_cores(limit: Path = _CPU_LIMIT) -> float:
    """Return how many cores this process may use: those it is bound to, or fewer where its container has a limit."""
    # Linux alone says which cores a process is bound to
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = limit.read_text().split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores


def _product_s(threads: int) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        left, right = torch.rand(_SIZE, _SIZE), torch.rand(_SIZE, _SIZE)
        times_s = []
        for _ in range(1 + _TIMINGS):
            began_s = time.perf_counter()
            torch.mm(left, right)
            times_s.append(time.perf_counter() - began_s)
        return statistics.median(times_s[1:])  # the first one makes the threads
    finally:
        torch.set_num_threads(before)


# RFC 8200: what every IPv6 link carries. VPNs go down to it, and below it is a mistake.
LEAST_MTU = 1280
FindAddresses = Callable[[str], Sequence[str]]
_BRIDGES = re.compile(r"^(docker|br-|virbr|lxcbr|lxdbr|cni|podman|veth|cbr|flannel|cali)")
_PRIVATE_NETWORKS = re.compile(r"^(wg|tun|tap|utun|tailscale|zt|ppp|nebula)")
_REACH_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The address that this host would show to the others."""

    address: str  # IPv4
    interface: str  # its interface
    why: str  # what made it this one
    is_asked: bool  # whether a person or the way to a given address chose it


def addresses_of_name(name: str) -> list[str]:
    """Return the addresses of a name, those of IPv4 first; an OSError if it has none."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def check_own_name(hostname: str, *, find: FindAddresses = addresses_of_name) -> Check:
    """See what this host's own name resolves to; programs that go by it advertise that."""
    remedy = f"thinwire does not go by the name, but gloo alone does: give {hostname} its address in /etc/hosts"
    try:
        addresses = find(hostname)
    except OSError as error:
        return warning("host name", f"{hostname} cannot be resolved: {error}", remedy=remedy)
    found = f"{hostname} is {', '.join(addresses)}"
    if all(ipaddress.ip_address(address).is_loopback for address in addresses):
        return warning("host name", f"{found}: only this host itself reaches that", remedy=remedy)
    return ok("host name", found)


def choose(
    *, interface: str | None, address: str | None, gloo_interface: str | None, target: str | None
) -> Chosen | Check:
    """Choose the address as `thinwire.connect` does, and say why; a check where none can be chosen."""
    named = interface or (gloo_interface or "").split(",")[0]
    why = "--interface" if interface else "the variable GLOO_SOCKET_IFNAME"
    try:
        if address:
            own, why = resolve(address), "--address"
        elif named:
            own = address_of(named)
        else:
            own = address_towards(target or ANYWHERE)
            why = f"packets to {target} leave from it" if target else "the default route leaves from it"
        if ":" in own:
            held = psutil.net_if_addrs().items()
            device = next((name for name, found in held if any(own == entry.address for entry in found)), "?")
        else:
            device = interface_of(own)
        return Chosen(address=own, interface=device, why=why, is_asked=bool(address or named or target))
    except ConnectError:
        return _no_route(target, local_addresses())
    except ValueError as error:
        return wrong_by("own address", error)


def is_outer(interface: str, address: str) -> bool:
    """Return whether an interface may lead to other hosts: no loopback, and no bridge of containers."""
    return not ipaddress.ip_address(address).is_loopback and not _BRIDGES.match(interface)


def _no_route(target: str | None, addresses: Mapping[str, Sequence[str]]) -> Check:
    outer = [f"{name} ({held[0]})" for name, held in addresses.items() if not held[0].startswith("127.")]
    remedy = "bring the network up, or name an interface that the others reach: --interface"
    if target is not None:
        return wrong("own address", f"there is no route to {target}", remedy=remedy)
    if not outer:
        return wrong("own address", "no interface but loopback has an IPv4 address", remedy=remedy)
    # a private switch needs no default route, so nothing is wrong yet
    return warning(
        "own address", f"there is no default route, and which of {', '.join(outer)} others reach cannot be told",
        remedy="give the ADDRESS that is to be reached, or --interface",
    )  # fmt: skip


def check_own_address(chosen: Chosen, *, target: str | None) -> Check:
    """Check the address that the other hosts receive."""
    found = f"{chosen.address} on {chosen.interface}: {chosen.why}"
    address = ipaddress.ip_address(chosen.address)
    remedy = "name an interface or address that the others reach: --interface, --address"
    if address.is_loopback:
        if target is not None and ipaddress.ip_address(target).is_loopback:
            return ok("own address", f"{found}; it serves replicas on this host only")
        return wrong("own address", f"{found}; other hosts do not reach a loopback address", remedy=remedy)
    if address.is_link_local:
        return warning("own address", f"{found}; no DHCP server gave this host an address", remedy=remedy)
    if _BRIDGES.match(chosen.interface):
        return warning(
            "own address", f"{found}; this bridge joins containers or virtual machines of this host", remedy=remedy
        )
    if _PRIVATE_NETWORKS.match(chosen.interface):
        note = f"{found}; all others must be in this private network too"
        return ok("own address", note) if chosen.is_asked else warning("own address", note, remedy=remedy)
    return ok("own address", found)


def check_port(address: str, *, connect: Callable[[str, int], None] | None = None) -> Check:
    """Listen on a free port of the address, and reach it from this host."""
    try:
        with listen(address, backlog=1) as listener:
            port = listener.getsockname()[1]
            if connect is None:
                socket.create_connection((address, port), timeout=_REACH_S).close()
            else:
                connect(address, port)
    except ConnectError as error:
        return wrong("listening", str(error), remedy="name an address of this host: --address, --interface")
    except OSError as error:
        return wrong(
            "listening", f"port {port} of {address} cannot be reached even from this host: {error.strerror or error}",
            remedy=f"let the firewall of this host pass it; {firewall_hint()}",
        )  # fmt: skip
    return ok("listening", f"port {port} of {address} was opened and reached from here")


def check_firewall(root: Path = Path("/")) -> Check:
    """Look for a firewall that is switched on; its rules are not read."""
    ufw = _text(root / "etc/ufw/ufw.conf")
    is_on = {
        "ufw": re.search(r"^\s*ENABLED\s*=\s*yes", ufw, re.MULTILINE | re.IGNORECASE) is not None,
        "firewalld": (root / "run/firewalld.pid").exists() or (root / "run/firewalld").is_dir(),
        "iptables": "filter" in _text(root / "proc/net/ip_tables_names").split(),
    }
    found = [name for name in is_on if is_on[name]]
    if found:
        return warning("firewall", f"{' and '.join(found)} may drop what the others send", remedy=firewall_hint())
    unseen = "neither ufw nor firewalld nor iptables is seen (nftables is not looked at)"
    return ok("firewall", f"{unseen}; {firewall_hint()}")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def check_mtu(interface: str, *, mtu: int | None = None) -> Check:
    """Look at the largest packet that an interface sends."""
    if mtu is None:
        status = psutil.net_if_stats().get(interface)
        if status is None:
            return skipped("MTU", f"{interface} is a label, and has no MTU of its own")
        mtu = int(status.mtu)
    if mtu < LEAST_MTU:
        return warning(
            "MTU", f"{interface} sends packets of at most {mtu} bytes; {LEAST_MTU} is the least that is usual",
            remedy=f"ip link set dev {interface} mtu 1500, or what the VPN's documentation says",
        )  # fmt: skip
    return ok("MTU", f"{interface} sends packets of up to {mtu:,} bytes")
