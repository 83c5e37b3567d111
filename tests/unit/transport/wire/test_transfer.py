"""Requests over a connection without a socket: one response each, bounds, none of an earlier connection."""

from __future__ import annotations

import time
import zlib

import pytest
import torch

from thinwire.errors import PeerLost, TransportError
from thinwire.transport.base import MOST_REPLICAS
from thinwire.transport.message import HEADER_BYTES, header_of, pack
from thinwire.transport.wire.framing import (
    MAX_REQUESTS,
    CancelFrame,
    FrameError,
    Hello,
    MessagePart,
    RequestFrame,
    write,
)
from thinwire.transport.wire.peer import Peer
from thinwire.transport.wire.transfer import RequestTransfer, ResponseTransfer


class FakeLine:
    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, raw: bytearray) -> bool:
        self.sent.append(bytes(raw))
        return True

    def close(self) -> None:
        return

    def reading(self) -> None:
        return None

    def is_closed(self) -> bool:
        return False


class Ends:
    """Replicas 0 and 1 and the connection between them, whose frames go over when they are told to."""

    def __init__(self) -> None:
        self.heard: list[list[RequestFrame | CancelFrame | None]] = [[], []]
        self.hellos = [Hello(replica=n, num_replicas=MOST_REPLICAS, incarnation=bytes(16)) for n in range(2)]
        self.links = [
            Peer(
                peer=1 - n,
                own=self.hellos[n],
                is_open=True,
                on_request=lambda _, frame, n=n: self.heard[n].append(frame),
            )
            for n in range(2)
        ]
        self.numbers = 0
        self.connect()

    def connect(self) -> None:
        self.lines = [FakeLine(), FakeLine()]
        for n in range(2):
            self.links[n].open(self.lines[n], self.hellos[1 - n])

    def carry(self, *, turns: int = 1 << 20) -> int:
        """Carry what is sent, and what follows from it; return the bytes that came to replica 0."""
        num_bytes = 0
        for _ in range(turns):
            for link in self.links:
                while link.flush():
                    continue
            if not any(line.sent for line in self.lines):
                break
            num_bytes += sum(map(len, self.lines[1].sent))
            for n in range(2):
                raws, self.lines[n].sent = self.lines[n].sent, []
                for raw in raws:
                    self.links[1 - n].take(memoryview(raw))
        return num_bytes

    def ask(self, name: bytes = b"x", *, most_bytes: int = 1 << 20) -> RequestTransfer:
        ask = RequestTransfer(
            peer=1, number=self.numbers, name=name, most_bytes=most_bytes, later=lambda task: task(),
            withdraw=self.links[0].post_cancel,
        )  # fmt: skip
        self.numbers += 1
        self.links[0].post_request(ask)
        return ask

    def answer(self, number: int, payload: torch.Tensor, *, is_there: bool = True) -> ResponseTransfer:
        answer = ResponseTransfer(
            peer=0, number=number, num_bytes=payload.numel(), is_there=is_there, later=lambda task: task()
        )
        message = pack(payload, sender=1, envelope=answer.envelope)
        self.links[1].post_response(answer, message[HEADER_BYTES:], header=bytes(message[:HEADER_BYTES].numpy().data))
        return answer


def content(size: int) -> torch.Tensor:
    return (torch.arange(size) % 251).to(torch.uint8)


def test_a_header_alone_is_that_of_the_whole_message() -> None:
    payload = content(1009)
    answer = ResponseTransfer(peer=0, number=3, num_bytes=1009, is_there=True, later=lambda task: task())
    whole = pack(payload, sender=1, envelope=answer.envelope)
    assert bytes(whole[:HEADER_BYTES].numpy().data) == header_of(
        zlib.crc32(payload.numpy().data), sender=1, envelope=answer.envelope
    )


@pytest.mark.parametrize("size", [0, 1, 65_479, 65_480, 65_481, 65_535, 65_536, 65_537, 1_000_003])
def test_an_answer_arrives_whole_and_says_that_it_is_one(size: int) -> None:
    ends = Ends()
    ask = ends.ask(b"round/3")
    ends.carry()
    assert ends.heard[1] == [RequestFrame(number=0, name=b"round/3")] and not ask.done()
    answer = ends.answer(0, content(size))
    ends.carry()
    received = ask.wait(deadline_s=0)
    assert received is not None and any(received.note) and torch.equal(received.payload, content(size))
    assert answer.done()
    gone = ends.ask(b"round/2")
    ends.carry()
    ends.answer(1, content(0), is_there=False)
    ends.carry()
    received = gone.wait(deadline_s=0)
    assert received is not None and not any(received.note)


def test_an_answer_larger_than_asked_for_is_refused_and_the_next_one_comes() -> None:
    ends = Ends()
    ask = ends.ask(most_bytes=100)
    ends.carry()
    ends.answer(0, content(101))
    ends.carry()
    with pytest.raises(TransportError, match="expected at most 100"):
        ask.wait(deadline_s=0)
    large = ends.ask(most_bytes=100)
    ends.carry()
    answer = ends.answer(1, content(200_000))
    ends.carry()
    for pending in (large, answer):
        with pytest.raises(TransportError):
            pending.wait(deadline_s=0)
    again = ends.ask()
    ends.carry()
    ends.answer(2, content(5))
    ends.carry()
    assert again.wait(deadline_s=0) is not None


