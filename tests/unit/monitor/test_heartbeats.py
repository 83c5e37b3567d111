"""How long a rank may be silent: by its beats, by how late it is again and again, and by what others hear of it."""

from __future__ import annotations

import pytest

from thinwire.monitor.detect.heartbeats import HeartbeatDelays
from thinwire.monitor.detect.live import LiveDetector
from thinwire.monitor.detect.timeline import Job
from thinwire.runlog.records import Beat, Communicator, Operation, Record, Span, TransferEnd

WHERE = Communicator(communicator="rounds", ranks=(0, 1, 2), hosts=("a", "a", "b"), clocks=("one", "one", "one"))


def beats(ranks: tuple[int, ...], begin_s: float, end_s: float, *, every_s: float = 0.5) -> list[Record]:
    count = round((end_s - begin_s) / every_s)
    return [Beat(rank=rank, at_s=begin_s + number * every_s) for number in range(count) for rank in ranks]


def told_after_s(*, own_host: str = "", silent: int = 1, late: tuple[float, ...] = (), until_s: float = 6.0) -> float:
    """Stop a rank's beats at 20 s, after some moments at which they were late; return when its silence is told."""
    judge, was_late_s = LiveDetector(own_host=own_host), 0.0
    judge.add([WHERE, *beats((0, 1, 2), 0.0, 8.0)])
    judge.update()
    now_s = 8.0
    for late_s in late:
        others = tuple(rank for rank in (0, 1, 2) if rank != silent)
        judge.add(beats(others, now_s, now_s + late_s))
        was_late_s += bool(judge.update())
        judge.add(beats((silent,), now_s, now_s + late_s))
        judge.update()
        now_s += late_s
    assert now_s <= 20
    judge.add(beats((0, 1, 2), now_s, 20.0))
    judge.update()
    while now_s < 20 + until_s:
        now_s = max(now_s, 20.0) + 0.5
        judge.add(beats(tuple(rank for rank in (0, 1, 2) if rank != silent), now_s - 0.5, now_s))
        for news in judge.update():
            assert (news.finding.kind, news.finding.where) == ("non-communication hang", f"rank {silent}")
            return now_s - 20
    return -1.0


def test_three_and_a_half_beats_that_do_not_come_are_a_silence() -> None:
    assert told_after_s() == 2.5  # 19.5 s was the last one; told at the second look


def test_who_is_late_again_and_again_may_be_late_as_long_again() -> None:
    assert told_after_s(late=(1.5, 1.5, 1.5)) == pytest.approx(3.5, abs=0.5)
    assert told_after_s(late=(1.5, 1.5)) == 2.5, "twice is no habit"


def test_a_rank_that_stood_still_once_is_found_as_soon_the_next_time() -> None:
    assert told_after_s(late=(6.0,)) == 2.5


def test_records_that_come_over_a_wire_may_be_later() -> None:
    assert told_after_s(own_host="a", silent=1) == 2.5
    assert told_after_s(own_host="a", silent=2) == pytest.approx(4.5, abs=0.5)


def heard(until_s: float) -> list[Record]:
    """Messages of rank 1 to rank 0, one a second, as both wrote."""
    found: list[Record] = []
    for number in range(int(until_s)):
        for rank, peer, direction in ((1, 0, "sent"), (0, 1, "received")):
            if rank == 1 and number > 10:
                continue
            found.append(TransferEnd(
                communicator="rounds", rank=rank, peer=peer, direction=direction, operation=number, part=0,
                num_bytes=1000, posted_s=float(number), done_s=number + 0.1,
            ))  # type: ignore[arg-type]  # fmt: skip
    return found


def test_who_was_heard_of_since_its_last_record_is_not_called_stopped_before_it_is_sure() -> None:
    judge, kinds = LiveDetector(), set()
    judge.add([WHERE, *beats((0, 1, 2), 0.0, 10.5)])
    # its disk is full at 10.2 s: it sends on, and writes no more
    for now_s in (11.0, 11.5, 12.0, 12.5, 13.0, 13.5, 14.0, 14.5, 15.0):
        judge.add([*beats((0, 2), now_s - 0.5, now_s), *heard(now_s)])
        kinds |= {news.finding.kind for news in judge.update()}
    assert kinds == {"no records"}


def test_a_clock_that_was_set_says_nothing_of_lateness() -> None:
    job = Job(last_seen_s={0: 1.0, 1: 9.0}, now_s=9.0, unsteady=frozenset({0}))
    assert HeartbeatDelays().take(job) == {}


def test_it_is_worth_looking_again_soon_where_something_was_seen_once() -> None:
    judge = LiveDetector()
    judge.add([WHERE, *beats((0, 1, 2), 0.0, 8.0)])
    assert judge.update() == [] and not judge.is_unsure
    judge.add(beats((0, 2), 8.0, 11.0))
    assert judge.update() == [] and judge.is_unsure
    assert [news.state for news in judge.update()] == ["new"] and not judge.is_unsure


def test_a_live_rank_may_be_three_usual_steps_late_for_the_first_round() -> None:
    judge = LiveDetector()
    judge.add([WHERE, *beats((0, 1, 2), 0.0, 20.0)])
    judge.add([
        Span(rank=rank, kind="compute", step=step, started_s=4.0 * step, done_s=4.0 * step + 4.0)
        for rank in (0, 1, 2) for step in range(5)
    ])  # fmt: skip
    for rank in (0, 2):
        judge.add([Operation(
            communicator="rounds", rank=rank, sequence=0, kind="all_gather", dtype="", count=0, posted_s=20.0, round=0,
        )])  # fmt: skip
    found_s, now_s = None, 20.0
    while found_s is None and now_s < 60:
        now_s += 0.5
        judge.add(beats((0, 1, 2), now_s - 0.5, now_s))
        found_s = now_s - 20 if judge.update() else None
    assert found_s == pytest.approx(12.5, abs=1)
