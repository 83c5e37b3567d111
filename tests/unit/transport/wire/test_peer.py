"""Peer and flow control without a socket: bounds, order, windows, pacing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import PayloadError, PeerLost, TransportError
from thinwire.transport.base import Envelope
from thinwire.transport.message import HEADER_BYTES, pack
from thinwire.transport.streams import BLOBS, CONTROL, ROUNDS, MessageAddress
from thinwire.transport.tcp_stats import ConnectionStats
from thinwire.transport.wire.connection import MOST_SILENCE_S
from thinwire.transport.wire.flow_control import (
    LEAST_BYTES,
    IncomingMessages,
    OutgoingMessages,
    ReceiveWindow,
)
from thinwire.transport.wire.framing import (
    MAX_UNEXPECTED,
    MAX_UNEXPECTED_BYTES,
    MAX_WINDOW_BYTES,
    OPENING_BYTES,
    PART_BYTES,
    Credit,
    FrameError,
    Goodbye,
    Hello,
    MessagePart,
    MessageRefused,
    MessageStart,
    Receipt,
    ReceivePosted,
    read,
    write,
)
from thinwire.transport.wire.peer import Peer
from thinwire.transport.wire.transfer import WireTransfer

OWN = Hello(replica=0, num_replicas=2, incarnation=bytes(16))


def envelope_of(size: int, round_id: int = 0, *, fragment: int = 0, **more) -> Envelope:
    return Envelope(stream=ROUNDS, key=(round_id, fragment), payload_bytes=size, numel=size, **more)


def transfer_of(size: int, round_id: int = 0, *, peer: int = 1, **more) -> WireTransfer:
    return WireTransfer(peer=peer, envelope=envelope_of(size, round_id, **more), verb="send", later=lambda task: task())


def message_of(size: int, round_id: int = 0, *, sender: int = 1) -> torch.Tensor:
    return pack((torch.arange(size) % 251).to(torch.uint8), sender=sender, envelope=envelope_of(size, round_id))


def post(sending: OutgoingMessages, size: int, round_id: int = 0, **more) -> WireTransfer:
    transfer = transfer_of(size, round_id, peer=0, **more)
    sending.post(transfer, message_of(size, round_id), now_s=0.0)
    return transfer


def out_of(sending: OutgoingMessages, *, now_s: float = 0.0) -> list[MessageStart | MessagePart]:
    frames = []
    while (frame := sending.next_frame(now_s=now_s)) is not None:
        frames.append(read(memoryview(write(frame))))
    return frames


def carry(sending: OutgoingMessages, receiving: IncomingMessages, *, bytes_per_s: float = 1e6) -> int:
    """Carry frames both ways until nothing moves, and return the most bytes that were under way at once."""
    most, now_s = 0, 0.0
    while True:
        frames = out_of(sending)
        most = max(most, sum(len(frame.body) for frame in frames))
        for frame in frames:
            now_s += len(frame.body) / bytes_per_s
            receiving.take(frame, now_s=now_s)
        replies = list(receiving.replies)
        receiving.replies.clear()
        for reply in replies:
            sending.take(read(memoryview(write(reply))))
        if not frames and not replies:
            return most


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 3_000_017])
def test_no_more_is_under_way_than_an_opening_or_a_window(size):
    sending, receiving, receive = OutgoingMessages(), IncomingMessages(), transfer_of(size)
    receiving.post(receive)
    send = post(sending, size)
    assert carry(sending, receiving) <= max(OPENING_BYTES, 2 * LEAST_BYTES)
    send.wait(deadline_s=0)
    received = receive.wait(deadline_s=0)
    assert received is not None and torch.equal(received.payload, message_of(size)[HEADER_BYTES:])


def test_many_messages_share_the_window():
    sending, receiving = OutgoingMessages(), IncomingMessages()
    receives = [transfer_of(500_000, number) for number in range(8)]
    for number, receive in enumerate(receives):
        receiving.post(receive)
        post(sending, 500_000, number)
    assert carry(sending, receiving) <= 8 * OPENING_BYTES + 8 * 2 * PART_BYTES
    assert all(receive.done() for receive in receives)


def test_the_rest_of_a_message_does_not_leave_before_it_is_asked_for():
    sending = OutgoingMessages()
    post(sending, 10 * OPENING_BYTES)
    assert [type(frame) for frame in out_of(sending)] == [MessageStart]
    sending.take(Credit(number=0, end=OPENING_BYTES + PART_BYTES + 1))
    assert [len(frame.body) for frame in out_of(sending)] == [PART_BYTES, 1]


def test_a_sender_holds_back_what_the_receiver_would_not_keep():
    sending, receiving = OutgoingMessages(), IncomingMessages()
    sends = [post(sending, 1, number) for number in range(MAX_UNEXPECTED + 3)]
    carry(sending, receiving)
    assert [send.done() for send in sends] == [True] * MAX_UNEXPECTED + [False] * 3
    for number in range(2):  # each that is taken makes room for one
        receiving.post(transfer_of(1, number))
    carry(sending, receiving)
    assert [send.done() for send in sends] == [True] * (MAX_UNEXPECTED + 2) + [False]


def test_control_goes_before_rounds_and_these_before_blobs():
    sending, size = OutgoingMessages(), 3 * PART_BYTES
    for number, stream in enumerate((BLOBS, BLOBS, ROUNDS, CONTROL, ROUNDS)):
        envelope = Envelope(stream=stream, key=(number,), payload_bytes=size)
        transfer = WireTransfer(peer=0, envelope=envelope, verb="take", later=lambda task: task())
        sending.post(transfer, pack(torch.zeros(size).byte(), sender=1, envelope=envelope), now_s=0.0)
    assert [frame.address.stream for frame in out_of(sending)] == [4, 1, 1, 5, 5]
    for number in (4, 3, 1, 0):
        sending.take(Credit(number=number, end=size + HEADER_BYTES))
    assert [frame.number for frame in out_of(sending)] == [0, 0, 1, 1, 3, 4, 3, 4]  # blobs take turns


def test_a_sender_holds_back_bytes_too():
    sending, receiving = OutgoingMessages(), IncomingMessages()
    num_messages = MAX_UNEXPECTED_BYTES // OPENING_BYTES
    for number in range(num_messages + 5):
        post(sending, OPENING_BYTES, number)
    assert len(out_of(sending)) == num_messages
    receiving.post(transfer_of(OPENING_BYTES, 0))
    sending.take(Credit(number=0, end=OPENING_BYTES + HEADER_BYTES))
    assert len(out_of(sending)) == 2  # the rest of the first, and one more opening


def address_of(round_id: int) -> MessageAddress:
    return MessageAddress(1, 0, round_id, 0, 0)


def opening(number: int, message: torch.Tensor, *, round_id: int = 0) -> MessageStart:
    view = message.numpy().data
    return MessageStart(number=number, address=address_of(round_id), message_bytes=len(view), body=view[:OPENING_BYTES])


@pytest.mark.parametrize("size", [1, OPENING_BYTES])
def test_messages_that_nobody_waits_for_are_refused_beyond_the_bound(size):
    receiving, message = IncomingMessages(), message_of(size)
    kept = 0
    with pytest.raises(FrameError, match="more unexpected messages"):
        for number in range(MAX_UNEXPECTED + 1):
            receiving.take(opening(number, message, round_id=number), now_s=0)
            kept = number + 1
    assert kept == min(MAX_UNEXPECTED, MAX_UNEXPECTED_BYTES // min(OPENING_BYTES, size + HEADER_BYTES))


def test_what_was_not_asked_for_is_refused():
    message = message_of(4 * OPENING_BYTES)
    view = message.numpy().data

    def part(start: int, size: int = 10, number: int = 0) -> MessagePart:
        return MessagePart(number=number, start=start, body=view[start : start + size])

    for wrong in (
        part(OPENING_BYTES, number=1),
        part(0),
        part(OPENING_BYTES + 1),
        opening(0, message),
        opening(2, message),
    ):
        receiving = IncomingMessages()
        receiving.post(transfer_of(4 * OPENING_BYTES))
        receiving.take(opening(0, message), now_s=0)
        with pytest.raises(FrameError):
            receiving.take(wrong, now_s=0)
    beyond = IncomingMessages()
    beyond.post(transfer_of(4 * OPENING_BYTES))
    beyond.take(opening(0, message), now_s=0)
    with pytest.raises(FrameError, match="of a message, expected"):
        for start in range(OPENING_BYTES, OPENING_BYTES + LEAST_BYTES + PART_BYTES, PART_BYTES):
            beyond.replies.clear()  # asked or not, no more than the window
            beyond._arriving[0].asked = OPENING_BYTES + LEAST_BYTES
            beyond.take(part(start, PART_BYTES), now_s=0)


@pytest.mark.parametrize(
    "wrong",
    [
        Credit(number=0, end=OPENING_BYTES),
        Credit(number=0, end=10**9),
        Credit(number=7, end=OPENING_BYTES + 1),
        Receipt(number=0, is_matched=True),
        Receipt(number=1, is_matched=True),
        ReceivePosted(number=0),
        MessageRefused(number=1),
    ],
)
def test_words_on_messages_that_cannot_be_are_refused(wrong):
    sending = OutgoingMessages()
    post(sending, 4 * OPENING_BYTES)
    out_of(sending)
    with pytest.raises(FrameError):
        sending.take(wrong)


def test_a_large_message_that_is_not_expected_is_refused_before_its_rest_is_sent():
    sending, receiving, receive = OutgoingMessages(), IncomingMessages(), transfer_of(3 * OPENING_BYTES)
    receiving.post(receive)
    send = post(sending, 2 * OPENING_BYTES)
    assert carry(sending, receiving) <= OPENING_BYTES
    with pytest.raises(PayloadError, match="elements is 131072, expected 196608"):
        receive.wait(deadline_s=0)
    with pytest.raises(PayloadError, match=r"replica 0 refused round 0 \(fragment 0\)"):
        send.wait(deadline_s=0)


def test_a_message_is_spread_over_the_seconds_that_its_sender_wants():
    sending = OutgoingMessages()
    size = OPENING_BYTES + 10 * PART_BYTES - HEADER_BYTES
    post(sending, size, spread_s=10.0)
    out_of(sending)
    sending.take(Credit(number=0, end=size + HEADER_BYTES))
    for second in range(11):
        assert sending.due_s() is None if second > 10 else sending.due_s() == pytest.approx(max(1, second))
        assert len(out_of(sending, now_s=second)) == (1 if second else 0)
    assert sending.due_s() is None


def test_a_spread_message_leaves_the_wire_to_others():
    sending, receiving = OutgoingMessages(), IncomingMessages()
    receives = [transfer_of(2_000_000, number) for number in range(2)]
    for receive in receives:
        receiving.post(receive)
    post(sending, 2_000_000, 0, spread_s=100.0)
    post(sending, 2_000_000, 1)
    carry(sending, receiving)
    assert [receive.done() for receive in receives] == [False, True]


def test_a_window_grows_while_that_makes_bytes_come_faster_and_stays_small_on_a_thin_wire():
    def settled(*, bytes_per_s: float, round_trip_s: float) -> int:
        window, now_s = ReceiveWindow(), 0.0
        for _ in range(60):
            now_s += max(window.num_bytes / bytes_per_s, round_trip_s)
            window.observe(window.num_bytes, now_s=now_s)
        return window.num_bytes

    assert settled(bytes_per_s=1e5, round_trip_s=0.05) == LEAST_BYTES
    far = settled(bytes_per_s=20e6, round_trip_s=0.1)
    assert 2e6 / 1.2 <= far <= 8e6
    assert settled(bytes_per_s=1e12, round_trip_s=0.1) == MAX_WINDOW_BYTES


class FakeLine:
    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.is_open = True
        self.has_gone = False
        self.told: ConnectionStats | None = None

    def send(self, raw: bytearray) -> bool:
        self.sent.append(bytes(raw))
        return True

    def close(self) -> None:
        self.is_open = False

    def reading(self) -> ConnectionStats | None:
        return self.told

    def is_closed(self) -> bool:
        return self.has_gone


def test_a_lost_connection_fails_what_is_on_its_way_by_name_and_what_comes_after():
    link, line = Peer(peer=1, own=OWN), FakeLine()
    link.open(line, Hello(replica=1, num_replicas=2, incarnation=bytes(16)))
    receive, send, later = transfer_of(5, 12, fragment=3), transfer_of(5, 13), transfer_of(5, 14)
    link.post_receive(receive)
    link.post_send(send, message_of(5, 13, sender=0))
    link.drop("closed its connection")
    link.post_receive(later)
    for transfer, what in ((receive, "round 12 (fragment 3)"), (send, "round 13"), (later, "round 14")):
        with pytest.raises(PeerLost) as caught:
            transfer.wait(deadline_s=0)
        assert f"replica 1 closed its connection during {what}" in str(caught.value)
    assert not line.is_open


def test_what_came_whole_before_the_other_closed_can_still_be_received():
    link = Peer(peer=1, own=OWN)
    link.open(FakeLine(), Hello(replica=1, num_replicas=2, incarnation=bytes(16)))
    posted, whole, half = transfer_of(5, 2), transfer_of(5, 0), transfer_of(100_000, 1)
    link.post_receive(posted)
    link.take(memoryview(write(opening(0, message_of(5), round_id=0))))
    link.take(memoryview(write(opening(1, message_of(100_000, 1), round_id=1))))
    link.take(memoryview(write(Goodbye())))
    link.post_receive(half)
    link.drop("closed its connection")
    link.post_receive(whole)
    assert whole.wait(deadline_s=0) is not None
    for transfer in (posted, half):
        with pytest.raises(PeerLost, match="replica 1 closed its connection"):
            transfer.wait(deadline_s=0)


def test_another_process_does_not_take_the_place_of_the_one_that_was_lost():
    link = Peer(peer=1, own=OWN)
    link.open(FakeLine(), Hello(replica=1, num_replicas=2, incarnation=bytes(16)))
    link.drop("closed its connection")
    link.check_hello(Hello(replica=1, num_replicas=2, incarnation=bytes(16)))
    for wrong in (
        Hello(replica=1, num_replicas=2, incarnation=bytes(15) + b"x"),
        Hello(replica=0, num_replicas=2, incarnation=bytes(16)),
        Hello(replica=1, num_replicas=3, incarnation=bytes(16)),
    ):
        with pytest.raises(FrameError):
            link.check_hello(wrong)


def test_a_peer_that_sends_and_never_reads_is_refused_in_the_end():
    link = Peer(peer=1, own=OWN)
    link.open(FakeLine(), Hello(replica=1, num_replicas=2, incarnation=bytes(16)))
    with pytest.raises(FrameError, match="replies unread"):
        for number in range(10_000):
            transfer = transfer_of(1)
            link.post_receive(transfer)
            link.take(memoryview(write(opening(number, message_of(1)))))


def test_a_connection_is_looked_at_with_the_kernel_s_eyes():
    link, line = Peer(peer=1, own=OWN), FakeLine()
    assert link.check() == ""
    link.open(line, Hello(replica=1, num_replicas=2, incarnation=bytes(16)))
    assert link.check() == ""
    usual = ConnectionStats(silence_s=0.5, rtt_s=0.05, sent_bytes=0, received_bytes=10_000_000)
    line.told = usual
    assert link.check() == ""
    line.told = replace(usual, silence_s=MOST_SILENCE_S)
    assert link.check() == "was silent for 30.0 s (its link allows 10 s)"
    line.told = replace(usual, received_bytes=200_000_000)  # a message of frames that has no end
    assert link.check() == "sent 200000000 bytes that make no messages and was disconnected"
    line.told, line.has_gone = usual, True
    assert link.check() == "closed its connection"


RAW = st.one_of(
    st.binary(max_size=80),
    st.builds(lambda n, e: bytes(write(Credit(number=n, end=e))), st.integers(0, 3), st.integers(0, 300_000)),
    st.builds(lambda n, m: bytes(write(Receipt(number=n, is_matched=m))), st.integers(0, 3), st.booleans()),
    st.builds(lambda n: bytes(write(ReceivePosted(number=n))), st.integers(0, 3)),
    st.builds(lambda n: bytes(write(MessageRefused(number=n))), st.integers(0, 3)),
    st.builds(
        lambda n, s, b: bytes(write(MessagePart(number=n, start=s, body=memoryview(b)))),
        st.integers(0, 3), st.integers(65_530, 65_540), st.binary(min_size=1, max_size=9),
    ),
    st.builds(
        lambda n, k, b: bytes(
            write(MessageStart(number=n, address=address_of(k), message_bytes=len(b), body=memoryview(b)))
        ),
        st.integers(0, 3), st.integers(0, 3), st.binary(max_size=90),
    ),
)  # fmt: skip


@given(st.lists(RAW, max_size=12))
def test_whatever_a_peer_sends_it_is_a_frame_error_or_harmless(raws):
    link, line = Peer(peer=1, own=OWN), FakeLine()
    link.open(line, Hello(replica=1, num_replicas=2, incarnation=bytes(16)))
    transfers = [transfer_of(100_000, 0), transfer_of(7, 1)]
    sends = [transfer_of(100_000, 2), transfer_of(0, 3)]
    for transfer in transfers:
        link.post_receive(transfer)
    for send in sends:
        link.post_send(send, message_of(send.envelope.payload_bytes, sender=0))
    try:
        for raw in raws:
            link.take(memoryview(raw))
            link.flush()
    except FrameError:
        link.drop("broke the protocol", for_good=True)
        assert all(transfer.done() for transfer in (*transfers, *sends))
    for transfer in (*transfers, *sends):
        if transfer.done():
            try:
                transfer.wait(deadline_s=0)
            except TransportError:
                continue
