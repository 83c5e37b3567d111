"""Sequences of calls that differ: a call left out, an extra one, two swapped, an early end, another order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.findings import Finding
from thinwire.runlog.reader import from_records
from thinwire.runlog.records import Communicator, Operation, Record

STEP = ["8192@loop:3", "128@loop:3", "1024@loop:3"]
EVALUATE = "2@loop:9"


def found_in(calls: dict[int, Sequence[str]], *, has_sites: bool = True, kind: str = "all_reduce") -> list[Finding]:
    """Return the findings where each rank makes calls of given sizes, at given places, and has ended equal ones."""
    records: list[Record] = [Communicator(communicator="0", ranks=tuple(calls), hosts=("a",) * len(calls))]
    for rank, own in calls.items():
        for number, call in enumerate(own):
            count, _, site = call.partition("@")
            others = [other[number : number + 1] for other in calls.values()]
            is_equal = all(other and other[0].partition("@")[0] == count for other in others)
            records.append(Operation(
                communicator="0", rank=rank, sequence=number, kind=kind, dtype="float32", count=int(count),
                posted_s=0.1 * number, done_s=0.1 * number + 0.01 if is_equal else None, site=site if has_sites else "",
            ))  # fmt: skip
    return diagnose(from_records(records))


def at_rank_1(usual: Sequence[str], odd: Sequence[str], *, has_sites: bool = True) -> Finding:
    (finding,) = found_in({0: usual, 1: odd, 2: usual}, has_sites=has_sites)
    assert (finding.kind, finding.where) == ("desync", "rank 1") and finding.confidence >= 0.9
    return finding


@pytest.mark.parametrize("has_sites", [True, False])
def test_a_call_left_out_is_told_from_an_extra_one_though_both_stop_at_the_first_difference(has_sites: bool) -> None:
    step = [*STEP, "3@loop:6"]
    finding = at_rank_1([*step * 9, *step], [*step * 9, *STEP, STEP[0]], has_sites=has_sites)
    assert "Rank 1 left out all_reduce(3)" in finding.text and finding.since_round == 39
    assert finding.evidence["deviation"] == "left out"
    finding = at_rank_1([*step * 9, *STEP], [*step * 9, "5@loop:6", *STEP[:2]], has_sites=has_sites)
    assert "Rank 1 made an extra call, all_reduce(5)" in finding.text and finding.evidence["deviation"] == "extra"
    finding = at_rank_1([*step * 9, STEP[0]], [*step * 9, "3@loop:6"], has_sites=has_sites)
    assert "Rank 1 left out all_reduce(8192)" in finding.text and "or made all_reduce(3)" in finding.text


def test_an_epoch_that_ends_early_is_told_with_the_missing_steps_if_an_earlier_one_was_seen() -> None:
    epoch = [*STEP * 20, EVALUATE]
    finding = at_rank_1([*epoch, *STEP * 17, STEP[0]], [*epoch, *STEP * 17, EVALUATE])
    assert "Rank 1 ended its loop 3 steps early" in finding.text and finding.evidence["steps_early"] == 3
    finding = at_rank_1([*STEP * 18], [*STEP * 17, EVALUATE])
    said = "at least 1 step before the others, or made a call that no rank has made, all_reduce(2) at loop:9"
    assert f"left its loop after 17 steps, {said}" in finding.text and finding.evidence["steps_done"] == 17
    assert "same number of batches" in finding.remedy
    setup, logged = "7@loop:1", [*STEP * 10, "1@loop:7"]
    finding = at_rank_1([setup, *STEP * 18], [setup, *STEP * 17, EVALUATE])
    assert f"left its loop after 17 steps, {said}" in finding.text, "a call before the loop is no step"
    finding = at_rank_1([*logged * 2, *STEP * 6], [*logged * 2, *STEP * 5, EVALUATE])
    assert f"left its loop, {said}" in finding.text, "calls every tenth step hide how many steps there were"
    finding = at_rank_1([*STEP * 18], [*STEP * 17, "2@loop:3"], has_sites=False)
    assert "brings 2 elements where the others bring 8192" in finding.text and "deviation" not in finding.evidence


def test_of_two_ranks_the_one_that_departs_from_the_past_is_described() -> None:
    step = [*STEP, "3@loop:6"]
    for skips in (0, 1):
        (finding,) = found_in({skips: [*step * 9, *STEP, STEP[0]], 1 - skips: [*step * 9, *step]})
        assert f"Rank {skips} left out all_reduce(3) at loop:6" in finding.text and finding.is_ambiguous


def test_two_calls_in_another_order_are_named() -> None:
    finding = at_rank_1([*STEP * 9, *STEP], [*STEP * 9, STEP[1], STEP[0], STEP[2]])
    assert "made all_reduce(8192) at loop:3, all_reduce(128) at loop:3 in another order" in finding.text
    assert "one order on all ranks" in finding.remedy


def test_calls_of_equal_size_in_another_order_are_found_by_their_places() -> None:
    layers = [f"64@model:{line}" for line in (10, 20, 30, 40)]
    finding = at_rank_1([*layers * 5], [*layers * 4, layers[1], layers[0], *layers[2:]])
    assert "Rank 1 made all_reduce(64) at model:10, all_reduce(64) at model:20 in another order" in finding.text
    finding = at_rank_1([*layers * 6], [*layers * 4, *layers[1:], *layers])
    assert "left out all_reduce(64) at model:10" in finding.text and finding.since_round == 16
    assert found_in({0: layers * 4, 1: layers * 4, 2: layers * 4}) == []


def test_one_call_at_two_places_is_no_other_order() -> None:
    first, second = [["64@run:1" if rank == 0 else "64@run:2" for _ in range(20)] for rank in (0, 1)]
    assert found_in({0: first, 1: second, 2: second}) == []
    turns = {rank: [f"64@run:{1 + (step % 3 == rank)}" for step in range(30)] for rank in range(3)}
    assert found_in(turns, kind="broadcast") == [], "the root changes from step to step"
