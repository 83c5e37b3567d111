"""Whom a fetch asks for what, in virtual time: holders that are slow, hang, die, come back, or lie."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.elastic.state_transfer import (
    FIRST_LIMIT_S,
    FIRST_WINDOW,
    LEAST_LIMIT_S,
    LEAST_WINDOW,
    MOST_LIMIT_S,
    MOST_UNDER_WAY,
    WINDOW,
    TransferPlan,
)

TICK_S = 0.125


@dataclass(kw_only=True)
class Holder:
    """One that sends its chunks one after another, each in `chunk_s`."""

    chunk_s: float
    dies_s: float = math.inf
    returns_s: float = math.inf
    hangs_s: float = math.inf
    lies: bool = False
    queue: list[int] = field(default_factory=list)
    free_s: float = 0.0

    def is_dead(self, now_s: float) -> bool:
        return self.dies_s <= now_s < self.returns_s


@dataclass
class Ran:
    seconds: float
    sent: Counter[int]
    lied: set[int]
    missing: list[int]


class World:
    """A fetch and its holders; the bounds are checked on the way."""

    def __init__(self, num_chunks: int, holders: dict[int, Holder]) -> None:
        self.plan, self.holders = TransferPlan(num_chunks), holders
        self.now_s, self.sent, self.banned = 0.0, Counter[int](), set[int]()
        for number in holders:
            self.plan.add_holder(number)

    def bring(self, number: int, holder: Holder) -> None:
        chunk = holder.queue.pop(0)
        holder.free_s = self.now_s + holder.chunk_s
        self.sent[number] += 1
        if holder.lies:
            self.banned.add(number)
            self.plan.remove_holder(number)
            holder.queue.clear()
        elif self.plan.on_chunk(number, chunk, now_s=self.now_s):
            for other in self.plan.superseded(chunk):
                self.holders[other].queue.remove(chunk)

    def move(self) -> None:
        for number, holder in self.holders.items():
            if holder.is_dead(self.now_s):
                queue, holder.queue = holder.queue, []
                for chunk in queue:
                    self.plan.on_failure(number, chunk, now_s=self.now_s)
            elif holder.queue and holder.free_s <= self.now_s < holder.hangs_s:
                self.bring(number, holder)

    def ask(self) -> None:
        asked = list(self.plan.requests(now_s=self.now_s))
        assert len(set(asked)) == len(asked)
        for number, chunk in asked:
            holder = self.holders[number]
            assert number not in self.banned and chunk not in holder.queue
            if not holder.queue:
                holder.free_s = max(holder.free_s, self.now_s + holder.chunk_s)
            holder.queue.append(chunk)
            assert len(holder.queue) <= WINDOW
        assert sum(len(holder.queue) for holder in self.holders.values()) <= MOST_UNDER_WAY


def ran(num_chunks: int, holders: dict[int, Holder], *, until_s: float = 2000) -> Ran:
    """Fetch in virtual time."""
    world = World(num_chunks, holders)
    while not world.plan.is_complete and world.now_s < until_s and world.plan.holders:
        world.move()
        world.ask()
        world.now_s += TICK_S
    return Ran(world.now_s, world.sent, world.banned, world.plan.missing)


def test_the_faster_holder_brings_more() -> None:
    found = ran(330, {1: Holder(chunk_s=0.25), 2: Holder(chunk_s=2.5)})
    assert not found.missing and 8 < found.sent[1] / found.sent[2] < 12
    assert sum(found.sent.values()) <= 1.05 * 330


def test_nothing_is_asked_for_twice_of_steady_holders() -> None:
    for chunk_s in (0.125, 1.0, 9.0):
        found = ran(100, {n: Holder(chunk_s=chunk_s) for n in range(3)})
        assert not found.missing and sum(found.sent.values()) == 100


def test_a_liar_costs_one_chunk_and_is_asked_no_more() -> None:
    found = ran(200, {1: Holder(chunk_s=0.5), 2: Holder(chunk_s=0.5, lies=True), 3: Holder(chunk_s=0.5)})
    assert not found.missing and found.lied == {2} and found.sent[2] == 1


def test_a_holder_that_dies_half_way_costs_no_bytes_and_one_that_returns_goes_on() -> None:
    found = ran(200, {1: Holder(chunk_s=0.5), 2: Holder(chunk_s=0.5, dies_s=20.0)})
    assert not found.missing and sum(found.sent.values()) == 200 and found.sent[1] > 150
    found = ran(200, {1: Holder(chunk_s=0.5, dies_s=20.0, returns_s=60.0)})
    assert not found.missing and sum(found.sent.values()) == 200 and 138 < found.seconds < 150


def test_a_holder_that_hangs_is_gone_round_soon_and_gets_little() -> None:
    found = ran(200, {1: Holder(chunk_s=0.5), 2: Holder(chunk_s=0.5, hangs_s=10.0)})
    assert not found.missing and found.seconds < 115


def test_the_last_chunks_do_not_wait_for_the_slowest_holder() -> None:
    found = ran(40, {1: Holder(chunk_s=0.25), 2: Holder(chunk_s=30.0)})
    assert not found.missing and found.seconds < 20
    assert sum(found.sent.values()) <= 42


def test_the_only_holder_is_never_too_slow() -> None:
    found = ran(10, {1: Holder(chunk_s=100.0)})
    assert not found.missing and sum(found.sent.values()) == 10


def test_holders_that_are_all_slow_are_still_asked() -> None:
    holders = {1: Holder(chunk_s=0.25, hangs_s=3.0), 2: Holder(chunk_s=80.0)}
    assert not ran(30, holders).missing


def test_a_new_holder_gets_little_until_it_has_brought_something() -> None:
    plan = TransferPlan(100)
    plan.add_holder(1)
    assert len(list(plan.requests(now_s=0))) == FIRST_WINDOW
    plan.on_chunk(1, 0, now_s=1)
    assert len(list(plan.requests(now_s=1))) == LEAST_WINDOW - FIRST_WINDOW + 1
    for chunk in range(1, 20):  # ten a second
        plan.on_chunk(1, chunk, now_s=1 + chunk / 10)
        list(plan.requests(now_s=1 + chunk / 10))
    assert len([chunk for chunk in plan.remove_holder(1) if chunk >= 20]) == WINDOW


def test_limits_follow_measured_times_within_bounds() -> None:
    plan = TransferPlan(1000)
    plan.add_holder(1)
    assert plan.limit_s(1) == FIRST_LIMIT_S
    now_s = 0.0
    for took_s, least, most in (
        (0.01, LEAST_LIMIT_S, LEAST_LIMIT_S),
        (3.0, 6.0, 6.5),
        (100.0, MOST_LIMIT_S, MOST_LIMIT_S),
    ):
        for _ in range(40):
            (holder, chunk), *rest = plan.requests(now_s=now_s)
            for _, other in rest:
                plan.on_failure(1, other, now_s=now_s - 10)
            now_s += took_s
            plan.on_chunk(holder, chunk, now_s=now_s)
        assert least <= plan.limit_s(1) <= most


def test_what_came_late_from_a_slow_holder_counts_if_it_is_first() -> None:
    plan = TransferPlan(1)
    plan.add_holder(1)
    plan.add_holder(2)
    assert list(plan.requests(now_s=0)) == [(1, 0)]
    assert list(plan.requests(now_s=FIRST_LIMIT_S + 1)) == [(2, 0)]
    assert plan.on_chunk(1, 0, now_s=FIRST_LIMIT_S + 2) and plan.superseded(0) == [2]
    assert plan.is_complete and not plan.on_chunk(2, 0, now_s=FIRST_LIMIT_S + 3) and plan.num_here == 1


def test_who_is_removed_gives_its_chunks_back_and_who_is_unknown_changes_nothing() -> None:
    plan = TransferPlan(2)
    plan.add_holder(1)
    list(plan.requests(now_s=0))
    assert plan.remove_holder(1) == [0, 1] and plan.remove_holder(1) == []
    plan.on_failure(1, 0, now_s=0)
    plan.add_holder(2)
    assert sorted(plan.requests(now_s=0)) == [(2, 0), (2, 1)]


TIMES = st.integers(0, 400).map(lambda eighths: eighths / 8)
HOLDERS = st.dictionaries(
    st.integers(0, 12),
    st.builds(
        Holder,
        chunk_s=st.integers(1, 80).map(lambda eighths: eighths / 8),
        dies_s=st.one_of(st.just(math.inf), TIMES),
        returns_s=st.one_of(st.just(math.inf), TIMES),
        hangs_s=st.one_of(st.just(math.inf), TIMES),
        lies=st.booleans(),
    ),
    max_size=6,
)  # fmt: skip


@given(num_chunks=st.integers(0, 120), holders=HOLDERS, chunk_s=st.integers(1, 20))
@settings(max_examples=150)
def test_one_good_holder_is_enough_whatever_the_others_do(
    num_chunks: int, holders: dict[int, Holder], chunk_s: int
) -> None:
    bad = sum(holder.lies for holder in holders.values())
    holders[20] = Holder(chunk_s=chunk_s / 8)
    found = ran(num_chunks, holders)
    assert not found.missing
    assert found.lied <= {number for number, holder in holders.items() if holder.lies}
    most_twice = WINDOW * len(holders) + 0.03 * num_chunks + 1
    assert sum(found.sent.values()) <= num_chunks + bad + most_twice
    assert found.seconds < 10 + 2 * num_chunks * chunk_s / 8 + 4 * MOST_LIMIT_S


@given(num_chunks=st.integers(1, 60), holders=HOLDERS)
@settings(max_examples=80)
def test_without_a_good_holder_what_is_missing_is_known(num_chunks: int, holders: dict[int, Holder]) -> None:
    for holder in holders.values():
        holder.dies_s, holder.returns_s = min(holder.dies_s, 1.0), math.inf
    found = ran(num_chunks, holders, until_s=120.0)
    assert len(found.missing) >= num_chunks - sum(found.sent.values())
