"""Eager updates against their equations in one process, and what they are in special cases."""

from __future__ import annotations

import pytest
import torch

from tests.reference.plain_replicas import Replica, assert_all_same, mean_of, train
from thinwire.codecs import block_int8, float32
from thinwire.methods import diloco, eager
from thinwire.sync.eager import EagerOuterStep, OwnFirst
from thinwire.sync.outer import PlainSGD


def reference_eager(*, kind, replicas, count, interval, lr, mu, codec):
    """Own share at once, the others' an interval later (arXiv 2502.12996), with plain dictionaries."""
    everyone = [Replica(kind, number) for number in range(replicas)]
    before, late = None, None
    for step in range(1, count + 1):
        for replica in everyone:
            replica.inner_step(step)
        if step % interval:
            continue
        fresh = [replica.difference() for replica in everyone]
        late = mean_of(before, codec) if before is not None else None
        for number, replica in enumerate(everyone):
            phi = {}
            for name, own in fresh[number].items():
                sent = torch.zeros_like(own) if before is None else before[number][name]
                d = (own - sent) / replicas
                if late is not None:
                    d += late[name]
                replica.momentum[name].mul_(mu).add_(d)
                phi[name] = replica.phi[name].add(d.add(replica.momentum[name], alpha=mu), alpha=-lr)
            replica.phi = phi
            replica.start_again()
        before = fresh
    return [replica.result() for replica in everyone]


@pytest.mark.parametrize(("replicas", "interval", "count"), [(2, 5, 23), (3, 4, 24), (4, 1, 7), (1, 4, 18), (2, 5, 4)])
def test_eager_updates_are_the_papers_equations_bit_for_bit(replicas, interval, count):
    # above two replicas an exchange in two phases would code the mean again
    codec = block_int8() if replicas == 2 else float32()
    method = eager(sync_interval=interval, codec=codec, outer_lr=0.7, outer_momentum=0.9)
    expected = reference_eager(
        kind="conv", replicas=replicas, count=count, interval=interval, lr=0.7, mu=0.9, codec=codec
    )
    assert_all_same(train(method, replicas=replicas, count=count), expected)


def test_alone_there_is_nothing_to_wait_for_and_eager_is_diloco():
    arguments = {"sync_interval": 4, "outer_lr": 0.7}
    (one,) = train(eager(**arguments), kind="linear", replicas=1, count=18)
    (other,) = train(diloco(**arguments), kind="linear", replicas=1, count=18)
    for mine, theirs in zip(one[0], other[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [8, 10, 3])
def test_with_plain_outer_steps_all_work_arrives_and_the_end_is_the_mean_of_all(count):
    """One interval is in flight: its own shares are in the replicas' mean, the others' come by the last step."""
    method = eager(sync_interval=4, outer_lr=1.0, outer_momentum=0.0)
    (one, other) = train(method, kind="linear", count=count, final=True, dtype=torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
    open_ended = train(method, kind="linear", count=count, dtype=torch.float64)
    means = [(a + b) / 2 for a, b in zip(open_ended[0][0], open_ended[1][0], strict=True)]
    if count < 4:  # nothing was ever sent
        for mine, mean in zip(one[0], means, strict=True):
            torch.testing.assert_close(mine, mean, rtol=1e-6, atol=1e-6)
        return
    moved = sum(float((a - b).abs().sum()) for a, b in zip(one[0], means, strict=True))
    assert moved > 0, "the others' share of the round in flight was taken in"


def test_both_rounds_of_a_launch_have_numbers_of_their_own_and_the_late_one_comes_first():
    schedule = OwnFirst(sync_interval=3)
    launched = [r for step in range(1, 10) for r in schedule.launches(step, num_fragments=2)]
    assert [r.id for r in launched] == sorted(r.id for r in launched) and len({r.id for r in launched}) == len(launched)
    applied = [r for step in range(1, 20) for r in schedule.applies(step, num_fragments=2)]
    assert {r.id for r in launched} <= {r.id for r in applied}
    at_six = [(r.channel, r.launch_step) for r in schedule.applies(6, num_fragments=1)]
    assert at_six == [(0, 3), (1, 6)]


def test_a_view_with_a_common_global_value_is_refused():
    method = diloco(sync_interval=4)
    update = EagerOuterStep(optimizer=PlainSGD(), num_replicas=2, lr=1.0)
    with pytest.raises(ValueError, match="OwnPseudoGradient"):
        update.bind(method.view.bind(Replica("conv", 0).model))


def test_an_interval_below_one_is_refused():
    with pytest.raises(ValueError, match="sync_interval must be at least 1"):
        eager(sync_interval=0)
