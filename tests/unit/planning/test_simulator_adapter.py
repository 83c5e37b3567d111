"""What the planner tells the simulator: the bytes that are really sent, the wires' rates, the links that count."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import thinwire
from tests.laws.test_simulate_laws import schedules
from tests.reference.every_method import ARGUMENTS, inner_of, one_step
from tests.reference.loops import wrap
from tests.reference.small_models import Transformer
from thinwire import methods, simulate
from thinwire.averaging.message_pattern import MessagePattern
from thinwire.codecs import float32
from thinwire.planning.cluster import Cluster, Machine, Wire
from thinwire.planning.predict import predict
from thinwire.planning.simulator_adapter import (
    Traffic,
    condensed,
    faster,
    simulated_cluster,
    traffic_of,
)
from thinwire.sync.schedule import EveryStep, Staggered
from thinwire.transport.loopback import LoopbackTransport
from thinwire.transport.recording import RecordingTransport

STEPS = 12
# Past its ramp: what is sent in the ramp is not what is sent for most of a run.
RECIPE_ARGUMENTS: dict[str, dict[str, Any]] = {**ARGUMENTS, "dgc": {"density": 0.1, "warmup_steps": 0}}


def make(name: str) -> thinwire.Method:
    return methods.recipe(name)(**RECIPE_ARGUMENTS.get(name, {}))


def small_model(device: str = "cpu") -> Transformer:
    torch.manual_seed(0)
    with torch.device(device):
        return Transformer(layers=2)


@cache
def really_sent(name: str, num_replicas: int) -> int:
    """Return the bytes of all messages of all rounds, headers and all, of the replica that sends most."""

    def replica_main(loopback: LoopbackTransport) -> int:
        transport, model = RecordingTransport(loopback), small_model()
        optimizer = wrap(model, transport, make(name), inner_of(name, model))
        for step in range(1, STEPS + 1):
            one_step(optimizer, model, data=step, replica=transport.replica)
        sent = sum(
            record.wire_bytes for record in transport.log if (record.direction, record.kind) == ("sent", "round")
        )
        optimizer.close(final_exchange=False)
        return sent

    return max(thinwire.run_replicas(num_replicas, replica_main))


def planned_to_be_sent(name: str, model: nn.Module, *, num_replicas: int) -> float:
    method = make(name)
    traffic = traffic_of(method, model, num_replicas=num_replicas, inner=inner_of(name, model))
    rounds = [
        round
        for step in range(1, STEPS + 1)
        for round in method.schedule.launches(step, num_fragments=traffic.num_fragments)
    ]
    return sum(traffic.times_sent * traffic.payload_bytes[round.fragment][round.channel] for round in rounds)


# How long their lists of positions are depends on the values that are kept: what is planned is the longest.
LISTS = ("dgc", "ef21", "masha2")


@pytest.mark.slow
@pytest.mark.parametrize("name", methods.RECIPES)
def test_what_is_planned_to_be_sent_is_what_a_run_really_sends_to_the_byte(name: str) -> None:
    planned, real = planned_to_be_sent(name, small_model(), num_replicas=3), really_sent(name, 3)
    if name in LISTS:
        assert real <= planned <= 1.01 * real
    else:
        assert planned == pytest.approx(real, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "num_replicas"),
    [("all-reduce", 2), ("power-sgd", 2), ("one-bit-adam", 2), ("streaming-diloco", 5), ("noloco", 5)],
)
def test_two_alone_shards_of_many_and_groups_of_some_are_counted_to_the_byte_too(name: str, num_replicas: int) -> None:
    planned = planned_to_be_sent(name, small_model(), num_replicas=num_replicas)
    assert planned == pytest.approx(really_sent(name, num_replicas), rel=1e-12)


@pytest.mark.parametrize("name", methods.RECIPES)
def test_a_model_without_values_sends_the_same(name: str) -> None:
    found = [
        traffic_of(make(name), model, num_replicas=4, inner=inner_of(name, model))
        for model in (small_model(), small_model("meta"))
    ]
    assert found[0] == found[1] and found[0].num_fragments >= 1
    assert found[0].payload_bytes[0][found[0].last_channel] > 0


class Odd:
    """An exchange that nobody has told the planner of."""


def test_an_exchange_that_is_not_known_is_refused_by_its_name() -> None:
    method = dataclasses.replace(make("diloco"), exchange=lambda num_replicas: Odd())
    with pytest.raises(ValueError, match=r"nothing is known of how Odd\(\) crosses the links"):
        traffic_of(method, small_model(), num_replicas=2)


def traffic(*payloads: float, pattern: MessagePattern | None = None) -> Traffic:
    exchange = simulate.ExchangeModel(pattern=pattern or simulate.AllGatherMessages())
    sizes = tuple((size,) for size in payloads)
    return Traffic(payload_bytes=sizes, times_sent=1.0, coded=tuple((0.0,) for _ in sizes), exchange=exchange)


def round_s(cluster: Cluster, *, payload_bytes: float) -> float:
    """Return how long one all-gather takes that everyone waits for."""
    run = simulate.simulate_training(
        EveryStep(), cluster=simulated_cluster(cluster),
        replicas=[simulate.SimReplica(step_s=1.0)] * cluster.num_replicas,
        payload_bytes=[(payload_bytes,)], num_steps=1,
    )  # fmt: skip
    return run.total_s - 1.0


def machines(count: int, *, up: float | None = 8e6, down: float | None = 8e6, latency_s: float = 0.0) -> list[Machine]:
    return [
        Machine(name=f"m{number}", flops_per_s=1e12, up_bits_per_s=up, down_bits_per_s=down, latency_s=latency_s)
        for number in range(count)
    ]


@pytest.mark.parametrize(("rate", "seconds"), [(4e6, 2.0), (8e6, 1.0), (9e6, 1.0)])
def test_a_pair_is_bound_by_its_wire_or_by_the_accesses_whichever_is_thinner(rate: float, seconds: float) -> None:
    wires = tuple(Wire(source=a, destination=b, bandwidth_bits_per_s=rate) for a, b in (("m0", "m1"), ("m1", "m0")))
    assert round_s(Cluster(machines=tuple(machines(2)), wires=wires), payload_bytes=1e6) == pytest.approx(seconds)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_an_access_carries_what_goes_to_all_others(count: int) -> None:
    cluster = Cluster(machines=(Machine(name="thin", up_bits_per_s=4e6, down_bits_per_s=1e9), *machines(count - 1)))
    assert round_s(cluster, payload_bytes=1e6) == pytest.approx(2.0 * (count - 1))


def test_machines_without_accesses_are_joined_by_their_wires_alone() -> None:
    wires = tuple(
        Wire(source=f"m{a}", destination=f"m{b}", bandwidth_bits_per_s=8e6, latency_s=0.5 if a == 0 else 0.0)
        for a in range(3) for b in range(3) if a != b
    )  # fmt: skip
    cluster = Cluster(machines=tuple(machines(3, up=None, down=None)), wires=wires)
    assert round_s(cluster, payload_bytes=1e6) == pytest.approx(1.5)


def test_the_time_to_a_peer_is_that_of_both_accesses_or_that_of_the_pair_s_own_wire() -> None:
    own = Wire(source="m0", destination="m1", bandwidth_bits_per_s=1e9, latency_s=0.25)
    cluster = Cluster(machines=tuple(machines(2, latency_s=0.05)), wires=(own,))
    links = simulated_cluster(cluster)
    assert (links.latency_s(links.route(0, 1)), links.latency_s(links.route(1, 0))) == (0.25, 0.1)


@given(st.floats(1e-6, 9.0))
def test_latencies_are_rounded_up_by_less_than_a_tenth(latency_s: float) -> None:
    own = Wire(source="m0", destination="m1", bandwidth_bits_per_s=1e9, latency_s=latency_s)
    links = simulated_cluster(Cluster(machines=tuple(machines(2)), wires=(own,)))
    found = links.latency_s(links.route(0, 1))
    assert latency_s * (1 - 1e-12) <= found < 1.1 * latency_s


def test_those_that_take_part_keep_their_own_order_and_an_unknown_name_is_refused() -> None:
    cluster = Cluster(machines=tuple(machines(4)))
    assert simulated_cluster(cluster, names=["m3", "m1"]).num_hosts == 2
    with pytest.raises(ValueError, match="there is no replica 'm7'; there are m0, m1"):
        simulated_cluster(cluster, names=["m0", "m7"])


def test_of_many_machines_pairs_that_have_nearly_what_their_accesses_leave_get_no_link_of_their_own() -> None:
    wires = (
        Wire(source="m0", destination="m1", bandwidth_bits_per_s=7.5e6),
        Wire(source="m0", destination="m2", bandwidth_bits_per_s=4e6),
    )
    few, many = (Cluster(machines=tuple(machines(count)), wires=wires) for count in (8, 9))
    assert len(simulated_cluster(few).links) - 2 * 8 == 2
    assert len(simulated_cluster(many).links) - 2 * 9 == 1


def test_faster_wires_have_the_same_latency() -> None:
    links = simulated_cluster(Cluster(machines=tuple(machines(2, latency_s=0.1))))
    assert [link.bandwidth_bits_per_s for link in faster(links, 3.0).links[:2]] == [24e6, 24e6]
    assert faster(links, 3.0).latency_s(links.route(0, 1)) == 0.2


rates = st.floats(1e5, 1e9)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Return 2 to 6 machines with accesses, or with wires alone, or with both."""
    count = draw(st.integers(2, 6))
    kind = draw(st.sampled_from(["accesses", "wires", "both"]))
    found = tuple(
        Machine(
            name=f"m{number}", up_bits_per_s=draw(rates) if kind != "wires" else None,
            down_bits_per_s=draw(rates) if kind != "wires" else None, latency_s=draw(st.sampled_from([0.0, 0.01, 0.2])),
        )
        for number in range(count)
    )  # fmt: skip
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b and kind != "accesses"]
    wires = tuple(
        Wire(source=f"m{a}", destination=f"m{b}", bandwidth_bits_per_s=draw(rates), latency_s=draw(st.floats(0.0, 0.1)))
        for a, b in pairs if kind == "wires" or draw(st.booleans())
    )  # fmt: skip
    return Cluster(machines=found, wires=wires)


