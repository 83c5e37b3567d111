"""Graphs of tasks in virtual time, and clusters of links."""

from __future__ import annotations

import math

import pytest

from thinwire.simulate import (
    AllGatherMessages,
    ComputeTask,
    ExchangeModel,
    FluidFlow,
    RingMessages,
    SimCluster,
    SimLink,
    StarMessages,
    TransferTask,
    TwoPhaseMessages,
    joined_sites,
    leaf_spine,
    ring,
    run_tasks,
    star,
)  # fmt: skip

WIRE = SimLink(bandwidth_bits_per_s=10.0)


def send(size, link=0, latency_s=0.0, **settings):
    return TransferTask(flow=FluidFlow(size_bits=size, loads=((link, 1.0),), latency_s=latency_s), **settings)


def work(seconds, processor="a", **settings):
    return ComputeTask(processor=processor, seconds=seconds, **settings)


def test_a_processor_does_one_task_after_another_in_the_order_of_readiness():
    times = run_tasks([work(3, after=(2,)), work(2), work(1, "b"), work(5)])
    # task 3 was ready at 0, task 0 only at 1
    assert times.start_s == (7, 0, 0, 2)
    assert times.makespan_s == 10


def test_a_lower_priority_goes_first_among_those_that_wait_but_interrupts_nobody():
    waiting = [work(1, priority=2.0), work(1, priority=1.0), work(1, "b"), work(1, priority=-1.0, after=(3,))]
    times = run_tasks([work(4), *waiting])
    assert times.start_s == (0, 6, 5, 0, 4)


def test_all_that_becomes_ready_in_one_instant_is_chosen_from_together():
    tasks = [work(1, "b"), work(1, "c"), work(1, after=(0,), priority=2.0), work(1, after=(1,), priority=1.0)]
    assert run_tasks(tasks).start_s == (0, 0, 2, 1)


def test_transfers_share_a_link_where_they_name_no_queue_and_take_turns_where_they_do():
    assert run_tasks([send(10), send(10)], links=[WIRE]).end_s == (2, 2)
    assert run_tasks([send(10, queue="q"), send(10, queue="q")], links=[WIRE]).end_s == (1, 2)


def test_a_queue_goes_on_when_the_last_bit_has_left_or_where_asked_has_arrived():
    assert run_tasks([send(10, latency_s=0.5, queue="q")] * 2, links=[WIRE]).end_s == (1.5, 2.5)
    waiting = [send(10, latency_s=0.5, queue="q", waits_for_arrival=True)] * 2
    assert run_tasks(waiting, links=[WIRE]).end_s == (1.5, 3.0)


def test_a_queue_takes_the_lowest_priority_first():
    later = [send(10, queue=0, priority=2.0), send(10, queue=0, priority=1.0)]
    times = run_tasks([send(10, queue=0), *later], links=[WIRE])
    assert times.end_s == (1, 3, 2)
    assert times.link_bits == (30,) and times.peak_bits_per_s == (10,)


def test_what_waits_for_a_dead_link_never_starts_and_the_rest_ends():
    dead = SimLink(bandwidth_bits_per_s=0.0)
    times = run_tasks([send(1), work(1, after=(0,)), work(2)], links=[dead])
    assert times.end_s == (math.inf, math.inf, 2)
    assert times.start_s == (0, math.inf, 0)


def test_a_pipeline_has_the_bubble_of_its_formula():
    """GPipe without link time: `(m + p - 1) (t_f + t_b)`, so the idle part is `(p - 1) / m` of the work."""
    num_stages, num_microbatches, t_f, t_b = 4, 8, 1.0, 2.0
    tasks, number = [], {}
    for stage in range(num_stages):
        for batch in range(num_microbatches):
            number["f", stage, batch] = len(tasks)
            before = (number["f", stage - 1, batch],) if stage else ()
            tasks.append(work(t_f, stage, after=before, priority=1.0 + batch))
    for stage in reversed(range(num_stages)):
        for batch in range(num_microbatches):
            number["b", stage, batch] = len(tasks)
            last = number["f", stage, num_microbatches - 1]
            before = (last, number["b", stage + 1, batch]) if stage + 1 < num_stages else (last,)
            tasks.append(work(t_b, stage, after=before))
    assert run_tasks(tasks).makespan_s == (num_microbatches + num_stages - 1) * (t_f + t_b)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([work(1, after=(1,)), work(1, after=(0,))], r"tasks \[0, 1\] wait for each other"),
        ([work(1, after=(0,))], "go round in circles"),
        ([work(1, after=(7,))], "tasks 0 to 0, got 7"),
    ],
)
def test_a_graph_that_cannot_end_is_refused(tasks, message):
    with pytest.raises(ValueError, match=message):
        run_tasks(tasks)


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_work_that_takes_no_number_of_seconds_is_refused(seconds):
    with pytest.raises(ValueError, match="seconds must be finite"):
        work(seconds)


