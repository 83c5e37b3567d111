"""Address that a host shows to the others, and the check that they reach it.

The classic failure of a first run on two machines is a host that advertises 127.0.0.1 (its own name in `/etc/hosts`):
gloo then hangs until its time-out and says nothing of use. These functions find the address, prove it before gloo
starts, and name both ends when it does not work. gloo listens on IPv4 only; thinwire's own connections take IPv6 too.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypedDict

import msgspec
import psutil

from thinwire.errors import ConnectError, DataError, refusal
from thinwire.transport.secret import Secret
from thinwire.transport.streams import FORMAT_VERSION

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK_NAMESPACE = Path("/proc/self/ns/net")
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_MAX_TEXT = 4096
# Environment variable: names the file in which ranks of one host meet, in place of MASTER_ADDR and MASTER_PORT.
RENDEZVOUS_FILE = "THINWIRE_RENDEZVOUS_FILE"
_MAX_REASON = 200
_HOST_PORT = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")
# Where a process of this host reaches one that listens on all addresses.
ANY_LOOPBACK = {"::": "::1", "0.0.0.0": "127.0.0.1"}
# RFC 5737: never assigned, so packets to it would leave by the default route
ANYWHERE = "192.0.2.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address and port at which a replica is dialled."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPlace:
    """Address of a relay, and the token that opens it; who has the token can use the relay, and reads nothing by it."""

    address: Address
    token: Secret = field(repr=False)

    def describe(self) -> str:
        return host_port(self.address.host, self.address.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class DialPaths:
    """Planned connections to one replica, each over a path of its own."""

    source_ports: tuple[tuple[int, ...], ...]  # for each connection, the ports that take its path, the best first
    shares: tuple[float, ...]  # each connection's part of the bytes
    port: int  # port of the replica for which this holds; switches hash it too


_TRAFFIC_PLAN, _MOST_PLAN_BYTES, _MOST_DIAL_PATHS = "thinwire-traffic-plan", 64 * 2**20, 16
_Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]


class _PlannedPiece(msgspec.Struct):
    share: Annotated[float, msgspec.Meta(gt=0, le=1)]
    source_port: _Port | None = None
    spare_source_ports: Annotated[tuple[_Port, ...], msgspec.Meta(max_length=64)] = ()
    destination_port: _Port | None = None


class _PlannedFlow(msgspec.Struct):
    source: str
    destination: str
    pieces: list[_PlannedPiece]


class _TrafficPlanFile(msgspec.Struct):
    format: str
    version: int
    hosts: list[str]
    assignment: list[_PlannedFlow]


def read_dial_paths(path: Path, *, rank: int, world_size: int) -> dict[int, DialPaths]:
    """Read the connections that a rank dials from a traffic plan (`thinwire traffic plan --probe`).

    Args:
        path: The plan. Rank n runs on its n-th host, and dials the ranks below it.
        rank: This rank.
        world_size: Number of ranks.

    Returns:
        By rank; a rank whose flow has no source ports is missing.

    Raises:
        DataError: It cannot be read, or is no such plan; names the file and the field.
    """
    try:
        if (size := path.stat().st_size) > _MOST_PLAN_BYTES:
            raise DataError(f"{path} has {size} bytes, more than {_MOST_PLAN_BYTES}; is it a traffic plan?")
        plan = msgspec.json.decode(path.read_bytes(), type=_TrafficPlanFile)
    except OSError as error:
        raise DataError(f"cannot read the traffic plan {path}: {error.strerror}; {_MAKE_PLAN}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise DataError(f"{path} is no traffic plan: {error}; {_MAKE_PLAN}") from error
    if (plan.format, plan.version) != (_TRAFFIC_PLAN, 1):
        raise DataError(f"{path} is a {plan.format[:40]!r} of version {plan.version}, no traffic plan; {_MAKE_PLAN}")
    if len(plan.hosts) < world_size:
        raise DataError(f"{path}: hosts: {len(plan.hosts)} of them for {world_size} ranks; plan for one host a rank")
    rank_of = {host: number for number, host in enumerate(plan.hosts)}
    pieces: dict[int, list[_PlannedPiece]] = {}
    for flow in plan.assignment:
        if flow.source == plan.hosts[rank] and (peer := rank_of.get(flow.destination, rank)) < rank:
            pieces.setdefault(peer, []).extend(piece for piece in flow.pieces if piece.source_port)
    found = {peer: _dial_paths(path, plan.hosts[peer], planned) for peer, planned in pieces.items() if planned}
    if not any(piece.source_port for flow in plan.assignment for piece in flow.pieces):
        raise DataError(f"{path} names no source ports; {_MAKE_PLAN}")
    return found


_MAKE_PLAN = "write one with thinwire traffic plan --probe"


def _dial_paths(path: Path, host: str, pieces: Sequence[_PlannedPiece]) -> DialPaths:
    ports = {piece.destination_port for piece in pieces}
    port = next(iter(ports))
    if len(ports) > 1 or port is None:
        raise DataError(f"{path}: the pieces to {host} name {len(ports)} destination ports, expected one; {_MAKE_PLAN}")
    if len(pieces) > _MOST_DIAL_PATHS:
        raise DataError(
            f"{path}: {len(pieces)} connections to {host}, expected at most {_MOST_DIAL_PATHS}; plan fewer connections"
        )
    source_ports = tuple((piece.source_port or 0, *piece.spare_source_ports) for piece in pieces)
    total = sum(piece.share for piece in pieces)
    return DialPaths(source_ports=source_ports, shares=tuple(piece.share / total for piece in pieces), port=port)


def check_dial_paths(paths: Mapping[int, DialPaths], addresses: Mapping[int, Address]) -> None:
    """Check that planned connections lead to the ports that they were probed for.

    Raises:
        ConnectError: Names the replica and both ports.
    """
    for peer, planned in paths.items():
        if peer in addresses and addresses[peer].port != planned.port:
            raise ConnectError(
                f"the traffic plan holds for port {planned.port} of replica {peer}, which listens on port "
                f"{addresses[peer].port}; start all with --port-range {planned.port}-{planned.port}"
            )


def host_port(host: str, port: int | str) -> str:
    """Return an address and a port as one text; an IPv6 address stands in brackets.

    Example:
        >>> host_port("10.0.0.1", 29400), host_port("fd00::1", 29400)
        ('10.0.0.1:29400', '[fd00::1]:29400')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_host_port(text: str, *, what: str) -> Address:
    """Read what `host_port` returned.

    Raises:
        ValueError: It is neither.
    """
    found = _HOST_PORT.fullmatch(text.strip())
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        raise refusal(f"{what} cannot be read", got=repr(text[:60]), allowed="HOST:PORT or [IPV6]:PORT",
                      remedy="203.0.113.5:29400")  # fmt: skip
    return Address(host=found["host"].strip("[]"), port=int(found["port"]))


