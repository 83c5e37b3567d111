"""`cluster.json`: what is read is what was written, and nothing else is taken for a cluster."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import DataError
from thinwire.planning.cluster import Cluster, Machine, Wire, load_cluster, save_cluster

HOME = Machine(
    name="home", flops_per_s=2e13, memory_bytes=24e9, up_bits_per_s=20e6, down_bits_per_s=1e8, latency_s=0.01
)
OFFICE = Machine(name="office", up_bits_per_s=1e9, down_bits_per_s=1e9, latency_s=0.002)
GOOD: dict[str, Any] = {
    "format": "thinwire-cluster",
    "version": 1,
    "replicas": [{"name": "a", "up_bits_per_s": "5mbit", "memory_bytes": "24 GB"}, {"name": "b", "up_bits_per_s": 1e6}],
    "links": [{"source": "a", "destination": "b", "bandwidth_bits_per_s": "4mbit", "latency_s": "20ms"}],
}


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    wires = (Wire(source="home", destination="office", bandwidth_bits_per_s=18e6, latency_s=0.02),)
    cluster = Cluster(machines=(HOME, OFFICE), wires=wires)
    save_cluster(cluster, tmp_path / "cluster.json")
    assert load_cluster(tmp_path / "cluster.json") == cluster
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.json"]


def test_a_pair_has_its_own_link_or_what_two_accesses_leave() -> None:
    wires = (Wire(source="home", destination="office", bandwidth_bits_per_s=18e6, latency_s=0.5),)
    cluster = Cluster(machines=(HOME, OFFICE), wires=wires)
    assert cluster.wire("home", "office").bandwidth_bits_per_s == 18e6
    back = cluster.wire("office", "home")
    assert (back.bandwidth_bits_per_s, back.latency_s) == (1e8, 0.012)


def test_texts_bring_their_units() -> None:
    found = Cluster.from_json(GOOD)
    assert found.machines[0].up_bits_per_s == 5e6 and found.machines[0].memory_bytes == 24e9
    assert found.wires[0].bandwidth_bits_per_s == 4e6 and found.wires[0].latency_s == 0.02


def changed(path: str, value: object) -> dict[str, Any]:
    content = copy.deepcopy(GOOD)
    *way, last = path.split(".")
    place: Any = content
    for key in way:
        place = place[int(key)] if isinstance(place, list) else place[key]
    if value is ...:
        del place[last]
    elif isinstance(place, list):
        place[int(last)] = value
    else:
        place[last] = value
    return content


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "this is no cluster"),
        (changed("version", 2), "version 2; this thinwire reads 1"),
        (changed("replicas", []), "at least one machine"),
        (changed("replicas", {}), '"replicas" must be a list'),
        (changed("speed", 3), "'speed', which means nothing here"),
        (changed("replicas.0.name", ...), "replicas[0] lacks 'name'"),
        (changed("replicas.0.name", "b"), "'b' twice; rename"),
        (changed("replicas.0.name", 7), "replicas[0].name must be a text"),
        (changed("replicas.0.memory_gb", 3), "'memory_gb', which means nothing here; use memory_bytes"),
        (changed("replicas.0.up_bits_per_s", -1), "replicas[0].up_bits_per_s must be above 0, got -1"),
        (changed("replicas.0.up_bits_per_s", True), "must be a finite number, got True"),
        (changed("replicas.0.up_bits_per_s", 10**400), "up_bits_per_s must be a finite number, got 1000"),
        (changed("replicas.0.up_bits_per_s", float("nan")), "must be a finite number, got nan"),
        (changed("replicas.0.up_bits_per_s", "9e999mbit"), "must be a finite number, got '9e999mbit'"),
        (changed("replicas.0.up_bits_per_s", "5 parsec"), "the rate cannot be read; got '5 parsec'"),
        (changed("replicas.0.memory_bytes", "much"), "the size cannot be read; got 'much'"),
        (changed("replicas.0.flops_per_s", "fast"), "flops_per_s must be a number, got 'fast'"),
        (changed("replicas.1.up_bits_per_s", ...), "how fast 'b' reaches 'a'; give that link, or up_bits_per_s of 'b'"),
        (changed("links.0.latency_s", -0.1), "links[0].latency_s must be at least 0"),
        (changed("links.0.bandwidth_bits_per_s", 0), "links[0].bandwidth_bits_per_s must be above 0"),
        (changed("links.0.destination", "c"), "names 'c', which is no replica"),
        (changed("links.0.destination", "a"), "leads from 'a' to itself"),
        (changed("links", [GOOD["links"][0]] * 2), "from 'a' to 'b' is there twice"),
        (changed("links", [3]), "links[0] must be an object, got 3"),
    ],
)
def test_what_is_wrong_is_named_with_its_place_and_value(content: object, said: str) -> None:
    with pytest.raises(DataError) as raised:
        Cluster.from_json(content)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "cannot read"), ("{", "is no JSON"), ('{"a": NaN}', "NaN is no number"), ("[" * 9999, "JSON")],
)
def test_a_file_that_cannot_be_read_says_which_and_how_to_make_one(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "cluster.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=r"cluster\.json.*thinwire probe") as raised:
        load_cluster(path)
    assert said in str(raised.value)


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["5mbit", "a", "b"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*GOOD, "name", "up_bits_per_s"]), inner)
    ),
    max_leaves=12,
)


@given(
    path=st.sampled_from(
        ["replicas", "links", "replicas.0", "replicas.1.up_bits_per_s", "links.0.latency_s", "version"]
    ),
    junk=JUNK,
)
def test_junk_is_a_cluster_with_sound_numbers_or_a_data_error(path: str, junk: object) -> None:
    try:
        found = Cluster.from_json(changed(path, junk))
    except DataError as error:
        assert len(str(error).splitlines()) == 1
        return
    json.dumps(found.to_json(), allow_nan=False)
    for one in found.machines:
        for other in found.machines:
            if one.name != other.name:
                wire = found.wire(one.name, other.name)
                assert 0 < wire.bandwidth_bits_per_s < math.inf and wire.latency_s >= 0