def test_an_ask_of_an_earlier_connection_is_never_answered_over_the_next() -> None:
    ends = Ends()
    ask = ends.ask()
    ends.carry()
    for link in ends.links:
        link.drop("closed its connection")
    assert ends.heard[1] == [RequestFrame(number=0, name=b"x"), None]
    with pytest.raises(PeerLost, match=r"replica 1 closed its connection during blob 'x'; .* the others go on"):
        ask.wait(deadline_s=0)
    ends.connect()
    answer = ends.answer(0, content(5))
    with pytest.raises(PeerLost, match="does not wait for the response"):
        answer.wait(deadline_s=0)
    later = ends.ask()
    ends.carry()
    assert not later.done()
    ends.answer(1, content(7))
    ends.carry()
    received = later.wait(deadline_s=0)
    assert received is not None and received.payload.numel() == 7


def test_nobody_is_answered_twice_or_unasked() -> None:
    ends = Ends()
    ends.ask()
    ends.carry()
    ends.answer(0, content(5))
    for number in (0, 1):
        with pytest.raises(PeerLost):
            ends.answer(number, content(5)).wait(deadline_s=0)


def test_asks_are_bounded_at_both_ends_and_answers_make_room() -> None:
    ends = Ends()
    asks = [ends.ask() for _ in range(MAX_REQUESTS)]
    with pytest.raises(TransportError, match=f"{MAX_REQUESTS} requests to replica 1"):
        ends.ask().wait(deadline_s=0)
    ends.carry()
    assert len(ends.heard[1]) == MAX_REQUESTS
    with pytest.raises(FrameError, match=f"more than {MAX_REQUESTS} requests"):
        ends.links[1].take(memoryview(write(RequestFrame(number=1 << 40, name=b"x"))))
    for number in range(3):
        ends.answer(number, content(1))
    ends.carry()
    assert [ask.done() for ask in asks[:4]] == [True, True, True, False]
    for _ in range(3):
        ends.ask()
    ends.carry()
    assert len(ends.heard[1]) == MAX_REQUESTS + 3


def test_a_cancelled_ask_frees_its_place_by_its_answer_which_is_thrown_away() -> None:
    ends = Ends()
    asks = [ends.ask() for _ in range(MAX_REQUESTS)]
    ends.carry()
    ends.answer(0, content(100_000))  # crosses the cancel
    for ask in asks:
        ask.cancel()
        ask.cancel()
        with pytest.raises(TransportError, match="is not wanted any more"):
            ask.wait(deadline_s=0)
    ends.carry()
    cancelled = [frame.number for frame in ends.heard[1] if isinstance(frame, CancelFrame)]
    assert cancelled in ([*range(MAX_REQUESTS)], [*range(1, MAX_REQUESTS)])
    for number in range(1, MAX_REQUESTS):
        ends.answer(number, content(0), is_there=False)
    ends.carry()
    for _ in range(MAX_REQUESTS):
        ends.ask()
    ends.carry()  # no more than there may be, or this would be a FrameError
    asks[0].cancel()
    ends.carry()
    with pytest.raises(TransportError, match="is not wanted any more"):
        asks[0].wait(deadline_s=0)


def test_a_cancel_in_the_middle_of_an_answer_ends_it_and_no_other() -> None:
    size = 20_000_000
    ends = Ends()
    asks = [ends.ask(most_bytes=size) for _ in range(MAX_REQUESTS)]
    ends.carry()
    long, short = ends.answer(0, content(size)), ends.answer(1, content(300_000))
    came = ends.carry(turns=2)
    asks[0].cancel()
    came += ends.carry()
    assert came < size / 2, "what is not wanted does not fill the wire"
    with pytest.raises(TransportError, match=r"took .* no further: it does not want it any more"):
        long.wait(deadline_s=0)
    received = asks[1].wait(deadline_s=0)
    assert short.done() and received is not None and torch.equal(received.payload, content(300_000))
    assert not any(isinstance(frame, CancelFrame) for frame in ends.heard[1]), "the answer's end says it already"
    for _ in range(2):  # both have given their places back
        ends.ask()
    ends.carry()
    assert len(ends.heard[1]) == MAX_REQUESTS + 2


def test_an_answer_that_begins_after_its_cancel_is_not_asked_for_further() -> None:
    ends = Ends()
    ask = ends.ask(most_bytes=20_000_000)
    ends.carry()
    answer = ends.answer(0, content(5_000_000))
    ask.cancel()
    assert ends.carry() < 1_000_000
    with pytest.raises(TransportError, match="no further"):
        answer.wait(deadline_s=0)


def test_no_more_comes_of_a_cancelled_answer_than_was_asked_for() -> None:
    ends = Ends()
    ask = ends.ask(most_bytes=20_000_000)
    ends.carry()
    ends.answer(0, content(20_000_000))
    ends.carry(turns=2)
    ask.cancel()
    ends.links[0].flush()
    with pytest.raises(FrameError, match="bytes 19000000 to 19000003 of a message"):
        ends.links[0].take(memoryview(write(MessagePart(number=0, start=19_000_000, body=memoryview(b"abc")))))


@pytest.mark.parametrize("wrong", [[RequestFrame(number=0, name=b"y")], [CancelFrame(number=0), CancelFrame(number=0)]])
def test_who_asks_or_cancels_twice_under_one_number_breaks_the_rules(wrong: list[RequestFrame | CancelFrame]) -> None:
    ends = Ends()
    ends.ask()
    ends.carry()
    with pytest.raises(FrameError, match="a second"):
        for frame in wrong:
            ends.links[1].take(memoryview(write(frame)))


def test_a_cancel_of_what_is_over_or_never_was_is_harmless() -> None:
    ends = Ends()
    ends.links[1].take(memoryview(write(CancelFrame(number=5))))
    ends.links[1].take(memoryview(write(CancelFrame(number=5))))
    assert ends.heard[1] == []


def test_the_dialler_of_an_open_set_does_not_lose_patience() -> None:
    ends = Ends()
    for _ in range(20):
        ends.links[1].back_off()
    before = ends.links[1].redial_s
    ends.links[1].back_off()
    assert before - time.monotonic() < 1.0
