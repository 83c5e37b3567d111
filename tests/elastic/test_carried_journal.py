"""The journal on a carrier: in every order of two leaders' requests no position and no round is decided twice."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from thinwire.carriers.memory import CarrierFault, MemoryCarrier, MemoryStore
from thinwire.elastic import carried_journal
from thinwire.elastic.carried_journal import CarriedJournal, JournalWriter, LostLeadership, Procedure, run
from thinwire.errors import TransportError

FIRST = [{"what": "job"}]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def journal(store: MemoryStore, holder: str, **known: Any) -> CarriedJournal:
    return CarriedJournal(carrier=MemoryCarrier(store), holder=holder, now=Clock(), **known)


def lines_of(store: MemoryStore) -> list[dict[str, Any]]:
    reader = journal(store, "reader")
    run(reader.read())
    return reader.lines


def decide(one: CarriedJournal, announced: list[tuple[int, str]], *, rounds: int) -> Procedure[None]:
    """Lead, and decide the next rounds that the journal does not hold, as a coordinator does."""
    try:
        is_leading = yield from one.lead(first_lines=FIRST)
        if not is_leading:
            return
        decided = [line["round"] for line in one.lines if line["what"] == "decision"]
        for number in range(len(decided), len(decided) + rounds):
            line = {"what": "decision", "round": number, "by": one.holder}
            yield from one.append([line], all_lines=lambda: one.lines)
            announced.append((number, one.holder))  # sent only now: see `HeldMessages`
    except LostLeadership:
        return


def schedules(lengths: tuple[int, int]) -> Iterator[tuple[int, ...]]:
    """Every order of so many requests of each of two."""
    total = sum(lengths)
    for places in itertools.combinations(range(total), lengths[0]):
        yield tuple(0 if place in places else 1 for place in range(total))


def play(order: tuple[int, ...], *, stop: tuple[int, int] | None, start: int) -> int:
    """Interleave two leaders' requests in an order; one stops before one of its requests. Return requests done."""
    store = MemoryStore(is_virtual=True)
    announced: list[tuple[int, str]] = []
    if start:  # a leader of before, which still goes on
        run(journal(store, "z").lead(first_lines=FIRST))
    sides = [journal(store, "a", term=start), journal(store, "b", term=start)]
    procedures: list[Any] = [decide(one, announced, rounds=2) for one in sides]
    waiting: list[Any] = [next(one) for one in procedures]
    done = [0, 0]
    for side in (*order, *(0,) * 40, *(1,) * 40):
        if procedures[side] is None:
            continue
        if stop == (side, done[side]):
            procedures[side] = None
            continue
        done[side] += 1
        try:
            try:
                found = waiting[side]()
            except TransportError as error:
                waiting[side] = procedures[side].throw(error)
            else:
                waiting[side] = procedures[side].send(found)
        except StopIteration:
            procedures[side] = None
    lines = lines_of(store)
    decided = [(line["round"], line["by"]) for line in lines if line["what"] == "decision"]
    assert [number for number, _ in decided] == list(range(len(decided))), (order, stop, decided)
    assert set(announced) <= set(decided), (order, stop, announced, decided)
    return max(done)


@pytest.mark.parametrize("start", [0, 1])
def test_in_every_order_of_two_leaders_and_every_crash_no_round_is_decided_twice(start: int) -> None:
    """All 924 orders of six requests each, then the rest in turn; without a crash, and with one at each place."""
    for number, order in enumerate(schedules((6, 6))):
        play(order, stop=None, start=start)
        play(order, stop=(number % 2, number % 7), start=start)
    for order in itertools.islice(schedules((6, 6)), 0, None, 40):
        for side, place in itertools.product((0, 1), range(10)):
            play(order, stop=(side, place), start=start)


def test_a_journal_without_fences_decides_a_round_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check finds the error where positions are overwritten."""
    put = MemoryCarrier.put
    monkeypatch.setattr(MemoryCarrier, "put", lambda self, name, raw, *, only_new: put(self, name, raw, only_new=False))
    with pytest.raises(AssertionError):
        for order in schedules((6, 6)):
            play(order, stop=None, start=0)


def test_an_old_leader_stops_at_its_next_entry_and_its_lines_are_kept() -> None:
    store = MemoryStore(is_virtual=True)
    old, new = journal(store, "old"), journal(store, "new", term=1)
    assert run(old.lead(first_lines=FIRST))
    run(old.append([{"what": "decision", "round": 0, "by": "old"}], all_lines=list))
    assert run(new.lead())
    assert [line["what"] for line in new.lines] == ["job", "term", "decision", "term"]
    with pytest.raises(LostLeadership):
        run(old.append([{"what": "decision", "round": 1, "by": "old"}], all_lines=list))
    run(new.append([{"what": "decision", "round": 1, "by": "new"}], all_lines=list))
    assert [line.get("by") for line in lines_of(store)] == [None, None, "old", None, "new"]


def test_an_entry_without_an_answer_is_written_once() -> None:
    store = MemoryStore(is_virtual=True)
    one = journal(store, "one")
    assert run(one.lead(first_lines=FIRST))
    writer = JournalWriter(one, all_lines=list)
    writer.write("decision", {"round": 0})
    one.carrier.inject(CarrierFault(on="put", kind="unanswered"))  # type: ignore[attr-defined]
    with pytest.raises(TransportError):
        writer.flush()
    writer.write("decision", {"round": 1})
    assert writer.is_behind and writer.flush() and not writer.is_behind
    assert [line["round"] for line in lines_of(store) if line["what"] == "decision"] == [0, 1]


def test_a_new_leader_reads_the_newest_snapshot_and_old_positions_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried_journal, "SNAPSHOT_EVERY", 4)
    store = MemoryStore(is_virtual=True)
    one, state = journal(store, "one"), [dict(line) for line in FIRST]
    assert run(one.lead(first_lines=FIRST))
    for number in range(30):
        line = {"what": "decision", "round": number}
        state.append(line)
        run(one.append([line], all_lines=lambda: state))
        one.now.now_s += 200.0  # type: ignore[attr-defined]
        run(one.collect())
    two = journal(store, "two", term=1)
    assert run(two.lead())
    assert [line["round"] for line in two.lines if line["what"] == "decision"] == list(range(30))
    reads = two.carrier.cost().gets
    assert reads <= 12, "doubling, bisection, and the positions since the newest snapshot"
    assert len(one.carrier.listing("journal")) < 20


def test_a_leader_that_stood_still_stops_though_its_position_is_free() -> None:
    """Its position may have been deleted since: only its own clock can tell."""
    one = journal(MemoryStore(is_virtual=True), "one")
    assert run(one.lead(first_lines=FIRST))
    one.now.now_s += carried_journal.STALE_S + 1  # type: ignore[attr-defined]
    with pytest.raises(LostLeadership, match="stood still"):
        run(one.append([{"what": "decision"}], all_lines=list))
