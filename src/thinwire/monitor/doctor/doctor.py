"""Checks of `thinwire doctor`: common causes of failed starts, in order."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from thinwire.monitor.doctor import checks, peer
from thinwire.monitor.doctor.checks import Check, Chosen, Verdict, skipped
from thinwire.monitor.doctor.peer import Ask, Attempt
from thinwire.transport.addresses import Address, listen_config, local_addresses

_WHEN_UNKNOWN_BYTES = 1500
_STORE_ANSWER_S = 2.0  # other servers wait for more and answer nothing
_ROUTE_S = 1.0  # an interface that does not reach the other host by then is no choice
_MOST_PACKET_BYTES = 65_535  # of IPv4; the loopback interface says one more


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """Settings of the checks."""

    target: str | None = None  # HOST:PORT, or the string to join a run by; None for this host alone
    interface: str | None = None  # that of `--interface`
    address: str | None = None  # that of `--address`
    advertise: str | None = None  # that of `--advertise`
    port_range: str | None = None  # that of `--port-range`
    gloo_interface: str | None = None  # the variable GLOO_SOCKET_IFNAME
    secret: Path | None = None  # the secret's file
    out: Path = Path("runs")  # where runs go
    cache: Path = Path("~/.cache/thinwire")  # where tokens are kept
    deadline_s: float = 5.0  # seconds that a connection may take


def run_checks(config: DoctorConfig, *, ask: Ask | None = None) -> Iterator[Check]:
    """Check this machine, its network, and the path to another host; yield each check as it is done.

    Nothing is changed. A port is opened for a moment, and files are written that have no name.

    Raises:
        ValueError: The target is no address, a number is out of range, or interface and address are both given.

    Example:
        >>> names = [check.name for check in run_checks(DoctorConfig())]
        >>> "memory" in names, "TCP connection" in names
        (True, False)
    """
    if config.interface is not None and config.address is not None:
        raise ValueError(f"give --interface or --address, not both, got {config.interface!r} and {config.address!r}")
    if not config.deadline_s > 0:
        raise ValueError(f"the deadline of a connection must be above 0 s, got {config.deadline_s:g}; 5 s is usual")
    listen_config(address="127.0.0.1", advertise=config.advertise, port_range=config.port_range)  # refused now
    goal = None if config.target is None else peer.parse_target(config.target)
    return _all_checks(config, goal, ask=ask)


def has_passed(checks: list[Check]) -> bool:
    """Tell whether nothing is wrong; warnings and what was skipped do not count."""
    return all(check.verdict is not Verdict.WRONG for check in checks)


def _all_checks(config: DoctorConfig, goal: tuple[str, int] | None, *, ask: Ask | None) -> Iterator[Check]:
    builds = checks.installed()
    yield checks.check_versions(builds, needs_pyzmq=config.secret is not None)
    yield checks.check_devices(builds)
    yield checks.check_backends(builds)
    yield checks.check_secret(config.secret)
    yield checks.check_folder("run folder", config.out.expanduser())
    yield checks.check_folder("cache", config.cache.expanduser())
    yield checks.check_open_files()
    yield checks.check_memory()
    yield checks.check_speed()
    yield checks.check_own_name(socket.gethostname())
    target: Address | None = None
    if goal is not None:
        check, found = peer.check_name(goal[0])
        yield check
        target = None if found is None else Address(host=found, port=goal[1])
    chosen = checks.choose(
        interface=config.interface, address=config.address, gloo_interface=config.gloo_interface,
        target=None if target is None else target.host,
    )  # fmt: skip
    if isinstance(chosen, Check):
        yield chosen
        if target is not None:
            yield skipped("TCP connection", "this host has no address to come from")
        return
    yield checks.check_own_address(chosen, target=None if target is None else target.host)
    yield checks.check_port(chosen.address)
    yield checks.check_firewall()
    yield checks.check_mtu(chosen.interface)
    if config.advertise is not None:
        listen = listen_config(address=chosen.address, advertise=config.advertise, port_range=config.port_range)
        yield peer.check_advertised(listen, deadline_s=config.deadline_s)
    if target is not None:
        yield from _way_to(target, chosen, config, ask=ask)


def _way_to(target: Address, chosen: Chosen, config: DoctorConfig, *, ask: Ask | None) -> Iterator[Check]:
    source = chosen.address if config.interface or config.address else None

    def attempt(address: Address) -> Attempt:
        return peer.try_connection(address, deadline_s=config.deadline_s, source=source)

    connection = peer.check_connection(target, attempt=attempt)
    yield connection
    if connection.verdict is Verdict.WRONG:
        for name in ("torch store", "packet size", "other interfaces", "other version", "clock"):
            yield skipped(name, "there is no connection")
        return
    if "://" in (config.target or ""):
        yield skipped("torch store", "the address is that of an elastic run, which has none")
    else:
        is_store = peer.is_torch_store(target, deadline_s=min(config.deadline_s, _STORE_ANSWER_S))
        yield peer.check_store(target, is_store=is_store)
    status = psutil.net_if_stats().get(chosen.interface)
    mtu = _WHEN_UNKNOWN_BYTES if status is None else min(int(status.mtu), _MOST_PACKET_BYTES)
    yield peer.check_path(peer.measure_path(target.host, mtu=mtu), mtu=mtu, interface=chosen.interface)
    held = {name: own[0] for name, own in local_addresses().items() if checks.is_outer(name, own[0])}
    if not config.address and chosen.interface in held and ":" not in target.host:
        routes = peer.measure_routes(target, held, deadline_s=min(config.deadline_s, _ROUTE_S))
        yield peer.check_routes(chosen.interface, routes)
    else:
        yield skipped("other interfaces", "the address of this host or of the other one leaves no choice")
    yield from peer.check_info(target, ask=ask, attempt=attempt)
