"""Source ports of a plan by probe files, and the probe where no router is on the path."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Never

import msgspec
import pytest

from thinwire.errors import ConnectError, DataError
from thinwire.traffic import Fabric, FabricFlow, plan_traffic
from thinwire.traffic.source_ports import (
    PathProbe,
    TcpPaths,
    probe_by_timing,
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


class Board:
    """Texts that the ranks of a test, each a thread, post for each other."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.texts: dict[str, str] = {}
        self.failure: str | None = None
        self.changed = threading.Condition()
        self.loaded: tuple[int, int] | None = None  # leaf and spine


class FakeMeeting:
    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank, self.world_size = board, rank, board.num_ranks

    def post(self, key: str, text: str) -> None:
        with self.board.changed:
            self.board.texts[key] = text
            self.board.changed.notify_all()

    def collect_all(self, topic: str) -> list[str]:
        keys = [f"{topic}/{rank}" for rank in range(self.world_size)]
        with self.board.changed:
            assert self.board.changed.wait_for(
                lambda: self.board.failure or all(key in self.board.texts for key in keys), timeout=60
            )
            if self.board.failure:
                raise ConnectError(self.board.failure)
            return [self.board.texts[key] for key in keys]

    def fail(self, text: str) -> Never:
        with self.board.changed:
            self.board.failure = text
            self.board.changed.notify_all()
        raise ConnectError(text)


@dataclass
class FakePaths:
    """Ports of one host: each takes a spine at random; those behind the load are slow."""

    board: Board
    leaf: int
    spine_of: dict[tuple[str, int], int]
    loads: Iterator[int]
    slow_s: float = 0.1
    disturbed: frozenset[tuple[str, int]] = frozenset()
    num_disturbed_loads: int = 1_000_000

    def round_trips(self) -> dict[tuple[str, int], float]:
        jitter = Random(len(self.board.texts))
        loaded = self.board.loaded
        return {
            ends: 0.04
            + 0.001 * jitter.random()
            + (self.slow_s if loaded == (self.leaf, spine) or (loaded and ends in self.disturbed) else 0.0)
            for ends, spine in self.spine_of.items()
        }

    @contextmanager
    def load(self, number: int) -> Iterator[None]:
        if number >= self.num_disturbed_loads:
            self.disturbed = frozenset()
        self.board.loaded = (self.leaf, next(self.loads))
        yield
        self.board.loaded = None


Found = dict[str, dict[int, str]] | str


def probe_together(leaves: Sequence[int], spines: int, **changes: Any) -> list[tuple[FakePaths, Found]]:
    """Probe from one host for each leaf that is given; return each host, and what it found, or its error."""
    board, random = Board(len(leaves)), Random(3)
    ends = [("a", port) for port in range(20)] + [("b", port) for port in range(20)]
    hosts = [
        FakePaths(
            board=board, leaf=leaf, spine_of={} if leaf < 0 else {one: random.randrange(spines) for one in ends},
            loads=iter(lambda: random.randrange(spines), -1), **changes,
        )
        for leaf in leaves
    ]  # fmt: skip

    def probe(rank: int) -> Found:
        try:
            return probe_by_timing(FakeMeeting(board, rank), hosts[rank], leaf=leaves[rank], spines=spines)
        except ConnectError as error:
            return str(error)

    with ThreadPoolExecutor(len(leaves)) as pool:
        return list(zip(hosts, pool.map(probe, range(len(leaves))), strict=True))


@pytest.mark.parametrize(("leaves", "spines"), [([0], 1), ([0, 0], 2), ([0, 1, 0], 4), ([-1, 2, 0, 2, 2], 7)])
def test_loads_find_the_ports_that_share_a_path_and_the_hosts_of_a_leaf_agree(leaves: list[int], spines: int) -> None:
    names = set()
    for host, paths in probe_together(leaves, spines):
        assert isinstance(paths, dict), paths
        assert sum(map(len, paths.values())) == len(host.spine_of) == (0 if host.leaf < 0 else 40)
        names |= {(host.leaf, spine, paths[name][port]) for (name, port), spine in host.spine_of.items()}
    # one name for each spine of a leaf, and one spine for each name
    assert len(names) == len({(leaf, spine) for leaf, spine, _ in names}) == len({(one[0], one[2]) for one in names})


def test_a_port_that_is_slow_during_loads_of_two_paths_is_left_out() -> None:
    for _, paths in probe_together([0, 0], 3, disturbed=frozenset({("a", 7)})):
        assert isinstance(paths, dict)
        assert 7 not in paths["a"] and len(paths["a"]) == 19 and len(paths["b"]) == 20