class ReachOptions(TypedDict, total=False):
    """Options of `connect` and `join` for a host behind a port forward or a firewall.

    Attributes:
        advertise: `HOST:PORT` that the others dial, which need not be an address of this host. With a port range, it
            stands for the range's first port, and the ports after it for those after that.
        port_range: `FIRST-LAST`: the only ports that this host listens on.
    """

    advertise: str | None
    port_range: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """Addresses at which this host listens, and that the others dial.

    Attributes:
        advertise: What the others dial; None for the address itself.
        ports: First and last port to listen on; None for any.
        relay: Where others meet this host too, and it meets them where it cannot dial them; None for nowhere.

    Example:
        >>> listen = ListenConfig(address="10.0.0.1", advertise=Address(host="203.0.113.5", port=5000), ports=(40, 49))
        >>> listen.advertised(42)
        Address(host='203.0.113.5', port=5002)
    """

    address: str
    advertise: Address | None = None
    ports: tuple[int, int] | None = None
    relay: RelayPlace | None = None

    @property
    def candidates(self) -> Sequence[int]:
        """Ports to try one after the other; 0 stands for a free one."""
        return (0,) if self.ports is None else range(self.ports[0], self.ports[1] + 1)

    def advertised(self, port: int) -> Address:
        """Return what the others dial to reach a port of this host."""
        if self.advertise is None:
            return Address(host=self.address, port=port)
        shift = 0 if self.ports is None else port - self.ports[0]
        return Address(host=self.advertise.host, port=self.advertise.port + shift)


