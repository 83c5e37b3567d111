"""Wires that became slower by what kernels count alone: told where calls show little of it, and each cause once."""

from __future__ import annotations

from collections.abc import Callable
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
    LOOK_S,
    SIZE,
    STEPS,
    communicator,
    flows,
    judged,
    operations,
    pairs,
    probes,
    slow_from,
)

from thinwire.monitor.detect.connections import watch_bursts, watch_flows
from thinwire.monitor.detect.delay_matrix import Cell
from thinwire.monitor.detect.timeline import build
from thinwire.runlog.reader import from_records
from thinwire.runlog.records import Flow, Operation, Probe, Record, TransferEnd

SENDER: list[Cell] = [(1, 0), (1, 2)]


@pytest.mark.parametrize(
    ("slow", "where"),
    [
        ([(1, 2)], "link 1 -> 2"),
        ([(1, 2), (2, 1)], "link 1 <-> 2"),
        (SENDER, "sender rank 1"),
        ([(0, 2), (1, 2)], "receiver rank 2"),
        ([(0, 1), (1, 0), (1, 2), (2, 1)], "host b"),
    ],
)
def test_a_wire_that_is_half_as_slow_again_is_told_where_calls_take_as_long_as_ever(
    slow: list[Cell], where: str
) -> None:
    (found,) = judged(operations(slow_from(BROKEN, 1.05)), flows(dict.fromkeys(slow, 1.6), heavy=EVERYONE))
    assert (found.kind, found.where) == ("communication slow", where)
    assert found.evidence["times_longer"] == pytest.approx(1.6, rel=0.05)
    # 1 MB in 50 ms, and in 80 ms
    assert found.evidence["usual_mbit_a_second"] == pytest.approx(160, rel=0.01)
    assert found.evidence["now_mbit_a_second"] == pytest.approx(100, rel=0.05)
    assert "A byte takes 1.6 times as long" in found.text and found.confidence == 0.7
    assert found.since_s == pytest.approx(BROKEN_S, abs=4 * EVERY_S) and found.until_s is None


@pytest.mark.parametrize(
    ("slow", "times", "told"),
    [([(1, 2)], 1.3, 0), ([(1, 2), (2, 1)], 1.3, 0), (SENDER, 1.3, 1), (SENDER, 1.15, 0)],
)
def test_all_wires_of_an_end_are_told_from_less_on_than_one_wire(slow: list[Cell], times: float, told: int) -> None:
    found = judged(operations(slow_from(BROKEN, 1.0)), flows(dict.fromkeys(slow, times), heavy=EVERYONE))
    assert len(found) == told


@pytest.mark.parametrize(
    "seen",
    [
        flows({}, heavy=EVERYONE),
        flows({}, heavy=EVERYONE, common=2.0),
        flows({}, heavy=EVERYONE, held={(1, 2): BUSY_S}),
        # acknowledgements that wait are no wire's rate
        flows({(2, 1): 2.0}),
    ],
)
def test_what_is_no_slower_wire_is_not_told(seen: list[Record]) -> None:
    assert judged(operations(slow_from(BROKEN, 1.0)), seen) == []


def test_what_has_not_lasted_for_five_seconds_is_not_told_yet() -> None:
    told = {}
    for steps in (BROKEN + 20, BROKEN + 32):
        seen = flows(dict.fromkeys(SENDER, 1.6), heavy=EVERYONE, steps=steps)
        told[steps - BROKEN] = [one.where for one in judged(operations(slow_from(BROKEN, 1.0), steps=steps), seen)]
    assert told == {20: [], 32: ["sender rank 1"]}


def test_what_is_over_is_told_with_its_end() -> None:
    healed, steps = BROKEN + 40, BROKEN + 80
    seen = flows(dict.fromkeys(SENDER, 1.6), heavy=EVERYONE, healed=healed, steps=steps)
    (found,) = judged(operations(slow_from(BROKEN, 1.0), steps=steps), seen)
    assert found.where == "sender rank 1"
    assert found.until_s == pytest.approx(healed * EVERY_S, abs=4 * EVERY_S)


def test_wires_by_which_calls_were_placed_are_not_told_again() -> None:
    (found,) = judged(operations(slow_from(BROKEN, 4.0)), flows(dict.fromkeys(SENDER, 4.0), heavy=EVERYONE))
    assert found.where == "sender rank 1" and "Operations of all ranks" in found.text


def test_a_wire_that_does_not_explain_the_calls_is_told_beside_them() -> None:
    found = judged(operations(slow_from(BROKEN, 4.0)), flows({(1, 2): 1.5}, heavy=EVERYONE))
    assert [one.where for one in found] == ["communicator", "link 1 -> 2"]


def test_what_stands_still_is_told_alone() -> None:
    seen = flows(dict.fromkeys(SENDER, 1.6), heavy=EVERYONE)
    stuck: list[Record] = [
        Operation(communicator="job", rank=rank, sequence=STEPS, kind="all_reduce", posted_s=STEPS * EVERY_S - 8.0)
        for rank in range(3)
    ]
    kinds = [one.kind for one in judged(operations(slow_from(BROKEN, 1.0)), seen, stuck)]
    assert kinds == ["communication hang"]


