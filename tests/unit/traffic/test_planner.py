from __future__ import annotations

from fractions import Fraction
from random import Random

import pytest

from thinwire.traffic import METHODS, Fabric, FabricFlow, plan_traffic
from thinwire.traffic.colouring import edge_colours
from thinwire.traffic.comparison import compare_methods, failure_chart

HOSTS = {"a": (0,), "b": (0,), "c": (1,), "d": (1,)}
FABRIC = Fabric(spines=4, uplink_bits_per_s=10e6, port_bits_per_s=100e6, hosts=HOSTS)
PAIRS = [("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")]
FLOWS = [FabricFlow(source=a, destination=b, num_bytes=12_500_000) for a, b in PAIRS]


@pytest.mark.parametrize("method", ["round-robin", "c4p", "ethereal", "colour", "spray"])
def test_four_flows_over_four_spines_take_the_time_of_one(method: str) -> None:
    plan = plan_traffic(FABRIC, FLOWS, method=method)
    assert plan.max_congestion == plan.bound == 1
    assert max(plan.completion_s.values()) == pytest.approx(10.0)


def test_a_dead_cable_leaves_three_spines_which_only_splitting_fills() -> None:
    found = {row.method: row for row in compare_methods(FABRIC, FLOWS, failed=["leaf-0/spine-1"])}
    assert [found[name].completion_s for name in ("ethereal", "spray")] == pytest.approx([40 / 3] * 2)
    assert [found[name].completion_s for name in ("colour", "c4p")] == pytest.approx([20.0] * 2)
    assert found["ecmp"].completion_s > found["k-ecmp"].completion_s > 40 / 3
    assert found["ethereal"].bound == pytest.approx(4 / 3)


@pytest.mark.parametrize("method", METHODS)
def test_flows_below_one_leaf_need_no_spine(method: str) -> None:
    flows = [FabricFlow(source="a", destination="b", num_bytes=12_500_000)]
    plan = plan_traffic(FABRIC, flows, method=method, failed=["spine-0"])
    assert plan.max_congestion == plan.bound == 0
    assert plan.completion_s == {"job": pytest.approx(1.0)}, "the ports alone limit it"


@pytest.mark.parametrize("method", METHODS)
def test_no_flow_is_planned_where_no_path_is_left(method: str) -> None:
    failed = ["leaf-0/spine-0", "leaf-0/spine-1", "leaf-1/spine-2", "leaf-1/spine-3"]
    with pytest.raises(ValueError, match="no path from leaf-0 to leaf-1"):
        plan_traffic(FABRIC, FLOWS, method=method, failed=failed)


def test_planned_flows_stay_on_their_rail_and_balance_while_hashed_ones_cross() -> None:
    fabric = Fabric(spines=2, uplink_bits_per_s=1e9, port_bits_per_s=1e9, hosts={"a": (0, 1), "b": (2, 3)})
    flows = [FabricFlow(source="a", destination="b", num_bytes=10**6, connections=4)]
    for method in ("round-robin", "c4p", "ethereal", "colour", "spray"):
        (pieces,) = plan_traffic(fabric, flows, method=method).pieces
        assert all(piece.rail == piece.destination_rail for piece in pieces), method
        assert sum(piece.share for piece in pieces if piece.rail == 0) == Fraction(1, 2), method
    crossed = [
        piece.rail != piece.destination_rail
        for seed in range(20)
        for piece in plan_traffic(fabric, flows, method="ecmp", seed=seed).pieces[0]
    ]
    assert any(crossed) and not all(crossed)


def test_a_slow_cable_gets_its_share_and_at_most_spines_less_one_flows_are_split() -> None:
    fabric = Fabric(spines=4, uplink_bits_per_s=10e6, port_bits_per_s=1e9, hosts=HOSTS, rates={"leaf-0/spine-0": 5e6})
    plan = plan_traffic(fabric, FLOWS * 4, method="ethereal")
    assert plan.max_congestion == plan.bound == Fraction(16 * 2, 7)
    assert sum(len(pieces) > 1 for pieces in plan.pieces) <= 3


@pytest.mark.parametrize("method", ["c4p", "round-robin"])
def test_whole_connections_go_to_spines_in_proportion_to_the_rates(method: str) -> None:
    fabric = Fabric(
        spines=2, uplink_bits_per_s=1e7, port_bits_per_s=1e9, hosts={"a": (0,), "b": (1,)},
        rates={"leaf-0/spine-0": 2.5e6},
    )  # fmt: skip
    flow = FabricFlow(source="a", destination="b", num_bytes=10**6)
    alone = plan_traffic(fabric, [flow], method=method)
    assert alone.pieces[0][0].spine == 1 and alone.completion_s["job"] == pytest.approx(0.8)
    used = [row[0].spine for row in plan_traffic(fabric, [flow] * 10, method=method).pieces]
    assert (used.count(0), used.count(1)) == (2, 8)


def test_two_rails_are_bounded_by_what_any_ports_and_spines_reach() -> None:
    hosts = {"h0": (0, 0), "h1": (1, 1), "h2": (1, 0)}
    fabric = Fabric(spines=2, uplink_bits_per_s=1e7, port_bits_per_s=1e9, hosts=hosts)
    flows = [FabricFlow(source=host, destination="h0", num_bytes=10**6) for host in ("h1", "h2")]
    plan = plan_traffic(fabric, flows, method="ethereal")
    assert plan.bound == plan.max_congestion == Fraction(1, 2), "h2 has a port on h0's leaf"


def test_a_split_in_more_connections_narrows_the_gap_of_hashing() -> None:
    rows = [compare_methods(FABRIC, FLOWS, methods=["k-ecmp"], k=k, seeds=40)[0] for k in (1, 4, 16)]
    assert rows[0].max_congestion > rows[1].max_congestion > rows[2].max_congestion > rows[2].bound


def test_a_cable_of_another_name_is_refused() -> None:
    for name in ("leaf-2/spine-0", "spine-4", "leaf-0", "leaf-0/spine-1x"):
        with pytest.raises(ValueError, match="no such cable; got"):
            plan_traffic(FABRIC, FLOWS, method="c4p", failed=[name])


def test_the_chart_has_a_line_a_method_over_the_dead_cables() -> None:
    chart = failure_chart(FABRIC, FLOWS, methods=["ecmp", "ethereal"], k=4, seeds=2, most_failed=3)
    planned = next(one for one in chart.series if one.name == "ethereal")
    assert [y for _, y in planned.points] == pytest.approx([10.0, 40 / 3, 20.0, 40.0])


def test_a_path_that_alternates_is_recoloured() -> None:
    """Dense multigraphs force alternating paths: no vertex may have an edge of one colour twice."""
    for seed in range(20):
        random = Random(seed)
        edges = [(a, b) for a in range(6) for b in range(6) for _ in range(2)]
        random.shuffle(edges)
        colours = edge_colours(edges, num_colours=12)
        for side in (0, 1):
            used = [(edge[side], colour) for edge, colour in zip(edges, colours, strict=True)]
            assert len(set(used)) == len(edges)