@settings(max_examples=50, deadline=None)
@given(
    cluster=clusters(), schedule=schedules, payloads=st.lists(st.floats(1e3, 1e6), min_size=1, max_size=4),
    steps=st.lists(st.floats(0.01, 2.0), min_size=6, max_size=6), num_steps=st.integers(1, 60),
    pattern=st.sampled_from([simulate.AllGatherMessages(), simulate.TwoPhaseMessages()]),
)  # fmt: skip
def test_two_links_and_the_slowest_replica_tell_the_times_of_all(
    cluster: Cluster, schedule: Any, payloads: list[float], steps: list[float], num_steps: int, pattern: Any
) -> None:
    links, sent = simulated_cluster(cluster), traffic(*payloads, pattern=pattern)
    replicas = [simulate.SimReplica(step_s=step_s) for step_s in steps[: cluster.num_replicas]]
    whole = simulate.simulate_training(
        schedule, cluster=links, replicas=replicas, payload_bytes=sent.payload_bytes, num_steps=num_steps,
        exchange=sent.exchange,
    )  # fmt: skip
    few = condensed(sent.exchange, links, num_replicas=cluster.num_replicas)
    assert few.fixed_stages is not None and all(len(stage.loads) <= 2 for stage in few.fixed_stages)
    quick = simulate.simulate_training(
        schedule, cluster=links, replicas=[max(replicas, key=lambda replica: replica.step_s)] * 2,
        payload_bytes=sent.payload_bytes, num_steps=num_steps, exchange=few,
    )  # fmt: skip
    assert quick.total_s == pytest.approx(whole.total_s, rel=1e-9)
    slowest = max(range(len(replicas)), key=lambda number: replicas[number].step_s)
    assert quick.step_ends_s[0] == pytest.approx(whole.step_ends_s[slowest], rel=1e-9)
    limited = [number for number, link in enumerate(links.links) if link.bandwidth_bits_per_s < math.inf]
    most = [max(run.link_bits[number] for number in limited) for run in (quick, whole)]
    assert most[0] == pytest.approx(most[1], rel=1e-9)