CLUSTERS = {
    "star": star([SimLink(bandwidth_bits_per_s=1.0 + n, latency_s=0.01 * n) for n in range(5)]),
    "ring": ring([SimLink(bandwidth_bits_per_s=1.0 + n, latency_s=0.01 * n) for n in range(5)]),
    "leaf-spine": leaf_spine([[WIRE, WIRE], [WIRE, WIRE, WIRE]], trunks=[[WIRE] * 3] * 2),
    "sites": joined_sites(
        [[WIRE], [WIRE] * 3, [WIRE]], wires={(0, 1): WIRE, (2, 1): SimLink(bandwidth_bits_per_s=3.0)}
    ),
}


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize(("senders", "receivers"), [([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), ([1, 3], [1, 2]), ([4], [4])])
def test_what_many_send_to_many_is_the_sum_over_all_pairs(name, senders, receivers):
    cluster = CLUSTERS[name]
    loads, longest_s = {}, 0.0
    for sender in senders:
        for receiver in receivers:
            way = cluster.route(sender, receiver)
            longest_s = max(longest_s, cluster.latency_s(way))
            for link, part in way:
                loads[link] = loads.get(link, 0.0) + part
    found, found_s = cluster.spread(senders, receivers)
    assert dict(found) == pytest.approx(loads)
    assert found_s == pytest.approx(longest_s)


def test_bits_between_sites_without_a_wire_pass_the_fewest_others():
    cluster = joined_sites([[WIRE]] * 4, wires={(0, 1): WIRE, (1, 2): WIRE, (2, 3): WIRE, (3, 0): WIRE})
    assert [len(cluster.route(0, to)) for to in range(4)] == [0, 3, 4, 3]


def test_each_pattern_puts_the_bits_of_its_formula_on_every_link():
    cluster, everyone = star([WIRE] * 8), list(range(8))

    def load(pattern):
        stages = ExchangeModel(pattern=pattern).stages(cluster, senders=everyone, members=everyone)
        total = [sum(dict(stage.loads).get(link, 0.0) for stage in stages) for link in range(16)]
        return sorted(set(total)), sum(stage.num_messages for stage in stages)

    assert load(AllGatherMessages()) == ([7], 1)
    assert load(TwoPhaseMessages()) == ([2 * 7 / 8], 2)
    assert load(RingMessages()) == ([2 * 7 / 8], 14)
    assert load(StarMessages(server=3)) == ([1, 7], 2)


def test_a_pattern_that_needs_everyone_says_so():
    with pytest.raises(ValueError, match="needs a payload from each of the 3 members, got 2; take AllGatherMessages"):
        TwoPhaseMessages().stages(senders=[0, 1], members=[0, 1, 2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: star([WIRE] * 2, downs=[WIRE]), "each of the 2 hosts, got 1"),
        (lambda: ring([WIRE] * 2, backwards=[WIRE]), "each of the 2 hosts, got 1"),
        (lambda: leaf_spine([[WIRE]] * 2, trunks=[[WIRE], [WIRE] * 2]), r"got \[1, 2\]"),
        (lambda: joined_sites([[WIRE]] * 3, wires={(0, 1): WIRE}), r"lacks \[\(0, 2\)"),
        (lambda: SimCluster(links=(), site_of=(0,), ways_out=(), ways_in=()), "got 1, 0 and 0"),
    ],
)
def test_a_cluster_that_does_not_hold_together_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
