"""Checks of `thinwire doctor` in this host's network: its name, its address, ports, MTU.

Each check takes what it judges as values, or as functions that a test can replace; the defaults ask the host.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from thinwire.errors import ConnectError
from thinwire.monitor.doctor.check import Check, ok, skipped, warning, wrong, wrong_by
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

# RFC 8200: what every IPv6 link carries. VPNs go down to it, and below it is a mistake.
LEAST_MTU = 1280
LookUp = Callable[[str], Sequence[str]]
_BRIDGES = re.compile(r"^(docker|br-|virbr|lxcbr|lxdbr|cni|podman|veth|cbr|flannel|cali)")
_PRIVATE_NETWORKS = re.compile(r"^(wg|tun|tap|utun|tailscale|zt|ppp|nebula)")
_REACH_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The address that this host would show to the others.

    Attributes:
        address: IPv4.
        interface: Its interface.
        why: What made it this one.
        is_asked: Whether a person or the way to a given address chose it.
    """

    address: str
    interface: str
    why: str
    is_asked: bool


def look_up(name: str) -> list[str]:
    """Return the IPv4 addresses of a name.

    Raises:
        OSError: It has none.
    """
    found = socket.getaddrinfo(name, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def check_own_name(hostname: str, *, find: LookUp = look_up) -> Check:
    """See what this host's own name resolves to; programs that go by it advertise that.

    Args:
        hostname: The name.
        find: Looks it up.
    """
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
    """Choose the address as `thinwire.connect` does, and say why; a check where none can be chosen.

    Args:
        interface: That of `--interface`.
        address: That of `--address`.
        gloo_interface: The variable GLOO_SOCKET_IFNAME.
        target: An IPv4 address that is to be reached; without one, the default route counts.
    """
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
        return Chosen(
            address=own, interface=interface_of(own), why=why, is_asked=bool(address or named or target)
        )  # fmt: skip
    except ConnectError:
        return _no_route(target, local_addresses())
    except ValueError as error:
        return wrong_by("own address", error)


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
    """Judge the address that the others would be told.

    Args:
        chosen: What was chosen.
        target: The IPv4 address that is to be reached, if there is one.
    """
    found = f"{chosen.address} on {chosen.interface}: {chosen.why}"
    address = ipaddress.IPv4Address(chosen.address)
    remedy = "name an interface or address that the others reach: --interface, --address"
    if address.is_loopback:
        if target is not None and ipaddress.IPv4Address(target).is_loopback:
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
    """Listen on a free port of the address, and reach it from this host.

    Args:
        address: IPv4.
        connect: Opens a connection to an address and a port, and closes it.
    """
    try:
        with listen(address, backlog=1) as listener:
            port = listener.getsockname()[1]
            (connect or _connect)(address, port)
    except ConnectError as error:
        return wrong("listening", str(error), remedy="name an address of this host: --address, --interface")
    except OSError as error:
        return wrong(
            "listening", f"port {port} of {address} cannot be reached even from this host: {error.strerror or error}",
            remedy=f"let the firewall of this host pass it; {firewall_hint()}",
        )  # fmt: skip
    return ok("listening", f"port {port} of {address} was opened and reached from here")


def _connect(address: str, port: int) -> None:
    with socket.create_connection((address, port), timeout=_REACH_S):
        pass


def check_firewall(root: Path = Path("/")) -> Check:
    """Look for a firewall that is switched on; its rules are not read.

    Args:
        root: The folder that holds `etc`, `run` and `proc`.
    """
    found = [name for name, is_on in _firewalls(root) if is_on]
    if found:
        return warning("firewall", f"{' and '.join(found)} may drop what the others send", remedy=firewall_hint())
    return ok(
        "firewall", f"neither ufw nor firewalld nor iptables is seen (nftables is not looked at); {firewall_hint()}"
    )


def _firewalls(root: Path) -> list[tuple[str, bool]]:
    ufw = _text(root / "etc/ufw/ufw.conf")
    is_ufw = re.search(r"^\s*ENABLED\s*=\s*yes", ufw, re.MULTILINE | re.IGNORECASE) is not None
    is_firewalld = (root / "run/firewalld.pid").exists() or (root / "run/firewalld").is_dir()
    return [
        ("ufw", is_ufw),
        ("firewalld", is_firewalld),
        ("iptables", "filter" in _text(root / "proc/net/ip_tables_names").split()),
    ]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def check_mtu(interface: str, *, mtu: int | None = None) -> Check:
    """Look at the largest packet that an interface sends.

    Args:
        interface: Its name.
        mtu: Bytes; asks the kernel by default.
    """
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
