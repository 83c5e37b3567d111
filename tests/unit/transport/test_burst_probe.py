"""Bursts between hosts: timed while the job is quiet, answered by who is known, and thrown away."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count, pairwise

import pytest
from loopback_connections import HERE, THERE

from thinwire.recording.connection_records import RankPlace, WatchedWires
from thinwire.runlog.reader import parse_line
from thinwire.runlog.records import Flow, Probe
from thinwire.transport import burst_probe as host_probes
from thinwire.transport.burst_probe import BURST_BYTES, BurstProbe, open_probe_port
from thinwire.transport.default_group import TEXT_BYTES
from thinwire.transport.tcp_stats import HostFlows

SOON_S = 600.0


class Told:
    """Keeps what it is told of."""

    def __init__(self) -> None:
        self.bursts: list[tuple[int, float, float]] = []
        self.beside: list[int] = []

    def take(self, host: int, began_s: float, took_s: float, num_beside: int) -> None:
        self.bursts.append((host, began_s, took_s))
        self.beside.append(num_beside)


def probes_of(
    stack: ExitStack, told: Told, hosts: dict[int, tuple[list[str], int]], door: socket.socket | None = None,
    is_used: Callable[[int], bool] = lambda host: False,
) -> BurstProbe:  # fmt: skip
    probes = BurstProbe(open_probe_port() if door is None else door, hosts, told.take, is_used=is_used)
    stack.callback(probes.close)
    return probes


def other_end(stack: ExitStack, told: Told) -> socket.socket:
    """Return a host's end of the connection over which bursts come to it."""
    server = stack.enter_context(socket.create_server((HERE, 0)))
    server.settimeout(SOON_S)
    probes_of(stack, told, {1: ([HERE], server.getsockname()[1])})
    connection = stack.enter_context(server.accept()[0])
    connection.settimeout(SOON_S)
    return connection


def wait_for(is_there: Callable[[], bool]) -> None:
    until_s = time.monotonic() + SOON_S
    while not is_there():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_hosts_time_bursts_to_each_other(stack: ExitStack) -> None:
    doors = [open_probe_port(), open_probe_port()]
    ports = [door.getsockname()[1] for door in doors]
    tolds = [Told(), Told()]
    # the second one's first address leads nowhere
    probes_of(stack, tolds[0], {7: (["127.0.0.3", HERE], ports[1])}, doors[0])
    second = probes_of(stack, tolds[1], {5: ([HERE], ports[0])}, doors[1])
    wait_for(lambda: len(tolds[1].bursts) >= 3)
    host, began_s, took_s = tolds[1].bursts[0]
    assert host == 5 and 0 < took_s < SOON_S and began_s < time.monotonic()
    times = [began for _, began, _ in tolds[1].bursts]
    assert all(later - early > 0.24 for early, later in pairwise(times)), times
    wait_for(lambda: len(tolds[0].bursts) >= 1)
    assert tolds[0].bursts[0][0] == 7
    second.close()
    second.close()


def test_nothing_is_sent_while_a_call_is_open_nor_where_the_job_sends_enough(stack: ExitStack) -> None:
    doors = [open_probe_port() for _ in range(3)]
    ports = [door.getsockname()[1] for door in doors]
    told = Told()
    for door in doors[1:]:
        probes_of(stack, Told(), {0: ([HERE], 9)}, door)
    probes = probes_of(stack, told, {1: ([HERE], ports[1]), 2: ([HERE], ports[2])}, doors[0], lambda host: host == 1)
    wait_for(lambda: len(told.bursts) >= 2)
    assert {host for host, *_ in told.bursts} == {2}
    probes.note_call(is_open=True)
    time.sleep(0.3)
    wait_for(lambda: probes._ways[2].left is None)  # the burst under way comes to its end
    time.sleep(0.3)
    before = len(told.bursts)
    time.sleep(0.7)
    assert len(told.bursts) == before
    # the call's end rings: a burst begins 3 ms later
    ended_s = time.monotonic()
    probes.note_call(is_open=False)
    wait_for(lambda: len(told.bursts) > before)
    assert told.bursts[before][1] - ended_s >= 0.003


def test_a_job_that_calls_without_a_pause_is_left_alone(stack: ExitStack) -> None:
    doors = [open_probe_port(), open_probe_port()]
    told = Told()
    probes_of(stack, Told(), {0: ([HERE], 9)}, doors[1])
    probes = probes_of(stack, told, {1: ([HERE], doors[1].getsockname()[1])}, doors[0])
    probes.note_call(is_open=True)
    wait_for(lambda: probes._is_due)
    until_s = time.monotonic() + 1.0
    longest_s, before_s = 0.0, time.monotonic()
    while time.monotonic() < until_s:
        probes.note_call(is_open=False)
        probes.note_call(is_open=True)
        longest_s, before_s = max(longest_s, time.monotonic() - before_s), time.monotonic()
    # a core that is taken from this thread for longer is a pause
    assert told.bursts == [] or longest_s > 0.003