def test_a_ring_is_ambiguous_without_bursts_which_are_waited_for() -> None:
    calls = operations(slow_from(BROKEN, 1.0))
    ring = flows({(1, 2): 2.5}, heavy=HEAVY)
    (found,) = judged(calls, ring)
    assert found.where == "ambiguous: link 1 -> 2 or sender rank 1 or receiver rank 2"
    assert "probe_wires=True" in found.probe and found.confidence == 0.5
    (found,) = judged(calls, ring, probes([(1, 0)]))
    assert found.where == "sender rank 1" and found.probe == ""
    steps = BROKEN + 20
    calls, ring = operations(slow_from(BROKEN, 1.0), steps=steps), flows({(1, 2): 2.5}, heavy=HEAVY, steps=steps)
    assert [one.is_ambiguous for one in judged(calls, ring)] == [True]
    early = [one for one in probes([(1, 0)]) if isinstance(one, Probe) and one.at_s < BROKEN_S]
    assert judged(calls, ring, [*early]) == []


def test_a_burst_that_met_the_jobs_bytes_had_only_its_part_of_the_access() -> None:
    met: list[Record] = []
    for one in probes([]):
        assert isinstance(one, Probe)
        # two of three from rank 1 share what it can send with as many bytes of the job
        is_beside = one.rank == 1 and one.at_s >= BROKEN_S and len(met) % 3
        more = {"took_s": 2 * one.took_s, "num_beside": one.num_bytes} if is_beside else {}
        met.append(Probe(**{**_fields(one), **more}))
    (found,) = judged(operations(slow_from(BROKEN, 1.0)), flows({(1, 2): 2.5}, heavy=HEAVY), met)
    assert found.where == "link 1 -> 2"


def _fields(one: Probe) -> dict[str, float]:
    return {name: getattr(one, name) for name in ("rank", "peer", "at_s", "num_bytes", "took_s")}


def test_jobs_whose_messages_are_recorded_are_judged_by_these() -> None:
    ends: list[Record] = [
        TransferEnd(
            communicator="job", rank=rank, peer=1 - rank, direction="sent" if rank == 0 else "received",
            operation=step, num_bytes=SIZE, posted_s=step * EVERY_S, done_s=step * EVERY_S + BUSY_S,
        )
        for step in range(STEPS)
        for rank in range(2)
    ]  # fmt: skip
    assert judged(ends, flows(dict.fromkeys(SENDER, 1.6), heavy=EVERYONE)) == []


def rounds(took: Callable[[Cell, int], float]) -> list[Record]:
    """Return thinwire's own rounds: everybody sends to everybody, and both ends write it down."""
    ends: list[Record] = [
        TransferEnd(
            communicator="job", rank=rank, peer=peer, direction="sent" if is_sent else "received", operation=step,
            num_bytes=SIZE, posted_s=step * EVERY_S, started_s=step * EVERY_S,
            done_s=step * EVERY_S + took((rank, peer) if is_sent else (peer, rank), step),
        )
        for step in range(STEPS)
        for rank, peer in EVERYONE
        for is_sent in (True, False)
    ]  # fmt: skip
    return [*operations(lambda step: 1.5 * BUSY_S, kind="round"), *ends]


@pytest.mark.parametrize(("slow", "where"), [([(1, 2)], "link 1 -> 2"), (SENDER, "sender rank 1")])
def test_wires_of_own_rounds_are_told_by_bytes_where_messages_do_not_show_them(slow: list[Cell], where: str) -> None:
    by_bytes = flows(dict.fromkeys(slow, 1.6), heavy=EVERYONE)
    (found,) = judged(rounds(lambda cell, step: BUSY_S), by_bytes)
    assert (found.kind, found.where, found.text[:6]) == ("communication slow", where, "A byte")
    slower = rounds(lambda cell, step: BUSY_S * (2.0 if cell in slow and step >= BROKEN else 1.0))
    (found,) = judged(slower, by_bytes)
    assert (found.where, found.text[:8]) == (where, "Messages"), "each cause once, by what tells most"
    assert judged(rounds(lambda cell, step: BUSY_S), flows({}, heavy=EVERYONE)) == []


def test_the_advice_on_own_rounds_is_one_that_can_be_followed() -> None:
    """Between two hosts nothing tells a wire from its ends; who trains with thinwire watches nothing."""
    heavy = dict.fromkeys(pairs(2), SIZE)
    looks = flows({(0, 1): 1.9}, heavy=heavy, ranks=2)
    own = [one for one in rounds(lambda cell, step: BUSY_S) if max(one.rank, getattr(one, "peer", 0)) < 2]  # type: ignore[union-attr]
    (found,) = judged(own, looks, hosts=HOSTS[:2])
    assert len(found.places) > 1 and found.probe and "watch" not in found.probe
    (found,) = judged(operations(slow_from(BROKEN, 1.05), ranks=2), looks, hosts=HOSTS[:2])
    assert "thinwire.watch(..., probe_wires=True)" in found.probe


