"""What the simulator promises for random flows, graphs and trainings."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws.test_schedule_laws import staggered
from thinwire.averaging.mixing import RandomPairs
from thinwire.simulate import (
    AllGatherMessages,
    ComputeTask,
    ExchangeModel,
    FlowDemand,
    FluidFlow,
    FluidNetwork,
    RingMessages,
    SimLink,
    SimReplica,
    StarMessages,
    TransferTask,
    TwoPhaseMessages,
    VirtualClock,
    max_min_rates,
    run_tasks,
    simulate_training,
    star,
)  # fmt: skip
from thinwire.sync.schedule import EveryStep, Prefetched, Staggered

sizes = st.floats(1.0, 1e3)
weights = st.floats(0.1, 10.0)


@st.composite
def demands(draw):
    """Return flows over some of up to five links, and the links' rates."""
    num_links = draw(st.integers(1, 5))
    flows = []
    for _ in range(draw(st.integers(1, 7))):
        links = draw(st.sets(st.integers(0, num_links - 1), min_size=1))
        limit = draw(st.one_of(st.just(math.inf), st.floats(0.1, 100.0)))
        flows.append(FlowDemand([(link, draw(weights)) for link in sorted(links)], limit, draw(st.floats(0.5, 4.0))))
    rates = draw(st.lists(st.one_of(st.just(0.0), st.floats(0.1, 100.0)), min_size=num_links, max_size=num_links))
    return flows, dict(enumerate(rates))


@given(demands())
def test_no_link_is_above_its_rate_and_no_flow_can_get_more_without_taking_from_one_that_has_no_more(case):
    flows, capacities = case
    rates = max_min_rates(flows, capacities)
    # the part of its most loaded link that each flow has, by its share: what is made equal
    levels = [rate * max(w for _, w in flow.loads) / flow.share for flow, rate in zip(flows, rates, strict=True)]
    used = dict.fromkeys(capacities, 0.0)
    for flow, rate in zip(flows, rates, strict=True):
        assert 0 <= rate <= flow.limit * (1 + 1e-9)
        for link, weight in flow.loads:
            used[link] += weight * rate
    assert all(used[link] <= capacities[link] * (1 + 1e-9) for link in capacities)
    for flow, rate, level in zip(flows, rates, levels, strict=True):
        bottlenecks = [
            link for link, _ in flow.loads
            if used[link] >= capacities[link] * (1 - 1e-9)
            and level >= max(lv for lv, f in zip(levels, flows, strict=True) if link in dict(f.loads)) * (1 - 1e-9)
        ]  # fmt: skip
        assert bottlenecks or rate >= flow.limit * (1 - 1e-9)


@given(demands(), st.randoms(use_true_random=False))
def test_the_order_of_flows_does_not_matter(case, random):
    flows, capacities = case
    order = list(range(len(flows)))
    random.shuffle(order)
    shuffled = max_min_rates([flows[number] for number in order], capacities)
    assert shuffled == pytest.approx([max_min_rates(flows, capacities)[number] for number in order], rel=1e-9)


@st.composite
def traffic(draw):
    """Return flows that start at different times, and links of which none is dead."""
    flows, capacities = draw(demands())
    times = st.tuples(st.floats(0.5, 20.0), st.floats(0.0, 50.0))
    changes = sorted(draw(st.lists(times, max_size=2, unique_by=lambda change: change[0])))
    links = [SimLink(bandwidth_bits_per_s=rate + 0.5, changes=(*changes, (30.0, 5.0))) for rate in capacities.values()]
    transfers = [
        (draw(st.floats(0.0, 10.0)), FluidFlow(size_bits=draw(st.one_of(st.just(0.0), sizes)), loads=tuple(flow.loads),
         limit_bits_per_s=flow.limit, share=flow.share, latency_s=draw(st.floats(0.0, 2.0))))
        for flow in flows
    ]  # fmt: skip
    return transfers, links


@given(traffic())
def test_every_bit_arrives_and_no_link_is_ever_above_its_rate(case):
    transfers, links = case
    clock = VirtualClock()
    network = FluidNetwork(links, clock=clock)
    ends = {}

    def starting(number, flow):
        def done():
            ends[number] = clock.now_s

        return lambda: network.start(flow, done)

    def look():
        for link in range(len(links)):
            assert network.load_bits_per_s(link) <= network.rate_bits_per_s(link) * (1 + 1e-9)

    clock.settle_with(look)
    for number, (start_s, flow) in enumerate(transfers):
        clock.at(start_s, starting(number, flow))
    clock.run()
    carried = [0.0] * len(links)
    for number, (start_s, flow) in enumerate(transfers):
        assert ends[number] >= start_s + flow.latency_s
        for link, weight in flow.loads:
            carried[link] += weight * flow.size_bits
    assert network.carried_bits() == pytest.approx(carried)


