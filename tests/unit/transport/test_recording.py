"""What the recording transport writes down."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from thinwire.errors import DeadlineExceeded, PayloadError, PeerLost
from thinwire.events import StreamTotals, Totals, TransferLog
from thinwire.transport.base import Envelope, Pending, Received, Transport
from thinwire.transport.loopback import LoopbackWorld
from thinwire.transport.message import HEADER_BYTES
from thinwire.transport.recording import RecordingTransport
from thinwire.transport.streams import CONTROL, ROUNDS


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Manual:
    """A transfer in the background that ends when the test says."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.callbacks: list[Callable[[], None]] = []

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self.ended.set()
        for callback in self.callbacks:
            callback()

    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self, *, deadline_s: float) -> Received | None:
        if not self.ended.is_set():
            raise DeadlineExceeded("too late")
        if self.error is not None:
            raise self.error
        return Received(payload=torch.zeros(0, dtype=torch.uint8))

    def on_finish(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)
        if self.ended.is_set():
            callback()


class Background:
    """A transport whose transfers the test ends by hand."""

    replica = 0
    num_replicas = 2
    runs_in_background = True

    def __init__(self) -> None:
        self.pending = Manual()
        self.is_closed = False

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        return self.pending

    def receive(self, *, source: int, envelope: Envelope) -> Pending:
        return self.pending

    def close(self) -> None:
        self.is_closed = True


class Broken(Background):
    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        raise PeerLost("gone before it began")


def payload(size: int) -> torch.Tensor:
    return torch.arange(size).to(torch.uint8)


def envelope_of(size: int) -> Envelope:
    return Envelope(stream=ROUNDS, key=(5, 2, 1), payload_bytes=size, numel=size)


def test_it_is_a_transport_and_passes_the_inner_ones_facts_on() -> None:
    inner = Background()
    transport = RecordingTransport(inner)
    assert isinstance(transport, Transport)
    assert (transport.replica, transport.num_replicas, transport.runs_in_background) == (0, 2, True)
    transport.close()
    assert inner.is_closed


@pytest.mark.parametrize("size", [0, 1, 1009])
def test_each_message_is_recorded_once_on_both_sides_with_its_real_bytes(size: int) -> None:
    world = LoopbackWorld(2)
    ends = [RecordingTransport(transport) for transport in world.transports]
    sent = ends[0].send(payload(size), to=1, envelope=envelope_of(size))
    assert len(ends[0].log) == 1, "a message that left at once is recorded though nobody waited"
    sent.wait(deadline_s=1)
    receive = ends[1].receive(source=0, envelope=envelope_of(size))
    assert receive.done() and len(ends[1].log) == 0
    received = receive.wait(deadline_s=1)
    assert received is not None and torch.equal(received.payload, payload(size))
    for end, direction, peer in ((ends[0], "sent", 1), (ends[1], "received", 0)):
        (record,) = end.log
        assert (record.direction, record.peer, record.kind) == (direction, peer, "round")
        assert (record.round_id, record.fragment, record.phase) == (5, 2, 1)
        assert (record.payload_bytes, record.wire_bytes, record.error) == (size, size + HEADER_BYTES, "")


def test_the_log_sums_each_stream_and_keeps_the_most_bytes_that_were_in_flight() -> None:
    inner = Background()
    transport = RecordingTransport(inner)
    for size in (30, 70):
        transport.send(payload(size), to=1, envelope=envelope_of(size))
    control = Envelope(stream=CONTROL, key=(0,), payload_bytes=5)
    with pytest.raises(DeadlineExceeded):
        transport.receive(source=1, envelope=control).wait(deadline_s=0)  # it may still come
    assert transport.log.streams("sent")["round"].in_flight_bytes == 100
    inner.pending.end()
    found = transport.log.streams("sent")
    assert list(found) == ["round"]
    assert found["round"] == StreamTotals(totals=Totals(messages=2, wire_bytes=2 * HEADER_BYTES), peak_bytes=100)
    assert transport.log.streams("received")["control"].peak_bytes == 5
    assert transport.log.streams("received")["control"].in_flight_bytes == 0


def test_the_end_in_the_background_is_recorded_when_it_happens_not_when_somebody_asks() -> None:
    inner, clock = Background(), Clock()
    transport = RecordingTransport(inner, clock=clock)
    pending = transport.send(payload(3), to=1, envelope=envelope_of(3))
    clock.now = 2.0
    inner.pending.end()
    clock.now = 9.0
    pending.wait(deadline_s=1)
    (record,) = transport.log
    assert (record.started_s, record.finished_s) == (0.0, 2.0)


def test_a_missed_deadline_is_recorded_once_and_a_later_end_still_counts() -> None:
    inner = Background()
    transport = RecordingTransport(inner)
    pending = transport.receive(source=1, envelope=envelope_of(3))
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            pending.wait(deadline_s=0)
    assert [record.error for record in transport.log] == ["too late"]
    assert transport.log.totals("received").messages == 0
    inner.pending.end()
    assert [record.error for record in transport.log] == ["too late", ""]
    assert transport.log.totals("received").wire_bytes == HEADER_BYTES, "what came was empty, and that is what counts"


def test_a_failure_in_the_background_is_recorded_and_raised_where_somebody_waits() -> None:
    inner = Background()
    transport = RecordingTransport(inner)
    pending = transport.receive(source=1, envelope=envelope_of(3))
    inner.pending.end(PayloadError("damaged"))
    assert [record.error for record in transport.log] == ["damaged"]
    with pytest.raises(PayloadError, match="damaged"):
        pending.wait(deadline_s=1)
    assert len(transport.log) == 1


def test_a_send_that_cannot_begin_is_recorded_with_its_error() -> None:
    transport = RecordingTransport(Broken())
    with pytest.raises(PeerLost):
        transport.send(payload(3), to=1, envelope=envelope_of(3))
    assert [record.error for record in transport.log] == ["gone before it began"]


def test_wrappers_stack_and_each_sees_the_end() -> None:
    inner = Background()
    outer = RecordingTransport(RecordingTransport(inner))
    outer.send(payload(3), to=1, envelope=envelope_of(3))
    inner.pending.end()
    assert isinstance(outer.inner, RecordingTransport)
    assert len(outer.log) == len(outer.inner.log) == 1


def test_a_log_can_be_shared_between_transports() -> None:
    log = TransferLog()
    world = LoopbackWorld(2)
    ends = [RecordingTransport(transport, log=log) for transport in world.transports]
    ends[0].send(payload(1), to=1, envelope=envelope_of(1))
    ends[1].receive(source=0, envelope=envelope_of(1)).wait(deadline_s=1)
    assert [record.direction for record in log] == ["sent", "received"]