def listen_config(
    *, address: str | None, interface: str | None = None, towards: str | None = None, advertise: str | None = None,
    port_range: str | None = None,
) -> ListenConfig:  # fmt: skip
    """Read the options by which a host is reached; see `own_address` and `ReachOptions`.

    Raises:
        ValueError: One cannot be read, or is not this host's.
        ConnectError: There is no route to `towards`.
    """
    shown = None if advertise is None else read_host_port(advertise, what="--advertise")
    ports = None if port_range is None else read_port_range(port_range)
    if shown is not None and ports is None:
        raise refusal("--advertise needs the port that this host listens on", got=advertise,
                      allowed="--advertise with --port-range",
                      remedy=f"--port-range {shown.port}-{shown.port}")  # fmt: skip
    if address in ("::", "0.0.0.0"):
        if shown is None:
            raise refusal(f"{address} stands for all addresses of this host, and none that others dial", got=address,
                          allowed="an address of this host, or --advertise HOST:PORT",
                          remedy="--advertise HOST:PORT too")  # fmt: skip
        own = address
    else:
        own = own_address(address=address, interface=interface, towards=towards)
    return ListenConfig(address=own, advertise=shown, ports=ports)


def read_port_range(text: str, *, what: str = "--port-range") -> tuple[int, int]:
    """Read `FIRST-LAST`, the value of an option.

    Raises:
        ValueError: It is no range of ports.

    Example:
        >>> read_port_range("40000-40010")
        (40000, 40010)
    """
    found = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text.strip())
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 < first <= last < 1 << 16:
        raise refusal(f"{what} is no range of ports", got=repr(text[:40]), allowed="FIRST-LAST, 1 to 65535",
                      remedy=f"{what} 40000-40010")  # fmt: skip
    return first, last


class RankEndpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Address of one rank, as it introduces itself to the others.

    Attributes:
        host: Equal for two ranks that share a kernel and a network namespace, and so reach each other's loopback.
        address: The IP address it advertises, or a name.
        port: A port on which it listens while the addresses are checked, or as long as it lives.
        secret: Fingerprint of the job's secret, empty where there is none.
        version: Of the format that its messages have.
    """

    rank: int
    replica: int
    hostname: str
    host: str
    address: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    secret: str = ""
    version: int = FORMAT_VERSION

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str, *, rank: int) -> RankEndpoint:
        """Read the text of a rank; it comes from the network and is not trusted.

        Raises:
            ConnectError: It is no endpoint, or another rank's.
        """
        try:
            if len(text) > _MAX_TEXT:
                raise ValueError(f"{len(text)} characters")
            found = msgspec.json.decode(text, type=cls)
            if not _NAME.fullmatch(found.address):
                ipaddress.IPv6Address(found.address)
            # names are shown in errors: a terminal must not obey them
            if not all(name.isprintable() for name in (found.hostname, found.host, found.secret)):
                raise ValueError("a field cannot be printed")
            if found.version != FORMAT_VERSION:
                raise ValueError(f"messages of version {found.version}, and this host reads {FORMAT_VERSION}")
            if found.rank != rank:
                raise ValueError(f"rank {found.rank}")
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            # the reason quotes the text
            reason = "".join(letter if letter.isprintable() else "?" for letter in str(error)[:_MAX_REASON])
            raise ConnectError(
                f"rank {rank} introduced itself in a way that this version does not understand ({reason}); run the "
                f"same thinwire on all hosts, and give each run a MASTER_PORT of its own"
            ) from None
        return found

    def describe(self) -> str:
        return f"replica {self.replica} (rank {self.rank}) on host {self.hostname}"


def host_identity() -> str:
    """Return a text that is equal for two processes exactly when they reach each other over loopback."""
    if not _BOOT_ID.exists():
        return socket.gethostname()
    # Containers on one machine share the kernel but not the loopback interface: the namespace tells them apart.
    return f"{_BOOT_ID.read_text().strip()}/{_NETWORK_NAMESPACE.stat().st_ino}"


def host_name() -> str:
    """Return what to call this host: its name and its first address, since hosts and containers may share a name."""
    shown = outer_addresses()
    return f"{socket.gethostname()} ({shown[0]})" if shown else socket.gethostname()


def clock_name() -> str:
    """Return a text that is equal for two processes whose `time.monotonic` is of one clock: those of one kernel."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()


