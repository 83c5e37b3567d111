"""Exact step times of pipeline schedules, and the closed forms beside them."""

from __future__ import annotations

import doctest
import random
from dataclasses import replace

import pytest

from tests.reference import site_closed_forms as closed_forms
from thinwire.site.cost_model import pipette_s
from thinwire.site.memory import interleaved_in_flight, one_f_one_b_in_flight
from thinwire.site.pipeline import (
    StageLink,
    StageTimes,
    interleaved,
    lower_bound_s,
    most_in_flight,
    one_f_one_b,
    order_of,
    passes_ahead,
    pipeline_s,
    step_s,
)

GPIPE = 1000


def test_the_closed_forms_give_the_examples_of_their_papers() -> None:
    assert not doctest.testmod(closed_forms).failed


def simulated(stages: int, micro_batches: int, latency_s: float, *, eagerness: int = 1) -> float:
    order = one_f_one_b(num_stages=stages, num_micro_batches=micro_batches, eagerness=eagerness)
    times = [StageTimes(forward_s=1, backward_s=2)] * stages
    return pipeline_s(order, times, [StageLink(latency_s=latency_s)] * stages)


# forward 1, backward 2, 32 micro-batches: one-way latency, and makespans of 1F1B, twice and three times as eager, GPipe
@pytest.mark.parametrize(
    ("stages", "latency_s", "makespans"),
    [
        (4, 1, (157, 111, 111, 111)), (4, 2, (209, 130, 117, 117)), (4, 4, (313, 194, 147, 129)),
        (8, 1, (185, 131, 131, 131)), (8, 2, (253, 159, 145, 145)), (8, 4, (389, 243, 191, 173)),
    ],
)  # fmt: skip
def test_makespans_are_those_of_the_reference(stages: int, latency_s: float, makespans: tuple[int, ...]) -> None:
    found = tuple(simulated(stages, 32, latency_s, eagerness=eagerness) for eagerness in (1, 2, 3, GPIPE))
    assert found == makespans


@pytest.mark.parametrize(("stages", "amp", "pipette", "exact"), [(4, 117, 201, 209), (8, 145, 229, 253)])
def test_formulas_underestimate_the_exact_schedule(stages: int, amp: int, pipette: int, exact: int) -> None:
    about = {"forward_s": 1, "backward_s": 2, "num_micro_batches": 32, "links_s": [2] * (stages - 1)}
    assert closed_forms.amp_s(**about) == amp
    assert pipette_s(**about) == pipette
    assert simulated(stages, 32, 2) == exact


@pytest.mark.parametrize(("interleave", "free", "delayed"), [(1, 33.0, 48.0), (2, None, 70.0), (4, 26.25, 117.0)])
def test_interleaving_wins_on_free_links_and_loses_on_slow_ones(
    interleave: int, free: float | None, delayed: float
) -> None:
    order = interleaved(num_stages=4, num_micro_batches=8, interleave=interleave)
    times = [StageTimes(forward_s=1 / interleave, backward_s=2 / interleave)] * (4 * interleave)
    for latency_s, expected in ((0, free), (2, delayed)):
        if expected is not None:
            assert pipeline_s(order, times, [StageLink(latency_s=latency_s)] * 4) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "interleave"), [(4, 8, 1), (4, 8, 2), (4, 8, 4), (3, 9, 2), (2, 2, 3)]
)
def test_the_bubble_is_that_of_the_formula(stages: int, micro_batches: int, interleave: int) -> None:
    order = order_of(num_stages=stages, num_micro_batches=micro_batches, interleave=interleave)
    times = [StageTimes(forward_s=1 / interleave, backward_s=2 / interleave)] * (stages * interleave)
    ideal = 3 * micro_batches
    bubble = closed_forms.bubble_fraction(num_stages=stages, num_micro_batches=micro_batches, interleave=interleave)
    assert pipeline_s(order, times, [StageLink()] * stages) / ideal - 1 == pytest.approx(bubble)


