"""Eager updates against their equations in one process, and what they are in special cases."""

from __future__ import annotations

import copy

import pytest
import torch

import thinwire
from tests.reference.loops import same, steps, values, wrap
from tests.reference.plain_replicas import Replica, adamw, assert_all_same, mean_of, train
from tests.reference.small_models import build
from thinwire.codecs import block_int8, float32
from thinwire.errors import CheckpointError
from thinwire.methods import diloco, eager
from thinwire.methods.eager import EagerOuterStep, OwnFirst
from thinwire.sync.outer_optimizer import PlainSGD
from thinwire.transport.loopback import single


def reference_eager(*, kind, replicas, count, interval, lr, mu, codec=None):
    """Own share at once, the others' an interval later (arXiv 2502.12996); return replicas and what is in flight."""
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
    return everyone, before


@pytest.mark.parametrize(("replicas", "interval", "count"), [(2, 5, 23), (3, 4, 24), (4, 1, 7), (1, 4, 18), (2, 5, 4)])
def test_eager_updates_are_the_papers_equations_bit_for_bit(replicas, interval, count):
    # above two replicas an exchange in two phases would code the mean again
    codec = block_int8() if replicas == 2 else float32()
    method = eager(sync_interval=interval, codec=codec, outer_lr=0.7, outer_momentum=0.9)
    everyone, _ = reference_eager(
        kind="conv", replicas=replicas, count=count, interval=interval, lr=0.7, mu=0.9, codec=codec
    )
    assert_all_same(train(method, replicas=replicas, count=count), [replica.result() for replica in everyone])


def test_alone_there_is_nothing_to_wait_for_and_eager_is_diloco():
    arguments = {"sync_interval": 4, "outer_lr": 0.7}
    (one,) = train(eager(**arguments), kind="linear", replicas=1, count=18)
    (other,) = train(diloco(**arguments), kind="linear", replicas=1, count=18)
    for mine, theirs in zip(one[0], other[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [8, 10, 3])
def test_the_end_is_the_mean_of_all_and_a_plain_step_with_the_others_share_of_what_is_in_flight(count):
    """Theta = mean theta_m - lr (1 - 1/M) mean Delta_m; a replica's own part in M of it was taken in at once."""
    arguments = {"outer_lr": 1.0, "outer_momentum": 0.5}
    found = train(eager(sync_interval=4, **arguments), kind="linear", count=count, final=True)
    everyone, in_flight = reference_eager(kind="linear", replicas=2, count=count, interval=4, lr=1.0, mu=0.5)
    assert (in_flight is None) == (count < 4)
    expected = mean_of([{name: p.detach() for name, p in replica.theta.items()} for replica in everyone])
    if in_flight is not None:
        late = mean_of(in_flight)
        expected = {name: value - 0.5 * late[name] for name, value in expected.items()}
    for _, reached in found:
        names = [name for name, _ in everyone[0].model.named_parameters()]
        assert all(torch.equal(one, expected[name]) for name, one in zip(names, reached, strict=True))


def test_a_mean_that_came_early_waits_in_the_checkpoint_too():
    """Closing takes in what is in flight, but the others' share still waits for the next outer step."""

    def replica_main(transport):
        reached = []
        for saves in (False, True):
            model = build("linear")
            optimizer = wrap(model, transport, eager(sync_interval=3), adamw(model))
            steps(model, optimizer, 4, replica=transport.replica)
            if saves:
                optimizer.close()
                assert not optimizer.rounds_in_flight
                state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
                model = build("linear", seed=5)
                optimizer = wrap(model, transport, eager(sync_interval=3), adamw(model))
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
            steps(model, optimizer, 7, replica=transport.replica, start=4)
            reached.append(values(model))
        return same(*reached)

    assert thinwire.run_replicas(2, replica_main) == [True, True]


def test_a_mean_of_another_size_in_a_checkpoint_is_refused():
    model = build("linear")
    optimizer = wrap(model, single(), eager(sync_interval=3), adamw(model))
    state = copy.deepcopy(optimizer.state_dict())
    state["sync"]["update"]["arrived"] = {"0": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"mean 0 has the shape \(3,\), this run's"):
        optimizer.load_state_dict(state)


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
        update.init(method.view.bind(Replica("conv", 0).model))


def test_an_interval_below_one_is_refused():
    with pytest.raises(ValueError, match="sync_interval must be at least 1"):
        eager(sync_interval=0)
