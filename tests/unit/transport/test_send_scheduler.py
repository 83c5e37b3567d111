"""The order in which a library answers: bulk last, but never never."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from thinwire.transport.blob_store import (
    LEAST_BULK,
    LONGEST_HOLD_S,
    LONGEST_PLACE_S,
    MOST_BULK,
    BlobRequest,
    SendScheduler,
)


def order(number: int, *, peer: int = 1) -> BlobRequest:
    return BlobRequest(peer=peer, number=number, name=b"state/%d" % number)


def test_no_more_bulk_is_on_its_way_than_may_be_and_the_next_begins_when_one_ends() -> None:
    lanes = SendScheduler()
    for number in range(5):
        lanes.add(order(number), now_s=0)
    begun = [lanes.next_bulk(now_s=0) for _ in range(4)]
    assert [found and found.number for found in begun] == [0, 1, None, None]
    lanes.end_bulk(order(1), now_s=0)
    found = lanes.next_bulk(now_s=0)
    assert found is not None and found.number == 2 and lanes.next_bulk(now_s=0) is None


def most_at_once(seconds_of: Callable[[int], float]) -> int:
    """Have bulk go out for long, each taking what it takes beside so many; return how many go at a time in the end."""
    lanes, now_s, going = SendScheduler(), 0.0, 0
    for number in range(400):
        lanes.add(order(number), now_s=0)
    ends: list[tuple[float, BlobRequest]] = []
    for _ in range(300):
        while (found := lanes.next_bulk(now_s=now_s)) is not None:
            ends.append((now_s, found))
        going = len(ends)
        began_s, found = ends.pop(0)
        now_s = max(now_s, began_s + seconds_of(going))
        lanes.end_bulk(found, now_s=now_s)
    return going


def test_more_bulk_goes_at_once_only_where_that_makes_it_come_faster() -> None:
    assert most_at_once(lambda going: 0.4 * going) <= 2 * LEAST_BULK  # a thin wire, and its latest try
    assert most_at_once(lambda going: 0.4) == MOST_BULK  # a far one


def test_replicas_take_turns() -> None:
    lanes = SendScheduler()
    for number in range(3):
        lanes.add(order(number, peer=1), now_s=0)
    lanes.add(order(0, peer=2), now_s=0)
    found = []
    while (begun := lanes.next_bulk(now_s=0)) is not None:
        found.append((begun.peer, begun.number))
        lanes.end_bulk(begun, now_s=0)
    assert found == [(1, 0), (2, 0), (1, 1), (1, 2)]


def test_bulk_gives_way_to_others_but_one_at_a_time_goes_after_a_second() -> None:
    lanes = SendScheduler()
    lanes.begin_other()
    for number in range(3):
        lanes.add(order(number), now_s=10)
    assert lanes.next_bulk(now_s=10.5) is None and lanes.due_s(now_s=10.5) == 10 + LONGEST_HOLD_S
    assert lanes.next_bulk(now_s=11) == order(0)
    assert lanes.next_bulk(now_s=11) is None
    lanes.end_bulk(order(0), now_s=11.5)
    assert lanes.next_bulk(now_s=11.6) is None and lanes.due_s(now_s=11.6) == 11.5 + LONGEST_HOLD_S
    lanes.end_other()
    assert [lanes.next_bulk(now_s=11.7), lanes.next_bulk(now_s=11.7)] == [order(1), order(2)]


def test_a_replica_that_does_not_take_its_answers_keeps_nobody_else_waiting_for_long() -> None:
    lanes = SendScheduler()
    for number in range(4):
        lanes.add(order(number), now_s=0)
    assert lanes.next_bulk(now_s=0) and lanes.next_bulk(now_s=1)
    lanes.add(order(0, peer=2), now_s=1)
    assert lanes.due_s(now_s=1) == LONGEST_PLACE_S and lanes.next_bulk(now_s=4.9) is None
    assert lanes.next_bulk(now_s=5) is not None and lanes.next_bulk(now_s=5) is None


def test_what_waits_can_be_dropped() -> None:
    lanes = SendScheduler()
    for number in range(3):
        lanes.add(order(number), now_s=0)
    assert lanes.drop(order(1)) and not lanes.drop(order(1)) and not lanes.drop(order(0, peer=9))
    assert lanes.num_waiting == 2
    lanes.drop_all_of(1)
    lanes.drop_all_of(1)
    assert lanes.num_waiting == 0 and lanes.next_bulk(now_s=0) is None and lanes.due_s() is None


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
    lanes, now_s, added, others = SendScheduler(), 0.0, 0, 0
    begun: list[BlobRequest] = []
    going: list[tuple[float, BlobRequest]] = []

    def begin_all() -> None:
        while (found := lanes.next_bulk(now_s=now_s)) is not None:
            begun.append(found)
            going.append((now_s, found))
            fresh = [since_s for since_s, _ in going if now_s - since_s < LONGEST_PLACE_S]
            assert len(fresh) <= (1 if others else MOST_BULK)
        due_s = lanes.due_s(now_s=now_s)
        assert due_s is None or due_s > now_s

    for what, value in events:
        if what == "add":
            lanes.add(order(added, peer=value), now_s=now_s)
            added += 1
        elif what == "begin other":
            lanes.begin_other()
            others += 1
        elif what == "end other" and others:
            lanes.end_other()
            others -= 1
        elif what == "end bulk" and going:
            lanes.end_bulk(going.pop(0)[1], now_s=now_s)
        elif what == "wait":
            now_s += value / 8  # which floats hold exactly
        begin_all()
    while (due_s := lanes.due_s(now_s=now_s)) is not None:  # although nothing ends any more
        assert due_s - now_s <= LONGEST_PLACE_S
        now_s = due_s
        begin_all()
    assert sorted(found.number for found in begun) == list(range(added))
