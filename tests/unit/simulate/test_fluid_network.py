"""Flows on links in virtual time, against closed forms."""

from __future__ import annotations

import math
from random import Random

import pytest

from thinwire.simulate import FlowDemand, FluidFlow, FluidNetwork, SimLink, VirtualClock, fluid_network, max_min_rates


def ends(flows, links, *, starts=None):
    """Return when each flow ends, and the network."""
    clock = VirtualClock()
    network = FluidNetwork(links, clock=clock)
    found = [math.inf] * len(flows)

    def starting(number):
        def done():
            found[number] = clock.now_s

        return lambda: network.start(flows[number], done)

    for number in range(len(flows)):
        clock.at(starts[number] if starts else 0.0, starting(number))
    clock.run()
    return found, network


def over(*links, size, **settings):
    return FluidFlow(size_bits=size, loads=tuple((link, 1.0) for link in links), **settings)


def wire(rate, **settings):
    return SimLink(bandwidth_bits_per_s=rate, **settings)


def test_one_flow_takes_its_bits_by_the_slowest_link_and_then_the_latency():
    found, network = ends([over(0, 1, size=1000, latency_s=0.25)], [wire(100), wire(400)])
    assert found == [10.25]
    assert network.carried_bits() == [1000, 1000]
    assert network.peak_bits_per_s == [100, 100]


def test_two_flows_share_a_link_and_the_longer_one_has_it_alone_at_the_end():
    found, _ = ends([over(0, size=100), over(0, size=300)], [wire(10)])
    assert found == [20, 40]


def test_a_flow_that_comes_later_takes_half_from_then_on():
    found, _ = ends([over(0, size=100), over(0, size=100)], [wire(10)], starts=[0, 4])
    assert found == [16, 20]


def test_what_one_flow_cannot_use_the_others_get():
    # the first is held to 2 by link 1, so the others share 10 - 2
    found, _ = ends([over(0, 1, size=20), over(0, size=40), over(0, size=40)], [wire(10), wire(2)])
    assert found == [10, 10, 10]


def test_the_classic_parking_lot():
    demands = [FlowDemand([(0, 1.0), (1, 1.0)]), FlowDemand([(0, 1.0)]), FlowDemand([(1, 1.0)])]
    assert max_min_rates(demands, {0: 6.0, 1: 10.0}) == [3, 3, 7]


def test_a_limit_paces_a_flow_and_leaves_the_rest_to_others():
    found, network = ends([over(0, size=10, limit_bits_per_s=1), over(0, size=90)], [wire(10)])
    assert found == [10, 10]
    assert network.peak_bits_per_s == [10]


def test_a_share_of_three_gets_three_parts():
    assert max_min_rates([FlowDemand([(0, 1.0)], share=3.0), FlowDemand([(0, 1.0)])], {0: 8.0}) == [6, 2]


def test_a_collective_flow_loads_links_by_its_weights_and_takes_one_part_of_its_busiest_one():
    collective = FluidFlow(size_bits=10, loads=((0, 3.0), (1, 1.0)))
    assert ends([collective], [wire(6), wire(6)])[0] == [5]
    # on link 0 both have 3 bits a second: a collective's part is that of the bits on the link, not of its own bits
    assert max_min_rates([FlowDemand(collective.loads), FlowDemand([(0, 1.0)])], {0: 6.0, 1: 6.0}) == [1, 3]


def test_a_link_that_is_named_twice_carries_both():
    assert ends([over(0, 0, size=10)], [wire(10)])[0] == [2]


@pytest.mark.parametrize("latency_s", [0.0, 0.5])
def test_a_flow_of_no_bits_takes_only_its_latency(latency_s):
    found, network = ends([over(0, size=0, latency_s=latency_s), over(0, size=10)], [wire(10)])
    assert found == [latency_s, 1]
    assert network.carried_bits() == [10]


def test_a_flow_over_no_links_or_endless_ones_is_there_at_once_or_at_its_limit():
    flows = [over(size=10), over(size=10, limit_bits_per_s=5), over(0, size=10, latency_s=1)]
    assert ends(flows, [wire(math.inf)])[0] == [0, 2, 1]


def test_a_link_that_changes_its_rate_changes_the_flows_on_it():
    found, network = ends([over(0, size=100)], [wire(10, changes=((4, 30), (5, 3)))])
    assert found == [pytest.approx(5 + 30 / 3)]
    assert network.peak_bits_per_s == [30]
    assert network.rate_bits_per_s(0) == 3


def test_a_link_that_fails_holds_its_flows_until_it_is_back():
    assert ends([over(0, size=100)], [wire(10, changes=((4, 0), (104, 10)))])[0] == [110]


def test_a_link_that_never_comes_back_holds_its_flows_for_ever_and_no_others():
    found, network = ends([over(0, 1, size=100), over(1, size=100)], [wire(10, changes=((4, 0),)), wire(10)])
    assert found == [math.inf, 12]  # 20 bits in the first 4 seconds, then alone
    assert network.carried_bits() == [20, 120]
    assert network.load_bits_per_s(0) == 0


def test_a_flow_that_is_stopped_leaves_its_link_to_the_others_and_never_ends():
    clock = VirtualClock()
    network = FluidNetwork([wire(10)], clock=clock)
    seen = []
    moving = network.start(over(0, size=100), lambda: seen.append("stopped"))
    network.start(over(0, size=100), lambda: seen.append(clock.now_s))
    clock.at(4.0, lambda: network.stop(moving))
    clock.at(4.0, lambda: seen.append(network.load_bits_per_s(0)))
    clock.run()
    assert seen == [5, 12]
    assert network.carried_bits() == [120]


