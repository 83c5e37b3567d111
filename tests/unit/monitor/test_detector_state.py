"""What a judge remembers from look to look: the same as from all records at once, and no less in jobs of many ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.synthetic_jobs import NOISES, InjectedFault, Scene, _Synthesis
from thinwire.monitor.detect import diagnose as diagnose_module
from thinwire.monitor.detect.change_points import ChangePointDetector
from thinwire.monitor.detect.clocks import Sighting, SightingBook, align
from thinwire.monitor.detect.diagnose import DetectorState, DetectorStateConfig, settled_s
from thinwire.monitor.detect.link_history import LinkHistory, link_times
from thinwire.monitor.detect.live import LiveDetector, RecordWindow
from thinwire.monitor.detect.slow_compute import work_times
from thinwire.monitor.detect.timeline import Job, Message, build
from thinwire.monitor.findings import Place
from thinwire.runlog.reader import from_records
from thinwire.runlog.records import Beat, Communicator, Operation, Record, Span, TransferEnd

SLOW = InjectedFault(kind="slow link", place=Place(kind="link", ranks=(0, 1)), begin=40, severity=6.0)
SLOW_WORK = InjectedFault(kind="slow work", place=Place(kind="rank", ranks=(2,)), begin=50, severity=3.0)


def on_one_clock(scene: Scene) -> list[Record]:
    """Play a scene whose hosts share a clock, so that no estimate of one is between two ways to judge it."""
    player = _Synthesis(scene)
    player.clocks = dict.fromkeys(player.clocks, (0.0, 0.0))
    return [
        replace(record, clocks=("one",) * len(record.ranks)) if isinstance(record, Communicator) else record
        for record in player.run()
    ]


def as_written(records: list[Record], *, later_s: float = 0.0) -> Iterator[tuple[float, Record]]:
    """Yield each record with when it was written: what ends is told of when it begins, too."""
    for record in records:
        if isinstance(record, Communicator):
            yield -math.inf, record
        elif isinstance(record, Beat):
            yield record.at_s + later_s, replace(record, at_s=record.at_s + later_s)
        elif isinstance(record, Span):
            moved = replace(record, started_s=record.started_s + later_s, done_s=record.done_s + later_s)
            yield moved.done_s, moved
        else:
            assert isinstance(record, Operation | TransferEnd)
            posted = replace(record, posted_s=record.posted_s + later_s, done_s=None)
            yield posted.posted_s, posted
            if record.done_s is not None:
                yield record.done_s + later_s, replace(posted, done_s=record.done_s + later_s)


def looks(written: list[tuple[float, Record]], *, every_s: float = 0.5) -> Iterator[list[Record]]:
    """Yield what is new at each look."""
    part: list[Record] = []
    until_s = 0.0
    for at_s, record in sorted(written, key=lambda pair: pair[0]):
        while at_s > until_s:
            yield part
            part, until_s = [], until_s + every_s
        part.append(record)
    yield part


def told(watch: ChangePointDetector, *, until: int) -> list[tuple[int, float]]:
    return [(number, round(excess, 9)) for number, _, excess in watch.excess if number <= until]


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["calm", "heavy"])
@pytest.mark.parametrize(("pattern", "size"), [("all_gather", 4), ("two_phase", 3), ("rotating_ring", 5)])
def test_by_and_by_links_and_work_are_known_as_from_all_records(
    monkeypatch: pytest.MonkeyPatch, pattern: str, size: int, noise: str
) -> None:
    monkeypatch.setattr(diagnose_module, "STATE", DetectorStateConfig(min_records=0))
    hosts = tuple(f"host-{number}" for number in range(size))
    scene = Scene(hosts=hosts, rounds=90, noise=NOISES[noise], faults=(SLOW, SLOW_WORK), pattern=pattern)  # type: ignore[arg-type]
    records = on_one_clock(scene)
    window, history = RecordWindow(most_records=30 * size), DetectorState()
    for part in looks([*as_written(records)]):
        for record in part:
            window.add(record)
        links, work = history.update(build(window.records()))
    job = build(from_records(records))
    assert len(build(window.records()).messages) < len(job.messages) / 2, "most of them are forgotten"
    whole, all_work = link_times(job), work_times(job)
    assert set(links.watches) == set(whole.watches)
    for cell, watch in whole.watches.items():
        assert told(links.watches[cell], until=80) == told(watch, until=80), cell
        assert told(links.alone[cell], until=80) == told(whole.alone[cell], until=80), cell
    for rank, watch in all_work.own.items():
        assert told(work.own[rank], until=80) == told(watch, until=80)
        assert told(work.beside[rank], until=80) == told(all_work.beside[rank], until=80)
    alarmed = [{end.cells for end in times.ends if end.watch.change is not None} for times in (links, whole)]
    assert alarmed[0] == alarmed[1]


@pytest.mark.slow
def test_a_job_of_many_hosts_is_judged_while_it_runs() -> None:
    """What is kept of its records are 16 rounds: from these alone nothing would be known of what is usual."""
    hosts = tuple(f"host-{number}" for number in range(14))
    scene = Scene(hosts=hosts, rounds=60, noise=NOISES["shared"], faults=(SLOW,))
    judge, news = LiveDetector(), []
    for part in looks([*as_written(on_one_clock(scene))], every_s=1.0):
        judge.add(part)
        news += judge.update()
    assert [(one.state, one.finding.kind, one.finding.where) for one in news] == [
        ("new", "communication slow", "link 0 -> 1")
    ]
    assert 39 <= news[0].finding.since_round <= 41 and judge.num_failed == 0


def test_a_job_that_began_anew_has_a_new_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose_module, "STATE", DetectorStateConfig(min_records=300))
    hosts = ("a", "b", "c")
    clean, slow = (on_one_clock(Scene(hosts=hosts, rounds=100, faults=faults)) for faults in ((), (SLOW,)))
    later_s = max(at_s for at_s, _ in as_written(clean)) + 1.0
    judge, news = LiveDetector(), []
    for part in looks([*as_written(clean), *as_written(slow, later_s=later_s)]):
        judge.add(part)
        news += judge.update()
    where = [(one.finding.where, one.finding.since_round) for one in news if one.finding.kind == "communication slow"]
    assert [name for name, _ in where] == ["link 0 -> 1"] and 39 <= where[0][1] <= 41


def test_a_forged_number_stands_in_the_way_of_later_rounds_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose_module, "STATE", DetectorStateConfig(min_records=300))
    slow = replace(SLOW, place=Place(kind="link", ranks=(1, 0)), begin=100)
    records = on_one_clock(Scene(hosts=("a", "b", "c"), rounds=130, faults=(slow,)))
    written = sorted(as_written(records), key=lambda pair: pair[0])
    at_s = written[len(written) // 3][0]
    forged: list[Record] = [
        *(TransferEnd(communicator="world", rank=rank, peer=1 - rank, direction="sent" if rank else "received",
                      operation=1 << 50, num_bytes=1 << 20, posted_s=at_s, done_s=at_s + 0.01) for rank in (0, 1)),
        Span(rank=0, kind="compute", step=1 << 50, started_s=at_s, done_s=at_s + 0.01),
    ]  # fmt: skip
    judge, news = LiveDetector(most_records=600), []
    for part in looks([*written, *((at_s + 0.01, one) for one in forged)]):
        judge.add(part)
        news += judge.update()
    assert [(one.state, one.finding.where) for one in news] == [("new", "link 1 -> 0")] and judge.num_failed == 0


def test_links_of_who_is_gone_are_known_no_more_and_are_known_again() -> None:
    records = on_one_clock(Scene(hosts=("a", "b", "c", "d"), rounds=30))
    window, history = RecordWindow(), LinkHistory()
    for record in records:
        window.add(record)
    everyone = history.take(build(window.records()), settled_s=math.inf)
    assert len(everyone.watches) == 12
    left = history.take(build(window.records(without={3})), settled_s=math.inf)
    assert set(left.watches) == {(i, j) for i in range(3) for j in range(3) if i != j} == set(left.alone)
    assert history.take(build(window.records()), settled_s=math.inf).watches == everyone.watches


def _message(source: int, destination: int, begin_s: float, done_s: float | None) -> Message:
    return Message(source, destination, "w", 0, 0, 1 << 20, sent_posted_s=begin_s, received_posted_s=begin_s,
                   received_done_s=done_s)  # fmt: skip


@pytest.mark.parametrize(("open_since_s", "alone_s"), [(9.0, 0.25), (-5.0, 0.5)])
def test_who_shares_an_access_with_a_message_that_may_still_come_has_half_of_it(
    open_since_s: float, alone_s: float
) -> None:
    job = Job(host_of={0: "a", 1: "b", 2: "c"}, now_s=10.5, clock_of=dict.fromkeys(range(3), "one"))
    job.messages = [_message(0, 1, 9.5, 10.0), _message(0, 2, open_since_s, None)]
    history = LinkHistory()
    assert set(history.take(job, settled_s=10.2).watches) == {(0, 1)}
    ((_, _, early, _),) = history._times.alone[0, 1]._early
    assert early == pytest.approx(math.log(alone_s))
    job.messages[1].received_done_s = 10.4
    assert set(history.take(job, settled_s=10.5).watches) == {(0, 1), (0, 2)}


def test_a_second_message_of_a_round_is_waited_for_while_the_round_goes_on() -> None:
    job = Job(host_of={0: "a", 1: "b"}, now_s=10.5, clock_of=dict.fromkeys(range(2), "one"))
    going = Operation(communicator="w", rank=0, sequence=0, kind="round", posted_s=9.0)
    job.operations = {("w", 0): {0: going}}
    job.messages = [_message(0, 1, 9.5, 10.0)]
    history = LinkHistory()
    assert not history.take(job, settled_s=10.5).watches
    job.messages.append(replace(_message(0, 1, 10.0, 10.4), part=1))
    assert not history.take(job, settled_s=10.5).watches
    job.operations["w", 0][0] = replace(going, done_s=10.45)
    assert len(history.take(job, settled_s=10.5).watches) == 1 and history._parts == {(0, 1): 2}
    # the next round's two have come, so nothing more will, though the round goes on because of others
    job.operations["w", 1] = {0: replace(going, sequence=1)}
    job.messages = [replace(one, operation=1) for one in job.messages]
    history.take(job, settled_s=10.5)
    assert history.newest == 1


def test_a_message_that_comes_after_those_of_later_rounds_counts_and_counts_once() -> None:
    job = Job(host_of={0: "a", 1: "b"}, now_s=20.0, clock_of=dict.fromkeys(range(2), "one"))
    late, quick = _message(0, 1, 9.5, None), replace(_message(0, 1, 9.6, 9.7), operation=1)
    job.messages, history = [late, quick], LinkHistory()
    seen = []
    for done_s in (None, 15.0, 15.0):
        late.received_done_s = done_s
        watch = history.take(job, settled_s=19.0).watches[0, 1]
        seen.append([round for round, *_ in watch._early])
    assert seen == [[1], [1, 0], [1, 0]]
    watch = ChangePointDetector()
    for number in [*range(40), 41, 42, 40, 43]:
        watch.add(number, float(number), 2.0 if number == 40 else 1.0)
    assert [round(math.exp(excess)) for excess in watch.values_in(40, 42)] == [2, 1, 1]


def test_nothing_is_settled_that_a_rank_has_not_written_of_and_a_silent_one_holds_up_nothing() -> None:
    job = Job(host_of={0: "a", 1: "b"}, now_s=10.0, last_seen_s={0: 10.0, 1: 9.6})
    assert settled_s(job) == 9.6
    job.last_seen_s[1] = 5.0
    assert settled_s(job) == 10.0


def test_of_many_messages_those_are_kept_that_bound_clocks_best() -> None:
    book, all_seen = SightingBook(), []
    for number in range(3000):
        wait_s = 0.001 + 0.002 * (number * 7919 % 100) / 100
        there = Sighting("a", "b", float(number), number + 5.0 + 20e-6 * number + wait_s)
        back = Sighting("b", "a", number + 5.5 + 20e-6 * number, number + 0.5 + wait_s)
        all_seen += [there, back]
        kept = book.take([(number, there), (number, back)], of=["a", "b"])
    assert len(kept) <= 64
    fits = [align(["a", "b"], seen).fits["b"] for seen in (kept, all_seen)]
    for fit in fits:
        assert fit.is_steady and abs(fit.to_reference(2000.0 + 5.0 + 20e-6 * 2000.0) - 2000.0) < 0.001
        assert abs(fit.drift - 20e-6) < 2e-6
    assert book.take([], of=["a", "c"]) == []


@pytest.mark.parametrize(("ranks", "kept"), [(2, 40), (50, 800), (9000, 18_000)])
def test_some_rounds_of_all_ranks_are_kept_however_many_there_are(ranks: int, kept: int) -> None:
    window = RecordWindow(most_records=40)
    for number in range(20 if ranks < 9000 else 6):
        for rank in range(ranks):
            window.add(Operation(communicator="w", rank=rank, sequence=number, kind="r", posted_s=number))
    assert 0.9 * kept <= len(window.records().operations) <= kept
