"""What is waited for and moves: a wire over which few bytes come and a rank whose steps take long are slow."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.detect.live import LiveDetector, News
from thinwire.monitor.findings import Finding
from thinwire.runlog.reader import Records, from_records
from thinwire.runlog.records import Arrival, Beat, Communicator, Operation, Record, Span, TransferEnd

RANKS, ROUNDS, EVERY_S, STEP_S, MESSAGE_S, SIZE = (0, 1, 2), 30, 0.4, 0.1, 0.1, 1_000_000
NAME, BEGUN_S = "rounds", ROUNDS * EVERY_S
PAIRS = [(source, destination) for source in RANKS for destination in RANKS if source != destination]


def message(
    source: int, destination: int, number: int, *, at_s: float, took_s: float | None, error: str = ""
) -> Record:  # fmt: skip
    return TransferEnd(
        communicator=NAME, rank=destination, peer=source, direction="received", operation=number, num_bytes=SIZE,
        posted_s=at_s, done_s=None if took_s is None else at_s + took_s, error=error,
    )  # fmt: skip


def sent(source: int, destination: int, number: int, *, at_s: float) -> Record:
    return TransferEnd(
        communicator=NAME, rank=source, peer=destination, direction="sent", operation=number, num_bytes=SIZE,
        posted_s=at_s, done_s=at_s + 0.01,
    )  # fmt: skip


def operation(rank: int, number: int, *, at_s: float, took_s: float | None) -> Record:
    done_s = None if took_s is None else at_s + took_s
    return Operation(
        communicator=NAME, rank=rank, sequence=number, kind="round", posted_s=at_s, done_s=done_s, round=number
    )  # fmt: skip


def healthy() -> list[Record]:
    """Return rounds of three hosts in which all is well: work of 0.1 s, then 1 MB each way in 0.1 s."""
    found: list[Record] = [Communicator(communicator=NAME, ranks=RANKS, hosts=("a", "b", "c"))]
    for number in range(ROUNDS):
        at_s = number * EVERY_S
        for rank in RANKS:
            span = Span(rank=rank, kind="compute", step=number, started_s=at_s - STEP_S, done_s=at_s)
            found += [span, operation(rank, number, at_s=at_s, took_s=MESSAGE_S)]
        for pair in PAIRS:
            found += [sent(*pair, number, at_s=at_s), message(*pair, number, at_s=at_s, took_s=MESSAGE_S)]
    return found


def beats(until_s: float) -> list[Record]:
    return [Beat(rank=rank, at_s=0.5 * half) for half in range(int(2 * until_s) + 1) for rank in RANKS]


def waiting_for(*stuck: tuple[int, int], until_s: float, error: str = "") -> list[Record]:
    """Return a last round in which some messages do not end."""
    found: list[Record] = [operation(rank, ROUNDS, at_s=BEGUN_S, took_s=None) for rank in RANKS]
    for pair in PAIRS:
        took_s = None if pair in stuck else MESSAGE_S
        found += [sent(*pair, ROUNDS, at_s=BEGUN_S), message(*pair, ROUNDS, at_s=BEGUN_S, took_s=took_s, error=error)]
    return found + beats(until_s)


def arrivals(
    source: int, destination: int, *, a_second: float, until_s: float, since_s: float = BEGUN_S,
    has_signs: bool = True,
) -> list[Record]:  # fmt: skip
    times = [since_s + 0.5 + 0.5 * half for half in range(int(2 * (until_s - since_s)))]
    return [
        Arrival(
            rank=destination, peer=source, at_s=at_s, num_bytes=round(30_000_000 + a_second * (at_s - since_s)),
            has_signs=has_signs,
        ) for at_s in times
    ]  # fmt: skip


def judged(*parts: list[Record]) -> list[Finding]:
    return diagnose(from_records([record for part in parts for record in part]))


UNTIL_S = BEGUN_S + 3.0


@pytest.mark.parametrize("times", [4.0, 20.0, 100.0])
def test_a_wire_over_which_bytes_come_is_slow_and_by_how_much_is_known_before_a_message_has_ended(times: float) -> None:
    usual = SIZE / MESSAGE_S
    (found,) = judged(
        healthy(), waiting_for((0, 1), until_s=UNTIL_S), arrivals(0, 1, a_second=usual / times, until_s=UNTIL_S)
    )
    assert (found.kind, found.where, found.confidence) == ("communication slow", "link 0 -> 1", 0.7)
    assert found.evidence["times_longer"] == pytest.approx(times, rel=0.01)
    assert found.since_s == pytest.approx(BEGUN_S) and found.since_round == ROUNDS


def test_all_wires_of_an_end_name_the_end() -> None:
    stuck = [(2, 0), (2, 1)]
    slow = [one for pair in stuck for one in arrivals(*pair, a_second=5e5, until_s=UNTIL_S)]
    (found,) = judged(healthy(), waiting_for(*stuck, until_s=UNTIL_S), slow)
    assert (found.kind, found.where) == ("communication slow", "sender rank 2")


@pytest.mark.parametrize(
    "came",
    [
        [],  # nobody looked, as over gloo
        arrivals(0, 1, a_second=150.0, until_s=UNTIL_S),  # signs of life of the connection
        arrivals(0, 1, a_second=4e4, until_s=UNTIL_S),  # less than a two hundredth of the usual rate
        arrivals(0, 1, a_second=5e5, until_s=BEGUN_S + 1.0),  # not any more
        arrivals(0, 1, a_second=5e5, until_s=BEGUN_S + 1.0)
        + arrivals(0, 1, a_second=0.0, until_s=UNTIL_S, since_s=BEGUN_S + 1.0),
        arrivals(1, 0, a_second=5e5, until_s=UNTIL_S),  # the other way
        [Arrival(rank=1, peer=0, at_s=UNTIL_S - 0.5 * back, num_bytes=10**6 * back) for back in (2, 1, 0)],  # made anew
    ],
)
def test_a_wire_over_which_nothing_comes_hangs(came: list[Record]) -> None:
    (found,) = judged(healthy(), waiting_for((0, 1), until_s=UNTIL_S), came)
    assert (found.kind, found.where) == ("communication hang", "link 0 <-> 1")


@pytest.mark.parametrize(
    ("a_second", "lasts_s", "has_signs", "is_sure"),
    [(0.0, 3.0, True, False), (0.0, 5.0, True, True), (150.0, 5.0, True, False), (0.0, 5.0, False, False)],
)
def test_a_wire_over_which_not_even_a_sign_of_life_comes_is_dead_for_sure(
    a_second: float, lasts_s: float, has_signs: bool, is_sure: bool
) -> None:
    # messages usually take 0.4 s, so that 25 times as long has not gone by
    slower = [replace(one, done_s=one.posted_s + 0.39) if isinstance(one, TransferEnd) else one for one in healthy()]
    until_s = BEGUN_S + lasts_s
    came = arrivals(0, 1, a_second=a_second, until_s=until_s, has_signs=has_signs)
    (found,) = judged(slower, waiting_for((0, 1), until_s=until_s), came)
    assert (found.kind, found.where) == ("communication hang", "link 0 <-> 1")
    assert (found.confidence > 0.7, "may also be very slow" in found.text) == (is_sure, not is_sure)
    assert ("Not a byte" in found.text) == is_sure


def test_a_dead_wire_is_told_as_soon_after_slow_messages_as_before_them() -> None:
    # one message in ten took 1.5 s lately: three times of that would be waited for
    slower = [
        replace(one, done_s=one.posted_s + 1.5)
        if isinstance(one, TransferEnd) and one.operation % 5 == 0 and one.peer == 0 and one.done_s else one
        for one in healthy()
    ]  # fmt: skip
    longer = [
        replace(one, done_s=one.posted_s + 2.5) if isinstance(one, Operation) and one.sequence % 5 == 0 else one
        for one in slower
    ]
    until_s = BEGUN_S + 2.5
    hang = waiting_for((0, 1), until_s=until_s)
    assert judged(longer, hang) == []
    (found,) = judged(longer, hang, arrivals(0, 1, a_second=0.0, until_s=until_s))
    assert (found.kind, found.where) == ("communication hang", "link 0 <-> 1")


def test_where_one_message_moves_and_another_one_does_not_it_hangs() -> None:
    found = judged(
        healthy(), waiting_for((0, 1), (1, 2), until_s=UNTIL_S), arrivals(0, 1, a_second=5e5, until_s=UNTIL_S)
    )
    assert [one.kind for one in found] == ["communication hang"]
    failed = waiting_for((0, 1), until_s=UNTIL_S, error="no answer within 2 s")
    found = judged(healthy(), failed, arrivals(0, 1, a_second=5e5, until_s=UNTIL_S))
    assert [one.kind for one in found] == ["communication hang"]


def test_bytes_that_come_as_fast_as_usual_make_no_wire_slow() -> None:
    usual = SIZE / MESSAGE_S
    found = judged(healthy(), waiting_for((0, 1), until_s=UNTIL_S), arrivals(0, 1, a_second=usual, until_s=UNTIL_S))
    assert not [one for one in found if "slow" in one.kind]


def late(*steps: tuple[float, float], until_s: float = UNTIL_S) -> list[Record]:
    """Return a last round that ranks 0 and 2 wait in, while rank 1 does steps."""
    found: list[Record] = [operation(rank, ROUNDS, at_s=BEGUN_S, took_s=None) for rank in (0, 2)]
    for number, (began_s, done_s) in enumerate(steps):
        found.append(Span(rank=1, kind="compute", step=ROUNDS + number, started_s=began_s, done_s=done_s))
    return found + beats(until_s)


def test_a_rank_that_is_waited_for_and_whose_steps_end_is_slow() -> None:
    (found,) = judged(healthy(), late((BEGUN_S - 0.2, BEGUN_S + 0.8), (BEGUN_S + 0.8, BEGUN_S + 2.0)))
    assert (found.kind, found.where, found.confidence) == ("non-communication slow", "rank 1", 0.7)
    assert found.evidence["times_longer"] == pytest.approx(11.0) and found.evidence["steps"] == 2


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [(BEGUN_S - 0.1, BEGUN_S + 0.05)],  # one as usual, and then none
        [(BEGUN_S - 0.1, BEGUN_S + 0.7)],  # a long one, and then none for more than twice as long
    ],
)
def test_a_rank_whose_steps_do_not_end_hangs(steps: list[tuple[float, float]]) -> None:
    (found,) = judged(healthy(), late(*steps))
    assert (found.kind, found.where) == ("non-communication hang", "rank 1")


def test_a_slow_wire_is_told_once_however_many_messages_it_takes() -> None:
    judge, news = LiveDetector(), list[News]()
    records = healthy()
    at_s, number = BEGUN_S, ROUNDS
    for _ in range(6):  # each message takes 2.4 s instead of 0.1
        for rank in RANKS:
            records.append(operation(rank, number, at_s=at_s, took_s=2.4))
        for pair in PAIRS:
            took_s = 2.4 if pair == (0, 1) else MESSAGE_S
            records += [sent(*pair, number, at_s=at_s), message(*pair, number, at_s=at_s, took_s=took_s)]
        records += arrivals(0, 1, a_second=SIZE / 2.4, until_s=at_s + 2.4, since_s=at_s)
        at_s, number = at_s + 2.8, number + 1
    records += beats(at_s)
    for half in range(round(2 * at_s)):
        now_s = 0.5 * half
        seen = [one for record in records if (one := _as_seen(record, now_s)) is not None]
        judge.add(seen)
        news += judge.update()
    assert judge.num_failed == 0, judge.problem
    assert [(one.state, one.finding.kind, one.finding.where) for one in news] == [
        ("new", "communication slow", "link 0 -> 1")
    ]
    assert news[0].age_s < 2.5


def _as_seen(record: Record, now_s: float) -> Record | None:
    """Return a record as it stands when it is read at some time."""
    match record:
        case Beat(at_s=at_s) | Arrival(at_s=at_s):
            return record if now_s - 0.5 < at_s <= now_s else None
        case Span(done_s=done_s):
            return record if now_s - 0.5 < done_s <= now_s else None
        case Operation(posted_s=posted_s, done_s=done_s) | TransferEnd(posted_s=posted_s, done_s=done_s):
            if done_s is not None and now_s - 0.5 < done_s <= now_s:
                return record
            is_posted = now_s - 0.5 < posted_s <= now_s and (done_s is None or done_s > now_s)
            return replace(record, done_s=None) if is_posted else None
    return record if now_s == 0.0 else None


def test_nothing_is_known_without_history() -> None:
    records = [one for one in waiting_for((0, 1), until_s=UNTIL_S) if not isinstance(one, Communicator)]
    found = judged(records, arrivals(0, 1, a_second=5e5, until_s=UNTIL_S))
    assert not [one for one in found if "slow" in one.kind] and all(math.isfinite(one.confidence) for one in found)
    assert diagnose(Records()) == []
