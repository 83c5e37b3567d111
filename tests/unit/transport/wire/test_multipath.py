"""Several connections that act as one: order, paths that die or stall, bounds, and the choice of the path."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import free_port

from thinwire.errors import ConnectError, PeerLost
from thinwire.transport.addresses import Address, DialPaths
from thinwire.transport.base import Envelope
from thinwire.transport.secret import Secret
from thinwire.transport.streams import ROUNDS
from thinwire.transport.tcp_stats import ConnectionStats
from thinwire.transport.wire.framing import FrameError, FramesArrived, Goodbye, NumberedFrame, write
from thinwire.transport.wire.multipath import MOST_EARLY_FRAMES, MultipathConnection
from thinwire.transport.wire.wire_transport import WireTransport


class Pipe:
    """One direction of a connection: frames on their way, in order."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.is_open = True
        self.silence_s = 0.0
        self.source_port = 40_000

    def send(self, raw: bytearray) -> bool:
        if self.is_open:
            self.frames.append(bytes(raw))
        return self.is_open

    def close(self) -> None:
        self.is_open = False

    def is_closed(self) -> bool:
        return not self.is_open

    def reading(self) -> ConnectionStats:
        return ConnectionStats(silence_s=self.silence_s, rtt_s=0.01, sent_bytes=1, received_bytes=1)


class Pair:
    """Two ends joined by pipes, over a clock that stands until it is moved."""

    def __init__(self, num_paths: int) -> None:
        self.now_s = 100.0
        self.ends = [
            MultipathConnection(session=bytes(16), num_paths=num_paths, now=lambda: self.now_s) for _ in range(2)
        ]
        self.pipes = [[Pipe() for _ in range(num_paths)] for _ in range(2)]
        for end, pipes in zip(self.ends, self.pipes, strict=True):
            for path, pipe in enumerate(pipes):
                end.attach(path, pipe)
        self.arrived: list[list[bytes]] = [[], []]

    def deliver(self, side: int, path: int) -> bool:
        """Bring one frame that a side sent over a path to the other end."""
        pipe = self.pipes[side][path]
        if not pipe.frames:
            return False
        raw = memoryview(pipe.frames.popleft())
        for frame in self.ends[1 - side].take(self.pipes[1 - side][path], raw):
            self.arrived[1 - side].append(bytes(frame))
        return True

    def deliver_all(self, paths: list[int]) -> None:
        for _ in range(10):
            for end in self.ends:
                end.flush()
            while any(self.deliver(side, path) for side in range(2) for path in paths):
                pass


def frames(count: int) -> list[bytearray]:
    return [bytearray(f"frame {number} ".encode() * (1 + number % 7)) for number in range(count)]


@settings(max_examples=60, deadline=None)
@given(num_paths=st.integers(1, 4), count=st.integers(0, 60), seed=st.integers(0, 2**16))
def test_frames_arrive_once_and_in_order_however_the_paths_race_and_end(num_paths: int, count: int, seed: int) -> None:
    random = Random(seed)
    pair = Pair(num_paths)
    alive = list(range(num_paths))
    for raw in frames(count):
        assert pair.ends[0].send(raw)
        if random.random() < 0.5:
            pair.deliver(random.randrange(2), random.choice(alive))
        if random.random() < 0.3:
            pair.ends[random.randrange(2)].flush()
        if len(alive) > 1 and random.random() < 0.05:
            gone = alive.pop(random.randrange(len(alive)))
            for end, pipes in zip(pair.ends, pair.pipes, strict=True):
                pipes[gone].frames.clear()
                pipes[gone].close()
                end.detach(pipes[gone])
    pair.deliver_all(alive)
    assert pair.arrived[1] == [bytes(raw) for raw in frames(count)] and not pair.arrived[0]


def test_a_path_that_stalls_gives_its_frames_to_the_others_and_is_used_again_when_it_delivers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = Pair(2)
    sent = frames(20)
    for raw in sent[:10]:
        assert pair.ends[0].send(raw)
    pair.deliver_all([0])  # path 1 is silent
    assert len(pair.arrived[1]) < 10
    pair.now_s += 1.5
    assert pair.ends[0].tick() == []
    assert [one.is_stalled for one in pair.ends[0].stats()] == [False, True]
    assert [record.getMessage() for record in caplog.records] == [
        "path 1 to the replica has delivered nothing for 1.5 s; the other paths send its messages again"
    ]
    pair.deliver_all([0])
    assert pair.arrived[1] == [bytes(raw) for raw in sent[:10]]
    for raw in sent[10:]:
        assert pair.ends[0].send(raw)
    pair.deliver_all([0])
    assert pair.arrived[1] == [bytes(raw) for raw in sent], "new frames go round it"
    pair.deliver_all([1])  # it comes back: what it held arrives a second time, and counts for nothing
    assert pair.arrived[1] == [bytes(raw) for raw in sent]
    assert not any(one.is_stalled for one in pair.ends[0].stats())


def test_the_only_path_is_never_given_up() -> None:
    pair = Pair(1)
    assert pair.ends[0].send(bytearray(b"a"))
    pair.now_s += 60
    pair.ends[0].tick()
    assert not pair.ends[0].stats()[0].is_stalled


def test_a_silent_connection_is_named_for_closing() -> None:
    pair = Pair(2)
    pair.pipes[0][1].silence_s = 40.0
    assert pair.ends[0].tick() == [pair.pipes[0][1]]