def test_strangers_are_turned_away_and_a_known_host_that_talks_is_only_counted(stack: ExitStack) -> None:
    door = open_probe_port()
    port = door.getsockname()[1]
    probes_of(stack, Told(), {1: ([THERE], 9)}, door)
    stranger = stack.enter_context(socket.create_connection((HERE, port), source_address=(HERE, 0)))
    stranger.settimeout(SOON_S)
    with contextlib.suppress(ConnectionError):  # a reset says the same
        stranger.sendall(b"GET / HTTP/1.1")
        assert stranger.recv(1) == b""
    known = stack.enter_context(socket.create_connection((HERE, port), source_address=(THERE, 0)))
    known.settimeout(SOON_S)
    known.sendall(bytes(3 * BURST_BYTES))
    answers = b""
    while len(answers) < 12:
        answers += known.recv(12)
    assert answers == bytes(12), "nothing of the job came meanwhile"
    more = [stack.enter_context(socket.create_connection((HERE, port), source_address=(THERE, 0))) for _ in range(20)]
    for one in more:
        one.settimeout(SOON_S)
    with contextlib.suppress(ConnectionError):  # some are taken, and the rest are too many
        assert more[-1].recv(1) == b""
    known.sendall(bytes(10))
    known.settimeout(0.3)
    with pytest.raises(TimeoutError):
        known.recv(1)


def test_who_takes_all_places_of_one_address_takes_none_of_another(stack: ExitStack) -> None:
    door = open_probe_port()
    port = door.getsockname()[1]
    probes_of(stack, Told(), {1: ([THERE], 9), 2: (["127.0.0.77"], 9)}, door)
    for _ in range(40):
        stack.enter_context(socket.create_connection((HERE, port), source_address=(THERE, 0)))
    other = stack.enter_context(socket.create_connection((HERE, port), source_address=("127.0.0.77", 0)))
    other.settimeout(SOON_S)
    other.sendall(bytes(BURST_BYTES))
    assert other.recv(4) == bytes(4)


