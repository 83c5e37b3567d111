"""Scripted faults: each does what it says, to the messages it names and to no other."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from thinwire.errors import DeadlineExceeded, PayloadError, PeerLost
from thinwire.transport.base import Envelope, Pending, Received, Transport
from thinwire.transport.faulty import Fault, FaultyTransport
from thinwire.transport.loopback import LoopbackTransport, LoopbackWorld
from thinwire.transport.recording import RecordingTransport
from thinwire.transport.streams import BUFFERS, CONTROL, ROUNDS, Stream

SIZE = 101


def payload() -> torch.Tensor:
    return torch.arange(SIZE).to(torch.uint8)


def envelope_of(round_id: int, *, fragment: int = 0, stream: Stream = ROUNDS, note: bytes = b"") -> Envelope:
    return Envelope(stream=stream, key=(round_id, fragment), payload_bytes=SIZE, numel=SIZE, note=note)


class Pair:
    """Two replicas in one process, each behind its own faults."""

    def __init__(self, *script: Fault) -> None:
        self.world = LoopbackWorld(2)
        self.ends: list[Transport] = [FaultyTransport(transport, script) for transport in self.world.transports]

    def pass_on(self, envelope: Envelope) -> Received | None:
        """Send from replica 0 to replica 1 and return what arrives."""

        def replica_main(transport: LoopbackTransport) -> Received | None:
            end = self.ends[transport.replica]
            if transport.replica == 0:
                return end.send(payload(), to=1, envelope=envelope).wait(deadline_s=1)
            return end.receive(source=0, envelope=envelope).wait(deadline_s=1)

        return self.world.run(replica_main)[1]


class Threaded:
    """A loopback end that claims to move bytes in the background, for delays of what is sent."""

    runs_in_background = True

    def __init__(self, inner: LoopbackTransport) -> None:
        self.inner = inner
        self.replica = inner.replica
        self.num_replicas = inner.num_replicas
        self.sent_at: list[float] = []

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Pending:
        self.sent_at.append(time.monotonic())
        return self.inner.send(payload, to=to, envelope=envelope)

    def receive(self, *, source: int, envelope: Envelope) -> Pending:
        return self.inner.receive(source=source, envelope=envelope)

    def close(self) -> None:
        self.inner.close()


def test_without_faults_it_is_the_transport_it_wraps() -> None:
    pair = Pair()
    assert isinstance(pair.ends[0], Transport)
    assert (pair.ends[1].replica, pair.ends[1].num_replicas, pair.ends[1].runs_in_background) == (1, 2, False)
    received = pair.pass_on(envelope_of(3, note=b"77"))
    assert received is not None and torch.equal(received.payload, payload()) and received.note.startswith(b"77")
    pair.ends[0].close()


@pytest.mark.parametrize("direction", ["sent", "received"])
def test_a_dropped_message_is_missed_by_its_receiver_only(direction: Any) -> None:
    culprit = 0 if direction == "sent" else 1
    pair = Pair(Fault(kind="drop", replica=culprit, direction=direction, round_id=3))
    pair.pass_on(envelope_of(2))
    with pytest.raises(DeadlineExceeded, match=r"round 3 \(fragment 0\)"):
        pair.pass_on(envelope_of(3))
    pair.pass_on(envelope_of(4))


@pytest.mark.parametrize("direction", ["sent", "received"])
@pytest.mark.parametrize(
    ("byte", "reason"), [(-1, "payload's checksum"), (10, "header's checksum"), (-10_000, "header's checksum")]
)
def test_a_corrupt_byte_is_caught_by_the_real_check(direction: Any, byte: int, reason: str) -> None:
    culprit = 0 if direction == "sent" else 1
    pair = Pair(Fault(kind="corrupt", replica=culprit, direction=direction, round_id=3, byte=byte))
    with pytest.raises(PayloadError, match=reason):
        pair.pass_on(envelope_of(3, note=b"5"))
    assert pair.pass_on(envelope_of(4)) is not None


def test_a_fault_hits_only_the_fragment_peer_and_replica_it_names() -> None:
    pair = Pair(
        Fault(kind="drop", replica=0, peer=1, round_id=3, fragment=2),
        Fault(kind="drop", replica=0, peer=5),
        Fault(kind="drop", replica=7),
    )
    assert pair.pass_on(envelope_of(3, fragment=1)) is not None
    assert pair.pass_on(envelope_of(3, fragment=2, stream=BUFFERS)) is not None
    with pytest.raises(DeadlineExceeded):
        pair.pass_on(envelope_of(3, fragment=2))


def test_a_death_lasts_and_covers_what_belongs_to_no_round() -> None:
    pair = Pair(Fault(kind="die", replica=0, peer=1, round_id=3))
    assert pair.pass_on(envelope_of(2)) is not None
    assert pair.pass_on(envelope_of(0, stream=CONTROL)) is not None
    for envelope in (envelope_of(4), envelope_of(1), envelope_of(0, stream=CONTROL)):
        for pending in (
            pair.ends[0].send(payload(), to=1, envelope=envelope),
            pair.ends[0].receive(source=1, envelope=envelope),
        ):
            assert pending.done()
            with pytest.raises(PeerLost, match=r"replica 1 closed its connection.*resume"):
                pending.wait(deadline_s=1)


def test_a_silent_peer_takes_nothing_and_says_nothing() -> None:
    pair = Pair(Fault(kind="fall_silent", replica=0, round_id=3))
    sent = pair.ends[0].send(payload(), to=1, envelope=envelope_of(3))
    assert sent.done() and sent.wait(deadline_s=1) is None
    with pytest.raises(DeadlineExceeded):
        pair.pass_on(envelope_of(3))
    silent = pair.ends[0].receive(source=1, envelope=envelope_of(3))
    assert not silent.done()
    with pytest.raises(DeadlineExceeded, match="replica 1 did not send round 3"):
        silent.wait(deadline_s=1)


def test_a_lost_message_lets_real_time_pass_up_to_the_deadline_in_the_background() -> None:
    slept: list[float] = []
    inner = Threaded(LoopbackWorld(2).transports[0])
    transport = FaultyTransport(inner, [Fault(kind="fall_silent")], sleep=slept.append)
    with pytest.raises(DeadlineExceeded):
        transport.receive(source=1, envelope=envelope_of(0)).wait(deadline_s=7)
    assert slept == [pytest.approx(7, abs=0.5)]


def test_a_late_arrival_counts_against_the_deadline_and_still_comes() -> None:
    slept: list[float] = []
    world = LoopbackWorld(2)
    fault = Fault(kind="delay", direction="received", round_id=3, delay_s=1.5)
    receiver = FaultyTransport(world.transports[1], [fault], sleep=slept.append)
    world.transports[0].send(payload(), to=1, envelope=envelope_of(3))
    pending = receiver.receive(source=0, envelope=envelope_of(3))
    assert not pending.done()
    with pytest.raises(DeadlineExceeded):
        pending.wait(deadline_s=1.0)
    received = pending.wait(deadline_s=1.0)
    assert received is not None and torch.equal(received.payload, payload())
    assert (slept == [1.0, 0.5] and pending.done() is False) or pending.done()


def test_a_late_departure_leaves_later_and_waits_with_the_deadline() -> None:
    world = LoopbackWorld(2)
    inner = Threaded(world.transports[0])
    gate = threading.Event()
    fault = Fault(kind="delay", direction="sent", delay_s=0.05)
    sender = FaultyTransport(inner, [fault], sleep=lambda seconds: gate.wait(5) and None)
    pending = sender.send(payload(), to=1, envelope=envelope_of(3))
    assert not pending.done() and inner.sent_at == []
    with pytest.raises(DeadlineExceeded):
        pending.wait(deadline_s=0.01)
    gate.set()
    assert pending.wait(deadline_s=5) is None
    assert pending.done() and len(inner.sent_at) == 1


def test_a_late_departure_that_fails_says_so() -> None:
    inner = Threaded(LoopbackWorld(2).transports[0])
    sender = FaultyTransport(inner, [Fault(kind="delay", direction="sent", delay_s=0.01)])
    pending = sender.send(payload(), to=1, envelope=replace(envelope_of(3), payload_bytes=SIZE + 1))
    with pytest.raises(ValueError, match="give payload_bytes="):
        pending.wait(deadline_s=5)


def test_the_same_script_gives_the_same_faults_every_time() -> None:
    def what_happens() -> list[str]:
        pair = Pair(
            Fault(kind="drop", round_id=1, direction="sent"), Fault(kind="corrupt", round_id=2, direction="received")
        )
        seen = []
        for round_id in range(4):
            try:
                pair.pass_on(envelope_of(round_id))
                seen.append("whole")
            except (DeadlineExceeded, PayloadError) as error:
                seen.append(str(error))
        return seen

    assert what_happens() == what_happens()
    assert [text == "whole" for text in what_happens()] == [True, False, False, True]


def test_faults_inside_a_recording_transport_are_in_the_log() -> None:
    pair = Pair()
    script = [Fault(kind="corrupt", replica=0, direction="sent", round_id=3)]
    # Around or inside: the bytes are changed in the innermost transport.
    receiver = RecordingTransport(FaultyTransport(pair.world.transports[1], script))
    pair.ends = [FaultyTransport(RecordingTransport(pair.world.transports[0]), script), receiver]
    with pytest.raises(PayloadError):
        pair.pass_on(envelope_of(3))
    assert ["payload's checksum" in record.error for record in receiver.log] == [True]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kind": "explode"}, "kind must be one of delay, drop, corrupt, forge, die, fall_silent, got 'explode'"),
        ({"kind": "delay"}, "delay_s must be positive"),
        ({"kind": "drop", "delay_s": 1.0}, "delay_s must be positive for a delay and 0 otherwise, got 1.0"),
        ({"kind": "forge"}, "and for nothing else, got forge=None for forge"),
        ({"kind": "drop", "forge": lambda payload, envelope: payload}, "for drop with direction=None"),
        (
            {"kind": "forge", "forge": lambda payload, envelope: payload, "direction": "received"},
            "with direction=received",
        ),
        ({"kind": "die", "direction": "sent"}, "leave direction and fragment out"),
        ({"kind": "fall_silent", "fragment": 1}, "leave direction and fragment out"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Fault(**fields)


def test_a_script_that_the_transport_cannot_play_is_refused() -> None:
    class Opaque(Threaded):
        inner = property(lambda self: self.missing)  # type: ignore[assignment]

        def __init__(self) -> None:
            self.replica, self.num_replicas = 0, 2

    with pytest.raises(ValueError, match="sends at once; delay what is received instead"):
        FaultyTransport(LoopbackWorld(2).transports[0], [Fault(kind="delay", delay_s=1)])
    with pytest.raises(ValueError, match="no `tamper`"):
        FaultyTransport(Opaque(), [Fault(kind="corrupt")])


def test_a_lie_passes_every_check_and_leaves_the_true_payload_alone() -> None:
    def forge(payload: torch.Tensor, envelope: Envelope) -> torch.Tensor:
        return payload.add_(envelope.address.number)

    pair = Pair(Fault(kind="forge", replica=0, round_id=3, forge=forge))
    for round_id in (2, 3):
        received = pair.pass_on(envelope_of(round_id, note=b"9"))
        assert received is not None and received.note.startswith(b"9")
        assert torch.equal(received.payload, payload() + (3 if round_id == 3 else 0))
    # what the liar receives is what was sent
    assert not pair.ends[0].script[0].hits(envelope_of(3), replica=0, peer=1, direction="received")  # type: ignore[attr-defined]
