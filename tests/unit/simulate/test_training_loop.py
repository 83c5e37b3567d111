"""Training in virtual time, with the schedules and topologies of the engine, against closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from thinwire.averaging.mixing import Neighbours, RandomPairs, Ring
from thinwire.averaging.topology import AllReplicas, Participation
from thinwire.simulate import (
    AllGatherMessages,
    ExchangeModel,
    RingMessages,
    SimLink,
    SimRecovery,
    SimReplica,
    StarMessages,
    TwoPhaseMessages,
    joined_sites,
    leaf_spine,
    simulate_training,
    star,
)  # fmt: skip
from thinwire.sync.schedule import EveryStep, Prefetched, RandomRefresh, Staggered

BANDWIDTH, LATENCY, BYTES = 8e6, 0.05, 3e6  # a payload takes 3 s on one link
WIRE = SimLink(bandwidth_bits_per_s=BANDWIDTH, latency_s=LATENCY)
DILOCO = Staggered(sync_interval=10)


def train(schedule=DILOCO, *, num_replicas=4, num_steps=30, cluster=None, replicas=None, fragments=(BYTES,), **more):
    replicas = replicas or [SimReplica(step_s=1.0)] * num_replicas
    return simulate_training(
        schedule, cluster=cluster or star([WIRE] * len(replicas)), replicas=replicas,
        payload_bytes=[(size,) for size in fragments], num_steps=num_steps, **more,
    )  # fmt: skip


ONE_S = 8 * BYTES / BANDWIDTH
UNEQUAL = [SimReplica(step_s=1.0 + number) for number in range(3)]
PATTERNS = {
    "all-gather": (AllGatherMessages(), 3 * ONE_S + 2 * LATENCY),
    "two-phase": (TwoPhaseMessages(), 2 * (3 / 4 * ONE_S + 2 * LATENCY)),
    "ring": (RingMessages(), 2 * 3 / 4 * ONE_S + 6 * 2 * LATENCY),
    "star": (StarMessages(server=0), 2 * (3 * ONE_S + 2 * LATENCY)),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("overlap_steps", [0, 3, 9])
def test_a_round_takes_the_time_of_its_formula_and_stalls_by_what_the_overlap_does_not_hide(name, overlap_steps):
    pattern, round_s = PATTERNS[name]
    schedule = Staggered(sync_interval=10, overlap_steps=overlap_steps)
    run = train(schedule, exchange=ExchangeModel(pattern=pattern), num_steps=39)
    stall_s = max(0.0, round_s - overlap_steps)
    assert run.stall_s == pytest.approx([3 * stall_s] * 4)
    assert run.total_s == pytest.approx(39 + 3 * stall_s)
    assert run.compute_utilisation == pytest.approx(39 / (39 + 3 * stall_s))
    assert [r.finished_s - r.started_s for r in run.rounds] == pytest.approx([round_s] * 3)


@pytest.mark.parametrize("name", PATTERNS)
def test_links_carry_the_bits_of_the_formula(name):
    pattern, _ = PATTERNS[name]
    run = train(exchange=ExchangeModel(pattern=pattern))
    payloads = {"all-gather": 3, "two-phase": 1.5, "ring": 1.5, "star": 1}[name]
    assert run.link_bits[1] == pytest.approx(3 * payloads * 8 * BYTES)
    assert max(run.peak_bits_per_s) <= BANDWIDTH * (1 + 1e-9)


def test_an_all_reduce_at_every_step_waits_for_every_step():
    run = train(EveryStep(), exchange=ExchangeModel(pattern=RingMessages()), num_steps=5)
    assert run.total_s == pytest.approx(5 * (1 + PATTERNS["ring"][1]))


def test_fragments_that_are_sent_together_share_the_wire():
    whole = train(DILOCO, fragments=(BYTES,))
    cut = train(Staggered(sync_interval=10, is_staggered=False), fragments=(BYTES / 3,) * 3)
    assert cut.total_s == pytest.approx(whole.total_s)
    assert cut.link_bits == pytest.approx(whole.link_bits)


def test_staggered_fragments_with_overlap_hide_what_one_exchange_of_all_does_not():
    size = BYTES / 5
    streaming = train(Staggered(sync_interval=10, overlap_steps=2), fragments=(size,) * 5, num_steps=100)
    assert streaming.stalls == ()  # a fragment's 1.9 s fit into 2 steps, and the next one leaves 2 steps later
    assert streaming.compute_utilisation == 1
    assert train(num_steps=100).compute_utilisation < 0.6


def test_message_cost_counts_once_for_each_message_in_a_row():
    free, paid = (train(exchange=ExchangeModel(pattern=RingMessages(), message_s=cost)) for cost in (0.0, 0.25))
    assert paid.total_s - free.total_s == pytest.approx(3 * 6 * 0.25)


def test_a_pace_holds_the_busiest_link_to_its_rate():
    run = train(exchange=ExchangeModel(pace_bits_per_s=BANDWIDTH / 4))
    assert max(run.peak_bits_per_s) == pytest.approx(BANDWIDTH / 4)
    assert run.rounds[0].finished_s - run.rounds[0].started_s == pytest.approx(4 * 3 * ONE_S + 2 * LATENCY)


def test_everyone_waits_for_the_slowest_and_the_slowest_for_nobody():
    run = train(replicas=[SimReplica(step_s=1.0)] * 3 + [SimReplica(step_s=1.5)])
    round_s = PATTERNS["all-gather"][1]
    assert run.total_s == pytest.approx(45 + 3 * round_s)
    assert run.stall_s == pytest.approx([15 + 3 * round_s] * 3 + [3 * round_s])


def test_each_replica_applies_after_its_own_overlap():
    schedule = Staggered(sync_interval=10, overlap_steps=(0, 0, 4, 9))
    run = train(schedule, num_steps=19)
    round_s = PATTERNS["all-gather"][1]  # 9.1 s
    assert run.stall_s == pytest.approx([round_s, round_s, round_s - 4, round_s - 9])
    assert {stall.replica: stall.step for stall in run.stalls} == {0: 10, 1: 10, 2: 14, 3: 19}


def test_a_second_channel_has_bytes_of_its_own_and_is_waited_for_with_the_first():
    two = {"cluster": star([WIRE] * 2), "replicas": [SimReplica(step_s=1.0)] * 2}
    settings = {**two, "payload_bytes": [(BYTES, BYTES / 3)]}
    ahead = simulate_training(Prefetched(sync_interval=10), num_steps=20, **settings)
    # channel 0 leaves a step after the last outer step, and is there long before the next one
    assert ahead.total_s == pytest.approx(20 + 2 * (ONE_S / 3 + 2 * LATENCY))
    refresh = simulate_training(RandomRefresh(probability=1.0), num_steps=5, **settings)
    assert refresh.link_bits[0] == 5 * 8 * (BYTES + BYTES / 3)


def test_pairs_exchange_one_payload_each_whatever_the_number_of_replicas():
    run = train(exchange=ExchangeModel(topology=RandomPairs(seed=1)), num_replicas=20)
    assert run.total_s == pytest.approx(30 + 3 * (ONE_S + 2 * LATENCY))
    assert {len(r.members) for r in run.rounds} == {2} and len(run.rounds) == 30
    assert run.link_bits == pytest.approx([3 * 8 * BYTES] * 40)


def test_an_odd_number_of_replicas_has_a_group_of_three():
    run = train(exchange=ExchangeModel(topology=RandomPairs(seed=1)), num_replicas=5, num_steps=10)
    assert sorted(len(r.members) for r in run.rounds) == [2, 3]
    assert run.total_s == pytest.approx(10 + 2 * ONE_S + 2 * LATENCY)


def test_pairs_wait_only_for_each_other():
    slow = [SimReplica(step_s=1.0)] * 5 + [SimReplica(step_s=3.0)]
    everyone = train(replicas=slow, num_steps=10)
    pairs = train(replicas=slow, num_steps=10, exchange=ExchangeModel(topology=RandomPairs(seed=1)))
    assert sum(stall > 20 for stall in everyone.stall_s) == 5
    assert sum(stall > 20 for stall in pairs.stall_s) == 1


def test_a_topology_of_peers_that_form_one_group_is_taken_as_it_is():
    assert train(exchange=ExchangeModel(topology=AllReplicas())) == train()


def test_who_sends_nothing_in_a_round_is_not_waited_for_and_gets_what_the_others_send():
    half = Participation(probability=0.5, seed=3)
    senders = [half.peers(round_id=number, me=0, alive=range(4)).senders for number in range(3)]
    run = train(exchange=ExchangeModel(topology=half))
    for host in range(4):
        assert run.link_bits[host] == pytest.approx(8 * BYTES * 3 * sum(host in sent for sent in senders))
        received = sum(len(set(sent) - {host}) for sent in senders)
        assert run.link_bits[4 + host] == pytest.approx(8 * BYTES * received)


def test_neighbours_on_a_ring_need_a_direct_exchange_and_send_two_payloads_each():
    topology = Neighbours(graph=Ring())
    with pytest.raises(ValueError, match=r"form no groups: .* give is_direct=True"):
        train(num_replicas=5, exchange=ExchangeModel(topology=topology))
    run = train(num_replicas=5, exchange=ExchangeModel(topology=topology, is_direct=True))
    assert run.total_s == pytest.approx(30 + 3 * (2 * ONE_S + 2 * LATENCY))
    assert run.link_bits == pytest.approx([3 * 2 * 8 * BYTES] * 10)


def test_a_slow_replica_on_a_ring_holds_up_its_neighbours_first_and_the_others_one_round_later():
    slow = [SimReplica(step_s=2.0)] + [SimReplica(step_s=1.0)] * 7
    exchange = ExchangeModel(topology=Neighbours(graph=Ring()), is_direct=True)
    free = {"cluster": star([SimLink(bandwidth_bits_per_s=math.inf)] * 8), "replicas": slow, "exchange": exchange}
    first = train(num_steps=10, **free)
    assert first.stall_s == pytest.approx([0, 10, 0, 0, 0, 0, 0, 10])
    second = train(num_steps=20, **free)
    assert second.stall_s == pytest.approx([0, 20, 10, 0, 0, 0, 10, 20])


def test_a_thin_wire_between_sites_carries_every_pair_that_it_joins():
    fast = SimLink(bandwidth_bits_per_s=1e12)
    cluster = joined_sites([[fast] * 2, [fast] * 2], wires={(0, 1): WIRE})
    run = train(cluster=cluster, num_steps=10)
    assert run.link_bits[8:] == (2 * 2 * 8 * BYTES,) * 2
    assert run.total_s == pytest.approx(10 + 4 * ONE_S + LATENCY)
    rings = train(cluster=cluster, num_steps=10, exchange=ExchangeModel(pattern=RingMessages()))
    assert rings.link_bits[8:] == (1.5 * 8 * BYTES,) * 2  # a ring in the hosts' order crosses once each way


def test_a_fabric_with_half_the_trunks_is_half_as_fast():
    def total_s(num_spines):
        fabric = leaf_spine([[WIRE] * 4] * 2, trunks=[[SimLink(bandwidth_bits_per_s=2 * BANDWIDTH)] * num_spines] * 2)
        return train(num_replicas=8, cluster=fabric, num_steps=10).total_s - 10

    # 16 payloads cross to the other leaf over each trunk of a single spine, 7 leave each host
    assert total_s(1) == pytest.approx(16 / 2 * ONE_S + 2 * LATENCY)
    assert total_s(2) == pytest.approx(7 * ONE_S + 2 * LATENCY)


def test_rounds_move_off_a_trunk_that_dies_and_a_dead_fabric_is_named():
    def dying(at_s):
        return SimLink(bandwidth_bits_per_s=2 * BANDWIDTH, latency_s=0.0, changes=((at_s, 0.0),))

    def run(*trunks):
        fabric = leaf_spine([[WIRE] * 4] * 2, trunks=[trunks, trunks])
        return train(num_replicas=8, cluster=fabric, num_steps=10)

    alive = SimLink(bandwidth_bits_per_s=2 * BANDWIDTH)
    one_spine = run(alive)
    assert run(alive, dying(0.0)).total_s == pytest.approx(one_spine.total_s)
    between = run(alive, dying(10 + 4 * ONE_S))
    assert run(alive, alive).total_s < between.total_s < one_spine.total_s
    assert between.blocked_links == ()
    dead = run(dying(10.0), dying(10.0))
    assert dead.blocked_links[0] == "leaf-0/spine-0 up" and len(dead.blocked_links) == 8
    assert dead.rounds[-1].finished_s == math.inf


def test_uneven_links_are_as_fast_as_the_slowest():
    cluster = star([WIRE] * 3 + [SimLink(bandwidth_bits_per_s=BANDWIDTH / 5, latency_s=LATENCY)])
    assert train(cluster=cluster).total_s == pytest.approx(30 + 3 * (5 * 3 * ONE_S + 2 * LATENCY))


def test_a_quorum_goes_on_without_those_who_are_late_and_they_get_the_mean_still():
    replicas = [SimReplica(step_s=1.0)] * 3 + [SimReplica(step_s=3.0)]
    run = train(replicas=replicas, num_steps=10, exchange=ExchangeModel(quorum=3))
    round_s = 3 * ONE_S + 2 * LATENCY  # the late one's link down carries three payloads
    assert run.finished_s == pytest.approx([10 + round_s] * 3 + [30])
    assert run.link_bits[3] == 0 and run.link_bits[7] == 3 * 8 * BYTES


def test_a_replica_that_dies_is_missed_for_the_time_of_detection_and_no_longer():
    replicas = [SimReplica(step_s=1.0)] * 3 + [SimReplica(step_s=1.0, outages=((4.5, math.inf),))]
    run = train(replicas=replicas, num_steps=20, recovery=SimRecovery(detection_s=8.0))
    round_s = 2 * ONE_S + 2 * LATENCY  # among three
    assert run.total_s == pytest.approx(12.5 + round_s + 10 + round_s)
    assert run.last_step == (20, 20, 20, 4)
    assert run.compute_s == (20, 20, 20, 4)
    assert [r.members for r in run.rounds] == [(0, 1, 2)] * 2


def test_a_round_that_loses_a_replica_on_its_way_begins_anew_without_it():
    replicas = [SimReplica(step_s=1.0)] * 3 + [SimReplica(step_s=1.0, outages=((12.0, math.inf),))]
    run = train(replicas=replicas, num_steps=10, recovery=SimRecovery(detection_s=1.5))
    assert run.rounds[0].started_s == 13.5
    assert run.total_s == pytest.approx(13.5 + 2 * ONE_S + 2 * LATENCY)
    lost_bits = 2.0 / ONE_S * 8 * BYTES  # what each link carried in the 2 s before
    assert run.link_bits[0] == pytest.approx(lost_bits + 2 * 8 * BYTES)


@pytest.mark.parametrize("rejoin_bytes", [0.0, 2e6])
def test_a_replica_that_returns_loads_the_state_and_goes_on_where_the_others_are(rejoin_bytes):
    replicas = [SimReplica(step_s=1.0)] * 3 + [SimReplica(step_s=1.0, outages=((2.5, 5.75),))]
    run = train(replicas=replicas, num_steps=20, recovery=SimRecovery(rejoin_bytes=rejoin_bytes))
    load_s = 8 * rejoin_bytes / BANDWIDTH + 2 * LATENCY if rejoin_bytes else 0.0
    begins_s, step = 5.75 + load_s, 5 + (2 if rejoin_bytes else 0)
    assert run.step_ends_s[3][:3] == pytest.approx((1.0, 2.0, begins_s + 1))
    assert run.compute_s == (20, 20, 20, 2 + 20 - step)
    round_s = 3 * ONE_S + 2 * LATENCY
    assert run.rounds[0].started_s == pytest.approx(begins_s + 10 - step)
    assert run.total_s == pytest.approx(begins_s + 10 - step + round_s + 10 + round_s)


def test_a_replica_that_was_away_at_the_launch_has_no_part_in_the_round():
    replicas = [SimReplica(step_s=1.0)] * 3 + [SimReplica(step_s=1.0, outages=((2.5, 10.5),))]
    run = train(Staggered(sync_interval=10, overlap_steps=9), replicas=replicas, num_steps=25)
    assert [r.members for r in run.rounds] == [(0, 1, 2), (0, 1, 2, 3)]


def test_two_outages_that_touch_by_the_time_of_detection_are_one():
    replicas = [SimReplica(step_s=1.0)] * 2 + [SimReplica(step_s=1.0, outages=((2.5, 3.0), (4.0, 6.0)))]
    run = train(replicas=replicas, num_steps=9, recovery=SimRecovery(detection_s=2.0))
    assert run.step_ends_s[2] == (1.0, 2.0, 7.0, 8.0, 9.0)  # from 6.0 on, in step 7, where the others are


def test_a_neighbour_that_dies_is_no_longer_waited_for_in_a_direct_exchange():
    replicas = [SimReplica(step_s=1.0, outages=((8.0, math.inf),))] + [SimReplica(step_s=1.0)] * 4
    exchange = ExchangeModel(topology=Neighbours(graph=Ring()), is_direct=True)
    free = star([SimLink(bandwidth_bits_per_s=math.inf)] * 5)
    run = train(replicas=replicas, cluster=free, exchange=exchange, num_steps=10, recovery=SimRecovery(detection_s=4.0))
    assert run.finished_s[1:] == (12, 10, 10, 12)  # its two neighbours wait until it is struck off
    late = [SimReplica(step_s=1.0)] * 4 + [SimReplica(step_s=1.3, outages=((12.0, math.inf),))]
    run = train(replicas=late, cluster=free, exchange=exchange, num_steps=10, recovery=SimRecovery(detection_s=4.0))
    assert run.finished_s == pytest.approx((16, 10, 10, 16, 9 * 1.3))
    assert not [r for r in run.rounds if r.finished_s == math.inf]


def test_a_replica_alone_never_waits():
    assert train(num_replicas=1).total_s == 30
    assert train(EveryStep(), num_replicas=1, exchange=ExchangeModel(pattern=TwoPhaseMessages())).total_s == 30


def test_a_wire_that_fails_for_good_leaves_replicas_standing_and_says_which_rounds():
    cluster = star([WIRE] * 3 + [SimLink(bandwidth_bits_per_s=BANDWIDTH, changes=((12.0, 0.0),))])
    run = train(cluster=cluster)
    assert run.last_step == (10,) * 4
    assert [r.finished_s for r in run.rounds] == [math.inf]


def test_steps_vary_by_the_seed_and_by_nothing_else():
    replicas = [SimReplica(step_s=1.0, sigma=0.3)] * 4
    runs = [train(replicas=replicas, num_steps=200, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    faster = train(replicas=replicas, num_steps=200, seed=1, cluster=star([SimLink(bandwidth_bits_per_s=1e9)] * 4))
    assert faster.compute_s == pytest.approx(runs[0].compute_s)
    steps = sorted(b - a for a, b in zip(faster.step_ends_s[0], faster.step_ends_s[0][1:], strict=False))
    assert steps[100] == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: train(cluster=star([WIRE] * 3)), "cluster's 3 hosts, got 4"),
        (lambda: train(num_steps=0), "at least 1, got 0"),
        (lambda: train(fragments=()), "got 30 and 0"),
        (lambda: train(recovery=SimRecovery(detection_s=-1.0)), "at least 0, got -1"),
        (lambda: SimReplica(step_s=0.0), "step_s must be above 0"),
        (lambda: SimReplica(step_s=1.0, outages=((3.0, 2.0),)), "pairs of times"),
        (lambda: ExchangeModel(quorum=0), "quorum must be at least 1"),
        (lambda: ExchangeModel(pace_bits_per_s=0), "pace_bits_per_s must be above 0"),
        (lambda: ExchangeModel(topology=GroupsAlone(), is_direct=True), "needs a topology of peers"),
        (
            lambda: train(exchange=ExchangeModel(pattern=TwoPhaseMessages(), quorum=2), replicas=UNEQUAL),
            "needs a payload from each",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_simulated_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class GroupsAlone:
    def groups(self, *, round_id, alive):
        return [tuple(alive)]


@pytest.mark.parametrize("num_replicas", [2, 3, 8])
def test_a_replica_sends_the_bytes_that_the_exchange_of_that_name_counts(num_replicas):
    from thinwire.averaging import exchange
    from thinwire.codecs import float32

    numel = 64 * 7 * num_replicas
    for kind in (exchange.AllGather, exchange.TwoPhase):
        stated = kind(codec=float32()).traffic([torch.Size([numel])], num_members=num_replicas)
        run = train(
            num_replicas=num_replicas,
            num_steps=10,
            fragments=(4 * numel,),
            exchange=ExchangeModel(pattern=stated.pattern),
        )
        sent_bytes = kind(codec=float32()).sent_bytes(numel, num_replicas=num_replicas)
        assert run.link_bits[:num_replicas] == pytest.approx([8 * sent_bytes] * num_replicas)