def test_flows_that_share_no_link_do_not_see_each_other():
    flows = [over(number, size=number + 1) for number in range(50)]
    assert ends(flows, [wire(1)] * 50)[0] == [number + 1 for number in range(50)]


def test_what_happens_in_one_instant_happens_in_the_order_it_was_asked_for():
    clock, seen = VirtualClock(), []
    clock.at(1.0, lambda: clock.at(1.0, lambda: seen.append("last")))
    clock.at(1.0, lambda: seen.append("second"))
    clock.at(0.5, lambda: seen.append("first"))
    clock.at(math.inf, lambda: seen.append("never"))
    clock.run()
    assert seen == ["first", "second", "last"]
    assert clock.now_s == 1.0


@pytest.mark.parametrize("time_s", [-1.0, math.nan])
def test_a_clock_does_not_go_back(time_s):
    with pytest.raises(ValueError, match="at least the clock's 0"):
        VirtualClock().at(time_s, lambda: None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SimLink(bandwidth_bits_per_s=-1), "at least 0, got -1"),
        (lambda: SimLink(bandwidth_bits_per_s=math.nan), "at least 0, got nan"),
        (lambda: SimLink(bandwidth_bits_per_s=1, latency_s=math.inf), "latency_s must be finite"),
        (lambda: SimLink(bandwidth_bits_per_s=1, changes=((2, 1), (1, 1))), "ascending order"),
        (lambda: SimLink(bandwidth_bits_per_s=1, changes=((2, -1),)), "at least 0, got -1"),
        (lambda: over(0, size=-1), "size_bits must be finite"),
        (lambda: over(0, size=1, latency_s=-1), "latency_s must be finite"),
        (lambda: over(0, size=1, limit_bits_per_s=0), "must be above 0"),
        (lambda: over(0, size=1, share=0), "must be above 0"),
        (lambda: FluidFlow(size_bits=1, loads=((0, 0.0),)), "leave out links"),
        (lambda: ends([over(3, size=1)], [wire(1)]), "links 0 to 0, got 3"),
    ],
)
def test_numbers_out_of_range_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def fabric_flows(num_flows, *, seed, leaves=6, spines=4):
    random = Random(seed)
    links = [wire(random.choice([5.0, 10.0])) for _ in range(2 * leaves * spines)]
    flows = []
    for _ in range(num_flows):
        a, b, spine = *random.sample(range(leaves), 2), random.randrange(spines)
        more = {"limit_bits_per_s": random.choice([math.inf, 0.5])}
        flows.append(over(a * spines + spine, (leaves + b) * spines + spine, size=random.uniform(1, 30), **more))
    return flows, links


@pytest.mark.parametrize("seed", range(3))
def test_rates_that_change_around_an_event_are_those_of_all_flows_solved_together(seed):
    flows, links = fabric_flows(120, seed=seed)
    links[0] = wire(10, changes=((3.0, 2.0), (6.0, 10.0)))
    links[5] = wire(10, changes=((2.0, 0.0), (5.0, 5.0)))
    clock = VirtualClock()
    network = FluidNetwork(links, clock=clock)
    moving = []
    for number, flow in enumerate(flows):
        clock.at(0.05 * number, lambda flow=flow: moving.append(network.start(flow, lambda: None)))
    num_compared = 0

    def compare():
        nonlocal num_compared
        under_way = [one for one in moving if one.left_bits > 0]
        if under_way:
            capacities = {link: network.rate_bits_per_s(link) for link in range(len(links))}
            whole = max_min_rates([one.demand for one in under_way], capacities)
            assert [one.rate for one in under_way] == pytest.approx(whole, rel=1e-6, abs=1e-9)
            num_compared += len(under_way) > 32

    clock.settle_with(compare)
    clock.run()
    assert num_compared > 50
    assert sum(network.carried_bits()) == pytest.approx(2 * sum(flow.size_bits for flow in flows))


def test_an_event_among_many_flows_solves_few_of_them(monkeypatch):
    """4,096 flows on 64 leaves and 64 spines: the cost of an event must not grow with the number of flows."""
    flows, links = fabric_flows(4096, seed=1, leaves=64, spines=64)
    solved = []

    def counted(demands, capacities):
        solved.append(len(demands))
        return max_min_rates(demands, capacities)

    monkeypatch.setattr(fluid_network, "max_min_rates", counted)
    assert math.inf not in ends(flows, links)[0]
    assert sum(solved) < 6 * len(flows), "each flow is solved when it starts, and a few around one that ends"


def test_a_flow_moves_to_other_links_with_the_bits_that_it_has_left():
    clock = VirtualClock()
    network = FluidNetwork([wire(10, changes=((4, 0),)), wire(5)], clock=clock)
    seen = []
    flow = over(0, size=60)
    network.start(flow, lambda: seen.append(clock.now_s), reroute=lambda works: ((0 if works(0) else 1, 1.0),))
    clock.run()
    assert seen == [4 + 20 / 5]
    assert network.carried_bits() == [40, 20]
    assert network.blocked_links() == []


def test_a_flow_without_another_path_is_found_by_its_dead_link():
    _, network = ends([over(0, size=60)], [wire(10, changes=((4, 0),))])
    assert network.blocked_links() == [0]
