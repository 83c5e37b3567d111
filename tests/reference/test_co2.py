"""CO2 and SlowMo against their papers' loops in one process, and what CO2's two remedies do."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

import thinwire
from tests.reference.loops import same, steps, values, wrap
from tests.reference.plain_replicas import Replica, assert_all_same, mean_of, train
from tests.reference.small_models import build
from thinwire.codecs import e3m0, float32
from thinwire.methods import all_reduce, co2, diloco, noloco, slowmo
from thinwire.methods.co2 import StaleHeavyBall


def reference_co2(*, kind, replicas, count, interval, alpha, beta, phi, has_gap, codec):
    """Algorithm 1 of arXiv 2401.16265 with plain dictionaries, and with both of its anchors."""
    everyone = [Replica(kind, number) for number in range(replicas)]
    anchor = before = everyone[0].phi
    momentum, sent = everyone[0].momentum, None
    for step in range(1, count + 1):
        for replica in everyone:
            replica.inner_step(step)
        if step % interval:
            continue
        arrived, sent = sent, [replica.difference() for replica in everyone]
        if arrived is not None:
            delta = mean_of(arrived, codec)
            moved, measured = (math.sqrt(sum(float(v.double().square().sum()) for v in d.values())) for d in (
                {n: anchor[n].double() - before[n].double() for n in anchor}, delta
            ))  # fmt: skip
            gap = 1 + round(1024 * moved / measured) / 1024 if has_gap else 1.0
            before, anchor = anchor, dict(anchor)
            for name in anchor:
                momentum[name].mul_(beta).add_(delta[name] / gap)
                momentum[name] = momentum[name].clamp(-phi, phi)
                anchor[name] = anchor[name].add(momentum[name], alpha=-alpha)
        for replica in everyone:
            replica.phi = anchor
            replica.start_again()
    return [replica.result() for replica in everyone]


@pytest.mark.parametrize(
    ("replicas", "interval", "count", "has_gap", "phi"),
    [
        (2, 5, 23, True, 1.0),
        (3, 4, 24, True, 0.01),
        (2, 1, 9, True, 1.0),
        (1, 4, 18, True, 1.0),
        (2, 5, 23, False, 0.02),
    ],
)
def test_co2_is_the_papers_algorithm_bit_for_bit(replicas, interval, count, has_gap, phi):
    codec = float32() if replicas == 3 else e3m0()
    method = co2(
        sync_interval=interval, codec=codec, outer_lr=0.9, outer_momentum=0.4, outer_clip=phi, has_gap_penalty=has_gap
    )
    expected = reference_co2(
        kind="conv", replicas=replicas, count=count, interval=interval, alpha=0.9, beta=0.4, phi=phi,
        has_gap=has_gap, codec=codec,
    )  # fmt: skip
    results = train(method, replicas=replicas, count=count)
    assert_all_same(results, expected)
    assert all(same(one[1], results[0][1]) for one in results)


def reference_slowmo(*, kind, replicas, count, interval, alpha, beta):
    """Algorithm 1 of arXiv 1910.00643 with exact averages, and a constant inner rate that cancels."""
    everyone = [Replica(kind, number) for number in range(replicas)]
    anchor, momentum = everyone[0].phi, everyone[0].momentum
    for step in range(1, count + 1):
        for replica in everyone:
            replica.inner_step(step)
        if step % interval:
            continue
        delta = mean_of([replica.difference() for replica in everyone])
        for name in anchor:
            momentum[name].mul_(beta).add_(delta[name])
        anchor = {name: value.add(momentum[name], alpha=-alpha) for name, value in anchor.items()}
        for replica in everyone:
            replica.phi = anchor
            replica.start_again()
    return [replica.result() for replica in everyone]


@pytest.mark.parametrize(("kind", "replicas"), [("lstm", 2), ("conv", 3), ("unused", 5), ("linear", 1)])
def test_co2_without_delay_is_slowmo_bit_for_bit(kind, replicas):
    numbers = {"sync_interval": 4, "outer_lr": 0.9, "outer_momentum": 0.6}
    without_delay = train(co2(**numbers, outer_clip=None, is_delayed=False), kind=kind, replicas=replicas)
    assert_all_same(without_delay, train(slowmo(**numbers), kind=kind, replicas=replicas))
    expected = reference_slowmo(kind=kind, replicas=replicas, count=23, interval=4, alpha=0.9, beta=0.6)
    assert_all_same(without_delay, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_co2_run_that_ends_between_two_rounds_keeps_its_last_steps(dtype):
    method = co2(sync_interval=5)
    plain = {"kind": "linear", "replicas": 3, "dtype": dtype}
    trained = train(method, count=13, **plain)
    merged = train(method, count=13, final=True, **plain)
    at_launch = train(method, count=10, final=True, **plain)
    for number, everywhere in enumerate(merged[0][1]):
        work = torch.stack([(local[number].float() - start[number].float()) for local, start in trained]).mean(0)
        tolerance = 1e-6 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(
            everywhere.float(), at_launch[0][1][number].float() + work, rtol=tolerance, atol=tolerance
        )
    for local, everywhere in merged:
        assert same(local, merged[0][0])
        assert same(everywhere, merged[0][1])


def distance_of(rounds, *, share, alpha, beta):
    """Distance from the minimum of a quadratic, whose inner steps go `share` of the way, after CO2's outer steps."""
    value, before, momentum = torch.ones(1), torch.ones(1), torch.zeros(1)
    outer = StaleHeavyBall(lr=alpha, momentum=beta, has_gap_penalty=False, clip=None)
    for _ in range(rounds):
        delta, before = share * before, value.clone()
        outer.step(value, delta, momentum)
    return float(value.abs())


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.8])
def test_a_delay_of_one_round_bears_progress_up_to_one_minus_the_momentum(beta):
    assert distance_of(4000, share=0.97 * (1 - beta), alpha=1.0, beta=beta) < 0.1
    assert distance_of(4000, share=1.03 * (1 - beta), alpha=1.0, beta=beta) > 10