def test_ports_that_something_else_slowed_for_a_while_are_found_by_later_loads() -> None:
    disturbed = frozenset(("a", port) for port in range(12))
    for host, paths in probe_together([0], 4, disturbed=disturbed, num_disturbed_loads=3):
        assert isinstance(paths, dict)
        pairs = {(spine, paths[name][port]) for (name, port), spine in host.spine_of.items()}
        assert len(pairs) == len({path for _, path in pairs}) == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"slow_s": 0.0}, "no load slowed any source port: it was below the rate of a cable"),
        ({"slow_s": math.inf}, None),  # packets that are lost in a full queue are slow
        ({"disturbed": frozenset((name, port) for name in "ab" for port in range(20))}, "slowed every source port"),
    ],
)
def test_what_cannot_be_told_by_timing_is_named_by_all_ranks(changes: dict[str, Any], reason: str | None) -> None:
    for _, found in probe_together([0, 0, 1], 3, **changes):
        assert isinstance(found, dict) if reason is None else reason in found


@pytest.mark.parametrize(
    ("topic", "text"),
    [
        ("turn/0", '{"leaf": 0, "left": -3}'),
        ("turn/0", "["),
        ("slow/0", '{"known": {"0": [1, 0]}, "new": 0}'),
        ("slow/0", '{"known": {"a": [1, 1]}, "new": 0}'),
    ],
)
def test_a_strangers_text_is_refused(topic: str, text: str) -> None:
    board = Board(2)
    board.texts = {"turn/0/1": '{"leaf": 0, "left": 1}', "load/0/1": '{"leaf": 0, "left": 1}', f"{topic}/1": text}
    paths = FakePaths(board=board, leaf=0, spine_of={("a", 1): 0}, loads=iter([0]))
    with pytest.raises(ConnectError, match="a rank posted what no probe does"):
        probe_by_timing(FakeMeeting(board, 0), paths, leaf=0, spines=2)


def test_a_destination_that_answers_nothing_is_named() -> None:
    board = Board(1)
    silent = FakePaths(board=board, leaf=0, spine_of={("a", 1): 0}, loads=iter(()))
    silent.round_trips = lambda: {("a", 1): math.inf}  # type: ignore[method-assign]
    with pytest.raises(ConnectError, match="a does not answer connections at the probed port"):
        probe_by_timing(FakeMeeting(board, 0), silent, leaf=0, spines=2)


def test_connections_of_this_host_are_timed_and_a_port_in_use_is_left_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        taken = there.getsockname()[1]
        # a rate that no host reaches: the load ends nevertheless
        paths = TcpPaths({"here": "127.0.0.1"}, 1, source_ports=[20_050, 20_051, taken], load_bits_per_s=1e15)
        with paths.load(0):
            times = paths.round_trips()
    assert set(times) == {("here", 20_050), ("here", 20_051)}
    assert all(0 < seconds < math.inf for seconds in times.values())


def test_more_ports_than_sockets_may_be_open_are_timed_and_an_unreachable_host_is_no_answer() -> None:
    paths = TcpPaths({"here": "127.0.0.1"}, 1, source_ports=range(20_100, 20_700), load_bits_per_s=1e5)
    assert len(paths.round_trips()) >= 590
    beyond = TcpPaths({"beyond": "255.255.255.255"}, 1, source_ports=[20_060], load_bits_per_s=1e5)
    assert beyond.round_trips() == {("beyond", 20_060): math.inf}


def test_paths_that_only_timing_tells_give_ports_on_a_fabric_without_addresses() -> None:
    fabric = msgspec.structs.replace(FABRIC, spine_addresses=())
    probe = PathProbe(
        source="c", destination_port=29_600, routers={"a": {"20000": "path-1", "20001": "path-0", "20002": "path-1"}}
    )
    plan = with_source_ports(plan_traffic(fabric, [flow("c", "a", 2)], method="colour"), [probe])
    assert sorted((piece.spine, piece.source_ports) for row in plan.pieces for piece in row) == [
        (0, (20_001,)), (1, (20_000, 20_002)),
    ]  # fmt: skip
    beyond = PathProbe(source="c", destination_port=29_600, routers={"a": {"20000": "path-2"}})
    with pytest.raises(ValueError, match="met a router that is no spine of the fabric; got path-2"):
        with_source_ports(plan_traffic(fabric, [flow("c", "a")], method="colour"), [beyond])
