"""Checks of `thinwire doctor ADDRESS` on the way to another host: name, TCP, packet sizes, version, clock.

Each check takes what it judges as values, or as functions that a test can replace.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import secrets
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

import psutil

from thinwire.errors import ThinwireError
from thinwire.monitor.doctor.checks import (
    LEAST_MTU,
    Check,
    FindAddresses,
    addresses_of_name,
    ok,
    skipped,
    warning,
    wrong,
)
from thinwire.transport.addresses import Address, ListenConfig, firewall_hint, host_port
from thinwire.units import format_rate, format_seconds
from thinwire.version import __version__

ATTEMPTS = 5
FASTER_TIMES = 2.0  # from which on another interface is recommended
_FASTER_S = 1e-3  # answers that differ by less are of one network
MOST_SKEW_S = 1.0
_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*://")
_TOKEN_BYTES = 16
_HEADERS_BYTES = 28  # IPv4 and UDP
_SMALL_BYTES, _TRIES, _ECHO_S = 100, 3, 1.0
# What a client of torch's TCPStore sends first: the query VALIDATE with its magic number, then PING with a nonce that
# the server sends back (torch/csrc/distributed/c10d/TCPStoreBackend.hpp).
_STORE_VALIDATE, _STORE_PING, _STORE_MAGIC, _STORE_NONCE = 0, 13, 0x3C85F7CE, 0x7E57_0001
_STORE_QUERY = struct.Struct("<BI")
_STORE_ANSWER = struct.Struct("<I")
_UNUSED_PORT = 33_434  # as traceroute: hardly anybody listens there, so the host's kernel answers
# Linux's numbers, which Python does not name
_IP_MTU_DISCOVER, _IP_PMTUDISC_DO, _IP_MTU = 10, 2, 14


class Failure(StrEnum):
    """Kinds of a failed connection."""

    REFUSED = "refused"
    TIMED_OUT = "timed out"
    UNREACHABLE = "unreachable"
    OTHER = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try to connect."""

    seconds: float  # how long it took
    failure: Failure | None = None  # how it failed, None where it did not
    reason: str = ""  # the system's word for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """Reply of another host about itself."""

    version: str  # its thinwire
    unix_s: float  # its clock, in seconds since 1970 (UTC)
    # what its replicas advertise: a name for each, and where it is dialled
    replicas: tuple[tuple[str, Address], ...] = ()


Ask = Callable[[Address], Info]
Try = Callable[[Address], Attempt]


