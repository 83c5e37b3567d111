"""Who comes to a replica's port without the secret, or with it and ill will: a running exchange goes on unharmed."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import free_port
from zmq.utils import z85

from tests.strangers import GARBAGE, GARBAGE_NAMES, GREETING, hangs_up, memory_is_bounded
from thinwire.errors import ConnectError, PeerLost
from thinwire.transport.addresses import Address
from thinwire.transport.base import Envelope
from thinwire.transport.message import pack
from thinwire.transport.secret import Secret
from thinwire.transport.streams import BUFFERS, CONTROL, ROUNDS, MessageAddress, Stream
from thinwire.transport.wire import connection as wire_line
from thinwire.transport.wire.connection import key_pair
from thinwire.transport.wire.framing import (
    MAX_UNEXPECTED,
    MAX_UNEXPECTED_BYTES,
    Credit,
    Hello,
    MessagePart,
    MessageStart,
    read,
    write,
)
from thinwire.transport.wire.listener import MAX_UNPROVEN
from thinwire.transport.wire.wire_transport import WireTransport

SECRET, OTHER = Secret(key=bytes(range(32))), Secret(key=bytes(32))
SOON_S = 600.0
HOST = "127.0.0.1"


def made(replica: int, *, num_replicas: int = 3, secret: Secret = SECRET) -> WireTransport:
    return WireTransport(replica=replica, num_replicas=num_replicas, secret=secret, address=HOST)


def envelope_of(size: int, round_id: int, stream: Stream = ROUNDS) -> Envelope:
    return Envelope(stream=stream, key=(round_id,), payload_bytes=size, numel=size)


class Exchange:
    """Replicas 0 and 1 of three, which exchange all the time; replica 2 never came, so the ports stay open."""

    def __init__(self) -> None:
        self.low, self.high = made(0), made(1)
        self.high.dial({0: Address(host=HOST, port=self.low.port)}, deadline_s=SOON_S)
        self.port = self.low.port
        self.rounds = 0
        self._failure: BaseException | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def goes_on(self) -> None:
        """Wait until two more rounds have come out right."""
        end, until = time.monotonic() + SOON_S, self.rounds + 2
        while self.rounds < until:
            assert self._failure is None and time.monotonic() < end, self._failure
            time.sleep(0.005)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self.low.close()
        self.high.close()
        assert self._failure is None, self._failure

    def _run(self) -> None:
        try:
            while not self._is_over.wait(0.002):
                self._swap(100_003, self.rounds)
                self.rounds += 1
        except BaseException as failure:
            self._failure = failure

    def _swap(self, size: int, round_id: int) -> None:
        envelope, pairs = envelope_of(size, round_id, CONTROL), ((self.low, 1), (self.high, 0))
        receives = [transport.receive(source=peer, envelope=envelope) for transport, peer in pairs]
        payload = torch.full((size,), round_id % 251, dtype=torch.uint8)
        sends = [transport.send(payload, to=peer, envelope=envelope) for transport, peer in pairs]
        for pending in (*receives, *sends):
            received = pending.wait(deadline_s=SOON_S)
            assert received is None or torch.equal(received.payload, payload)


@pytest.fixture(scope="module")
def running() -> Iterator[Exchange]:
    exchange = Exchange()
    yield exchange
    exchange.close()


@pytest.mark.parametrize("said", GARBAGE, ids=GARBAGE_NAMES)
def test_who_speaks_something_else_is_hung_up_on(running: Exchange, said: bytes) -> None:
    with memory_is_bounded(), socket.create_connection((HOST, running.port)) as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(said)
        assert hangs_up(stranger)
    running.goes_on()


@given(st.binary(max_size=300), st.booleans())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_at_the_port_harm_the_exchange(running: Exchange, said: bytes, is_greeting: bool) -> None:
    with socket.create_connection((HOST, running.port)) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall((GREETING % b"CURVE".ljust(20, b"\0") if is_greeting else b"") + said)
    running.goes_on()


def why_refused(port: int, **options: Any) -> str:
    """Dial as a ZeroMQ program with these options and return which event ends it."""
    context: zmq.Context[Any] = zmq.Context()
    plug = context.socket(zmq.DEALER)
    plug.linger = 0
    for name, value in options.items():
        setattr(plug, name, value)
    monitor = plug.get_monitor_socket()
    plug.connect(f"tcp://{HOST}:{port}")
    with contextlib.suppress(zmq.Again):  # it may be refused before it can say a word
        plug.send(b"hello", zmq.NOBLOCK)
    found = ""
    end = time.monotonic() + SOON_S
    while not found and time.monotonic() < end:
        if monitor.poll(100):
            event = zmq.Event(int.from_bytes(monitor.recv_multipart()[0][:2], "little"))
            if event & (zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED) or "FAILED" in event.name:
                found = event.name
    plug.disable_monitor()
    context.destroy(linger=0)
    return found


def test_who_has_no_key_of_the_job_does_not_get_in(running: Exchange) -> None:
    server = key_pair(SECRET, replica=0, role="door")
    stranger, own = key_pair(OTHER, replica=2, role="dialler"), key_pair(SECRET, replica=2, role="dialler")

    def curve(pair: Any, other: bytes) -> dict[str, Any]:
        return {"curve_publickey": pair.public, "curve_secretkey": pair.private, "curve_serverkey": other}

    attempts = {
        "no mechanism": {},
        "a password": {"plain_username": b"replica", "plain_password": b"2"},
        "another job's keys": curve(stranger, key_pair(OTHER, replica=0, role="door").public),
        "this job's server key alone": curve(stranger, server.public),
        "a replica's own door key": curve(key_pair(SECRET, replica=2, role="door"), server.public),
        "the keys of a replica that is there": curve(key_pair(SECRET, replica=1, role="dialler"), server.public),
    }
    for name, options in attempts.items():
        assert "SUCCEEDED" not in why_refused(running.port, **options), name
        running.goes_on()
    del own


class Traitor:
    """One that has the secret and speaks for replica 2, or for another, as it likes."""

    def __init__(self, port: int, *, replica: int = 2) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.plug = self._context.socket(zmq.DEALER)
        pair = key_pair(SECRET, replica=replica, role="dialler")
        self.plug.curve_publickey, self.plug.curve_secretkey = pair.public, pair.private
        self.plug.curve_serverkey = key_pair(SECRET, replica=0, role="door").public
        self.plug.reconnect_ivl = -1
        self.plug.sndtimeo = round(1000 * SOON_S)
        self._monitor = self.plug.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.plug.connect(f"tcp://{HOST}:{port}")

    def hello(self, **more: Any) -> None:
        fields = {"replica": 2, "num_replicas": 3, "incarnation": os.urandom(16), **more}
        self.plug.send(write(Hello(**fields)))

    def is_cut_off(self) -> bool:
        return bool(self._monitor.poll(1000 * SOON_S))

    def close(self) -> None:
        self.plug.disable_monitor()
        self._context.destroy(linger=0)


@contextlib.contextmanager
def traitor(port: int) -> Iterator[Traitor]:
    made_up = Traitor(port)
    try:
        yield made_up
    finally:
        made_up.close()


def test_who_proves_a_key_but_says_no_hello_is_cut_off(running: Exchange) -> None:
    fields = {"replica": 2, "num_replicas": 3, "incarnation": bytes(16)}
    for said in (
        [b""],
        [os.urandom(70_000)],
        [b"a", b"b"],
        [write(Credit(number=0, end=1))],
        [write(Hello(**{**fields, "replica": 1}))],
        [write(Hello(**{**fields, "num_replicas": 9}))],
    ):  # fmt: skip
        with traitor(running.port) as enemy:
            enemy.plug.send_multipart(said)
            assert enemy.is_cut_off(), said
        running.goes_on()


def test_who_speaks_another_version_learns_ours_and_is_named() -> None:
    exchange = Exchange()
    try:
        with traitor(exchange.port) as enemy:
            raw = write(Hello(replica=2, num_replicas=3, incarnation=bytes(16)))
            raw[2] = 9
            enemy.plug.send(raw)
            assert enemy.plug.poll(1000 * SOON_S)
            answer = enemy.plug.recv()
            assert isinstance(read(memoryview(answer)), Hello)
            receive = exchange.low.receive(source=2, envelope=envelope_of(5, 9))
            with pytest.raises(
                PeerLost, match="replica 2 sent frames of version 9, and this host reads 2; run the same"
            ):
                receive.wait(deadline_s=SOON_S)
        exchange.goes_on()
    finally:
        exchange.close()


@pytest.mark.parametrize("way", ["garbage", "two frames", "too many early", "too many early bytes", "unasked"])
def test_who_breaks_the_bounds_is_cut_off_and_only_its_own_messages_fail(way: str) -> None:
    small, large = (pack(torch.zeros(n, dtype=torch.uint8), sender=2, envelope=envelope_of(n, 0)) for n in (1, 200_000))

    def opening(number: int, message: torch.Tensor) -> bytearray:
        view = message.numpy().data
        return write(
            MessageStart(
                number=number, address=MessageAddress(1, 0, number, 0, 0), message_bytes=len(view), body=view[: 1 << 16]
            )
        )

    frames: dict[str, Any] = {
        "garbage": ([b"\x00" * 100] for _ in range(1)),
        "two frames": ([b"a", b"b"] for _ in range(1)),
        "too many early": ([opening(number, small)] for number in range(MAX_UNEXPECTED + 2)),
        "too many early bytes": ([opening(number, large)] for number in range(MAX_UNEXPECTED_BYTES // (1 << 16) + 2)),
        "unasked": ([write(MessagePart(number=0, start=1 << 16, body=memoryview(b"x")))] for _ in range(1)),
    }
    exchange = Exchange()
    try:
        with memory_is_bounded(MAX_UNEXPECTED_BYTES + 60_000_000), traitor(exchange.port) as enemy:
            enemy.hello()
            assert enemy.plug.poll(1000 * SOON_S)  # the other's hello: from here on there is a connection
            receive = exchange.low.receive(source=2, envelope=envelope_of(5, 9, BUFFERS))
            for frame in frames[way]:
                enemy.plug.send_multipart(frame)
            assert enemy.is_cut_off()
            with pytest.raises(PeerLost, match=r"replica 2 sent .* and was disconnected during buffers 9"):
                receive.wait(deadline_s=SOON_S)
            exchange.goes_on()
        fields = {name: getattr(key_pair(SECRET, replica=2, role="dialler"), name) for name in ("public", "private")}
        server = key_pair(SECRET, replica=0, role="door").public
        again = why_refused(
            exchange.port, curve_publickey=fields["public"], curve_secretkey=fields["private"], curve_serverkey=server
        )
        assert "SUCCEEDED" not in again, "who was disconnected for good does not come back"
    finally:
        exchange.close()


def test_connections_that_never_shake_hands_end_and_do_not_fill_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_line, "HANDSHAKE_S", 5.0)
    exchange, process = Exchange(), psutil.Process()
    strangers: list[socket.socket] = []
    try:
        with memory_is_bounded():
            before = process.num_fds()
            for _ in range(4 * MAX_UNPROVEN):
                strangers.append(socket.create_connection((HOST, exchange.port), timeout=SOON_S))
                strangers[-1].sendall(b"\xff")
                if len(strangers) % 32 == 0:
                    exchange.goes_on()
            end = time.monotonic() + SOON_S
            # ours, and at the other end no more than may be there without a handshake
            while process.num_fds() - before > len(strangers) + MAX_UNPROVEN + 8:
                assert time.monotonic() < end
                time.sleep(0.01)
            exchange.goes_on()
        third = made(2)
        try:  # who belongs to the job comes in all the same
            ports = {0: exchange.low.port, 1: exchange.high.port}
            third.dial({n: Address(host=HOST, port=port) for n, port in ports.items()}, deadline_s=SOON_S)
        finally:
            third.close()
        for stranger in strangers:
            assert hangs_up(stranger)
    finally:
        for stranger in strangers:
            stranger.close()
        exchange.close()


def test_another_secret_is_one_clear_error_at_once_and_not_a_wait(running: Exchange) -> None:
    start = time.monotonic()
    for secret in (OTHER,):
        wrong = made(2, secret=secret)
        try:
            with pytest.raises(ConnectError) as caught:
                wrong.dial({0: Address(host=HOST, port=running.port)}, deadline_s=SOON_S)
        finally:
            wrong.close()
    assert f"replica 2 could not connect to replica 0 at {HOST}, port {running.port}" in str(caught.value)
    assert "the handshake failed: the secret there differs" in str(caught.value)
    assert time.monotonic() - start < SOON_S / 4, "far sooner than its deadline"
    running.goes_on()


def test_a_replica_that_is_there_cannot_be_replaced_by_another_that_claims_its_number(running: Exchange) -> None:
    second = made(1)
    try:
        with pytest.raises(ConnectError, match="another connection with this replica's number is still in use there"):
            second.dial({0: Address(host=HOST, port=running.port)}, deadline_s=1.5)
    finally:
        second.close()
    running.goes_on()


def test_a_port_that_nobody_listens_on_is_named() -> None:
    lonely = made(1)
    port = free_port()
    try:
        with pytest.raises(ConnectError, match=f"port {port}: it takes no connection"):
            lonely.dial({0: Address(host=HOST, port=port)}, deadline_s=0.5)
        with pytest.raises(ValueError, match="dials those with lower numbers, got 2"):
            lonely.dial({2: Address(host=HOST, port=port)}, deadline_s=0.5)
    finally:
        lonely.close()


def test_a_peer_that_cannot_be_is_refused_with_its_number(running: Exchange) -> None:
    for peer in (0, 3, -1):
        with pytest.raises(ValueError, match=f"got {peer}"):
            running.low.receive(source=peer, envelope=envelope_of(1, 0))
    with pytest.raises(ValueError, match="replica must be in"):
        made(3)


def test_keys_are_those_that_libzmq_takes() -> None:
    pair = key_pair(SECRET, replica=5, role="door")
    assert zmq.curve_public(pair.private) == pair.public and len(z85.decode(pair.private)) == 32
    assert "private" not in repr(pair)
