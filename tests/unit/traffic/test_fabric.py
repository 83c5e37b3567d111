from __future__ import annotations

import json
from pathlib import Path

import pytest

from thinwire.errors import DataError
from thinwire.traffic import read_fabric, read_flows

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "traffic"


def test_the_examples_are_read() -> None:
    fabric = read_fabric(EXAMPLES / "fabric-2x4.json")
    assert (fabric.num_leaves, fabric.spines, fabric.uplink_bits_per_s) == (2, 4, 10e6)
    assert [flow.num_bytes for flow in read_flows(EXAMPLES / "flows-4.json")] == [12_500_000] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spines": 0}, "spines"),
        ({"spines": 10**9}, "spines"),
        ({"uplink_bits_per_s": "10"}, "no unit"),
        ({"uplink_bits_per_s": None}, "uplink_bits_per_s"),
        ({"port_bits_per_s": -1}, "port_bits_per_s"),
        ({"hosts": {"a": []}}, "hosts"),
        ({"hosts": {"a": [-1]}}, "hosts"),
        ({"rates": {"leaf-7/spine-0": 1e6}}, "leaf-7/spine-0"),
        ({"colour": "red"}, "colour"),
        ({"spine_addresses": [["10.80.0.1"]]}, "spine_addresses"),
        ({"spine_addresses": [["10.80.0.1"]] * 4}, "spine_addresses"),
        ({"version": 2}, "version"),
        ({"format": "thinwire-flows"}, "thinwire-fabric"),
    ],
)
def test_a_wrong_fabric_is_refused_by_file_and_field(tmp_path: Path, change: dict, message: str) -> None:
    path = tmp_path / "fabric.json"
    path.write_text(json.dumps({**json.loads((EXAMPLES / "fabric-2x4.json").read_text()), **change}))
    with pytest.raises(DataError, match=rf"fabric\.json.*{message}"):
        read_fabric(path)


@pytest.mark.parametrize(
    "flows", [[], [{"source": "a"}], [{"source": "a", "destination": "b", "bytes": 0}], "x", [1], [{"bytes": 1.5}]]
)
def test_wrong_flows_are_refused(tmp_path: Path, flows: object) -> None:
    path = tmp_path / "flows.json"
    path.write_text(json.dumps({"format": "thinwire-flows", "version": 1, "flows": flows}))
    with pytest.raises(DataError, match=r"flows\.json"):
        read_flows(path)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"format": "thinwire-flows", "version": 1}'])
def test_what_is_no_flows_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "flows.json"
    path.write_text(text)
    with pytest.raises(DataError):
        read_flows(path)
