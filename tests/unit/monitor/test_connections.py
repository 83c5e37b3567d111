"""Collectives whose messages nobody records: the wires that make them slow or hang, by what kernels know of these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from flow_scenes import (
    BROKEN,
    BROKEN_S,
    BUSY_S,
    EVERY_S,
    EVERYONE,
    HEAVY,
    HOSTS,
    SIZE,
    communicator,
    flows,
    judged,
    operations,
    pairs,
    probes,
    slow_from,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.monitor.dashboard.chart_data import delay_matrix
from thinwire.monitor.detect.delay_matrix import Cell
from thinwire.monitor.detect.live import LiveDetector, RecordWindow
from thinwire.monitor.detect.timeline import build
from thinwire.runlog.reader import from_records
from thinwire.runlog.records import Beat, Flow, Operation, Probe, Record


@pytest.mark.parametrize(
    ("slow", "heavy", "where"),
    [
        ([(1, 2)], EVERYONE, "link 1 -> 2"),
        ([(1, 2), (2, 1)], EVERYONE, "link 1 <-> 2"),
        ([(1, 0), (1, 2)], EVERYONE, "sender rank 1"),
        ([(0, 2), (1, 2)], EVERYONE, "receiver rank 2"),
        ([(0, 1), (1, 0), (1, 2), (2, 1)], EVERYONE, "host b"),
        # a ring uses one wire of each end
        ([(1, 2)], HEAVY, "ambiguous: link 1 -> 2 or sender rank 1 or receiver rank 2"),
    ],
)
def test_slow_collectives_name_the_wires_whose_bytes_take_longer(
    slow: list[Cell], heavy: dict[Cell, int], where: str
) -> None:
    (found,) = judged(operations(slow_from(BROKEN, 4.0)), flows(dict.fromkeys(slow, 4.0), heavy=heavy))
    assert (found.kind, found.where) == ("communication slow", where)
    assert found.evidence["byte_times_longer"] == pytest.approx(4.0, rel=0.05)
    assert "a byte takes 4.0 times as long" in found.text
    assert found.confidence == pytest.approx(0.5 if "ambiguous" in where else 0.9)
    assert ("probe_wires=True" in found.probe) == ("ambiguous" in where) == bool(found.probe)


@pytest.mark.parametrize(
    "seen",
    [
        [],
        flows({}, heavy=EVERYONE),
        # a busy machine slows all
        flows({}, heavy=EVERYONE, common=4.0),
        # the time is that of a process that does not read
        flows({}, heavy=EVERYONE, held={(1, 2): 3 * BUSY_S}),
        # too little to explain it, or to be told alone
        flows({(1, 2): 1.3}, heavy=EVERYONE),
        # acknowledgements that wait are no wire's rate
        flows({(2, 1): 4.0}),
    ],
)
def test_where_no_wire_explains_it_no_link_is_named(seen: list[Record]) -> None:
    (found,) = judged(operations(slow_from(BROKEN, 4.0)), seen)
    assert (found.kind, found.where) == ("communication slow", "communicator")
    assert "do not tell by which link" in found.text


def test_connections_that_are_made_anew_and_looks_that_are_missing_tell_nothing() -> None:
    seen = flows({(1, 2): 4.0}, heavy=EVERYONE)
    anew = [
        Flow(rank=one.rank, peer=one.peer, at_s=one.at_s, num_bytes=one.num_bytes % 7_000_000, busy_s=one.busy_s % 0.7)
        for one in seen
        if isinstance(one, Flow) and not 20 < one.at_s / EVERY_S < 50
    ]
    (found,) = judged(operations(slow_from(BROKEN, 4.0)), anew)
    assert found.where == "link 1 -> 2"


def test_several_ranks_of_a_host_are_named_as_their_host() -> None:
    hosts = ("a", "a", "b", "b", "c", "c")
    ring: dict[Cell, int] = {(1, 2): SIZE, (3, 4): SIZE, (5, 0): SIZE, (2, 0): SIZE, (4, 2): SIZE, (0, 4): SIZE}
    seen = [one for one in flows({(3, 4): 4.0}, heavy=ring, ranks=6) if isinstance(one, Flow)]
    # the kernel tells which host a connection leads to, so that the peer is the lowest rank there
    kept: list[Record] = [one for one in seen if one.peer % 2 == 0 and hosts[one.rank] != hosts[one.peer]]
    (found,) = judged(operations(slow_from(BROKEN, 4.0), ranks=6), kept, hosts=hosts)
    assert found.where == "host link b -> c"


def test_looks_that_will_tell_the_place_are_waited_for_but_not_for_long() -> None:
    told: dict[int, list[str]] = {}
    for steps in (BROKEN + 8, BROKEN + 14):
        seen = [one for one in flows({}, heavy=EVERYONE, steps=steps) if isinstance(one, Flow)]
        # one more look since it broke, which is none for a stretch of time
        kept: list[Record] = [one for one in seen if one.at_s < BROKEN_S]
        kept += [replace(one, at_s=(steps - 1) * EVERY_S) for one in seen[len(seen) // 6 - 1 :: len(seen) // 6]]
        found = judged(operations(slow_from(BROKEN, 4.0), steps=steps), kept)
        told[steps - BROKEN] = [one.where for one in found]
    assert told == {8: [], 14: ["communicator"]}
    unwatched = judged(operations(slow_from(BROKEN, 4.0), steps=BROKEN + 8))
    assert [one.where for one in unwatched] == ["communicator"]


# -- probes


@pytest.mark.parametrize("met", [False, True])
@pytest.mark.parametrize(
    ("slow", "where"),
    [
        ([], "link 1 -> 2"),
        ([(2, 1)], "link 1 <-> 2"),
        ([(1, 0)], "sender rank 1"),
        ([(0, 2)], "receiver rank 2"),
    ],
)
def test_bursts_over_idle_wires_tell_which_end_or_link_is_slow(slow: list[Cell], where: str, met: bool) -> None:
    (found,) = judged(operations(slow_from(BROKEN, 4.0)), flows({(1, 2): 4.0}), probes(slow, met=met))
    assert (found.kind, found.where) == ("communication slow", where)
    assert found.evidence["byte_times_longer"] == pytest.approx(4.0, rel=0.05)


def test_bursts_that_will_tell_the_place_are_waited_for_but_not_for_long() -> None:
    told: dict[int, list[str]] = {}
    for steps in (BROKEN + 15, BROKEN + 30):
        seen = [one for one in probes([(1, 0)]) if isinstance(one, Probe) and one.at_s < BROKEN_S]
        found = judged(operations(slow_from(BROKEN, 4.0), steps=steps), flows({(1, 2): 4.0}, steps=steps), list(seen))
        told[steps - BROKEN] = [one.where for one in found]
    assert told == {15: [], 30: ["ambiguous: link 1 -> 2 or sender rank 1 or receiver rank 2"]}


def test_the_page_shows_the_time_of_a_megabyte_over_each_wire() -> None:
    seen = [
        communicator(HOSTS),
        *operations(slow_from(BROKEN, 4.0)),
        *flows({(1, 2): 4.0}),
        *probes([(1, 0)], met=True),
    ]
    usual: dict[Cell, float] = {}
    matrix = delay_matrix(build(from_records(seen)), usual)
    assert matrix["is_of_wires"] and matrix["ranks"] == [0, 1, 2] and len(matrix["cells"]) == 6
    told = {(cell["from"], cell["to"]): (cell["now_s"], cell["times_longer"]) for cell in matrix["cells"]}
    assert told.pop((1, 2)) == (pytest.approx(0.2), pytest.approx(4.0))
    assert told.pop((1, 0)) == (pytest.approx(0.06 / 0.131072), pytest.approx(6.0))
    assert all(times == pytest.approx(1.0) for _, times in told.values())
    assert usual[2, 1] == pytest.approx(0.01 / 0.131072)
    # what was slow for as long as records are kept is not as usual
    slow_only = [one for one in seen if not isinstance(one, Flow | Probe) or one.at_s > BROKEN_S]
    again = delay_matrix(build(from_records(slow_only)), usual)
    assert {(c["from"], c["to"]): c["times_longer"] for c in again["cells"]}[1, 2] == pytest.approx(4.0)


# -- hangs


def hang(*, at_s: float = BROKEN_S, until_s: float) -> list[Record]:
    """Return all-reduces of which the last does not end, and signs of life."""
    stuck: list[Record] = [
        Operation(
            communicator="job", rank=rank, sequence=BROKEN, kind="all_reduce", dtype="float32", count=SIZE,
            posted_s=at_s,
        )
        for rank in range(3)
    ]  # fmt: skip
    beats: list[Record] = [
        Beat(rank=rank, at_s=0.5 * half) for half in range(int(2 * until_s) + 1) for rank in range(3)
    ]
    return [*operations(lambda step: BUSY_S, steps=BROKEN), *stuck, *beats]


def silences(silence_s: Mapping[Cell, float], *, at_s: float, usual_s: float | None = 0.4) -> list[Record]:
    return [
        Flow(
            rank=cell[0], peer=cell[1], at_s=at_s, num_bytes=9, busy_s=1.0, silence_s=silence_s.get(cell, usual_s),
            unanswered=3 if cell in silence_s else 0,
        )
        for cell in pairs(3)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dead", "where"),
    [
        ([(1, 2), (2, 1)], "link 1 <-> 2"),
        ([(0, 1), (1, 0), (1, 2), (2, 1)], "host b"),
    ],
)
def test_a_hang_names_the_wires_over_which_nothing_comes(dead: list[Cell], where: str) -> None:
    until_s = BROKEN_S + 3.0
    (found,) = judged(hang(until_s=until_s), silences(dict.fromkeys(dead, 3.0), at_s=until_s))
    assert (found.kind, found.where) == ("communication hang", where)
    assert "nothing comes any more" in found.text and found.confidence > 0.9
    assert found.evidence["connections_known"] == 6


@pytest.mark.parametrize(("silence_s", "where"), [(None, "link 1 <-> 2"), (1.2, "link 1 <-> 2"), (0.4, "link 2 -> 1")])
def test_the_other_end_of_a_dead_connection_may_not_know_yet(silence_s: float | None, where: str) -> None:
    until_s = BROKEN_S + 3.0
    seen = silences({(1, 2): 1.6}, at_s=until_s - 0.4)
    seen = [one for one in seen if isinstance(one, Flow) and (one.rank, one.peer) != (2, 1)]
    late = Flow(rank=2, peer=1, at_s=until_s - 0.4, num_bytes=9, busy_s=1.0, silence_s=silence_s)
    (found,) = judged(hang(until_s=until_s), [*seen, late])
    assert (found.kind, found.where) == ("communication hang", where)


def test_where_all_connections_answer_no_wire_is_named() -> None:
    until_s = BROKEN_S + 3.0
    (found,) = judged(hang(until_s=until_s), silences({}, at_s=until_s))
    assert (found.kind, found.where) == ("communication hang", "communicator")
    assert "all 6 connections between hosts that are known of answer" in found.text and "py-spy" in found.remedy


@pytest.mark.parametrize(
    "seen", [[], silences({}, at_s=BROKEN_S - 3.0), silences({}, at_s=BROKEN_S + 3.0, usual_s=None)]
)
def test_what_nobody_has_looked_at_lately_tells_nothing_of_a_hang(seen: list[Record]) -> None:
    (found,) = judged(hang(until_s=BROKEN_S + 3.0), seen)
    assert (found.kind, found.where) == ("communication hang", "communicator")
    assert "answer" not in found.text


def test_a_hang_is_told_with_its_place_and_not_before() -> None:
    judge = LiveDetector(updates_until_new=2)
    judge.add([communicator(HOSTS), *operations(lambda step: BUSY_S, steps=BROKEN)])
    told = []
    fresh = hang(until_s=BROKEN_S)[3 * BROKEN :]
    for half in range(8):
        at_s = BROKEN_S + 0.5 * half
        beats: list[Record] = [Beat(rank=rank, at_s=at_s) for rank in range(3)]
        dead = dict.fromkeys([(1, 2), (2, 1)], 0.5 * half)
        judge.add([*fresh, *beats, *silences(dead, at_s=at_s)])
        told += [(news.finding.where, round(news.age_s, 1)) for news in judge.update()]
    assert told == [("link 1 <-> 2", 2.5)]


def test_a_very_slow_wire_is_told_from_a_dead_one() -> None:
    until_s = BROKEN_S + 4.0
    seen = [one for one in flows({}, heavy=EVERYONE, steps=BROKEN) if isinstance(one, Flow)]
    moving: list[Record] = []
    for last in seen[
        len(seen) // 6 - 1 :: len(seen) // 6
    ]:  # the last look at each way: all ends but a thirtieth of one
        for half in range(9):
            is_slow = (last.rank, last.peer) == (1, 2)
            moving.append(replace(
                last, at_s=BROKEN_S + 0.5 * half, num_bytes=last.num_bytes + half * is_slow * SIZE // 3,
                busy_s=last.busy_s + 0.5 * half * is_slow, silence_s=0.4,
            ))  # fmt: skip
    (found,) = judged(hang(until_s=until_s), list(seen), moving)
    assert found.kind == "communication slow" and found.where.startswith("ambiguous: link 1 -> 2 or ")
    assert "does not end yet: a byte takes 30.0 times as long" in found.text and found.confidence == 0.5


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_forged_flows_and_bursts_are_never_a_crash_nor_a_finding_of_their_own(data: st.DataObject) -> None:
    seconds = st.floats(0.0, 1e12) | st.just(0.0)
    forged: list[Record] = []
    for _ in range(data.draw(st.integers(1, 30))):
        source, destination = data.draw(st.permutations(range(4)))[:2]
        at_s, num_bytes = data.draw(st.floats(0.0, 20.0)), data.draw(st.integers(0, 1 << 53))
        forged.append(
            Flow(
                rank=source, peer=destination, at_s=at_s, num_bytes=num_bytes, busy_s=data.draw(seconds),
                held_s=data.draw(seconds), silence_s=data.draw(st.none() | seconds),
            )
            if data.draw(st.booleans())
            else Probe(rank=source, peer=destination, at_s=at_s, num_bytes=num_bytes, took_s=data.draw(seconds))
        )  # fmt: skip
    found = judged(operations(slow_from(BROKEN, 1.0)), flows({}, heavy=EVERYONE), forged)
    assert [one.kind for one in found if one.kind.startswith("communication")] == []
    slow = judged(operations(slow_from(BROKEN, 4.0)), flows({}, heavy=EVERYONE), forged)
    assert all(math.isfinite(one.confidence) for one in slow)


def test_what_is_kept_of_a_long_job_holds_its_first_looks_too() -> None:
    window = RecordWindow(most_records=40)
    for number in range(10_000):
        window.add(Flow(rank=0, peer=1, at_s=float(number), num_bytes=number, busy_s=0.0))
        window.add(Probe(rank=0, peer=1, at_s=float(number), num_bytes=9, took_s=1.0))
    kept = [flow.num_bytes for flow in window.records().flows]
    assert kept[:1024] == list(range(1024)) and kept[-1] == 9999 and len(kept) == len(window.records().probes) == 4096
    assert window.records(without=[1]).flows == window.records(without=[0]).probes == []


def test_what_is_slower_by_little_is_named_with_less_confidence() -> None:
    (found,) = judged(operations(slow_from(BROKEN, 1.6)), flows({(1, 2): 1.6}, heavy=EVERYONE))
    assert (found.where, found.confidence) == ("link 1 -> 2", 0.7)