def test_wires_of_own_rounds_are_as_usual_as_soon_as_their_latest_bytes_are() -> None:
    """Where each other look finds 1.8 times as long, it takes long until it is sure that all is as usual."""

    def looks(num_looks: int) -> list[Record]:
        found, busy_s = list[Record](), dict.fromkeys(EVERYONE, 0.0)
        for look in range(num_looks):
            for cell in EVERYONE:
                longer = 3.0 if cell == (1, 2) and 60 <= look < 84 else 1.0
                busy_s[cell] += 0.1 * longer * (0.75 if look % 2 else 1.33)
                found.append(Flow(
                    rank=cell[0], peer=cell[1], at_s=LOOK_S * look, num_bytes=SIZE * (look + 1), busy_s=busy_s[cell]
                ))  # fmt: skip
        return found

    own = rounds(lambda cell, step: BUSY_S)
    (found,) = judged(own, looks(86))
    assert (found.where, found.until_s) == ("link 1 -> 2", None)
    change = watch_flows(build(from_records(looks(92))))[1, 2].change
    assert change is not None and not change.is_over and judged(own, looks(92)) == []
    (found,) = judged(own, looks(94))
    assert (found.where, found.until_s) == ("link 1 -> 2", 84 * LOOK_S)


@pytest.mark.parametrize(("idle", "where"), [((2, 1), "link 1 <-> 2"), ((1, 0), "sender rank 1")])
def test_bursts_give_the_alarm_where_a_jobs_own_bytes_vary_too_much_for_it(idle: Cell, where: str) -> None:
    calls = operations(slow_from(BROKEN, 1.0))
    # what the job's bytes show alone is too little for a wire
    assert judged(calls, flows({(1, 2): 1.3}, heavy=HEAVY)) == []
    assert judged(calls, flows({(1, 2): 1.3}, heavy=HEAVY), probes([])) == []
    (found,) = judged(calls, flows({(1, 2): 1.3}, heavy=HEAVY), probes([idle]))
    assert found.where == where and found.evidence["times_longer"] == pytest.approx(1.3, rel=0.05)


def test_bursts_over_one_way_are_enough_where_they_are_many() -> None:
    watches = watch_bursts(build(from_records([communicator(HOSTS), *probes([(2, 1)])])))
    # HEAVY's ways need no bursts; of an end with one more way, and of it alone
    assert set(watches) == {
        frozenset(own) for own in ([(0, 2)], [(1, 0)], [(2, 1)])
    }  # fmt: skip
    slow = watches[frozenset([(2, 1)])].change
    assert slow is not None and slow.since_s == pytest.approx(BROKEN_S, abs=4 * EVERY_S)
    assert all(watch.change is None for own, watch in watches.items() if own != {(2, 1)})


@pytest.mark.parametrize("kind", ["broadcast", "reduce", "gather", "scatter"])
def test_collectives_in_which_a_rank_only_sends_are_told_by_their_wires(kind: str) -> None:
    # its kernel takes the bytes at once until a connection is full
    calls = operations(slow_from(BROKEN, 4.0), kind=kind)
    assert judged(calls, flows({}, heavy=EVERYONE)) == []
    (found,) = judged(calls, flows(dict.fromkeys(SENDER, 3.0), heavy=EVERYONE))
    assert found.where == "sender rank 1" and "A byte takes 3.0 times as long" in found.text


@pytest.mark.parametrize(("count", "told"), [(SIZE // 10, 0), (10 * SIZE, 0), (SIZE + SIZE // 4, 1)])
def test_a_job_whose_calls_are_of_another_size_now_has_no_slower_wires(count: int, told: int) -> None:
    """Bytes of small messages take longer on any wire: of two hosts nothing else tells that from a slow one."""
    calls: list[Record] = [
        replace(one, count=count) if isinstance(one, Operation) and one.posted_s >= BROKEN_S else one
        for one in operations(slow_from(BROKEN, 1.0), ranks=2)
    ]
    both: list[Cell] = [(0, 1), (1, 0)]
    seen = flows(dict.fromkeys(both, 2.5), heavy=dict.fromkeys(both, SIZE), ranks=2)
    assert len(judged(calls, seen, hosts=("a", "b"))) == told


def test_a_burst_that_says_it_met_far_more_than_it_sent_is_left_out() -> None:
    said: list[Record] = []
    for one in probes([(1, 0)]):
        assert isinstance(one, Probe)
        said.append(replace(one, num_beside=17 * one.num_bytes if one.at_s >= BROKEN_S else 0))
    (found,) = judged(operations(slow_from(BROKEN, 1.0)), flows({(1, 2): 2.5}, heavy=HEAVY), said)
    assert found.is_ambiguous, "nobody knows of the other wires, and they do not count as well"