def test_where_no_descriptor_is_left_the_door_closes_and_bursts_go_on(stack: ExitStack) -> None:
    doors = [open_probe_port(), open_probe_port()]
    told = Told()

    class NoDoor(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            raise OSError(24, "Too many open files")

    full = NoDoor(fileno=doors[0].detach())
    port = full.getsockname()[1]
    probes_of(stack, Told(), {0: ([HERE], 9)}, doors[1])
    probes_of(stack, told, {1: ([HERE], doors[1].getsockname()[1])}, full)
    with contextlib.suppress(ConnectionError):
        stack.enter_context(socket.create_connection((HERE, port), source_address=(HERE, 0)))
    wait_for(lambda: full.fileno() < 0 and len(told.bursts) > 1)


def test_what_the_job_sends_and_receives_meanwhile_is_told_whichever_is_more(stack: ExitStack) -> None:
    doors = [open_probe_port(), open_probe_port()]
    tolds = [Told(), Told()]
    sent, received = count(step=1000), count(step=70)

    def carried() -> tuple[int, int]:
        return next(sent), next(received)

    ports = [door.getsockname()[1] for door in doors]
    for told, door, port in zip(tolds, doors, reversed(ports), strict=True):
        probes = BurstProbe(door, {1: ([HERE], port)}, told.take, carried=carried)
        stack.callback(probes.close)
    wait_for(lambda: all(len(told.bursts) >= 2 for told in tolds))
    assert all(num_beside >= 1000 and num_beside % 1000 == 0 for told in tolds for num_beside in told.beside)


@pytest.mark.parametrize("num_received", [5, (1 << 32) - 1])
def test_an_answer_that_comes_in_pieces_is_one(stack: ExitStack, num_received: int) -> None:
    told = Told()
    other = other_end(stack, told)
    left = BURST_BYTES
    while left:
        left -= len(other.recv(left))
    answer = num_received.to_bytes(4, "little")
    other.sendall(answer[:1])
    time.sleep(0.1)
    assert told.bursts == []
    other.sendall(answer[1:])
    wait_for(lambda: bool(told.bursts))
    assert told.beside == [num_received]


def test_an_answer_that_nobody_asked_for_ends_the_connection(stack: ExitStack) -> None:
    told = Told()
    liar = other_end(stack, told)
    liar.sendall(b"\x01" * 5)
    with contextlib.suppress(ConnectionError):
        while liar.recv(1 << 20):
            pass
    assert told.bursts == []


def test_what_a_rank_tells_of_its_place_fits_and_comes_back() -> None:
    many = tuple(f"192.0.2.{number}" for number in range(200))
    place = RankPlace(host="h\u00f6st", clock="c", addresses=many, port=65_535)
    word = place.to_text()
    assert len(word.encode()) <= TEXT_BYTES
    again = RankPlace.from_text(word)
    assert (again.host, again.clock, again.port) == ("h\u00f6st", "c", 65_535)
    assert again.addresses == many[: len(again.addresses)] and len(again.addresses) > 30


@pytest.mark.parametrize(
    "word", ["", "a", "a\nb\nc\nd", "a\nb\n-1\n", "a\nb\n70000\n", "a\nb\n\u0661\n", "\n\n\n\n\n\n"]
)
def test_a_strange_word_of_another_rank_is_a_place_without_a_port(word: str) -> None:
    assert RankPlace.from_text(word).port == 0


def test_names_in_a_rank_s_word_are_no_addresses_so_nobody_is_asked_for_them() -> None:
    word = "a\nb\n80\nexample.invalid 192.0.2.1 localhost 2001:db8::5 1.2.3 ::x fd00::1%eth0"
    assert RankPlace.from_text(word).addresses == ("192.0.2.1", "2001:db8::5")


@pytest.mark.parametrize("has_both", [True, False])
def test_bursts_come_in_over_ipv4_also_where_there_is_no_other(
    has_both: bool, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: has_both)
    doors, told = [open_probe_port(), open_probe_port()], Told()
    assert [door.family == socket.AF_INET6 for door in doors] == [has_both] * 2
    probes_of(stack, Told(), {1: ([HERE], doors[0].getsockname()[1])}, doors[1])
    # its first address is one of a network that this machine is not in
    ways = ["2001:db8::5", HERE]
    monkeypatch.setattr(host_probes, "_AGAIN_S", 0.1)
    probes_of(stack, told, {0: (ways, doors[1].getsockname()[1])}, doors[0])
    wait_for(lambda: len(told.bursts) >= 1)


def test_the_lowest_rank_of_a_host_keeps_its_door_and_writes_what_it_times(stack: ExitStack) -> None:
    doors = [open_probe_port() for _ in range(3)]
    ports = [door.getsockname()[1] for door in doors]
    # one host as far as addresses go would be none to probe: they are told apart by name here
    places = [
        RankPlace(host="a", clock="c", addresses=(HERE,), port=ports[0]),
        RankPlace(host="b", clock="c", addresses=(THERE,), port=ports[1]),
        RankPlace(host="b", clock="c", addresses=(THERE,), port=ports[2]),
    ]
    wires = [WatchedWires(rank, places, door=door) for rank, door in enumerate(doors)]
    for one in wires:
        stack.callback(one.close)
    assert [door.fileno() >= 0 for door in doors] == [True, True, False]
    found: list[object] = []

    def is_there() -> bool:
        found.extend(parse_line(line.encode()) for line in wires[0].lines(is_waiting=False))
        return len(found) > 1

    wait_for(is_there)
    assert wires[0].num_bursts >= 2 and wires[2].num_bursts == 0
    # the connections of the bursts themselves are none of the job's
    assert not [one for one in found if isinstance(one, Flow)]
    probe = found[0]
    assert isinstance(probe, Probe) and (probe.rank, probe.peer, probe.num_bytes) == (0, 1, BURST_BYTES)


def test_what_takes_too_long_to_count_is_counted_no_more(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    doors = [open_probe_port(), open_probe_port()]
    places = [
        RankPlace(host=name, clock="c", addresses=(address,), port=door.getsockname()[1])
        for name, address, door in zip("ab", (HERE, THERE), doors, strict=True)
    ]
    monkeypatch.setattr("thinwire.recording.connection_records._LONG_S", -1.0)
    wires = [WatchedWires(rank, places, door=door) for rank, door in enumerate(doors)]
    for one in wires:
        stack.callback(one.close)
    wait_for(lambda: wires[0]._num_long >= 8)
    before = wires[0].num_bursts
    monkeypatch.setattr(HostFlows, "read", lambda flows: pytest.fail("it is counted all the same"))
    wait_for(lambda: wires[0].num_bursts > before + 1)
