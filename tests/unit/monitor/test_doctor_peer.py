"""What the doctor says of the way to another host, with each fault made on purpose."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from thinwire.errors import ConnectError
from thinwire.monitor.doctor import checks, peer
from thinwire.monitor.doctor.checks import Verdict
from thinwire.monitor.doctor.peer import Attempt, Failure, Info, PathSize
from thinwire.transport.addresses import Address, listen_config
from thinwire.version import __version__

THERE = Address(host="10.77.0.2", port=29_400)


@pytest.fixture
def server() -> Iterator[Address]:
    with closing(socket.create_server(("127.0.0.1", 0), backlog=16)) as listener:
        yield Address(host="127.0.0.1", port=listener.getsockname()[1])


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.77.0.2:29400", "10.77.0.2", 29400),
        ("host-a:1", "host-a", 1),
        ("[::1]:80", "::1", 80),
        ("thinwire://10.77.0.2:29400/job?key=ab:cd", "10.77.0.2", 29400),
        ("tcp://host-a:65535", "host-a", 65535),
    ],
)
def test_addresses_and_join_strings_are_read(text: str, host: str, port: int) -> None:
    assert peer.parse_target(text) == (host, port)


@pytest.mark.parametrize(
    "text", ["", "host-a", "host-a:", ":29400", "host-a:0", "host-a:65536", "host-a:http", "::1:80"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="an address must look like HOST:PORT, with a port of 1 to 65535, got"):
        peer.parse_target(text)


def test_a_name_that_cannot_be_resolved_is_wrong() -> None:
    def unknown(name: str) -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    check, found = peer.check_name("host-b", find=unknown)
    assert check.verdict is Verdict.WRONG and found is None
    assert "host-b cannot be resolved" in check.found and "DNS" in check.remedy
    check, found = peer.check_name("::1")
    assert check.verdict is Verdict.WARNING and found == "::1"


@pytest.mark.parametrize(
    ("addresses", "verdict", "target", "said"),
    [
        (["10.77.0.2", "10.78.0.2"], Verdict.OK, "10.77.0.2", "host-b is 10.77.0.2, 10.78.0.2"),
        (["127.0.1.1"], Verdict.WARNING, "127.0.1.1", "that is this host itself"),
        (["0.0.0.0"], Verdict.WRONG, None, "nobody's address"),
    ],
)
def test_a_name_that_leads_astray_is_told(
    addresses: list[str], verdict: Verdict, target: str | None, said: str
) -> None:
    check, found = peer.check_name("host-b", find=lambda name: addresses)
    assert (check.verdict, found) == (verdict, target) and said in check.found


def test_a_real_connection_is_timed(server: Address) -> None:
    attempt = peer.try_connection(server, deadline_s=5)
    assert attempt.failure is None and 0 < attempt.seconds < 5
    assert peer.try_connection(server, deadline_s=5, source="127.0.0.1").failure is None
    check = peer.check_connection(server, attempt=lambda address: peer.try_connection(address, deadline_s=5))
    assert check.verdict is Verdict.OK and "(median of 5)" in check.found


def test_a_closed_port_is_refused_and_a_foreign_source_is_another_failure(server: Address) -> None:
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        closed = Address(host="127.0.0.1", port=other.getsockname()[1])
        assert peer.try_connection(closed, deadline_s=5).failure is Failure.REFUSED
    attempt = peer.try_connection(server, deadline_s=5, source="192.0.2.77")
    assert attempt.failure is Failure.OTHER and attempt.reason


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (TimeoutError("timed out"), Failure.TIMED_OUT),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), Failure.REFUSED),
        (OSError(errno.EHOSTUNREACH, "No route to host"), Failure.UNREACHABLE),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), Failure.UNREACHABLE),
        (PermissionError(errno.EPERM, "Operation not permitted"), Failure.OTHER),
    ],
)
def test_failures_are_told_apart(error: OSError, failure: Failure, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    assert peer.try_connection(THERE, deadline_s=3).failure is failure


@pytest.mark.parametrize(
    ("failure", "remedy"),
    [
        (Failure.REFUSED, "nothing listens on port 29400: start the run there first"),
        (Failure.TIMED_OUT, "a firewall drops port 29400"),
        (Failure.UNREACHABLE, "check the address, the cable, Wi-Fi or VPN"),
        (Failure.OTHER, "ping"),
    ],
)
def test_each_failure_has_a_remedy_of_its_own_and_is_tried_once(failure: Failure, remedy: str) -> None:
    tried = []

    def attempt(address: Address) -> Attempt:
        tried.append(address)
        return Attempt(seconds=1.0, failure=failure, reason="the reason")

    check = peer.check_connection(THERE, attempt=attempt)
    assert check.verdict is Verdict.WRONG and tried == [THERE]
    assert check.found == f"10.77.0.2, port 29400: {failure} (the reason)" and remedy in check.remedy


def test_a_link_that_fails_now_and_then_or_is_uneven_is_a_warning() -> None:
    lost = Attempt(seconds=3.0, failure=Failure.TIMED_OUT, reason="no answer within 3 s")
    attempts = iter([Attempt(seconds=0.02), lost, *[Attempt(seconds=0.02)] * 3])
    check = peer.check_connection(THERE, attempt=lambda address: next(attempts))
    assert check.verdict is Verdict.WARNING and "answers in 20.0 ms (median of 4), but 1 of 5 tries" in check.found
    attempts = iter([*[Attempt(seconds=0.02)] * 4, Attempt(seconds=1.02)])
    check = peer.check_connection(THERE, attempt=lambda address: next(attempts))
    assert check.verdict is Verdict.WARNING and "at most 1.0 s" in check.found


@pytest.mark.parametrize(
    ("found", "verdict", "said"),
    [
        (PathSize(path_bytes=None), Verdict.SKIPPED, "does not tell"),
        (PathSize(path_bytes=1500, is_large_answered=True, is_small_answered=True), Verdict.OK, "arrive whole"),
        (PathSize(path_bytes=1420, is_large_answered=False, is_small_answered=True), Verdict.WARNING, "1,420 bytes"),
        (PathSize(path_bytes=1200, is_large_answered=False, is_small_answered=True), Verdict.WARNING, "1280 is usual"),
        (PathSize(path_bytes=1500, is_large_answered=False, is_small_answered=True), Verdict.WARNING, "are lost where"),
        (PathSize(path_bytes=1500, is_large_answered=False, is_small_answered=False), Verdict.SKIPPED, "no UDP"),
    ],
)
def test_packets_that_do_not_pass_are_told(found: PathSize, verdict: Verdict, said: str) -> None:
    check = peer.check_path(found, mtu=1500, interface="eth0")
    assert check.verdict is verdict and said in check.found
    assert bool(check.remedy) == (verdict is Verdict.WARNING)


def test_packets_to_this_host_itself_are_answered_in_both_sizes() -> None:
    found = peer.measure_path("127.0.0.1", mtu=65_535)
    assert found == PathSize(path_bytes=65_535, is_large_answered=True, is_small_answered=True)
    assert peer.measure_path("127.0.0.1", mtu=70_000).is_large_answered is False, "larger than loopback carries"


def ask(*, version: str = __version__, ahead_s: float = 0.0) -> peer.Ask:
    return lambda address: Info(version=version, unix_s=1000.1 + ahead_s)


def clock() -> peer.Callable[[], float]:
    times = iter([1000.0, 1000.2])
    return lambda: next(times)


def test_the_same_version_and_clock_are_well() -> None:
    version, time = peer.check_info(THERE, ask=ask(), clock=clock())
    assert version.verdict is Verdict.OK and version.found == f"both run thinwire {__version__}"
    assert time.verdict is Verdict.OK and "known to 100.0 ms" in time.found


def test_another_version_is_wrong() -> None:
    version, _ = peer.check_info(THERE, ask=ask(version="9.9.9"), clock=clock())
    assert version.verdict is Verdict.WRONG and "9.9.9" in version.found and "same version" in version.remedy


@pytest.mark.parametrize(
    ("ahead_s", "verdict", "said"),
    [
        (1.09, Verdict.OK, "1.1 s ahead of ours"),
        (1.2, Verdict.WARNING, "1.2 s ahead of ours"),
        (-7200, Verdict.WARNING, "2:00:00 behind ours"),
    ],
)
def test_a_clock_that_is_off_by_more_than_the_round_trip_explains_is_told(
    ahead_s: float, verdict: Verdict, said: str
) -> None:
    _, check = peer.check_info(THERE, ask=ask(ahead_s=ahead_s), clock=clock())
    assert check.verdict is verdict and said in check.found
    assert ("set-ntp" in check.remedy) == (verdict is Verdict.WARNING)


@pytest.mark.parametrize(
    ("error", "said"), [(ConnectError("it speaks another language"), "another language"), (OSError(), "did not answer")]
)
def test_who_does_not_answer_is_skipped_with_the_reason(error: Exception, said: str) -> None:
    def mute(address: Address) -> Info:
        raise error

    for check in peer.check_info(THERE, ask=mute, clock=clock()):
        assert check.verdict is Verdict.SKIPPED and said in check.found
    for check in peer.check_info(THERE, ask=None):
        assert check.verdict is Verdict.SKIPPED and "only a job" in check.found


def test_an_advertised_address_is_dialled_and_one_that_leads_elsewhere_is_wrong() -> None:
    with socket.create_server(("127.0.0.1", 0)) as elsewhere, socket.create_server(("127.0.0.1", 0)) as free:
        own, other = free.getsockname()[1], elsewhere.getsockname()[1]
        free.close()

        def check(shown: int) -> checks.Check:
            listen = listen_config(
                address="127.0.0.1", advertise=f"127.0.0.1:{shown}", port_range=f"{own}-{own}"
            )  # fmt: skip
            return peer.check_advertised(listen, deadline_s=0.3)

        assert check(own).verdict is Verdict.OK and "leads here" in check(own).found
        wrong = check(other)
    assert wrong.verdict is Verdict.WRONG and f"127.0.0.1:{other} for port {own} of 127.0.0.1" in wrong.found
    assert f"forward 127.0.0.1:{other} to 127.0.0.1:{own}, or correct --advertise" in wrong.remedy


def test_a_replica_that_advertises_a_wrong_address_is_named() -> None:
    replicas = (("replica 0 on a", THERE), ("replica 1 on b", Address(host="fd00::9", port=4100)))
    info = peer.Info(version="0", unix_s=0.0, replicas=replicas)

    def attempt(address: Address) -> peer.Attempt:
        return peer.Attempt(seconds=0.1, failure=peer.Failure.TIMED_OUT if ":" in address.host else None, reason="r")

    check = peer.check_replicas(info, attempt=attempt)
    assert check.verdict is Verdict.WRONG and "--advertise" in check.remedy
    assert check.found == "replica 1 on b advertises [fd00::9]:4100: timed out (r)"
    assert peer.check_replicas(peer.Info(version="0", unix_s=0.0), attempt=attempt).verdict is Verdict.SKIPPED


def _route(interface: str, answer_s: float, gbit: float = 0.0) -> peer.Route:
    return peer.Route(interface=interface, address="10.0.0.1", answer_s=answer_s, speed_bits_per_s=1e9 * gbit)


@pytest.mark.parametrize(
    ("routes", "verdict", "said"),
    [
        ([_route("wg0", 0.012), _route("eth1", 0.0004)], Verdict.WARNING, "eth1 (10.0.0.1), which it answers in"),
        ([_route("wg0", 0.0004, 1), _route("eth1", 0.0003, 10)], Verdict.WARNING, "eth1 (10.0.0.1) at 10.0 Gbit/s"),
        ([_route("wg0", 0.0008), _route("eth1", 0.0003)], Verdict.OK, "none of eth1 reaches it faster"),
        ([_route("wg0", 0.012, 10), _route("eth1", 0.0003, 1)], Verdict.OK, "none of eth1 reaches it faster"),
        ([_route("wg0", 0.012)], Verdict.OK, "no interface but wg0"),
        ([_route("eth1", 0.012)], Verdict.SKIPPED, "could not be bound to wg0"),
    ],
)
def test_another_interface_that_reaches_the_peer_faster_is_recommended(
    routes: list[peer.Route], verdict: Verdict, said: str
) -> None:
    check = peer.check_routes("wg0", routes)
    assert check.verdict is verdict and said in check.found
    assert ("--interface eth1" in check.remedy) == (verdict is Verdict.WARNING)


def test_routes_are_measured_through_each_interface_that_reaches_the_peer(server: Address) -> None:
    held = {"lo": "127.0.0.1", "none0": "192.0.2.1"}
    found = peer.measure_routes(server, held, deadline_s=5.0)
    assert [one.interface for one in found] == ["lo"] and 0 < found[0].answer_s < 5.0