def test_shares_follow_the_measured_rates() -> None:
    pair = Pair(2)
    raw = bytearray(30_000)
    for _ in range(200):  # path 0 delivers three frames where path 1 delivers one
        while len(pair.pipes[0][0].frames) < 4 and pair.ends[0].send(raw):
            pass
        pair.now_s += 0.05
        for path, count in ((0, 3), (1, 1)):
            for _ in range(count):
                pair.deliver(0, path)
        pair.ends[1].flush()
        while any(pair.deliver(1, path) for path in range(2)):
            pass
        pair.ends[0].tick()
    shares = [one.share for one in pair.ends[0].stats()]
    assert shares[0] == pytest.approx(0.75, abs=0.08)
    pair.ends[0].limit(0, 0.1)  # a finding: leave most of it to others
    for _ in range(8):
        pair.now_s += 1.1
        for path in range(2):
            for _ in range(10):
                pair.ends[0].send(raw)
                pair.deliver(0, path)
        pair.ends[1].flush()
        while any(pair.deliver(1, path) for path in range(2)):
            pass
        pair.ends[0].tick()
    assert pair.ends[0].stats()[0].share < shares[0] / 2
    with pytest.raises(ValueError, match="weight"):
        pair.ends[0].limit(0, 0.0)


def test_a_sender_never_runs_further_ahead_than_a_receiver_keeps() -> None:
    pair = Pair(2)
    count = 0
    while pair.ends[0].send(bytearray(b"x")):
        count += 1
    assert count == MOST_EARLY_FRAMES
    pair.deliver_all([1])  # the first frame is on path 0
    pair.deliver_all([0])
    assert len(pair.arrived[1]) == count


@pytest.mark.parametrize(
    "raw",
    [
        write(Goodbye()),
        write(NumberedFrame(number=MOST_EARLY_FRAMES, frame=memoryview(b"x"))),
        write(FramesArrived(count=0)),
        write(FramesArrived(count=1)),
        None,
    ],
)
def test_what_breaks_the_protocol_is_refused(raw: bytearray | None) -> None:
    pair = Pair(1)
    with pytest.raises(FrameError):
        pair.ends[1].take(pair.pipes[1][0], None if raw is None else memoryview(raw))


def free_ports(count: int) -> tuple[int, ...]:
    return tuple(free_port() for _ in range(count))


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@contextlib.contextmanager
def joined(num_paths: int) -> Iterator[tuple[WireTransport, WireTransport, DialPaths]]:
    low, high = (
        WireTransport(replica=replica, num_replicas=2, secret=Secret(key=bytes(range(32))), address="127.0.0.1")
        for replica in range(2)
    )
    try:
        paths = DialPaths(
            source_ports=tuple(free_ports(3) for _ in range(num_paths)), shares=(1 / num_paths,) * num_paths,
            port=low.port,
        )  # fmt: skip
        high.dial({0: Address(host="127.0.0.1", port=low.port)}, deadline_s=60, paths={0: paths})
        yield low, high, paths
    finally:
        high.close()
        low.close()


def break_path(wire: WireTransport, peer: int, path: int) -> None:
    """Shut one connection down in the kernel, as a reset would."""

    def shut() -> None:
        bundle = wire._loop.peers[peer].connection
        if isinstance(bundle, MultipathConnection) and path in bundle._paths:
            bundle._paths[path].connection._tap.shut()

    wire._loop.call_soon(shut)


@pytest.mark.slow
def test_messages_in_flight_survive_connections_that_break_and_come_back_from_spare_ports() -> None:
    size = 3_000_017
    with joined(3) as (low, high, _):
        for number in range(5):
            # both ends know that the path broken before is back
            until(lambda: all(one.is_connected for one in (*high.paths(0), *low.paths(1))))
            envelope = Envelope(stream=ROUNDS, key=(number,), payload_bytes=size)
            payload = (torch.arange(size) * 31 + number).to(torch.uint8)
            receives = [wire.receive(source=1 - wire.replica, envelope=envelope) for wire in (low, high)]
            sends = [wire.send(payload, to=1 - wire.replica, envelope=envelope) for wire in (low, high)]
            break_path(high, 0, number % 3)
            for receive, send in zip(receives, sends, strict=True):
                received = receive.wait(deadline_s=60)
                assert received is not None and torch.equal(received.payload, payload)
                send.wait(deadline_s=60)
        assert sum(one.sent_bytes for one in high.paths(0)) > 5 * size


def test_the_last_path_takes_the_messages_in_flight_with_it() -> None:
    with joined(2) as (_, high, _):
        until(lambda: all(one.is_connected for one in high.paths(0)))
        receive = high.receive(source=0, envelope=Envelope(stream=ROUNDS, key=(0,), payload_bytes=5))
        for path in range(2):
            break_path(high, 0, path)
        with pytest.raises(PeerLost, match="replica 0 closed its connection"):
            receive.wait(deadline_s=60)
        until(lambda: high.is_connected(0))  # a session of its own


def test_a_weight_given_from_outside_reaches_the_path() -> None:
    with joined(2) as (_, high, _):
        high.limit_path(0, 1, 0.25)
        until(lambda: high._loop._bundles[0]._limits == [1.0, 0.25])
        with pytest.raises(ValueError, match="weight"):
            high.limit_path(0, 1, 2.0)


def test_one_planned_port_is_one_plain_connection_from_it() -> None:
    with joined(1) as (low, high, paths):
        connection = low._loop.peers[1].connection
        assert not isinstance(connection, MultipathConnection)
        assert connection.tap.peer == ("127.0.0.1", paths.source_ports[0][0])
        assert high.paths(0) == []


def test_a_plan_for_another_port_is_refused() -> None:
    with joined(1) as (low, high, paths):
        wrong = DialPaths(source_ports=paths.source_ports, shares=paths.shares, port=low.port + 1)
        with pytest.raises(ConnectError, match=f"--port-range {low.port + 1}-{low.port + 1}"):
            high.dial({0: Address(host="127.0.0.1", port=low.port)}, deadline_s=1, paths={0: wrong})
