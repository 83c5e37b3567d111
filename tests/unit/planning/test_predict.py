"""A few intervals tell of a whole run: what is left out goes on like the last of what was simulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws.test_schedule_laws import staggered
from thinwire import simulate
from thinwire.methods import iso_loco, recipe, streaming_diloco
from thinwire.methods.eager import OwnFirst
from thinwire.planning import predict as predict_module
from thinwire.planning.cluster import Machine
from thinwire.planning.predict import Prediction, alone, inner_step_s, interval_coding_s, interval_outer_s, predict
from thinwire.planning.simulator_adapter import Traffic, traffic_of
from thinwire.sync.schedule import EveryStep, Prefetched, RandomRefresh, Staggered, WarmUp


def traffic(
    *fragments: tuple[float, ...],
    exchange: simulate.ExchangeModel | None = None,
    coded: float = 0.0,
    times_sent: float = 1.0,
) -> Traffic:  # fmt: skip
    return Traffic(
        payload_bytes=fragments, times_sent=times_sent, coded=tuple((coded,) * len(one) for one in fragments),
        exchange=exchange or simulate.ExchangeModel(),
    )  # fmt: skip


def star(count: int, *, rate: float = 8e6, latency_s: float = 0.0) -> simulate.SimCluster:
    return simulate.star([simulate.SimLink(bandwidth_bits_per_s=rate, latency_s=latency_s / 2)] * count)


def look(
    schedule: Any, sent: Traffic, *, num_steps: int, steps: tuple[float, ...] = (1.0, 1.0), **link: float
) -> Prediction:
    replicas = [simulate.SimReplica(step_s=step_s) for step_s in steps]
    return predict(schedule, sent, links=star(len(steps), **link), replicas=replicas, num_steps=num_steps)


def whole(schedule: Any, sent: Traffic, *, num_steps: int, steps: tuple[float, ...], **link: float) -> simulate.SimRun:
    return simulate.simulate_training(
        schedule, cluster=star(len(steps), **link), replicas=[simulate.SimReplica(step_s=step_s) for step_s in steps],
        payload_bytes=sent.payload_bytes, num_steps=num_steps, exchange=sent.exchange,
    )  # fmt: skip


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    schedule=st.one_of(st.just(EveryStep()), staggered(most=12)),
    sizes=st.lists(st.floats(1e3, 5e6), min_size=1, max_size=4),
    steps=st.lists(st.floats(0.1, 2.0), min_size=2, max_size=3).map(tuple), num_steps=st.integers(1, 600),
    latency_s=st.sampled_from([0.0, 0.3]),
    pattern=st.sampled_from([simulate.AllGatherMessages(), simulate.TwoPhaseMessages()]),
)  # fmt: skip
def test_what_is_left_out_is_what_a_simulation_of_it_would_say(
    schedule: Any, sizes: list[float], steps: tuple[float, ...], num_steps: int, latency_s: float, pattern: Any
) -> None:
    sent = traffic(*((size,) for size in sizes), exchange=simulate.ExchangeModel(pattern=pattern))
    found = look(schedule, sent, num_steps=num_steps, steps=steps, latency_s=latency_s)
    expected = whole(schedule, sent, num_steps=num_steps, steps=steps, latency_s=latency_s)
    assert found.simulated_steps <= found.num_steps == num_steps
    assert found.total_s == pytest.approx(expected.total_s, rel=1e-6)
    assert found.compute_s == pytest.approx(sum(steps) / len(steps))


@pytest.mark.parametrize(
    "schedule", [OwnFirst(sync_interval=7), Prefetched(sync_interval=7, overlap_steps=3), EveryStep(num_channels=2)]
)
def test_schedules_of_two_channels_go_on_alike_too(schedule: Any) -> None:
    sent = traffic((2e6, 1e6))
    found = look(schedule, sent, num_steps=1001, steps=(1.0, 0.7))
    expected = whole(schedule, sent, num_steps=1001, steps=(1.0, 0.7))
    assert found.simulated_steps < 100
    assert found.total_s == pytest.approx(expected.total_s, rel=1e-6)


def test_links_that_are_given_a_little_more_than_they_carry_are_watched_until_someone_waits() -> None:
    """Rounds end later by a fiftieth of a step each, so nobody waits at first, and then in circles of 30 steps."""
    schedule, sent = Staggered(sync_interval=10, overlap_steps=5), traffic(*[(1.02e6,)] * 10)
    found = look(schedule, sent, num_steps=10_000)
    assert found.step_s == pytest.approx(1.02, rel=1e-4)
    assert found.total_s == pytest.approx(10_200, rel=1e-3) and found.simulated_steps < 2000


# A payload of 1 MB takes a second on 8 Mbit/s.
@pytest.mark.parametrize(
    ("schedule", "megabytes", "step_s"),
    [
        (EveryStep(), (1.0,), 2.0),
        (EveryStep(), (1.0, 0.5), 2.5),
        (Staggered(sync_interval=10), (5.0,), 1.5),
        (Staggered(sync_interval=10, overlap_steps=2), (1.5, 1.5), 1.0),
        (Staggered(sync_interval=10, overlap_steps=2), (4.0, 4.0), 1.4),
        (Staggered(sync_interval=10, overlap_steps=10), (9.9,), 1.0),
        (Staggered(sync_interval=10, overlap_steps=10), (15.0,), 1.5),
    ],
)
def test_the_time_of_a_step_is_that_of_pen_and_paper(
    schedule: Any, megabytes: tuple[float, ...], step_s: float
) -> None:
    found = look(schedule, traffic(*((1e6 * size,) for size in megabytes)), num_steps=100_000)
    assert found.step_s == pytest.approx(step_s)
    assert found.total_s == pytest.approx(100_000 * step_s, rel=1e-3)
    assert found.compute_utilisation == pytest.approx(1 / step_s)
    assert found.stall_s == pytest.approx(step_s - 1)
    assert found.sent_bytes_per_step == pytest.approx(sum(megabytes) * 1e6 / schedule.sync_interval)
    assert found.busiest == pytest.approx(found.sent_bytes_per_step / 1e6 / step_s)


def test_two_that_differ_in_speed_compute_as_long_as_both_of_them_do() -> None:
    found = look(EveryStep(), traffic((1.0,)), num_steps=1000, steps=(1.0, 3.0), rate=1e15)
    assert found.step_s == pytest.approx(3.0) and found.compute_utilisation == pytest.approx(2 / 3)


@pytest.mark.parametrize("fragments", [1, 2, 5])
def test_what_is_sent_a_step_is_that_of_a_whole_interval_though_the_first_one_has_fewer_rounds(fragments: int) -> None:
    sent = traffic(*[(10e3,)] * fragments, times_sent=3.0)
    found = look(Staggered(sync_interval=10, overlap_steps=1), sent, num_steps=100_000)
    assert found.sent_bytes_per_step == pytest.approx(3 * fragments * 1000.0)


def test_a_run_that_is_short_is_simulated_as_a_whole() -> None:
    found = look(Staggered(sync_interval=10), traffic((5e6,)), num_steps=25)
    assert (found.num_steps, found.simulated_steps) == (25, 25)
    assert found.total_s == pytest.approx(25 + 2 * 5)


@pytest.mark.parametrize(
    "schedule",
    [
        WarmUp(warmup_steps=300), RandomRefresh(probability=0.3),
        recipe("zero-one-adam")(variance_steps=300, variance_updates=4, local_doubling_steps=50).schedule,
    ],
)  # fmt: skip
def test_a_schedule_that_changes_is_simulated_as_a_whole_or_refused_with_the_limit(schedule: Any) -> None:
    sent = traffic((2e6, 1e5, 1e5, 0.0))
    found = look(schedule, sent, num_steps=900)
    assert found.simulated_steps == 900
    assert found.total_s == pytest.approx(whole(schedule, sent, num_steps=900, steps=(1.0, 1.0)).total_s)
    with pytest.raises(ValueError, match="at most 20,000 steps, got 20,001; give fewer steps"):
        look(schedule, sent, num_steps=20_001)


def test_a_change_that_lies_behind_the_first_intervals_is_found_wherever_it_is() -> None:
    """Whatever is looked at is held against the first interval, not against the one next to it."""
    for warmup_steps in (11, 137, 5003, 19_000):
        with pytest.raises(ValueError, match="the schedule changes"):
            look(WarmUp(warmup_steps=warmup_steps), traffic((1e6, 1e5)), num_steps=1_000_000)


def test_steps_that_vary_are_looked_at_for_longer_and_cost_what_the_slower_one_of_each_step_takes() -> None:
    replicas = [simulate.SimReplica(step_s=1.0, sigma=0.3)] * 2
    found = predict(
        EveryStep(), traffic((1.0,)), links=star(2, rate=1e15), replicas=replicas, num_steps=5000, seed=3
    )  # fmt: skip
    assert found.simulated_steps > 500
    assert found.step_s == pytest.approx(1.045 * 1.168, rel=0.05)  # e^(sigma^2 / 2), and the mean of the larger of two
    assert found.compute_s == pytest.approx(1.045, rel=0.05)


def test_groups_that_change_are_looked_at_for_longer() -> None:
    method = recipe("noloco")(sync_interval=5)
    sent = traffic((5e6, 5e6), exchange=simulate.ExchangeModel(topology=method.topology))
    steps = (1.0, 1.1, 1.2, 3.0)
    found = look(method.schedule, sent, num_steps=5000, steps=steps)
    expected = whole(method.schedule, sent, num_steps=5000, steps=steps)
    assert found.total_s == pytest.approx(expected.total_s, rel=0.02)


def test_one_alone_does_nothing_but_compute() -> None:
    found = alone(100, step_s=0.5)
    assert (found.total_s, found.stall_s, found.compute_utilisation, found.sent_bytes_per_step) == (50.0, 0.0, 1.0, 0.0)


def test_a_step_takes_six_operations_a_parameter_and_token() -> None:
    assert inner_step_s(Machine(name="a", flops_per_s=3e12), num_parameters=1e9, tokens=1000) == 2.0
    with pytest.raises(ValueError, match="how fast 'attic' computes; give it flops_per_s in the cluster file"):
        inner_step_s(Machine(name="attic"), num_parameters=1e9, tokens=1000)


def test_coding_takes_its_share_of_an_interval_where_somebody_measured_it() -> None:
    sent = traffic((1e6,), (1e6,), coded=3e6)
    machine = Machine(name="a", encode_bytes_per_s=2.4e6)
    assert interval_coding_s(machine, sent) == pytest.approx(4 * 6e6 / 2.4e6)
    assert interval_coding_s(Machine(name="b"), sent) == 0.0


def test_an_outer_step_that_multiplies_matrices_takes_its_share_of_an_interval() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(100, 10, bias=False, device="meta") for _ in range(4)))
    sent = traffic_of(iso_loco(), model, num_replicas=2)
    assert sent.outer_operations == 4 * 9 * (4 * 10**2 * 100 + 2 * 10**3)
    measured = Machine(name="a", flops_per_s=6e9, float64_flops_per_s=3e9)
    assert interval_outer_s(measured, sent) == pytest.approx(sent.outer_operations / 3e9)
    assert interval_outer_s(Machine(name="b", flops_per_s=6e9), sent) == pytest.approx(sent.outer_operations / 1e9)
    assert interval_outer_s(Machine(name="c"), sent) == 0.0
    assert traffic_of(streaming_diloco(), model, num_replicas=2).outer_operations == 0.0


def test_after_a_warm_up_the_last_channel_s_coding_counts() -> None:
    sent = Traffic(
        payload_bytes=((4e6, 1e5, 0.0),), times_sent=1.0, coded=((9e9, 1e6, 0.0),), exchange=simulate.ExchangeModel()
    )
    assert sent.last_channel == 1
    assert interval_coding_s(Machine(name="a", encode_bytes_per_s=4e6), sent) == 1.0


def test_a_run_that_has_come_to_rest_is_not_simulated_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = simulate.simulate_training

    def counting(*arguments: Any, **named: Any) -> simulate.SimRun:
        asked.append(named["num_steps"])
        return real(*arguments, **named)

    monkeypatch.setattr(predict_module.simulate, "simulate_training", counting)
    look(Staggered(sync_interval=100, overlap_steps=5), traffic(*[(1e5,)] * 8), num_steps=1_000_000)
    assert len(asked) == 1 and asked[0] <= 505
