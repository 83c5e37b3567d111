"""Source ports of a plan by probe files, and the probe where no router is on the path."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from thinwire.errors import DataError
from thinwire.traffic import Fabric, FabricFlow, plan_traffic
from thinwire.traffic.source_ports import (
    PathProbe,
    probe_source_port,
    probe_source_ports,
    read_probes,
    with_source_ports,
)

ADDRESSES = (("10.80.0.1", "10.90.0.1"), ("10.80.0.2",))
FABRIC = Fabric(
    spines=2, uplink_bits_per_s=1e7, port_bits_per_s=1e8, hosts={"a": (0,), "b": (0,), "c": (1,)},
    spine_addresses=ADDRESSES,
)  # fmt: skip
ROUTERS = {"20000": "10.80.0.1", "20001": "10.80.0.2", "20002": "10.90.0.1", "20003": "10.80.0.2"}
PROBE = PathProbe(source="c", destination_port=29_600, routers={"a": ROUTERS})


def flow(source: str, destination: str, connections: int = 1) -> FabricFlow:
    return FabricFlow(source=source, destination=destination, num_bytes=1000, connections=connections)


def test_every_connection_gets_a_port_of_its_own_on_its_spine() -> None:
    plan = with_source_ports(plan_traffic(FABRIC, [flow("c", "a", 2)], method="colour"), [PROBE])
    spine_of = {address: spine for spine, addresses in enumerate(ADDRESSES) for address in addresses}
    first, second = plan.pieces[0]
    assert {first.spine, second.spine} == {0, 1}
    for piece in (first, second):
        assert piece.destination_port == 29_600
        assert [spine_of[ROUTERS[str(port)]] for port in piece.source_ports] == [piece.spine] * 2
    assert set(first.source_ports).isdisjoint(second.source_ports)


def test_flows_below_a_leaf_and_from_hosts_without_a_probe_stay_without_ports() -> None:
    plan = with_source_ports(plan_traffic(FABRIC, [flow("a", "b"), flow("a", "c")], method="colour"), [PROBE])
    assert [piece.source_ports for row in plan.pieces for piece in row] == [(), ()]


def test_a_path_that_no_probed_port_takes_is_named() -> None:
    probe = PathProbe(source="c", destination_port=29_600, routers={"a": {"20000": "10.80.0.1"}})
    with pytest.raises(ValueError, match=r"no probed source port from c to a takes spine-1; got 1 ports"):
        with_source_ports(plan_traffic(FABRIC, [flow("c", "a", 2)], method="colour"), [probe])


def test_a_router_that_is_no_spine_is_named() -> None:
    probe = PathProbe(source="c", destination_port=29_600, routers={"a": {"20000": "192.0.2.7"}})
    with pytest.raises(ValueError, match=r"no spine of the fabric; got 192\.0\.2\.7"):
        with_source_ports(plan_traffic(FABRIC, [flow("c", "a")], method="colour"), [probe])


def test_a_fabric_without_addresses_is_refused() -> None:
    bare = Fabric(spines=2, uplink_bits_per_s=1e7, port_bits_per_s=1e8, hosts=FABRIC.hosts)
    with pytest.raises(ValueError, match="spine_addresses"):
        with_source_ports(plan_traffic(bare, [flow("c", "a")], method="colour"), [PROBE])


def test_probe_files_of_a_folder_are_read(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(PROBE.to_json()))
    assert read_probes([tmp_path]) == read_probes([tmp_path / "c.json"]) == [PROBE]


@pytest.mark.parametrize(
    "change",
    [
        {"destination_port": 0}, {"destination_port": "x"}, {"routers": []}, {"routers": {"a": {"0": "10.0.0.1"}}},
        {"routers": {"a": {"70000": "10.0.0.1"}}}, {"routers": {"a": {"1": "router"}}}, {"more": 1}, {"version": 2},
        {"routers": {"a": {"9" * 5000: "10.0.0.1"}}},
    ],
)  # fmt: skip
def test_what_is_no_probe_is_refused_by_file(tmp_path: Path, change: dict) -> None:
    path = tmp_path / "probe.json"
    path.write_text(json.dumps({**PROBE.to_json(), **change}))
    with pytest.raises(DataError, match=r"probe\.json"):
        read_probes([path])
    with pytest.raises(DataError, match="no probe files"):
        read_probes([])


def test_a_host_without_routers_on_the_way_answers_for_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        source_port = free.getsockname()[1]
        free.close()
        assert probe_source_port("127.0.0.1", there.getsockname()[1], source_port=source_port) is None
        # a port in use is passed over
        assert probe_source_ports("127.0.0.1", 1, source_ports=[there.getsockname()[1]], timeout_s=0.05) == {}
