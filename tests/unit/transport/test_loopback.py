"""The loopback world: one order of events on every run, and no wait without an end."""

from __future__ import annotations

import pytest
import torch

from thinwire.errors import DeadlineExceeded, PayloadError
from thinwire.transport.base import Envelope
from thinwire.transport.loopback import LoopbackWorld, run_replicas
from thinwire.transport.message import HEADER_BYTES, pack, unpack
from thinwire.transport.streams import ROUNDS, SETUP


def envelope(round_id, size, **more):
    return Envelope(stream=ROUNDS, key=(round_id,), payload_bytes=size, numel=size, **more)


def bytes_of(*values):
    return torch.tensor(values, dtype=torch.uint8)


def test_messages_arrive_whole_and_by_envelope_not_by_order():
    def replica_main(transport):
        if transport.replica == 0:
            for number in (2, 0, 1):
                transport.send(bytes_of(number, 9), to=1, envelope=envelope(number, 2)).wait(deadline_s=1)
            return None
        pendings = [transport.receive(source=0, envelope=envelope(n, 2)) for n in range(3)]
        return [pending.wait(deadline_s=1).payload.tolist() for pending in pendings]

    assert run_replicas(2, replica_main)[1] == [[0, 9], [1, 9], [2, 9]]


def test_the_order_of_events_is_the_same_on_every_run():
    def events_of_a_run():
        events = []

        def replica_main(transport):
            peers = [p for p in range(3) if p != transport.replica]
            for number in range(4):
                events.append((transport.replica, number))
                for peer in peers:
                    transport.send(bytes_of(number), to=peer, envelope=envelope(number, 1))
                for peer in peers:
                    transport.receive(source=peer, envelope=envelope(number, 1)).wait(deadline_s=1)

        run_replicas(3, replica_main)
        return events

    assert events_of_a_run() == events_of_a_run()


def test_a_wait_that_nobody_can_end_is_an_error_at_once():
    def replica_main(transport):
        transport.receive(source=1 - transport.replica, envelope=envelope(5, 1)).wait(deadline_s=1e9)

    with pytest.raises(DeadlineExceeded, match=r"round 5 \(fragment 0\) from replica 1 never came"):
        run_replicas(2, replica_main)


def test_a_wait_outside_of_a_run_is_an_error_at_once():
    transport = LoopbackWorld(2).transports[0]
    with pytest.raises(DeadlineExceeded, match=r"outside of run\(\)"):
        transport.receive(source=1, envelope=envelope(0, 1)).wait(deadline_s=1e9)


def test_an_error_of_one_replica_ends_the_others_and_comes_out_first():
    def replica_main(transport):
        if transport.replica == 1:
            raise KeyError("mine")
        transport.receive(source=1, envelope=envelope(0, 1)).wait(deadline_s=1)

    with pytest.raises(KeyError, match="mine"):
        run_replicas(3, replica_main)


def test_a_world_can_run_again_and_needs_a_replica():
    world = LoopbackWorld(2)
    assert world.run(lambda t: t.replica) == world.run(lambda t: t.replica) == [0, 1]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        LoopbackWorld(0)


FIELDS = [
    ({"stream": SETUP}, "stream is 1, expected 2"),
    ({"owner": 3}, "owner is 0, expected 3"),
    ({"key": (7, 0, 1)}, "phase is 0, expected 1"),
    ({"codec_id": 6}, "codec is 0, expected 6"),
    ({"key": (7, 3)}, "fragment is 0, expected 3"),
    ({"key": (8,)}, "round is 7, expected 8"),
    ({"numel": 5}, "elements is 4, expected 5"),
    ({"payload_bytes": 3}, "payload bytes is 4, expected 3"),
]


@pytest.mark.parametrize(("difference", "expected"), FIELDS)
def test_a_message_that_is_not_the_expected_one_is_refused_and_names_the_field(difference, expected):
    sent = {"stream": ROUNDS, "key": (7,), "numel": 4, "payload_bytes": 4}
    message = pack(bytes_of(1, 2, 3, 4), sender=0, envelope=Envelope(**sent))
    with pytest.raises(PayloadError, match=expected):
        unpack(message, source=0, envelope=Envelope(**{**sent, **difference}))


def test_a_message_from_another_sender_another_version_or_cut_short_is_refused():
    right = Envelope(stream=ROUNDS, key=(0,), numel=4, payload_bytes=4)
    message = pack(bytes_of(1, 2, 3, 4), sender=2, envelope=right)
    assert unpack(message, source=2, envelope=right).payload.tolist() == [1, 2, 3, 4]
    with pytest.raises(PayloadError, match="sender is 2, expected 0"):
        unpack(message, source=0, envelope=right)
    with pytest.raises(PayloadError, match="fewer than a header"):
        unpack(message[:20], source=2, envelope=right)
    with pytest.raises(PayloadError, match="3 payload bytes arrived, expected 4"):
        unpack(message[:-1], source=2, envelope=right)


@pytest.mark.parametrize("position", range(HEADER_BYTES + 4))
def test_no_flipped_bit_anywhere_gets_through(position):
    right = Envelope(stream=ROUNDS, key=(0,), numel=4, payload_bytes=4)
    message = pack(bytes_of(1, 2, 3, 4), sender=2, envelope=right)
    message[position] ^= 1 << (position % 8)
    with pytest.raises(PayloadError):
        unpack(message, source=2, envelope=right)
