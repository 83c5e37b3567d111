"""TCP statistics of this process's own connections, and a watched rank's records of them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from loopback_connections import HERE, OTHER, THERE, connection

from thinwire.events import TransferLog
from thinwire.recording.connection_records import FlowLines, PeerFlows, RankPlace, WatchedWires
from thinwire.runlog.records import Flow
from thinwire.transport.default_group import store_port
from thinwire.transport.loopback import LoopbackWorld
from thinwire.transport.recording import RecordingTransport
from thinwire.transport.tcp_stats import HostFlow, HostFlows, LocalSockets

SOON_S = 600.0


def soon(read: Callable[[], dict[int, HostFlow]], rank: int, wanted: Callable[[HostFlow], bool]) -> HostFlow:
    """Return what is read as soon as it is as wanted: the kernel takes a moment."""
    until_s = time.monotonic() + SOON_S
    while True:
        found = read().get(rank)
        if found is not None and wanted(found):
            return found
        assert time.monotonic() < until_s, found
        time.sleep(0.02)


def test_what_is_acknowledged_over_all_connections_to_a_host_counts_together(stack: ExitStack) -> None:
    pairs = [connection(stack, address) for address in (THERE, THERE, OTHER)]
    flows = HostFlows({1: (THERE, "127.0.0.9"), 2: (OTHER,), 3: ("127.0.0.8",)})
    for (own, _), count in zip(pairs, (1000, 200, 30), strict=True):
        own.sendall(bytes(count))
    # the first segment, which makes the connection, counts as one byte
    found = soon(flows.read, 1, lambda one: one.num_bytes == 1202)
    assert soon(flows.read, 2, lambda one: one.num_bytes == 31).held_s == 0.0
    assert found.busy_s >= 0.0 and found.unanswered == 0 and found.silence_s is None
    assert sorted(flows.read()) == [1, 2]
    assert HostFlows({}).read() == {}


def test_time_in_which_the_other_end_does_not_read_is_known(stack: ExitStack) -> None:
    own, _ = connection(stack, THERE)
    own.setblocking(False)
    flows = HostFlows({1: (THERE,)})
    with pytest.raises(BlockingIOError):
        while True:
            own.send(bytes(1 << 20))
    found = soon(flows.read, 1, lambda one: one.held_s > 0.3)
    assert found.busy_s >= found.held_s


def test_an_idle_end_is_asked_only_while_somebody_waits_and_answers(stack: ExitStack) -> None:
    own, _ = connection(stack, THERE)
    flows = HostFlows({1: (THERE,)})
    assert flows.read()[1].silence_s is None
    assert flows.read(is_asking=True)[1].silence_s is None, "it cannot have answered yet"
    assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    silences = []
    for _ in range(8):
        time.sleep(0.45)
        silences.append(flows.read(is_asking=True)[1].silence_s)
    # without being asked it would have said nothing for 3.6 seconds
    assert all(one is not None and one < 1.5 for one in silences), silences
    assert flows.read()[1].silence_s is None
    assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
    flows.read(is_asking=True)
    flows.close()
    assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0


def test_who_looks_rarely_says_nothing_of_a_silence(stack: ExitStack) -> None:
    connection(stack, THERE)
    now_s = 0.0
    flows = HostFlows({1: (THERE,)}, now=lambda: now_s)
    found = []
    for now_s in (0.0, 0.5, 1.0, 3.0, 3.5):  # noqa: B007 (the clock reads it)
        found.append(flows.read(is_asking=True)[1].silence_s is not None)
    assert found == [False, True, True, False, True]


@pytest.mark.parametrize(
    "rule", [(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
)
def test_where_a_job_has_rules_of_its_own_nothing_is_asked(stack: ExitStack, rule: tuple[int, int, int]) -> None:
    own, _ = connection(stack, THERE)
    own.setsockopt(*rule)
    idle = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
    flows = HostFlows({1: (THERE,)})
    flows.read(is_asking=True)
    time.sleep(0.5)
    assert flows.read(is_asking=True)[1].silence_s is None
    flows.read()
    assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == idle
    assert own.getsockopt(*rule[:2]) == rule[2]


def test_the_store_s_connections_are_none_of_the_job_s(stack: ExitStack) -> None:
    own, _ = connection(stack, THERE)
    port = own.getpeername()[1]
    mapped = stack.enter_context(socket.create_server((THERE, 0)))
    # as torch's store reaches an address of IPv4
    store = stack.enter_context(socket.socket(socket.AF_INET6))
    store.connect((f"::ffff:{THERE}", mapped.getsockname()[1]))
    store.sendall(bytes(4000))
    assert soon(HostFlows({1: (THERE,)}).read, 1, lambda one: one.num_bytes > 0).num_bytes == 1
    places = [RankPlace(host="a", clock="c", addresses=(HERE,)), RankPlace(host="b", clock="c", addresses=(THERE,))]
    assert WatchedWires(0, places, store=port).lines(is_waiting=True) == []
    assert len(WatchedWires(0, places).lines(is_waiting=True)) == 1


@pytest.mark.parametrize("has_port", [True, False])
def test_the_store_s_port_is_known_where_it_has_one(has_port: bool) -> None:
    assert store_port() == 0, "there is no group"
    store = dist.TCPStore(HERE, 0, is_master=True) if has_port else dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert store_port() == (store.port if has_port else 0) and (store_port() > 0) == has_port
    finally:
        dist.destroy_process_group()


def lines_of(lines: FlowLines, *, is_waiting: bool = False) -> list[dict[str, object]]:
    return [json.loads(line) for line in lines.lines(is_waiting=is_waiting)]


def test_lines_tell_of_what_is_new_and_of_all_while_somebody_waits(stack: ExitStack) -> None:
    own, _ = connection(stack, THERE)
    connection(stack, OTHER)
    now_s = 100.0
    lines = FlowLines(
        0, hosts=["a", "b", "c"], addresses=[[HERE], [THERE], [OTHER]], clock=lambda: now_s, timer=lambda: 0.0
    )
    assert [line["peer"] for line in lines_of(lines)] == [1, 2], "the first look"
    assert lines_of(lines) == []
    own.sendall(bytes(500))
    until_s = time.monotonic() + SOON_S
    while not (found := lines_of(lines)):
        assert time.monotonic() < until_s
    assert [(line["peer"], line["num_bytes"], line["at_s"]) for line in found] == [(1, 501, 100.0)]
    assert [line["peer"] for line in lines_of(lines, is_waiting=True)] == [1, 2]


def test_asking_the_kernel_takes_a_part_of_the_time_only(stack: ExitStack) -> None:
    connection(stack, THERE)
    now_s, took_s = 0.0, iter([0.0, 0.01, 0.0, 0.0])
    lines = FlowLines(0, hosts=["a", "b"], addresses=[[HERE], [THERE]], clock=lambda: now_s, timer=lambda: next(took_s))
    assert len(lines_of(lines, is_waiting=True)) == 1
    now_s = 1.9  # it took 10 ms, so the next one is due after 2 s
    assert lines_of(lines, is_waiting=True) == []
    now_s = 2.1
    assert len(lines_of(lines, is_waiting=True)) == 1


def source(sent_bytes: int, busy_s: float = 1.0) -> SimpleNamespace:
    return SimpleNamespace(sent_bytes=sent_bytes, busy_s=busy_s, held_s=0.25)


def test_connections_of_a_transport_are_asked_about_where_something_is_sent() -> None:
    took_s = iter([0.0, 0.0, 0.0, 0.0, 0.0, 0.02, 0.0, 0.0])
    own, asked = PeerFlows(3, timer=lambda: next(took_s)), list[int]()
    # of rank 2 nobody can tell, and an old kernel tells nothing of rank 5
    known = {1: source(500), 5: source(700, busy_s=0.0)}

    def reading(peer: int) -> SimpleNamespace | None:
        asked.append(peer)
        return known.get(peer)

    assert own.records(1.0, reading) == [] and asked == []
    for peer in (5, 1, 2, 1):
        own.note_send(peer)
    assert own.records(1.5, reading) == [Flow(rank=3, peer=1, at_s=1.5, num_bytes=500, busy_s=1.0, held_s=0.25)]
    assert asked == [1, 2, 5]
    known[1] = source(500, busy_s=2.0)
    assert own.records(2.0, reading) == [], "nothing more was sent, and it took 20 ms to know that"
    known[1] = source(900)
    assert own.records(5.9, reading) == [], "a 200th of the time goes into asking"
    assert [one.num_bytes for one in own.records(6.1, reading)] == [900]
    assert asked == [1, 2, 5, 1, 1], "of whom nothing is known is asked about when something is sent there again"
    took_s = iter([0.0] * 4)
    for begin, at_s in ((0, 7.0), (500, 8.0)):
        for peer in range(begin, begin + 500):
            own.note_send(peer)
        asked.clear()
        own.records(at_s, reading)
        assert len(asked) == 64 and asked[:2] == ([0, 1] if begin == 0 else [1, 500])


OPEN = Path("/proc/self/fd")


def received(sockets: LocalSockets, rank: int, wanted: int) -> int:
    """Return what has come, as soon as it is as much as wanted: the kernel takes a moment."""
    until_s = time.monotonic() + 5.0
    while True:
        found = sockets.reading(rank)
        if found is not None and found.received_bytes >= wanted:
            return found.received_bytes
        assert time.monotonic() < until_s, found
        time.sleep(0.01)


def test_all_connections_to_a_rank_count_together_and_nobody_else_s(stack: ExitStack, tmp_path: Path) -> None:
    now_s = 0.0
    sockets = LocalSockets({0: HERE, 1: THERE, 2: OTHER}, now=lambda: now_s)
    assert sockets.reading(1) is None, "nothing leads there yet"
    num_open = len(list(OPEN.iterdir()))
    pairs = [connection(stack, address) for address in (THERE, THERE, OTHER)]
    assert sockets.reading(1) is None, "it has looked just now"
    now_s += 6.0
    for (_, far), count in zip(pairs, (1000, 200, 30), strict=True):
        far.sendall(bytes(count))
    assert received(sockets, 1, 1200) == 1200 and received(sockets, 2, 30) == 30
    found = sockets.reading(1)
    assert (
        found is not None
        and not found.has_signs
        and found.busy_s >= found.held_s >= 0
        and found.rtt_s > 0
        and found.silence_s >= 0
    )
    assert pairs[0][0].recv(10) == bytes(10), "the connection is as it was"
    for own, _ in pairs[:2]:
        own.close()
    stack.enter_context((tmp_path / "something else").open("w"))  # takes the number of one
    assert sockets.reading(1) is None and sockets.reading(7) is None
    stack.close()
    assert len(list(OPEN.iterdir())) == num_open


def test_ranks_with_one_address_cannot_be_told_apart(stack: ExitStack) -> None:
    connection(stack, THERE)
    sockets = LocalSockets({0: HERE, 1: THERE, 2: THERE, 3: OTHER})
    assert sockets.reading(1) is None and sockets.reading(2) is None
    assert LocalSockets({0: HERE, 1: THERE}).reading(1) is not None


def test_a_transport_that_cannot_tell_says_nothing() -> None:
    assert RecordingTransport(LoopbackWorld(2).transports[0], log=TransferLog()).reading(1) is None