SLOW_PAIR = Cluster(
    machines=tuple(Machine(name=f"m{n}", up_bits_per_s=1e5, down_bits_per_s=1e5, latency_s=0.0) for n in range(2))
)


@settings(max_examples=25, deadline=None)
@given(
    cluster=clusters(), schedule=schedules, payloads=st.lists(st.floats(1e3, 1e6), min_size=1, max_size=3),
    steps=st.lists(st.floats(0.01, 2.0), min_size=6, max_size=6), intervals=st.integers(1, 60),
)  # fmt: skip
@example(
    cluster=SLOW_PAIR, schedule=Staggered(sync_interval=2, overlap_steps=2), payloads=[1000.0, 1000.0],
    steps=[2.0, 1.5, 1.0, 1.0, 1.0, 1.0], intervals=9,
)  # fmt: skip
@example(
    cluster=SLOW_PAIR, schedule=Staggered(sync_interval=4, overlap_steps=1), payloads=[1000.0, 1000.0],
    steps=[2.0, 1.875, 1.0, 1.0, 1.0, 1.0], intervals=6,
)  # fmt: skip
def test_a_prediction_by_two_links_is_that_of_the_whole_cluster(
    cluster: Cluster, schedule: Any, payloads: list[float], steps: list[float], intervals: int
) -> None:
    links, sent = simulated_cluster(cluster), traffic(*payloads)
    replicas = [simulate.SimReplica(step_s=step_s) for step_s in steps[: cluster.num_replicas]]
    few = dataclasses.replace(sent, exchange=condensed(sent.exchange, links, num_replicas=cluster.num_replicas))
    found = [
        predict(schedule, one, links=links, replicas=replicas, num_steps=intervals * schedule.sync_interval)
        for one in (sent, few)
    ]
    assert found[1].total_s == pytest.approx(found[0].total_s, rel=1e-6)
    assert found[1].compute_s == pytest.approx(found[0].compute_s, rel=1e-9)
    # also where one of them comes to rest late and is simulated as a whole, and the other is not
    assert found[1].sent_bytes_per_step == pytest.approx(found[0].sent_bytes_per_step, rel=1e-9)


@pytest.mark.parametrize(
    "exchange",
    [
        simulate.ExchangeModel(pattern=simulate.StarMessages(server=0)),
        simulate.ExchangeModel(pattern=simulate.StarMessages(server=0), quorum=2),
        simulate.ExchangeModel(quorum=2),
    ],
)
def test_flows_that_differ_in_what_they_load_keep_all_links(exchange: simulate.ExchangeModel) -> None:
    links = simulated_cluster(Cluster(machines=tuple(machines(3))))
    assert condensed(exchange, links, num_replicas=3) is exchange


def test_payloads_of_two_patterns_are_told_apart_only_by_their_load() -> None:
    """A dense warm-up by all-gather and coded steps in two phases: the simulator is told one pattern for both."""
    method = methods.recipe("one-bit-adam")(warmup_steps=5)
    model = nn.Linear(100, 100, bias=False)
    found = traffic_of(method, model, num_replicas=2)
    dense = found.payload_bytes[0][0] * found.times_sent
    assert isinstance(found.exchange.pattern, simulate.AllGatherMessages)
    assert dense == float32().payload_bytes(100 * 100 + 1) + 56  # one element says whether there is a gradient
    assert 0 < found.payload_bytes[0][1] < dense / 20