@given(st.lists(st.tuples(st.floats(0.0, 50.0), sizes), min_size=1, max_size=8), st.floats(1.0, 100.0))
def test_a_link_works_as_long_as_there_is_work(jobs, rate):
    """The last end is that of one queue that is never idle while bits wait, however they share it."""
    clock = VirtualClock()
    network = FluidNetwork([SimLink(bandwidth_bits_per_s=rate)], clock=clock)
    ends = []
    for start_s, size in jobs:
        flow = FluidFlow(size_bits=size, loads=((0, 1.0),))
        clock.at(start_s, lambda flow=flow: network.start(flow, lambda: ends.append(clock.now_s)))
    clock.run()
    busy_until_s = 0.0
    for start_s, size in sorted(jobs):
        busy_until_s = max(busy_until_s, start_s) + size / rate
    assert max(ends) == pytest.approx(busy_until_s) and len(ends) == len(jobs)


@st.composite
def graphs(draw, *, has_links_of_its_own=False):
    """Return a graph of tasks whose order on every processor and queue is fixed by its edges, and links."""
    num_tasks, tasks, links, last = draw(st.integers(1, 14)), [], [], {}
    for number in range(num_tasks):
        after = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        server = draw(st.integers(0, 2))
        if server in last:
            after = after | {last[server]}
        last[server] = number
        if draw(st.booleans()):
            tasks.append(ComputeTask(processor=server, seconds=draw(st.floats(0.0, 10.0)), after=tuple(sorted(after))))
            continue
        links.append(SimLink(bandwidth_bits_per_s=draw(st.floats(1.0, 50.0))))
        loads = ((len(links) - 1 if has_links_of_its_own else draw(st.integers(0, len(links) - 1)), 1.0),)
        flow = FluidFlow(size_bits=draw(sizes), loads=loads, latency_s=draw(st.floats(0.0, 1.0)))
        tasks.append(TransferTask(flow=flow, after=tuple(sorted(after)), queue=draw(st.sampled_from([None, server]))))
    return tasks, links


@given(graphs())
def test_every_task_comes_after_those_it_waits_for_and_processors_do_one_at_a_time(case):
    tasks, links = case
    times = run_tasks(tasks, links=links)
    for number, task in enumerate(tasks):
        assert times.start_s[number] >= max((times.end_s[before] for before in task.after), default=0.0)
        assert times.end_s[number] < math.inf
    for processor in range(3):
        spans = sorted(
            (times.start_s[n], times.end_s[n]) for n, t in enumerate(tasks)
            if isinstance(t, ComputeTask) and t.processor == processor and t.seconds
        )  # fmt: skip
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert run_tasks(tasks, links=links) == times


@given(graphs(has_links_of_its_own=True), st.floats(1.0, 10.0), st.integers(0, 13))
def test_where_transfers_share_no_link_and_orders_are_fixed_a_faster_link_makes_nothing_later(case, factor, which):
    """Ends are then sums and maxima of durations. Where flows share links this is no theorem: see the next test."""
    tasks, links = case
    faster = [
        SimLink(bandwidth_bits_per_s=link.bandwidth_bits_per_s * (factor if number == which else 1.0))
        for number, link in enumerate(links)
    ]
    before, after = run_tasks(tasks, links=links), run_tasks(tasks, links=faster)
    assert all(late <= early * (1 + 1e-9) for late, early in zip(after.end_s, before.end_s, strict=True))


def test_where_flows_share_links_a_faster_link_can_make_the_end_later():
    """An anomaly of the kind that Graham found: what comes earlier takes from what the end waits for."""

    def end_s(rate):
        tasks = [
            TransferTask(flow=FluidFlow(size_bits=100, loads=((0, 1.0),))),  # what the end waits for
            ComputeTask(processor="a", seconds=10.0, after=(0,)),
            TransferTask(flow=FluidFlow(size_bits=100, loads=((1, 1.0),))),
            TransferTask(flow=FluidFlow(size_bits=100, loads=((0, 1.0),)), after=(2,)),
        ]
        return run_tasks(
            tasks, links=[SimLink(bandwidth_bits_per_s=10.0), SimLink(bandwidth_bits_per_s=rate)]
        ).makespan_s

    assert end_s(10.0) == 20 and end_s(100.0) > 28


schedules = st.one_of(st.just(EveryStep()), staggered(most=8))
patterns = st.sampled_from([AllGatherMessages(), TwoPhaseMessages(), RingMessages(), StarMessages(server=0)])


@st.composite
def trainings(draw, *, schedules=schedules, most_fragments=4):
    num_replicas = draw(st.integers(1, 5))
    links = [
        SimLink(bandwidth_bits_per_s=draw(st.floats(1.0, 1e3)), latency_s=draw(st.floats(0.0, 1.0)))
    ] * num_replicas
    replicas = [
        SimReplica(step_s=draw(st.floats(0.1, 3.0)), sigma=draw(st.sampled_from([0.0, 0.4])))
        for _ in range(num_replicas)
    ]
    fragments = draw(st.integers(1, most_fragments))
    return {
        "schedule": draw(schedules), "links": links, "replicas": replicas, "num_steps": draw(st.integers(1, 20)),
        "payload_bytes": [(draw(st.floats(0.0, 100.0)),) for _ in range(fragments)],
        "exchange": ExchangeModel(pattern=draw(patterns)),
    }  # fmt: skip


