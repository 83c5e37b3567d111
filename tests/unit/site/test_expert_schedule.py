"""Schedules of a layer of experts in chunks, against closed forms, and the choice of degrees."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.every_case import over
from thinwire.site.expert_schedule import DEGREES, Cost, LayerCosts, pass_times, schedules

LINK_BOUND = LayerCosts(all_to_all=Cost(whole_s=3.0), experts=Cost(whole_s=0.5), latency_s=0.1)
WORK_BOUND = LayerCosts(all_to_all=Cost(whole_s=0.5), experts=Cost(whole_s=3.0), latency_s=0.1)


@over(DEGREES)
def test_passes_take_the_times_of_closed_forms(chunks: int) -> None:
    # the line is always busy, but for the experts' last chunk; the counts go first in a forward pass
    bound = LINK_BOUND.all_to_all.whole_s
    alone = 0.5 + 2 * 0.1 if chunks == 1 else 0.1
    assert pass_times(LINK_BOUND, chunks).makespan_s == pytest.approx(0.1 + 2 * bound + alone)
    # the experts are always busy, from the first chunk's arrival to the last one's way back
    ends_s = 2 * (0.5 / chunks + 0.1)
    assert pass_times(WORK_BOUND, chunks).makespan_s == pytest.approx(0.1 + ends_s + 3)
    assert pass_times(WORK_BOUND, chunks, is_backward=True).makespan_s == pytest.approx(ends_s + 6)


def test_what_a_chunk_costs_to_start_decides_how_many_there_are() -> None:
    def best(start_s: float) -> tuple[int, int]:
        found = schedules(replace(WORK_BOUND, experts=Cost(start_s=start_s, whole_s=3.0)))[0]
        return found.forward, found.backward

    assert [best(start_s) for start_s in (0.0, 0.05, 0.3, 1.0)] == [(8, 8), (4, 4), (2, 1), (1, 1)]
    found = schedules(WORK_BOUND)
    assert len(found) == 16 and [one.seconds for one in found] == sorted(one.seconds for one in found)
    assert found[0].seconds < found[-1].seconds and (found[-1].forward, found[-1].backward) == (1, 1)


def test_messages_inside_a_node_overlap_with_those_between_nodes() -> None:
    costs = replace(WORK_BOUND, gather=Cost(whole_s=1.0), scatter=Cost(whole_s=1.0), latency_s=0.0)
    assert pass_times(costs, 1).makespan_s == pytest.approx(2 * 0.5 + 2 * 1 + 3)
    # the node's link gathers and scatters in turn, beside the experts
    assert pass_times(costs, 8).makespan_s == pytest.approx(2 * 0.5 / 8 + 2 * 1 / 8 + 3)


def test_gradients_of_later_layers_go_into_gaps_of_the_line() -> None:
    costs = replace(WORK_BOUND, gradient=Cost(start_s=0.01, whole_s=2.0))
    without, filled = schedules(WORK_BOUND)[0], schedules(costs)[0]
    assert filled.seconds == pytest.approx(without.seconds)  # 2 s in gaps of 5 s
    assert filled.seconds < without.seconds + 2
    # where the line has no gap they come on top, in one piece
    full = replace(LINK_BOUND, gradient=Cost(start_s=0.01, whole_s=2.0))
    best = schedules(full)[0]
    assert best.pieces == 1 and best.seconds > schedules(LINK_BOUND)[0].seconds + 1.5


def test_a_backward_pass_may_have_shorter_messages() -> None:
    shorter = replace(LINK_BOUND, backward_all_to_all=Cost(whole_s=1.0))
    assert pass_times(shorter, 4).makespan_s == pass_times(LINK_BOUND, 4).makespan_s
    assert pass_times(shorter, 4, is_backward=True).makespan_s < pass_times(LINK_BOUND, 4, is_backward=True).makespan_s