def test_in_flight_counts_are_those_of_the_order() -> None:
    for stages, micro_batches in ((4, 32), (4, 2), (1, 3), (3, 3)):
        order = one_f_one_b(num_stages=stages, num_micro_batches=micro_batches)
        for rank, operations in enumerate(order):
            about = {"num_stages": stages, "num_micro_batches": micro_batches}
            assert most_in_flight(operations) == one_f_one_b_in_flight(rank, **about)
            for eagerness in (1, 2, GPIPE):
                eager = one_f_one_b(**about, eagerness=eagerness)[rank]
                assert most_in_flight(eager) == passes_ahead(rank, **about, eagerness=eagerness)
    for stages, micro_batches, interleave in ((4, 8, 2), (2, 2, 3), (3, 9, 4)):
        about = {"num_stages": stages, "num_micro_batches": micro_batches, "interleave": interleave}
        for rank, operations in enumerate(interleaved(**about)):
            assert most_in_flight(operations) == interleaved_in_flight(rank, **about)
    stored = [most_in_flight(one_f_one_b(num_stages=4, num_micro_batches=32, eagerness=k)[0]) for k in (1, 2, 3, GPIPE)]
    assert stored == [4, 7, 10, 32]


def test_a_message_occupies_its_link_and_latency_does_not() -> None:
    order = one_f_one_b(num_stages=2, num_micro_batches=8, eagerness=GPIPE)
    times = [StageTimes(forward_s=1, backward_s=1)] * 2
    # forward messages follow each other, the last backward one finds its link free
    assert pipeline_s(order, times, [StageLink(message_s=4)] * 2) == 1 + 8 * 4 + 1 + 1 + 4 + 1
    assert pipeline_s(order, times, [StageLink(latency_s=4)] * 2) == 1 + 4 + 8 + 8 + 4 + 1


def test_a_shorter_message_back_has_a_time_of_its_own() -> None:
    order = one_f_one_b(num_stages=2, num_micro_batches=8, eagerness=GPIPE)
    times = [StageTimes(forward_s=1, backward_s=1)] * 2
    link = StageLink(message_s=4, less_back_s=3, latency_s=0.5)
    assert (link.total_s, link.back.total_s) == (4.5, 1.5)
    assert pipeline_s(order, times, [link] * 2) == 1 + 8 * 4 + 0.5 + 1 + 1 + 1.5 + 1


def random_case(seed: int) -> tuple[list[StageTimes], list[StageLink], int]:
    draw = random.Random(seed)
    stages, interleave = draw.randint(2, 5), draw.choice((1, 1, 2, 3))
    times = [
        StageTimes(
            forward_s=draw.uniform(0.5, 2), backward_s=draw.uniform(0.5, 3),
            ready_s=draw.choice((0.0, 4.0)), reduce_s=draw.choice((0.0, 5.0)),
        )
        for _ in range(stages * interleave)
    ]  # fmt: skip
    slow = draw.choice((1, 1, 5))
    stage_links = [StageLink(message_s=draw.uniform(0, slow), latency_s=draw.uniform(0, slow)) for _ in range(stages)]
    return times, stage_links, interleave


@pytest.mark.parametrize("seed", range(40))
def test_no_schedule_beats_the_lower_bound(seed: int) -> None:
    times, stage_links, interleave = random_case(seed)
    about = {"num_micro_batches": (1 + seed % 5) * len(times) // interleave, "interleave": interleave}
    about["eagerness"] = 1 + seed % 4 if interleave == 1 else 1
    if seed % 2:  # messages back are shorter
        stage_links = [replace(link, less_back_s=0.6 * link.message_s) for link in stage_links]
    bound, exact = lower_bound_s(times, stage_links, **about), step_s(times, stage_links, **about)
    assert 0.5 * exact < bound <= exact * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_many_micro_batches_repeat_the_last_rounds(seed: int) -> None:
    times, stage_links, interleave = random_case(seed)
    ranks = len(times) // interleave
    count = 24 * ranks
    order = order_of(num_stages=ranks, num_micro_batches=count, interleave=interleave)
    assert step_s(times, stage_links, num_micro_batches=count, interleave=interleave) == pytest.approx(
        pipeline_s(order, times, stage_links), rel=0.01
    )


def test_an_uneven_number_of_micro_batches_cannot_be_interleaved() -> None:
    with pytest.raises(ValueError, match=r"got 6 micro-batches; allowed multiples of 4; try 8"):
        interleaved(num_stages=4, num_micro_batches=6, interleave=2)
