"""Blob store over a manual transport: waiting requests, withdrawn blobs, and bulk that yields but never starves."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import DeadlineExceeded, NotThere, TransportError
from thinwire.transport import blob_store as blob_store_module
from thinwire.transport.base import Envelope, Received
from thinwire.transport.blob_store import (
    LEAST_BULK,
    LONGEST_HOLD_S,
    LONGEST_PLACE_S,
    MOST_BULK,
    BlobRequest,
    BlobStore,
    SendScheduler,
)
from thinwire.transport.streams import BLOBS
from thinwire.transport.wire.transfer import IS_THERE


class Hand:
    """A transfer that ends when it is told to."""

    def __init__(self, peer: int, number: int, payload: torch.Tensor | None = None, *, is_there: bool = True) -> None:
        self.peer, self.number, self.payload, self.is_there = peer, number, payload, is_there
        self.envelope = Envelope(stream=BLOBS, key=(number,))
        self.callbacks: list[Callable[[], None]] = []
        self.has_ended = False
        self.received: Received | None = None

    def done(self) -> bool:
        return self.has_ended

    def wait(self, *, deadline_s: float) -> Received | None:
        return self.received

    def on_finish(self, callback: Callable[[], None]) -> None:
        if self.has_ended:
            callback()
        else:
            self.callbacks.append(callback)

    def cancel(self) -> None:
        self.end()

    def end(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            for callback in self.callbacks:
                callback()


class HandTransport:
    replica, num_replicas, runs_in_background = 7, 4, True

    def __init__(self) -> None:
        self.on_request: Callable[[int, int, bytes], None] | None = None
        self.on_cancel: Callable[[int, int], None] | None = None
        self.on_lost: Callable[[int], None] | None = None
        self.answers: list[Hand] = []
        self.ends_at_once = False

    def request(self, source: int, name: bytes, *, most_bytes: int) -> Hand:
        return Hand(source, 0)

    def respond(
        self, peer: int, number: int, payload: torch.Tensor, *, is_there: bool = True, crc: int | None = None
    ) -> Hand:
        answer = Hand(peer, number, payload, is_there=is_there)
        answer.has_ended = self.ends_at_once
        self.answers.append(answer)
        return answer

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> Hand:
        raise NotImplementedError

    def receive(self, *, source: int, envelope: Envelope) -> Hand:
        raise NotImplementedError

    def close(self) -> None:
        return

    def want(self, peer: int, number: int, name: bytes) -> None:
        assert self.on_request is not None
        self.on_request(peer, number, name)

    @property
    def told(self) -> list[tuple[int, int, bool]]:
        return [(answer.peer, answer.number, answer.is_there) for answer in self.answers]


@pytest.fixture
def wire() -> HandTransport:
    return HandTransport()


def content(size: int = 3) -> torch.Tensor:
    return torch.arange(size).to(torch.uint8)


def test_an_ask_waits_for_the_publication_and_a_later_one_does_not(wire: HandTransport) -> None:
    library = BlobStore(wire)
    wire.want(1, 0, b"a")
    wire.want(2, 0, b"a")
    wire.want(2, 1, b"b")
    assert wire.answers == [] and library.num_waiting == 3
    payload = content()
    library.publish(b"a", payload)
    wire.want(3, 5, b"a")
    assert wire.told == [(1, 0, True), (2, 0, True), (3, 5, True)] and library.num_waiting == 1
    assert all(answer.payload is payload for answer in wire.answers), "a blob is not copied"
    assert library.num_bytes == 3


def test_what_was_withdrawn_or_is_past_is_gone(wire: HandTransport) -> None:
    library = BlobStore(wire, is_past=lambda name: name < b"m")
    library.publish(b"z", content())
    library.withdraw(b"z")
    library.withdraw(b"never was")
    for number, name in enumerate((b"z", b"never was", b"a", b"x")):
        wire.want(1, number, name)
    assert wire.told == [(1, 0, False), (1, 1, False), (1, 2, False)]
    assert library.num_bytes == 0
    library.publish(b"z", content(4))
    wire.want(1, 9, b"z")
    assert wire.told[-1] == (1, 9, True)


def test_who_waits_for_what_becomes_past_is_told_and_what_is_past_is_held_no_longer(wire: HandTransport) -> None:
    library = BlobStore(wire)
    library.publish(b"a", content())
    library.publish(b"q", content())
    wire.want(1, 0, b"b")
    wire.want(1, 1, b"r")
    own = library.get(7, b"c", most_bytes=9)
    library.is_past = lambda name: name < b"m"
    assert wire.told == [(1, 0, False)] and library.num_bytes == 3
    with pytest.raises(NotThere, match="replica 7 does not have blob 'c'"):
        own.wait(deadline_s=0)


def test_names_that_were_withdrawn_are_not_remembered_without_an_end(
    wire: HandTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_store_module, "MOST_WITHDRAWN", 10)
    library = BlobStore(wire)
    for number in range(30):
        library.withdraw(b"%d" % number)
    assert len(library._withdrawn) == 10
    wire.want(1, 0, b"29")
    wire.want(1, 1, b"3")
    assert wire.told == [(1, 0, False)]


def test_its_own_blobs_need_no_wire(wire: HandTransport) -> None:
    library = BlobStore(wire)
    early = library.get(7, b"a", most_bytes=9)
    heard: list[str] = []
    early.on_finish(lambda: heard.append("here"))
    with pytest.raises(DeadlineExceeded, match="replica 7 did not publish blob 'a'"):
        early.wait(deadline_s=0)
    payload = content()
    library.publish(b"a", payload)
    assert heard == ["here"] and early.done() and early.wait(deadline_s=0) is payload
    assert library.get(7, b"a", most_bytes=9).wait(deadline_s=0) is payload
    dropped = library.get(7, b"b", most_bytes=9)
    dropped.cancel()
    assert library.num_waiting == 0
    with pytest.raises(TransportError, match="is not wanted any more"):
        dropped.wait(deadline_s=0)
    library.withdraw(b"a")
    with pytest.raises(NotThere):
        library.get(7, b"a", most_bytes=9).wait(deadline_s=0)
    waits = library.get(7, b"c", most_bytes=9)
    library.close()
    with pytest.raises(TransportError, match="the blob store was closed"):
        waits.wait(deadline_s=0)


def test_what_comes_is_the_payload_or_the_word_that_it_is_gone(wire: HandTransport) -> None:
    loan, payload = BlobStore(wire).get(1, b"a", most_bytes=9), content()
    assert isinstance(loan._ask, Hand)
    loan._ask.received = Received(payload=payload, note=IS_THERE)
    assert loan.wait(deadline_s=0) is payload
    loan._ask.received = Received(payload=payload)
    with pytest.raises(NotThere, match="replica 1 does not have blob 'a', and will not have it"):
        loan.wait(deadline_s=0)


def test_asks_of_a_lost_replica_are_forgotten_and_cancelled_ones_answered(wire: HandTransport) -> None:
    library = BlobStore(wire)
    for peer in (1, 2):
        wire.want(peer, 0, b"a")
        wire.want(peer, 1, b"b")
    assert wire.on_lost is not None and wire.on_cancel is not None
    wire.on_lost(1)
    wire.on_cancel(2, 1)
    wire.on_cancel(2, 77)
    wire.on_cancel(1, 0)
    assert wire.told == [(2, 1, False)] and library.num_waiting == 1
    library.publish(b"a", content())
    assert wire.told == [(2, 1, False), (2, 0, True)]
    assert library._requests == {}


def test_bulk_is_answered_last_and_a_few_at_a_time(wire: HandTransport) -> None:
    library = BlobStore(wire)
    for number in range(4):
        library.publish(b"state/%d" % number, content(), is_bulk=True)
    library.publish(b"round", content())
    wire.want(1, 100, b"round")
    for number in range(4):
        wire.want(2, number, b"state/%d" % number)
    assert wire.told == [(1, 100, True)] and library.num_waiting == 4
    wire.answers[0].end()
    assert wire.told[1:] == [(2, 0, True), (2, 1, True)]
    wire.want(1, 101, b"round")
    wire.answers[1].end()
    assert wire.told[3:] == [(1, 101, True)], "no bulk begins while another answer is on its way"
    wire.answers[3].end()
    assert wire.told[4:] == [(2, 2, True)]
    assert wire.on_cancel is not None
    wire.on_cancel(2, 3)
    assert wire.told[5:] == [(2, 3, False)] and library.num_waiting == 0
    library.close()


def test_bulk_goes_on_while_others_never_cease(wire: HandTransport) -> None:
    library = BlobStore(wire)
    library.publish(b"state", content(), is_bulk=True)
    library.publish(b"round", content())
    wire.want(1, 0, b"round")
    wire.want(2, 0, b"state")
    end = time.monotonic() + 20
    while len(wire.answers) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert wire.told == [(1, 0, True), (2, 0, True)]
    library.close()


def test_bulk_that_is_withdrawn_while_it_waits_is_gone(wire: HandTransport) -> None:
    library = BlobStore(wire)
    library.publish(b"state", content(), is_bulk=True)
    library.publish(b"round", content())
    wire.want(1, 0, b"round")
    wire.want(2, 0, b"state")
    library.withdraw(b"state")
    wire.answers[0].end()
    assert wire.told == [(1, 0, True), (2, 0, False)]


def test_thousands_of_answers_that_end_at_once_do_not_nest(wire: HandTransport) -> None:
    library = BlobStore(wire)
    wire.ends_at_once = True
    for number in range(4000):
        wire.want(1, number, b"state")
    library.publish(b"state", content(), is_bulk=True)
    assert len(wire.answers) == 4000


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)[::2]]
)
def test_what_cannot_be_sent_as_it_is_is_refused(wire: HandTransport, wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="must be uint8, one-dimensional, contiguous"):
        BlobStore(wire).publish(b"a", wrong)


def test_a_name_stands_for_one_thing(wire: HandTransport) -> None:
    library = BlobStore(wire)
    library.publish(b"a", content())
    with pytest.raises(ValueError, match="blob 'a' is published already"):
        library.publish(b"a", content())


def test_a_closed_library_has_nothing(wire: HandTransport) -> None:
    library = BlobStore(wire)
    wire.want(1, 0, b"a")
    library.publish(b"b", content())
    library.close()
    assert wire.told == [(1, 0, False)] and library.num_bytes == 0 and wire.on_request is None


def order(number: int, *, peer: int = 1) -> BlobRequest:
    return BlobRequest(peer=peer, number=number, name=b"state/%d" % number)


def test_no_more_bulk_is_on_its_way_than_may_be_and_the_next_begins_when_one_ends() -> None:
    scheduler = SendScheduler()
    for number in range(5):
        scheduler.add(order(number), now_s=0)
    begun = [scheduler.next_bulk(now_s=0) for _ in range(4)]
    assert [found and found.number for found in begun] == [0, 1, None, None]
    scheduler.end_bulk(order(1), now_s=0)
    found = scheduler.next_bulk(now_s=0)
    assert found is not None and found.number == 2 and scheduler.next_bulk(now_s=0) is None


def most_at_once(seconds_of: Callable[[int], float]) -> int:
    """Have bulk go out for long, each taking what it takes beside so many; return how many go at a time in the end."""
    scheduler, now_s, going = SendScheduler(), 0.0, 0
    for number in range(400):
        scheduler.add(order(number), now_s=0)
    ends: list[tuple[float, BlobRequest]] = []
    for _ in range(300):
        while (found := scheduler.next_bulk(now_s=now_s)) is not None:
            ends.append((now_s, found))
        going = len(ends)
        began_s, found = ends.pop(0)
        now_s = max(now_s, began_s + seconds_of(going))
        scheduler.end_bulk(found, now_s=now_s)
    return going


def test_more_bulk_goes_at_once_only_where_that_makes_it_come_faster() -> None:
    assert most_at_once(lambda going: 0.4 * going) <= 2 * LEAST_BULK  # a thin wire, and its latest try
    assert most_at_once(lambda going: 0.4) == MOST_BULK  # a far one


def test_replicas_take_turns() -> None:
    scheduler = SendScheduler()
    for number in range(3):
        scheduler.add(order(number, peer=1), now_s=0)
    scheduler.add(order(0, peer=2), now_s=0)
    found = []
    while (begun := scheduler.next_bulk(now_s=0)) is not None:
        found.append((begun.peer, begun.number))
        scheduler.end_bulk(begun, now_s=0)
    assert found == [(1, 0), (2, 0), (1, 1), (1, 2)]


def test_bulk_gives_way_to_others_but_one_at_a_time_goes_after_a_second() -> None:
    scheduler = SendScheduler()
    scheduler.begin_other()
    for number in range(3):
        scheduler.add(order(number), now_s=10)
    assert scheduler.next_bulk(now_s=10.5) is None and scheduler.due_s(now_s=10.5) == 10 + LONGEST_HOLD_S
    assert scheduler.next_bulk(now_s=11) == order(0)
    assert scheduler.next_bulk(now_s=11) is None
    scheduler.end_bulk(order(0), now_s=11.5)
    assert scheduler.next_bulk(now_s=11.6) is None and scheduler.due_s(now_s=11.6) == 11.5 + LONGEST_HOLD_S
    scheduler.end_other()
    assert [scheduler.next_bulk(now_s=11.7), scheduler.next_bulk(now_s=11.7)] == [order(1), order(2)]


def test_a_replica_that_does_not_take_its_answers_keeps_nobody_else_waiting_for_long() -> None:
    scheduler = SendScheduler()
    for number in range(4):
        scheduler.add(order(number), now_s=0)
    assert scheduler.next_bulk(now_s=0) and scheduler.next_bulk(now_s=1)
    scheduler.add(order(0, peer=2), now_s=1)
    assert scheduler.due_s(now_s=1) == LONGEST_PLACE_S and scheduler.next_bulk(now_s=4.9) is None
    assert scheduler.next_bulk(now_s=5) is not None and scheduler.next_bulk(now_s=5) is None


def test_what_waits_can_be_dropped() -> None:
    scheduler = SendScheduler()
    for number in range(3):
        scheduler.add(order(number), now_s=0)
    assert scheduler.drop(order(1)) and not scheduler.drop(order(1)) and not scheduler.drop(order(0, peer=9))
    assert scheduler.num_waiting == 2
    scheduler.drop_all_of(1)
    scheduler.drop_all_of(1)
    assert scheduler.num_waiting == 0 and scheduler.next_bulk(now_s=0) is None and scheduler.due_s() is None


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3)),
        st.tuples(st.just("begin other"), st.just(0)),
        st.tuples(st.just("end other"), st.just(0)),
        st.tuples(st.just("end bulk"), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 30)),
    ),
    max_size=60,
)


@given(EVENTS)
def test_all_bulk_begins_in_the_end_once_and_within_its_bounds(events: list[tuple[str, int]]) -> None:
    scheduler, now_s, added, others = SendScheduler(), 0.0, 0, 0
    begun: list[BlobRequest] = []
    going: list[tuple[float, BlobRequest]] = []

    def begin_all() -> None:
        while (found := scheduler.next_bulk(now_s=now_s)) is not None:
            begun.append(found)
            going.append((now_s, found))
            fresh = [since_s for since_s, _ in going if now_s - since_s < LONGEST_PLACE_S]
            assert len(fresh) <= (1 if others else MOST_BULK)
        due_s = scheduler.due_s(now_s=now_s)
        assert due_s is None or due_s > now_s

    for what, value in events:
        if what == "add":
            scheduler.add(order(added, peer=value), now_s=now_s)
            added += 1
        elif what == "begin other":
            scheduler.begin_other()
            others += 1
        elif what == "end other" and others:
            scheduler.end_other()
            others -= 1
        elif what == "end bulk" and going:
            scheduler.end_bulk(going.pop(0)[1], now_s=now_s)
        elif what == "wait":
            now_s += value / 8  # which floats hold exactly
        begin_all()
    while (due_s := scheduler.due_s(now_s=now_s)) is not None:  # although nothing ends any more
        assert due_s - now_s <= LONGEST_PLACE_S
        now_s = due_s
        begin_all()
    assert sorted(found.number for found in begun) == list(range(added))