def run(case, *, factor=1.0):
    case = dict(case)
    schedule, links = case.pop("schedule"), case.pop("links")
    faster = [
        SimLink(bandwidth_bits_per_s=link.bandwidth_bits_per_s * factor, latency_s=link.latency_s) for link in links
    ]
    return simulate_training(schedule, cluster=star(faster), **case)


@settings(max_examples=60)
@given(trainings())
def test_a_training_computes_every_step_waits_only_where_it_applies_and_carries_every_bit(case):
    result = run(case)
    schedule, replicas, num_fragments = case["schedule"], case["replicas"], len(case["payload_bytes"])
    assert result.last_step == (case["num_steps"],) * len(replicas)
    for replica, ends in enumerate(result.step_ends_s):
        assert len(ends) == case["num_steps"] and list(ends) == sorted(ends)
        applied = {s for s in range(1, 21) if schedule.applies(s, num_fragments=num_fragments, replica=replica)}
        assert {stall.step for stall in result.stalls if stall.replica == replica} <= applied
        assert result.finished_s[replica] == pytest.approx(result.compute_s[replica] + result.stall_s[replica])
    launched = [
        round for step in range(1, case["num_steps"] + 1)
        for round in schedule.launches(step, num_fragments=num_fragments)
    ]  # fmt: skip
    assert sorted(r.id for r in result.rounds) == [round.id for round in launched]
    stages = case["exchange"].stages(star(case["links"]), senders=range(len(replicas)), members=range(len(replicas)))
    bits = sum(8 * case["payload_bytes"][round.fragment][round.channel] for round in launched)
    for link, carried in enumerate(result.link_bits):
        load = sum(weight for stage in stages for at, weight in stage.loads if at == link)
        assert carried == pytest.approx(bits * load * (len(replicas) > 1))
        assert result.peak_bits_per_s[link] <= case["links"][0].bandwidth_bits_per_s * (1 + 1e-9)
    assert run(case) == result


blocking = st.one_of(st.just(EveryStep()), st.builds(Staggered, sync_interval=st.integers(1, 8)))


@settings(max_examples=60)
@given(trainings(schedules=blocking, most_fragments=1), st.floats(1.0, 20.0))
def test_where_one_round_is_on_the_wire_at_a_time_more_bandwidth_makes_no_step_later(case, factor):
    """Everyone waits for the round before it computes on, so ends are sums and maxima of durations.

    With rounds that overlap this is no theorem: a round that is launched earlier takes from one that is waited for.
    """
    before, after = run(case), run(case, factor=factor)
    for slow, fast in zip(before.step_ends_s, after.step_ends_s, strict=True):
        assert all(late <= early * (1 + 1e-9) for late, early in zip(fast, slow, strict=True))


@settings(max_examples=40)
@given(trainings())
def test_no_bandwidth_beats_a_wire_without_limit_and_no_training_is_faster_than_its_slowest_replica_alone(case):
    limited, free = run(case), run(case, factor=math.inf)
    assert free.total_s <= limited.total_s * (1 + 1e-9)
    assert limited.total_s >= max(limited.compute_s) * (1 - 1e-9)


@settings(max_examples=30)
@given(
    interval=st.integers(1, 6), num_replicas=st.integers(1, 9), size=st.floats(0.0, 50.0), seed=st.integers(0, 5),
    step_s=st.floats(0.1, 2.0),
)  # fmt: skip
def test_pairs_of_equal_replicas_take_the_closed_form(interval, num_replicas, size, seed, step_s):
    link = SimLink(bandwidth_bits_per_s=100.0, latency_s=0.1)
    result = simulate_training(
        Staggered(sync_interval=interval), cluster=star([link] * num_replicas), num_steps=4 * interval,
        replicas=[SimReplica(step_s=step_s)] * num_replicas, payload_bytes=[(size,)],
        exchange=ExchangeModel(topology=RandomPairs(seed=seed)),
    )  # fmt: skip
    if num_replicas % 2 == 0 or num_replicas == 1:
        round_s = (8 * size / 100 + 0.2) * (num_replicas > 1)
        assert result.total_s == pytest.approx(4 * interval * step_s + 4 * round_s)
    assert result.link_bits[0] <= 4 * 2 * 8 * size * (1 + 1e-9)


@given(interval=st.integers(1, 10), overlap=st.integers(0, 9), num_steps=st.integers(1, 40))
def test_what_is_sent_ahead_of_time_is_not_waited_for(interval, overlap, num_steps):
    schedule = Prefetched(sync_interval=interval, overlap_steps=min(overlap, interval - 1))
    result = simulate_training(
        schedule, cluster=star([SimLink(bandwidth_bits_per_s=8.0)] * 2), replicas=[SimReplica(step_s=1.0)] * 2,
        payload_bytes=[(float(interval - 1), 0.0)], num_steps=num_steps,
    )  # fmt: skip
    assert result.total_s == num_steps