def parse_target(text: str) -> tuple[str, int]:
    """Read HOST:PORT, or a string to join a run by, which is a URL with both: SCHEME://HOST:PORT/...

    Raises:
        ValueError: There is no host or no port in it.

    Example:
        >>> parse_target("10.77.0.1:29400"), parse_target("thinwire://host-a:4000/job?key=1")
        (('10.77.0.1', 29400), ('host-a', 4000))
    """
    parts = urlsplit(text if _SCHEME.match(text) else f"//{text}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise ValueError(f"an address must look like HOST:PORT, with a port of 1 to 65535, got {text!r}")
    return host, port


def check_name(host: str, *, find: FindAddresses = addresses_of_name) -> tuple[Check, str | None]:
    """Resolve the other host's name.

    Returns:
        The check, and the first address where there is one.
    """
    name = "name of the address"
    try:
        addresses = find(host)
    except OSError as error:
        remedy = "check its spelling and this host's DNS (/etc/resolv.conf), or use the address itself"
        return wrong(name, f"{host} cannot be resolved to an address: {error}", remedy=remedy), None
    found = f"{host} is {', '.join(addresses)}"
    if ipaddress.ip_address(addresses[0]).is_loopback:
        return warning(
            name, f"{found}: that is this host itself",
            remedy="to reach another host, use an address that it shows to the others; see /etc/hosts",
        ), addresses[0]  # fmt: skip
    if ipaddress.ip_address(addresses[0]).is_unspecified:
        remedy = "use the address that the other host shows to this one"
        return wrong(name, f"{found}: that is nobody's address, only a word for all of one's own", remedy=remedy), None
    return ok(name, found), addresses[0]


def try_connection(address: Address, *, deadline_s: float, source: str | None = None) -> Attempt:
    """Open a TCP connection and close it, with no word said."""
    began_s = time.perf_counter()
    failure, reason = None, ""
    try:
        with socket.create_connection(
            (address.host, address.port), timeout=deadline_s, source_address=None if source is None else (source, 0)
        ):
            pass
    except TimeoutError:
        failure, reason = Failure.TIMED_OUT, f"no answer within {deadline_s:g} s"
    except ConnectionRefusedError as error:
        failure, reason = Failure.REFUSED, str(error.strerror)
    except OSError as error:
        is_far = error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
        failure, reason = Failure.UNREACHABLE if is_far else Failure.OTHER, str(error.strerror or error)
    return Attempt(seconds=time.perf_counter() - began_s, failure=failure, reason=reason)


def check_connection(address: Address, *, attempt: Try) -> Check:
    """Connect a few times, or once where the first try fails."""
    name, where = "TCP connection", f"{address.host}, port {address.port}"
    tried = [attempt(address)]
    while tried[0].failure is None and len(tried) < ATTEMPTS:
        tried.append(attempt(address))
    times_s = [one.seconds for one in tried if one.failure is None]
    failed = [one for one in tried if one.failure is not None]
    if not times_s:
        return wrong(name, f"{where}: {failed[0].failure} ({failed[0].reason})", remedy=_remedy(failed[0], address))
    found = f"{where} answers in {format_seconds(statistics.median(times_s))} (median of {len(times_s)})"
    if failed:
        what = f"{found}, but {len(failed)} of {len(tried)} tries failed: {failed[0].failure} ({failed[0].reason})"
        return warning(name, what, remedy="the link loses packets, or the other side is too busy to answer; try again")
    if max(times_s) > 10 * statistics.median(times_s) + 0.5:
        what = f"{found}, at most {format_seconds(max(times_s))}"
        return warning(name, what, remedy="the link is full or loses packets; measure it with thinwire probe")
    return ok(name, found)


def _remedy(attempt: Attempt, address: Address) -> str:
    if attempt.failure is Failure.REFUSED:
        return (
            f"the host is there, and nothing listens on port {address.port}: start the run there first, check the "
            f"port, and that it listens on this address and not on 127.0.0.1 alone; a rejecting firewall looks the same"
        )
    if attempt.failure is Failure.TIMED_OUT:
        return (
            f"nobody answers: the host is off or its link is cut, the address belongs to another network (behind NAT, "
            f"use a VPN), or a firewall drops port {address.port}; {firewall_hint()}"
        )
    if attempt.failure is Failure.UNREACHABLE:
        return (
            "no host has this address, or no way leads there: check the address, the cable, Wi-Fi or VPN at both ends"
        )
    return "see the reason; try: ping, ip route get"


def is_torch_store(address: Address, *, deadline_s: float) -> bool:
    """Tell whether torch's TCPStore answers at an address; it is asked for an echo, and nothing is read or changed."""
    hello = _STORE_QUERY.pack(_STORE_VALIDATE, _STORE_MAGIC) + _STORE_QUERY.pack(_STORE_PING, _STORE_NONCE)
    answer = b""
    try:
        with socket.create_connection((address.host, address.port), timeout=deadline_s) as connection:
            connection.sendall(hello)
            end_s = time.monotonic() + deadline_s
            while len(answer) < _STORE_ANSWER.size and (left_s := end_s - time.monotonic()) > 0:
                connection.settimeout(left_s)
                received = connection.recv(_STORE_ANSWER.size - len(answer))
                if not received:
                    break
                answer += received
    except OSError:
        return False
    return answer == _STORE_ANSWER.pack(_STORE_NONCE)


def check_store(address: Address, *, is_store: bool) -> Check:
    """Say what an open store of torch's exposes."""
    name, where = "torch store", f"{address.host}, port {address.port}"
    if not is_store:
        return ok(name, f"no store of torch answers at {where}")
    return warning(
        name,
        f"a store of torch answers at {where} and authenticates no one: any peer that reaches it can read and "
        f"overwrite it. A store that torch opens itself listens on every interface, and a launcher with "
        f"--rdzv-backend=c10d or --standalone unpickles what lies there: a stranger runs code as its user",
        remedy=f"let a firewall or VPN pass port {address.port} between the hosts of the run only, and start torchrun "
        f"with --master-addr and --master-port (static rendezvous, which unpickles nothing); or use thinwire train "
        f"--elastic and thinwire join, which need no store",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSize:
    """Packet sizes that a path carries."""

    path_bytes: int | None  # the largest packet that the kernel takes the path to carry; None if unknown
    # whether the other host answered a packet of the interface's full size; None: not tried
    is_large_answered: bool | None = None
    is_small_answered: bool | None = None  # the same for a small packet


def measure_path(address: str, *, mtu: int) -> PathSize:
    """Send packets that may not be cut to an unused UDP port over IPv4; the other host's kernel says that they came."""
    if not sys.platform.startswith("linux") or ":" in address:
        return PathSize(path_bytes=None)
    small, _ = _echo(address, _SMALL_BYTES)
    large, path_bytes = _echo(address, mtu)
    return PathSize(path_bytes=path_bytes, is_large_answered=large, is_small_answered=small)


def _echo(address: str, size: int) -> tuple[bool, int | None]:
    """Return whether a packet of a size was answered, and the path's size as the kernel knows it afterwards."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DO)
        probe.settimeout(_ECHO_S)
        try:
            probe.connect((address, _UNUSED_PORT))
        except OSError:
            return False, None
        answered = False
        for _ in range(_TRIES):
            try:
                probe.send(bytes(max(0, size - _HEADERS_BYTES)))
                probe.recv(1)
                answered = True
            except OSError as error:  # "nobody listens there" is the answer that is hoped for
                answered = isinstance(error, ConnectionRefusedError)
            if answered:
                break
        try:
            return answered, probe.getsockopt(socket.IPPROTO_IP, _IP_MTU)
        except OSError:
            return answered, None


def check_path(found: PathSize, *, mtu: int, interface: str) -> Check:
    """Judge whether full packets pass."""
    name = "packet size"
    size = found.path_bytes
    if size is None:
        return skipped(name, "this system does not tell the size of packets on the path")
    if size < mtu:
        narrow = f"the path carries packets of {size:,} bytes, the interface {interface} sends {mtu:,}"
        if size < LEAST_MTU:
            return warning(name, f"{narrow}; {LEAST_MTU} is usual", remedy="check the tunnels on the path")
        return warning(
            name, narrow, remedy=f"the kernels adapt; if transfers hang: ip link set dev {interface} mtu {size}"
        )
    if found.is_small_answered and found.is_large_answered is False:
        return warning(
            name, f"packets of {mtu:,} bytes are lost where small ones arrive: a part of the path cannot carry them, "
            f"and does not say so",
            remedy=f"make packets smaller on both hosts: ip link set dev {interface} mtu {LEAST_MTU}; until then a job "
            "hangs in large messages while heartbeats pass, which thinwire diagnose shows as a communication hang",
        )  # fmt: skip
    if not found.is_large_answered:
        return skipped(
            name, f"the other host answers no UDP, so full packets could not be tried; {mtu:,} bytes are assumed"
        )
    return ok(name, f"packets of {mtu:,} bytes arrive whole")


def check_advertised(listen: ListenConfig, *, deadline_s: float) -> Check:
    """Listen on the first port of a host, and dial what the others would dial for it."""
    name = "advertised address"
    try:
        listener = socket.create_server(
            (listen.address, listen.candidates[0]), family=socket.AF_INET6 if ":" in listen.address else socket.AF_INET
        )
    except OSError as error:
        port = listen.candidates[0]
        return warning(
            name, f"port {port} of {listen.address} cannot be opened for the test: {error.strerror}",
            remedy="where a run uses it, look with thinwire doctor HOST:PORT from another host",
        )  # fmt: skip
    with listener:
        port = int(listener.getsockname()[1])
        shown = listen.advertised(port)
        where = f"{host_port(shown.host, shown.port)} for port {port} of {listen.address}"
        try:
            with socket.create_connection((shown.host, shown.port), timeout=deadline_s) as connection:
                token = secrets.token_bytes(_TOKEN_BYTES)
                connection.sendall(token)
                listener.settimeout(deadline_s)
                with listener.accept()[0] as accepted:
                    accepted.settimeout(deadline_s)
                    is_own = accepted.recv(_TOKEN_BYTES, socket.MSG_WAITALL) == token
        except OSError as error:
            why = "timed out" if isinstance(error, TimeoutError) else error.strerror or str(error)
            return wrong(
                name, f"{where} does not lead to this host: {why}",
                remedy=f"forward {host_port(shown.host, shown.port)} to {host_port(listen.address, port)}, or correct "
                f"--advertise; a router may not loop back, then look with thinwire doctor from another host",
            )  # fmt: skip
    if is_own:
        return ok(name, f"{where} leads here")
    return wrong(name, f"{where} leads to another program", remedy="correct --advertise or the forward")


def check_replicas(info: Info, *, attempt: Try) -> Check:
    """Dial each replica of a run at the address that it advertises."""
    name = "advertised addresses"
    tried = {whose: (address, attempt(address)) for whose, address in info.replicas}
    lost = [
        f"{whose} advertises {host_port(address.host, address.port)}: {found.failure} ({found.reason})"
        for whose, (address, found) in tried.items() if found.failure is not None
    ]  # fmt: skip
    if not tried:
        return skipped(name, "the run has no replicas yet")
    if lost:
        return wrong(
            name, "; ".join(lost[:5]),
            remedy="correct --advertise there (or --address), the port forward, or the firewall of that host",
        )  # fmt: skip
    return ok(name, f"all {len(tried)} replicas answer where they say")


def check_info(
    address: Address, *, ask: Ask | None, clock: Callable[[], float] = time.time, attempt: Try | None = None
) -> list[Check]:
    """Compare the other host's version and clock with ours, and dial its replicas."""
    if ask is None:
        reason = "only a job's coordinator tells them, to those with its secret: give the words to join by, or --secret"
        return [skipped("other version", reason), skipped("clock", reason)]
    began_s, info = clock(), None
    problem = "it did not answer"
    with contextlib.suppress(OSError):
        try:
            info = ask(address)
        except ThinwireError as error:
            problem = str(error)
    ended_s = clock()
    if info is None:
        return [skipped("other version", problem), skipped("clock", problem)]
    version = ok("other version", f"both run thinwire {__version__}") if info.version == __version__ else wrong(
        "other version", f"it runs thinwire {info.version}, this host {__version__}",
        remedy="install the same version on all hosts",
    )  # fmt: skip
    skew_s, trip_s = info.unix_s - (began_s + ended_s) / 2, ended_s - began_s
    direction = "ahead of" if skew_s > 0 else "behind"
    found = f"its clock is {format_seconds(abs(skew_s))} {direction} ours, known to {format_seconds(trip_s / 2)}"
    other_clock = ok("clock", found) if abs(skew_s) <= MOST_SKEW_S + trip_s / 2 else warning(
        "clock", f"{found}; logs of both cannot be put beside each other",
        remedy="let both keep time by NTP: timedatectl set-ntp true",
    )  # fmt: skip
    return [version, other_clock, *([] if attempt is None else [check_replicas(info, attempt=attempt)])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Path to another host through one interface."""

    interface: str  # its name
    address: str  # of this host, on it
    answer_s: float  # median time of a TCP connection
    speed_bits_per_s: float = 0.0  # of the interface; 0 if the system does not tell

    def __str__(self) -> str:
        speed = f" at {format_rate(self.speed_bits_per_s)}" if self.speed_bits_per_s else ""
        return f"{self.interface} ({self.address}){speed}, which it answers in {format_seconds(self.answer_s)}"


def check_routes(chosen: str, routes: Sequence[Route]) -> Check:
    """Compare the interfaces that reach the other host."""
    name = "other interfaces"
    own = next((one for one in routes if one.interface == chosen), None)
    others = [one for one in routes if one.interface != chosen]
    if own is None:
        return skipped(name, f"connections could not be bound to {chosen}, so interfaces cannot be compared")
    if not others:
        return ok(name, f"no interface but {chosen} reaches the other host")
    best = max(others, key=lambda one: (_times_faster(one, own), -one.answer_s))
    if _times_faster(best, own) < FASTER_TIMES:
        return ok(name, f"none of {', '.join(one.interface for one in others)} reaches it faster than {chosen}")
    return warning(
        name, f"{best} is faster than {own}",
        remedy=f"--interface {best.interface} on this host, and the interface of the same network on the other one; "
        f"GLOO_SOCKET_IFNAME={best.interface} for a job without thinwire",
    )  # fmt: skip


def _times_faster(one: Route, other: Route) -> float:
    """Return how many times faster a route is: by the speeds of both interfaces, or by its answers."""
    by_speed = one.speed_bits_per_s / other.speed_bits_per_s if one.speed_bits_per_s and other.speed_bits_per_s else 1.0
    is_near = other.answer_s - one.answer_s < _FASTER_S
    # a slower interface that answers sooner is not faster
    return by_speed if is_near or by_speed < 1 else max(by_speed, other.answer_s / max(one.answer_s, 1e-9))


def measure_routes(address: Address, held: Mapping[str, str], *, deadline_s: float) -> list[Route]:
    """Connect to another host through each interface of this one."""
    routes = []
    for interface, own in held.items():
        times_s, until_s = list[float](), time.monotonic() + deadline_s
        while len(times_s) < _TRIES and (left_s := until_s - time.monotonic()) > 0:
            took_s = _connect_through(interface, own, address, deadline_s=left_s)
            if took_s is None:
                break
            times_s.append(took_s)
        status = psutil.net_if_stats().get(interface)
        if len(times_s) == _TRIES:
            routes.append(Route(
                interface=interface, address=own, answer_s=statistics.median(times_s),
                speed_bits_per_s=1e6 * status.speed if status is not None else 0.0,
            ))  # fmt: skip
    return routes


def _connect_through(interface: str, own: str, address: Address, *, deadline_s: float) -> float | None:
    """Return the seconds of a connection over one interface; None if it does not reach the other host."""
    began_s = time.perf_counter()
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(deadline_s)
            if hasattr(socket, "SO_BINDTODEVICE"):  # else the kernel may take another interface
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
            connection.bind((own, 0))
            connection.connect((address.host, address.port))
        except OSError:
            return None
    return time.perf_counter() - began_s
