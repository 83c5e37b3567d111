"""Which address a host shows, and what is said when the others cannot reach it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from msgspec.structs import replace
from processes import free_port

from thinwire.errors import ConnectError, DataError
from thinwire.transport import addresses
from thinwire.transport.addresses import DialPaths, RankEndpoint, read_dial_paths

OWN = RankEndpoint(rank=0, replica=0, hostname="ada", host="boot-a/1", address="127.0.0.1", port=1)
OTHER = RankEndpoint(rank=3, replica=1, hostname="bob", host="boot-b/1", address="192.0.2.7", port=4711)


@contextmanager
def full_server() -> Iterator[int]:
    """Hold a port that answers no more: its queue of connections is full."""
    with closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        port = server.getsockname()[1]
        waiting = []
        for _ in range(4):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
            waiting.append(client)
        yield port
        for client in waiting:
            client.close()


def test_loopback_is_found_by_name_and_by_address() -> None:
    assert addresses.address_of("lo") == "127.0.0.1"
    assert addresses.interface_of("127.0.0.1") == "lo"
    assert addresses.resolve("localhost") == "127.0.0.1"
    assert addresses.address_towards("127.0.0.1") == "127.0.0.1"


def test_an_unknown_interface_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"there is no interface 'nope0'.*lo \(127\.0\.0\.1"):
        addresses.address_of("nope0")


def test_an_interface_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"wan0": []})
    with pytest.raises(ValueError, match="interface 'wan0' has no IPv4 address; those that have one: none"):
        addresses.address_of("wan0")


def test_an_address_of_no_interface_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"no interface of this host has the address '192\.0\.2\.1'.*lo"):
        addresses.interface_of("192.0.2.1")


def test_a_second_address_is_refused_because_gloo_listens_on_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "local_addresses", lambda: {"eth0": ("10.0.0.1", "10.0.0.2")})
    with pytest.raises(ValueError, match=r"10\.0\.0\.2 is not the first address of eth0.*use 10\.0\.0\.1"):
        addresses.interface_of("10.0.0.2")


def test_a_name_that_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'no-such-host.invalid' cannot be resolved"):
        addresses.resolve("no-such-host.invalid")


def test_the_own_address_is_the_one_that_was_named_or_leads_to_the_others() -> None:
    assert addresses.own_address(address="localhost", interface=None) == "127.0.0.1"
    assert addresses.own_address(address=None, interface="lo") == "127.0.0.1"
    assert addresses.own_address(address=None, interface=None, towards="127.0.0.1") == "127.0.0.1"
    with pytest.raises(ValueError, match=r"203\.0\.113\.9"):
        addresses.own_address(address="203.0.113.9", interface=None)


@pytest.mark.parametrize(
    ("held", "own"),
    [({"lo": ("127.0.0.1",), "eth0": ("10.0.0.3",)}, "10.0.0.3"), ({"lo": ("127.0.0.1",)}, "127.0.0.1")],
)
def test_without_a_route_the_only_address_counts_and_none_is_guessed(
    held: dict[str, tuple[str, ...]], own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_route(host: str) -> str:
        raise ConnectError(f"no route to {host}")

    monkeypatch.setattr(addresses, "address_towards", no_route)
    monkeypatch.setattr(addresses, "local_addresses", lambda: held)
    assert addresses.own_address(address=None, interface=None) == own
    monkeypatch.setattr(addresses, "local_addresses", lambda: {**held, "eth1": ("10.1.0.3",), "eth2": ("10.2.0.3",)})
    with pytest.raises(ValueError, match=r"which of .*10\.1\.0\.3, 10\.2\.0\.3 the others reach cannot be told"):
        addresses.own_address(address=None, interface=None)


def test_others_may_know_a_host_by_ipv4_first_and_never_by_what_holds_on_one_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def entry(family: int, address: str) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=address)

    held = {
        "lo": [entry(socket.AF_INET, "127.0.0.1"), entry(socket.AF_INET6, "::1")],
        "eth0": [
            entry(socket.AF_INET6, "fe80::1%eth0"), entry(socket.AF_INET6, "2001:db8::5"),
            entry(socket.AF_PACKET, "02:00:00:00:00:01"), entry(socket.AF_INET, "169.254.0.3"),
        ],
    }  # fmt: skip
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: held)
    assert addresses.outer_addresses() == ("169.254.0.3", "2001:db8::5")
    assert addresses.host_name() == f"{socket.gethostname()} (169.254.0.3)"
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": held["lo"]})
    assert addresses.outer_addresses() == () and addresses.host_name() == socket.gethostname()


def test_two_processes_of_one_namespace_are_one_host() -> None:
    assert addresses.host_identity() == addresses.host_identity() != ""


def test_a_rank_of_the_same_host_needs_no_check_and_may_show_loopback() -> None:
    other = replace(OTHER, host=OWN.host, address="127.0.0.1", port=1)
    assert addresses.first_unreachable(OWN, [OWN, other], deadline_s=1) == ""


def test_a_loopback_address_on_another_host_is_named_with_the_remedy() -> None:
    text = addresses.first_unreachable(OWN, [OWN, replace(OTHER, address="127.0.1.1")], deadline_s=1)
    assert text.startswith("replica 1 (rank 3) on host bob advertises 127.0.1.1, which host ada cannot reach")
    assert "pass interface=... or address=..." in text


@pytest.fixture
def another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    # Loopback stands in for a real link: the check of the address's kind is what is left out.
    class NeverLoopback:
        def __init__(self, text: str) -> None:
            self.is_loopback = False

    monkeypatch.setattr(addresses.ipaddress, "IPv4Address", NeverLoopback)


@pytest.mark.usefixtures("another_address")
def test_a_rank_that_answers_is_reachable_without_anybody_accepting() -> None:
    with addresses.listen("127.0.0.1", backlog=2) as listener:
        other = replace(OTHER, address="127.0.0.1", port=listener.getsockname()[1])
        assert addresses.first_unreachable(OWN, [other], deadline_s=1) == ""


@pytest.mark.usefixtures("another_address")
def test_refusal_and_time_out_name_both_ends_the_reason_and_the_ports() -> None:
    closed = free_port()
    refused = addresses.first_unreachable(OWN, [replace(OTHER, address="127.0.0.1", port=closed)], deadline_s=1)
    with full_server() as full:
        late = addresses.first_unreachable(OWN, [replace(OTHER, address="127.0.0.1", port=full)], deadline_s=0.2)
    for text, reason in ((refused, "the connection was refused"), (late, "timed out after 0.2 s")):
        assert "replica 0 (rank 0) on host ada cannot reach replica 1 (rank 3) on host bob at 127.0.0.1" in text
        assert reason in text and "ephemeral TCP ports" in text


def test_listening_on_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(ConnectError, match=r"cannot listen on its address 192\.0\.2\.1"):
        addresses.listen("192.0.2.1", backlog=1)


def test_a_station_survives_its_note() -> None:
    assert RankEndpoint.from_json(OTHER.to_json(), rank=3) == OTHER


@pytest.mark.parametrize(
    "note",
    [
        "",
        "no json",
        "[]",
        "{}",
        json.dumps({"rank": 3}),
        json.dumps({**json.loads(OTHER.to_json()), "port": "4711"}),
        json.dumps({**json.loads(OTHER.to_json()), "port": 0}),
        json.dumps({**json.loads(OTHER.to_json()), "rank": 2}),
        json.dumps({**json.loads(OTHER.to_json()), "address": "bob:1"}),
        json.dumps({**json.loads(OTHER.to_json()), "host": 5}),
        json.dumps({**json.loads(OTHER.to_json()), "more": 5}),
        OTHER.to_json() + " " * 5000,
        "[" * 4000,
        json.dumps({**json.loads(OTHER.to_json()), "address": 167772162}),
        json.dumps({**json.loads(OTHER.to_json()), "hostname": "h\x1b[2J"}),
    ],
)
def test_a_foreign_note_is_refused_with_its_rank(note: str) -> None:
    with pytest.raises(ConnectError, match="rank 3 introduced itself in a way"):
        RankEndpoint.from_json(note, rank=3)


@pytest.mark.parametrize("text", ["10.77.0.1:29400", "host-a:1", "[fd00::7]:65535"])
def test_an_address_with_its_port_is_read_and_written(text: str) -> None:
    found = addresses.read_host_port(text, what="--advertise")
    assert addresses.host_port(found.host, found.port) == text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"advertise": "fd00::1:80", "port_range": "1-2"}, "--advertise cannot be read; got 'fd00::1:80'; allowed"),
        ({"advertise": "host:0", "port_range": "1-2"}, "--advertise cannot be read"),
        ({"advertise": "host:80"}, "got host:80; allowed --advertise with --port-range; try --port-range 80-80"),
        ({"port_range": "9-8"}, "--port-range is no range of ports; got '9-8'; allowed FIRST-LAST, 1 to 65535"),
        ({"port_range": "80"}, "--port-range is no range of ports"),
        ({"address": "::"}, ":: stands for all addresses of this host, and none that others dial"),
        ({"address": "fd00::dead"}, "no interface of this host has the address 'fd00::dead'"),
    ],
)
def test_an_option_by_which_a_host_is_reached_is_refused_with_the_remedy(options: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError) as error:
        addresses.listen_config(**{"address": "127.0.0.1", **options})  # type: ignore[arg-type]
    assert told in str(error.value)


def test_all_addresses_are_listened_on_where_another_is_advertised() -> None:
    listen = addresses.listen_config(address="::", advertise="[fd00::9]:50000", port_range="40000-40003")
    assert (listen.address, [*listen.candidates]) == ("::", [40000, 40001, 40002, 40003])
    assert listen.advertised(40002) == addresses.Address(host="fd00::9", port=50002)


def test_addresses_of_ipv6_are_found_like_those_of_ipv4() -> None:
    assert addresses.resolve("::1") == addresses.address_towards("::1") == "::1"
    assert addresses.is_own("::1") and addresses.needs_ipv6("::1") and not addresses.needs_ipv6("127.0.0.1")
    assert addresses.own_address(address="::1", interface=None) == "::1"


PIECE = {"share": 0.5, "source_port": 20_001, "spare_source_ports": [20_006], "destination_port": 29_600}
PLAN = {
    "format": "thinwire-traffic-plan", "version": 1, "hosts": ["a", "b", "c"],
    "assignment": [
        {"source": "c", "destination": "a", "pieces": [PIECE, {**PIECE, "share": 0.25, "source_port": 20_002}]},
        {"source": "a", "destination": "c", "pieces": [{**PIECE, "source_port": 20_009}]},
        {"source": "c", "destination": "b", "pieces": [{"share": 1.0, "source_port": None}]},
    ],
}  # fmt: skip


def test_a_rank_dials_those_below_it_from_the_ports_of_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN))
    found = read_dial_paths(path, rank=2, world_size=3)
    ports = ((20_001, 20_006), (20_002, 20_006))
    assert found == {0: DialPaths(source_ports=ports, shares=(2 / 3, 1 / 3), port=29_600)}
    assert read_dial_paths(path, rank=0, world_size=3) == {}, "the rank below listens"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": "thinwire-flows"}, "no traffic plan"),
        ({"version": 2}, "version 2"),
        ({"hosts": ["a", "c"]}, "2 of them for 3 ranks"),
        ({"assignment": []}, "no source ports"),
        ({"assignment": [{"source": "c", "destination": "a", "pieces": [{**PIECE, "source_port": 0}]}]}, "source_port"),
        ({"assignment": [{"source": "c", "destination": "a", "pieces": [{**PIECE, "share": 0}]}]}, "share"),
        (
            {"assignment": [{"source": "c", "destination": "a", "pieces": [{**PIECE, "destination_port": None}]}]},
            "destination ports",
        ),
        ({"assignment": [{"source": "c", "destination": "a", "pieces": [PIECE] * 17}]}, "at most 16"),
        ({"assignment": 7}, "assignment"),
    ],
)
def test_what_is_no_plan_is_one_error_with_the_file(tmp_path: Path, change: dict, problem: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**PLAN, **change}))
    with pytest.raises(DataError, match=problem) as found:
        read_dial_paths(path, rank=2, world_size=3)
    assert str(path) in str(found.value)


def test_a_plan_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read the traffic plan .*missing\.json"):
        read_dial_paths(tmp_path / "missing.json", rank=0, world_size=2)