def test_the_gap_penalty_tames_the_delay():
    for has_penalty, is_near in ((True, True), (False, False)):
        generator = torch.Generator().manual_seed(0)
        value = torch.randn(101, generator=generator)
        before, momentum = value.clone(), torch.zeros(101)
        outer = StaleHeavyBall(lr=1.0, momentum=0.5, has_gap_penalty=has_penalty, clip=None)
        for _ in range(200):
            delta, before = 0.7 * before, value.clone()
            outer.step(value, delta, momentum)
        assert (float(value.abs().max()) < 0.01) == is_near


def test_a_gap_counts_the_rounds_worth_of_movement_between_two_anchors():
    outer = StaleHeavyBall(lr=0.5, momentum=0.9)
    delta = torch.tensor([3.0, 4.0])
    assert outer.gap(delta, torch.zeros(2)) == 1
    assert outer.gap(delta, torch.tensor([0.0, 10.0])) == 2
    assert outer.gap(torch.zeros(2), torch.ones(2)) == 1
    assert outer.gap(torch.zeros(0), torch.zeros(0)) == 1, "an empty shard"
    # a last bit more or less in the vectors does not change it
    assert outer.gap(delta * (1 + 2**-22), torch.tensor([0.1, 7.0])) == outer.gap(delta, torch.tensor([0.1, 7.0]))


def test_clipping_cuts_the_momentum_itself():
    value, momentum = torch.zeros(3), torch.zeros(3)
    StaleHeavyBall(lr=2.0, momentum=0.5, clip=0.25).step(value, torch.tensor([1.0, -1.0, 0.125]), momentum)
    assert momentum.tolist() == [0.25, -0.25, 0.125]
    assert value.tolist() == [-0.5, 0.5, -0.25]


def test_parts_of_one_method_are_refused_in_another():
    with pytest.raises(ValueError, match="SlowWeightsAndPseudoGradient"):
        wrap(build("linear"), None, replace(diloco(), update=noloco().update))
    with pytest.raises(ValueError, match="use PseudoGradient"):
        wrap(build("linear"), None, replace(all_reduce(), update=co2().update))


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("is_delayed", [True, False])
def test_a_sharded_outer_state_comes_to_the_same_bits_and_is_kept_once(replicas, is_delayed):
    arguments = {"sync_interval": 4, "has_gap_penalty": False, "outer_clip": 0.01, "is_delayed": is_delayed}
    whole = train(co2(**arguments), replicas=replicas, count=18)
    sharded = train(co2(**arguments, shards_outer_state=True), replicas=replicas, count=18)
    for one, other in zip(whole, sharded, strict=True):
        # the step is made as a difference from zero there, so its last bit may be another
        for mine, theirs in zip([*one[0], *one[1]], [*other[0], *other[1]], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    assert all(same(one[1], sharded[0][1]) for one in sharded)

    def kept(transport):
        model = build("conv")
        optimizer = wrap(model, transport, co2(**arguments, shards_outer_state=True))
        exchanges = optimizer.state_dict()["sync"]["exchanges"]["0"]
        return sum(hops["mean"]["momentum"].numel() for hops in exchanges.values()), optimizer

    found = thinwire.run_replicas(replicas, kept)
    numel = sum(p.numel() for p in build("conv").parameters())
    assert sum(size for size, _ in found) == numel


def test_a_sharded_outer_state_with_gap_penalty_trains_and_goes_on_from_its_state():
    method = co2(sync_interval=4, shards_outer_state=True)

    def replica_main(transport):
        model = build("conv")
        optimizer = wrap(model, transport, method)
        steps(model, optimizer, 9, replica=transport.replica)
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        steps(model, optimizer, 9, replica=transport.replica, start=9)
        again = build("conv", seed=4)
        resumed = wrap(again, transport, method)
        again.load_state_dict(state[0])
        resumed.load_state_dict(state[1])
        steps(again, resumed, 9, replica=transport.replica, start=9)
        return values(model), values(again)

    for one, other in thinwire.run_replicas(3, replica_main):
        assert same(one, other)
