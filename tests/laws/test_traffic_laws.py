"""What the methods of traffic planning promise, for random fabrics and flows, in exact fractions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import ceil, gcd
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.traffic import METHODS, Fabric, FabricFlow, TrafficPlan, plan_traffic

MOST = 64
FEW = settings(max_examples=25, deadline=None)


def fabric_of(leaves: int, spines: int, **more: object) -> Fabric:
    hosts = {f"h{leaf}": (leaf,) for leaf in range(leaves)}
    return Fabric(spines=spines, uplink_bits_per_s=1e9, port_bits_per_s=1e12, hosts=hosts, **more)


def random_flows(leaves: int, count: int, seed: int, sizes: Sequence[int] = (10**6,)) -> list[FabricFlow]:
    random = Random(seed)
    pairs = (random.sample(range(leaves), 2) for _ in range(count))
    return [FabricFlow(source=f"h{a}", destination=f"h{b}", num_bytes=random.choice(sizes)) for a, b in pairs]


@st.composite
def cases(draw: st.DrawFn, *, most: int = MOST, most_flows: int = 300) -> tuple[Fabric, list[FabricFlow]]:
    leaves, spines = draw(st.integers(2, most)), draw(st.integers(1, most))
    count, seed = draw(st.integers(1, most_flows)), draw(st.integers(0, 2**32))
    return fabric_of(leaves, spines), random_flows(leaves, count, seed)


def optimum(flows: Sequence[FabricFlow], spines: int) -> Fraction:
    """Return C* = max(row sums, column sums)/s from its definition."""
    sums = Counter(("from", flow.source) for flow in flows) + Counter(("to", flow.destination) for flow in flows)
    return Fraction(max(sums.values()), spines)


def num_pieces(num_flows: int, num_spines: int) -> int:
    rest = num_flows % num_spines
    return num_flows - rest + (rest * num_spines // gcd(rest, num_spines) if rest else 0)


@FEW
@given(cases())
def test_ethereal_reaches_the_optimum_of_spraying_with_the_stated_number_of_pieces(case) -> None:
    fabric, flows = case
    plan = plan_traffic(fabric, flows, method="ethereal")
    pairs = Counter((flow.source, flow.destination) for flow in flows)
    assert plan.max_congestion == plan.bound == optimum(flows, fabric.spines)
    assert plan.num_pieces == sum(num_pieces(count, fabric.spines) for count in pairs.values())


@FEW
@given(cases())
def test_colouring_reaches_the_rounded_optimum_without_a_split(case) -> None:
    fabric, flows = case
    plan = plan_traffic(fabric, flows, method="colour")
    assert plan.max_congestion == ceil(optimum(flows, fabric.spines))
    assert plan.num_pieces == len(flows)


@pytest.mark.parametrize("method", ["ethereal", "colour"])
def test_the_largest_fabric_is_planned_at_its_optimum(method: str) -> None:
    flows = random_flows(MOST, 1000, seed=3)
    plan = plan_traffic(fabric_of(MOST, MOST), flows, method=method)
    best = optimum(flows, MOST)
    assert plan.max_congestion == (best if method == "ethereal" else ceil(best))


@FEW
@given(cases(most=12, most_flows=40), st.sampled_from(METHODS), st.data())
def test_every_method_sends_all_bytes_over_working_cables_and_never_beats_the_bound(case, method, data) -> None:
    fabric, flows = case
    cables = [(leaf, spine) for leaf in range(fabric.num_leaves) for spine in range(1, fabric.spines)]
    dead = data.draw(st.sets(st.sampled_from(cables), max_size=4)) if cables else set()
    plan = plan_traffic(fabric, flows, method=method, failed=[f"leaf-{leaf}/spine-{spine}" for leaf, spine in dead])
    assert all(sum(piece.share for piece in pieces) == 1 for pieces in plan.pieces)
    assert not any((link[1], link[2]) in dead for link in plan.link_bytes)
    assert plan.max_congestion >= plan.bound


@settings(max_examples=10, deadline=None)
@given(st.integers(2, 5), st.integers(1, 5), st.integers(1, 20), st.integers(0, 2**32))
def test_with_unequal_rates_the_bound_lies_below_the_linear_programme_and_every_method_above(
    leaves, spines, count, seed
) -> None:
    random = Random(seed)
    rates = {f"leaf-{a}/spine-{s}": random.choice([2.5e8, 5e8, 1e9]) for a in range(leaves) for s in range(spines)}
    fabric = fabric_of(leaves, spines, rates=rates)
    flows = random_flows(leaves, count, seed, sizes=(10**6, 2 * 10**6))
    best = least_congestion(plan_traffic(fabric, flows, method="spray"))
    for method in METHODS:
        plan = plan_traffic(fabric, flows, method=method)
        assert float(plan.bound) <= best + 1e-6 <= float(plan.max_congestion) + 2e-6, method
        if method in ("spray", "ethereal"):
            assert float(plan.max_congestion) <= 1.1 * best


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 8), st.integers(2, 8), st.integers(1, 60), st.integers(0, 2**32))
def test_under_failed_cables_splits_come_within_a_tenth_of_the_linear_programme(leaves, spines, count, seed) -> None:
    random = Random(seed)
    failed = [f"leaf-{a}/spine-{s}" for a in range(leaves) for s in range(1, spines) if random.random() < 0.25]
    flows = random_flows(leaves, count, seed)
    plan = plan_traffic(fabric_of(leaves, spines), flows, method="spray", failed=failed)
    best = least_congestion(plan)
    assert best / 1.1 <= float(plan.bound) <= best + 1e-6
    for method in ("spray", "ethereal"):
        plan = plan_traffic(fabric_of(leaves, spines), flows, method=method, failed=failed)
        assert best - 1e-6 <= float(plan.max_congestion) <= 1.1 * best, method


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 20), st.integers(0, 2**32))
def test_with_two_rails_the_bound_is_no_higher_than_any_choice_of_ports_and_paths(leaves, spines, count, seed) -> None:
    random = Random(seed)
    hosts = {f"h{number}": (random.randrange(leaves), random.randrange(leaves)) for number in range(5)}
    hosts |= {f"one{leaf}": (leaf,) for leaf in range(leaves)}
    rates = {f"leaf-{a}/spine-{s}": random.choice([5e8, 1e9]) for a in range(leaves) for s in range(spines)}
    fabric = Fabric(spines=spines, uplink_bits_per_s=1e9, port_bits_per_s=1e12, hosts=hosts, rates=rates)
    pairs = [random.sample(list(hosts), 2) for _ in range(count)]
    flows = [FabricFlow(source=a, destination=b, num_bytes=random.choice((1, 2)) * 10**6) for a, b in pairs]
    best = least_congestion(plan_traffic(fabric, flows, method="spray"))
    for method in METHODS:
        plan = plan_traffic(fabric, flows, method=method)
        assert best / 1.1 <= float(plan.bound) + 1e-6 <= best + 2e-6 <= float(plan.max_congestion) + 4e-6, method


def least_congestion(plan: TrafficPlan) -> float:
    """Return the least maximum congestion of any split over ports and spines, by HiGHS: load <= C rate."""
    paths, hosts = plan.paths, plan.paths.fabric.hosts
    unit = max(flow.num_bytes for flow in plan.flows)
    rate = plan.paths.fabric.uplink_bits_per_s
    choices = [
        (number, source, destination, spine)
        for number, flow in enumerate(plan.flows)
        for source, destination in {(a, b) for a in hosts[flow.source] for b in hosts[flow.destination]}
        for spine in range(paths.fabric.spines)
        if source == destination or (paths.rate(source, spine) and paths.rate(destination, spine))
    ]
    rows: dict[tuple[str, int, int], np.ndarray] = {}
    equal = np.zeros((len(plan.flows), len(choices) + 1))
    for place, (number, source, destination, spine) in enumerate(choices):
        equal[number, place] = 1
        for key in (("up", source, spine), ("down", destination, spine)) if source != destination else ():
            row = rows.setdefault(key, np.zeros(len(choices) + 1))
            row[place] += plan.flows[number].num_bytes / unit
            row[-1] = -float(paths.rate(key[1], spine)) / rate
    if not rows:
        return 0.0
    from scipy.optimize import linprog  # takes a second, which each worker that collects would spend

    found = linprog(
        np.eye(len(choices) + 1)[-1], A_ub=np.array(list(rows.values())), b_ub=np.zeros(len(rows)), A_eq=equal,
        b_eq=np.ones(len(plan.flows)), method="highs",
    )  # fmt: skip
    return float(found.fun)


@FEW
@given(cases(most=16, most_flows=100))
def test_c4p_spreads_each_port_and_round_robin_each_leaf_to_within_one_connection(case) -> None:
    fabric, flows = case
    for method in ("c4p", "round-robin"):
        used = {host: Counter(dict.fromkeys(range(fabric.spines), 0)) for host in fabric.hosts}
        for flow, pieces in zip(flows, plan_traffic(fabric, flows, method=method).pieces, strict=True):
            used[flow.source].update(piece.spine for piece in pieces)
        assert all(max(counts.values()) - min(counts.values()) <= 1 for counts in used.values()), method


def test_hashed_connections_use_the_expected_number_of_spines() -> None:
    fabric = fabric_of(2, 4)
    flows = [FabricFlow(source="h0", destination="h1", num_bytes=10**6)] * 4
    seeds = 2000
    used = sum(
        len(
            {piece.spine for pieces in plan_traffic(fabric, flows, method="ecmp", seed=seed).pieces for piece in pieces}
        )
        for seed in range(seeds)
    )
    # the standard deviation of one draw is 0.66 spines: five of the mean's are 0.07
    assert used / seeds == pytest.approx(4 * (1 - (1 - 1 / 4) ** 4), abs=0.07)
