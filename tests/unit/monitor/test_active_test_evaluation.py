"""Active tests, judged: which place is named for which pattern of rates, and what is no fault."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from thinwire.monitor.active_test.evaluation import (
    AllReduce,
    FlowTest,
    Measured,
    PairTest,
    all_reduce_s,
    evaluate,
    expected_s,
    rate_of,
    reference_rate,
    slow_loopbacks,
    suspects,
)
from thinwire.monitor.findings import Place

Cell = tuple[int, int]
USUAL = 50e6
KINDS = ("link", "link both ways", "sender", "receiver", "host")


def cells(count: int) -> list[Cell]:
    return list(itertools.permutations(range(count), 2))


def hit(place: Place, cell: Cell) -> bool:
    """Tell whether a place is in the way of a pair."""
    if place.kind == "host":
        return int(place.hosts[0][1:]) in cell
    return {
        "link": cell == place.ranks, "link both ways": set(cell) == set(place.ranks),
        "sender": cell[0] == place.ranks[0], "receiver": cell[1] == place.ranks[0],
    }[place.kind]  # fmt: skip


def measured(count: int, slow: dict[Cell, float] | None = None, **changes: object) -> Measured:
    """Return a job of hosts h0, h1, ... whose pairs have the usual rate, or another one."""
    rates = dict.fromkeys(cells(count), USUAL) | (slow or {})
    pairs = {cell: PairTest(rate_bits_per_s=rate, overhead_s=0.001) for cell, rate in rates.items()}
    return Measured(hosts=tuple(f"h{rank}" for rank in range(count)), **{"pairs": pairs, **changes})  # type: ignore[arg-type]


@some.composite
def places(draw: some.DrawFn) -> tuple[int, Place]:
    count = draw(some.integers(3, 7))
    one, other = draw(some.permutations(range(count)))[:2]
    kind = draw(some.sampled_from(KINDS))
    if kind == "host":
        return count, Place(kind="host", hosts=(f"h{one}",))
    ranks = {"link": (one, other), "link both ways": (min(one, other), max(one, other))}.get(kind, (one,))
    return count, Place(kind=kind, ranks=ranks)  # type: ignore[arg-type]


@given(places(), some.floats(1.5, 40.0), some.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_the_one_slow_place_is_named_and_nothing_else(drawn: tuple[int, Place], severity: float, seed: int) -> None:
    count, place = drawn
    noise = random.Random(seed)
    rates = {cell: USUAL / (severity if hit(place, cell) else 1.0) * noise.uniform(0.96, 1.0) for cell in cells(count)}
    (found,) = evaluate(measured(count, rates))
    assert found.kind == "communication slow" and found.places == (place,)
    assert found.evidence["times_slower"] == pytest.approx(severity, rel=0.06)
    assert set(suspects(measured(count, rates))) == {cell for cell in rates if hit(place, cell)}


@given(places(), some.sampled_from(["dead", "corrupt"]))
@settings(max_examples=40, deadline=None)
def test_a_dead_or_corrupt_place_is_named_before_all_that_is_slow(drawn: tuple[int, Place], fault: str) -> None:
    count, place = drawn
    pairs = {
        cell: PairTest(fault=fault, detail="it said so") if hit(place, cell) else PairTest(rate_bits_per_s=USUAL)
        for cell in cells(count)
    }
    (found,) = evaluate(measured(count, pairs=pairs))
    assert found.kind == {"dead": "communication hang", "corrupt": "corrupt data"}[fault]
    assert found.places == (place,) and found.evidence["said"] == ["it said so"]


@given(some.integers(2, 8), some.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_wires_that_scatter_by_a_tenth_are_no_fault(count: int, seed: int) -> None:
    noise = random.Random(seed)
    rates = {cell: USUAL * noise.uniform(0.9, 1.0) for cell in cells(count)}
    assert evaluate(measured(count, rates)) == [] and suspects(measured(count, rates)) == []


def test_two_faults_at_once_are_both_named() -> None:
    rates = {cell: USUAL / 5 for cell in cells(5) if cell[0] == 3} | {(0, 1): USUAL / 3}
    assert [finding.where for finding in evaluate(measured(5, rates))] == ["sender rank 3", "link 0 -> 1"]


def test_of_two_ranks_link_and_ends_cannot_be_told_apart_and_the_probe_is_named() -> None:
    (found,) = evaluate(measured(2, {(0, 1): USUAL / 3}))
    assert found.where == "ambiguous: link 0 -> 1 or sender rank 0 or receiver rank 1"
    assert found.confidence == 0.5 and "another peer" in found.probe


def test_an_expected_rate_finds_what_all_wires_lack_and_one_that_all_keep_finds_nothing() -> None:
    (found,) = evaluate(measured(3), expect_bits_per_s=100e6)
    assert found.where == "job" and "50.0 Mbit/s instead of 100 Mbit/s" in found.text
    assert evaluate(measured(3), expect_bits_per_s=55e6) == []
    (found,) = evaluate(measured(2, {(0, 1): 12e6, (1, 0): 12e6}), expect_bits_per_s=12.5e6 * 4)
    assert found.where == "job"
    (found,) = evaluate(measured(4, {(0, 1): 35e6}), expect_bits_per_s=50e6)
    assert found.where == "link 0 -> 1" and "50.0 Mbit/s is expected" in found.text


def test_an_expectation_above_what_the_hosts_carry_to_themselves_is_said_to_be_theirs() -> None:
    (found,) = evaluate(measured(3, loopback_bits_per_s=dict.fromkeys(range(3), 80e6)), expect_bits_per_s=100e6)
    assert "No host carries more than 80.0 Mbit/s to itself" in found.text and found.confidence == 0.5


def crowd(count: int, longer: dict[Cell, float]) -> dict[Cell, FlowTest]:
    """Return transfers of everyone to everyone that take as long as they should, or so many times longer."""
    flows = {cell: FlowTest(num_bytes=100_000, seconds=1.0) for cell in cells(count)}
    due = expected_s(flows, measured(count))
    return {cell: FlowTest(num_bytes=100_000, seconds=due[cell] * longer.get(cell, 1.0)) for cell in flows}


def test_a_host_that_is_slow_only_while_all_send_is_named_and_so_is_what_all_share() -> None:
    longer = {cell: 2.5 for cell in cells(4) if 2 in cell}
    (found,) = evaluate(measured(4, everyone=crowd(4, longer)))
    assert found.where == "host h2" and found.evidence["times_slower_than_alone"] == 2.5
    (found,) = evaluate(measured(4, everyone=crowd(4, dict.fromkeys(cells(4), 3.0))))
    assert found.where == "job" and "3.0 times" in found.text
    assert evaluate(measured(4, everyone=crowd(4, {}))) == []


def test_what_only_follows_from_a_slow_wire_is_not_told_again() -> None:
    slow = {cell: USUAL / 3 for cell in cells(4) if cell[1] == 2}
    (found,) = evaluate(measured(4, slow, neighbours=crowd(4, {(2, 3): 2.5})))
    assert found.where == "receiver rank 2"


def test_hosts_of_one_machine_share_its_processor_so_all_at_once_may_take_longer() -> None:
    flows = crowd(3, {})
    loopback = dict.fromkeys(range(3), 20e6)
    shared = measured(3, machines=("m", "m", "m"), loopback_bits_per_s=loopback)
    apart = measured(3, machines=("a", "b", "c"), loopback_bits_per_s=loopback)
    # six transfers of 100 kB, both ends on the machine, which carries 20 Mbit/s to itself
    assert expected_s(flows, shared)[0, 1] == pytest.approx(0.001 + 6 * 8e5 / 20e6)
    assert expected_s(flows, apart)[0, 1] == pytest.approx(0.001 + 2 * 8e5 / 20e6)


def test_a_host_that_is_slow_without_any_wire_is_its_processor() -> None:
    (found,) = evaluate(measured(4, loopback_bits_per_s={0: 1e9, 1: 9e8, 2: 3e8, 3: 1e9}))
    assert found.kind == "non-communication slow" and found.where == "rank 2"
    shared = measured(3, loopback_bits_per_s={0: 1e9, 1: 1e9, 2: 3e8}, machines=("m", "m", "m"))
    assert slow_loopbacks(shared) == {}, "three times is what another process on the same machine action"


def test_a_rank_that_is_not_there_is_named_with_its_reason() -> None:
    (found,) = evaluate(measured(3, absent={1: "did not come to the meeting point in time"}))
    assert found.kind == "non-communication hang"
    assert found.where == "ambiguous: rank 1 or link 0 <-> 1", "rank 0, where all meet, cannot tell"
    assert found.places[0] == Place(kind="rank", ranks=(1,)) and "Rank 1 on h1 did not" in found.text


def test_a_wrong_sum_names_its_sender_and_a_slow_one_the_job() -> None:
    whole = measured(3)
    done = AllReduce(order=(0, 1, 2), num_bytes=3_000_000, seconds=0.0)
    due_s = all_reduce_s(done, whole)
    assert due_s == pytest.approx(4 * (0.001 + 8e6 / USUAL))
    wrong = AllReduce(order=done.order, num_bytes=done.num_bytes, seconds=due_s, wrong=((1, 2),))
    (found,) = evaluate(measured(3, all_reduce=wrong))
    assert found.kind == "corrupt data" and found.where == "sender rank 1"
    late = AllReduce(order=done.order, num_bytes=done.num_bytes, seconds=2.5 * due_s)
    (found,) = evaluate(measured(3, all_reduce=late))
    assert found.where == "job" and "2.5 times" in found.text


def test_rates_come_from_the_quickest_of_each_size_and_none_from_noise() -> None:
    times = [(25_000, 0.03), (25_000, 0.4), (100_000, 0.09), (100_000, 0.5)]
    assert rate_of(times) == (10e6, 0.01)
    # the large block took no longer than the small one: no overhead can be told
    assert rate_of([(25_000, 0.09), (100_000, 0.09)]) == (round(8e5 / 0.09, 3), 0.0)
    assert rate_of([(100, 0.1)]) == (8000.0, 0.0)


def test_the_usual_rate_is_not_that_of_a_slow_host_of_three() -> None:
    assert reference_rate([9.0, 9.0, 3.0, 3.0, 3.0, 3.0]) == 9.0 and reference_rate([]) == 0.0


def test_nothing_measured_is_nothing_found() -> None:
    assert evaluate(Measured(hosts=("a", "b"))) == []