def local_addresses() -> dict[str, tuple[str, ...]]:
    """Return the IPv4 addresses of each interface that has one, in the kernel's order."""
    found: dict[str, tuple[str, ...]] = {}
    for name, entries in psutil.net_if_addrs().items():
        addresses = tuple(entry.address for entry in entries if entry.family == socket.AF_INET)
        if addresses:
            found[name] = addresses
    return found


def outer_addresses() -> tuple[str, ...]:
    """Return the addresses by which other hosts may know this one: those of IPv4 first, then those of IPv6.

    Addresses of IPv6 that hold on one link only are left out: the same one may be several hosts' on different links.
    """
    entries = [entry for own in psutil.net_if_addrs().values() for entry in own]
    families = (socket.AF_INET, socket.AF_INET6)
    texts = [entry.address for family in families for entry in entries if entry.family == family]
    return tuple(text for text in texts if not _is_inner(ipaddress.ip_address(text)))


def _is_inner(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.is_loopback or (address.version == 6 and address.is_link_local)


def address_of(interface: str) -> str:
    """Return the first IPv4 address of an interface, or of IPv6 where it has no other.

    Raises:
        ValueError: There is no such interface, or it has no address.
    """
    found = local_addresses()
    if interface in found:
        return found[interface][0]
    for entry in psutil.net_if_addrs().get(interface, ()):
        if entry.family == socket.AF_INET6 and not ipaddress.ip_address(entry.address).is_link_local:
            return str(entry.address)
    if interface in psutil.net_if_addrs():
        raise ValueError(f"interface {interface!r} has no IPv4 address; those that have one: {_listing(found)}")
    raise ValueError(f"there is no interface {interface!r} on this host; those that exist: {_listing(found)}")


def interface_of(address: str) -> str:
    """Return the interface that holds an IPv4 address.

    Raises:
        ValueError: No interface of this host has it, or it is not its interface's first, the one gloo listens on.
    """
    found = local_addresses()
    for interface, addresses in found.items():
        if address == addresses[0]:
            return interface
        if address in addresses:
            raise ValueError(
                f"{address} is not the first address of {interface}, and gloo listens on the first; "
                f"use {addresses[0]}, or give {address} a label of its own (ip address add ... label {interface}:1)"
            )
    raise ValueError(f"no interface of this host has the address {address!r}; those that exist: {_listing(found)}")


def resolve(host: str) -> str:
    """Return the first IPv4 address of a host's name, or of IPv6 where it has no other; of an address, the address.

    Raises:
        ValueError: The name has none.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"{host!r} cannot be resolved to an address: {error}; use the address itself") from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def needs_ipv6(host: str) -> bool:
    """Return whether a host is reached over IPv6: it has no IPv4 address, or cannot be resolved yet."""
    try:
        return ":" in resolve(host)
    except ValueError:
        return False


def address_towards(host: str) -> str:
    """Return the local address from which packets to `host` would leave.

    Raises:
        ValueError: `host` cannot be resolved.
        ConnectError: There is no route to it.
    """
    target = resolve(host)
    with socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; the kernel only chooses the route.
            probe.connect((target, 9))
        except OSError as error:
            raise ConnectError(
                f"this host has no route to {host!r} ({target}): {error.strerror}; "
                f"check the address and the host's network"
            ) from None
        address: str = probe.getsockname()[0]
    # The kernel answers 127.0.0.1 for all of 127.0.0.0/8, and that is what the loopback interface holds.
    return address


def own_address(*, address: str | None, interface: str | None, towards: str | None = None) -> str:
    """Return the address that this host shows to the others.

    Args:
        address: The one that the user named, by number or name.
        interface: Or its interface.
        towards: Where neither is named: the host that packets must leave for. Without one the default route counts,
            and where there is none, the only address beside loopback; 127.0.0.1 where there is nothing else.

    Raises:
        ValueError: No interface holds it, or a name cannot be resolved, or which address counts cannot be told.
        ConnectError: There is no route to `towards`.
    """
    if address is not None:
        own = resolve(address)
        if ":" not in own:
            interface_of(own)
        elif not is_own(own):
            raise ValueError(f"no interface of this host has the address {address!r}; see: ip -6 address")
        return own
    if interface is not None:
        return address_of(interface)
    if towards is not None:
        return address_towards(towards)
    try:
        return address_towards(ANYWHERE)
    except ConnectError:
        held = [one for several in local_addresses().values() for one in several]
        outer = [one for one in held if not ipaddress.IPv4Address(one).is_loopback]
        if len(outer) > 1:
            raise ValueError(
                f"there is no default route, and which of {', '.join(outer)} the others reach cannot be told; name it "
                f"by --address or --interface"
            ) from None
        return outer[0] if outer else "127.0.0.1"


def is_own(host: str) -> bool:
    """Return whether a host's name or address is one of this host; a name that cannot be resolved is not."""
    try:
        own = ipaddress.ip_address(resolve(host))
    except ValueError:
        return False
    held = {entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    return own.is_loopback or str(own) in held


def free_port(address: str = "") -> int:
    """Return a port that is free now on an address, by default on all."""
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as trial:
        return int(trial.getsockname()[1])


def listen(address: str, *, backlog: int) -> socket.socket:
    """Listen on a free port of an address; the kernel completes connections without an accept."""
    try:
        return socket.create_server((address, 0), backlog=backlog)
    except OSError as error:
        raise ConnectError(f"this host cannot listen on its address {address}: {error.strerror}") from None


def first_unreachable(own: RankEndpoint, endpoints: Sequence[RankEndpoint], *, deadline_s: float) -> str:
    """Try every rank on another host and say what is wrong with the first that cannot be reached.

    Returns:
        An error's text naming both ends, the reason and the remedy; an empty text when all is well.
    """
    for endpoint in endpoints:
        if endpoint.host == own.host:
            continue
        if _is_loopback(endpoint.address):
            return (
                f"{endpoint.describe()} advertises {endpoint.address}, which host {own.hostname} cannot reach: it is a "
                f"loopback address; pass interface=... or address=... there (--interface, --address), "
                f"with an address that the others reach"
            )
        reason = _why_not(endpoint, deadline_s=deadline_s)
        if reason:
            return (
                f"{own.describe()} cannot reach {endpoint.describe()} at {endpoint.address}, port {endpoint.port}: "
                f"{reason}; {firewall_hint()}; or pass interface=... or address=... "
                f"(--interface, --address) with an address it can reach"
            )
    return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def firewall_hint() -> str:
    """Say which ports a firewall between the hosts has to leave open."""
    low, high = _PORT_RANGE.read_text().split() if _PORT_RANGE.exists() else ("32768", "60999")
    return (
        f"replicas listen on ephemeral TCP ports ({low} to {high} here), which a firewall must let pass between hosts "
        f"(--port-range names others)"
    )


def _why_not(endpoint: RankEndpoint, *, deadline_s: float) -> str:
    try:
        with socket.create_connection((endpoint.address, endpoint.port), timeout=deadline_s):
            return ""
    except TimeoutError:
        return f"the connection timed out after {deadline_s:g} s"
    except ConnectionRefusedError:
        return "the connection was refused"
    except OSError as error:
        no_route = error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)
        return "there is no route to it" if no_route else str(error.strerror)


def _listing(found: dict[str, tuple[str, ...]]) -> str:
    return ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in found.items()) or "none"
