"""EF21: a state that sender and receivers both hold; what happens to it on message loss, resume, or a flipped bit."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import thinwire
from tests.reference.loops import steps, values, wrap
from tests.reference.small_models import build
from thinwire.codecs import float32, top_k
from thinwire.codecs.error_feedback import Shift
from thinwire.errors import CheckpointError, DesyncError, TransportError
from thinwire.methods import ef21
from thinwire.methods.masha import Star
from thinwire.sync.views import Gradient

CODEC = top_k(density=0.2)
METHODS = {
    "plain": lambda: ef21(codec=CODEC),
    "momentum": lambda: ef21(codec=CODEC, momentum=0.9),
    "participation": lambda: ef21(codec=CODEC, participation=0.5, seed=1),
    "both": lambda: ef21(codec=CODEC, participation=0.6, momentum=0.5),
}
STEPS = 9


def twins(optimizer):
    state = optimizer._engine.exchanges[0].state_dict()["0"]["out"]
    return {name: vector.clone() for name, vector in state.items()}


def resumed(states):
    """Go on from each replica's state, and return its values after the last step."""

    def replica_main(transport):
        step, state, model_state, method = states[transport.replica]
        model = build("transformer")
        optimizer = wrap(model, transport, method())
        model.load_state_dict(model_state)
        optimizer.load_state_dict(state)
        steps(model, optimizer, STEPS - step, replica=transport.replica, start=step)
        return values(model)

    return thinwire.run_replicas(len(states), replica_main)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_run_resumed_after_any_step_ends_with_the_bits_of_one_never_stopped(name):
    def replica_main(transport):
        model = build("transformer")
        optimizer = wrap(model, transport, METHODS[name]())
        saved = []
        for step in range(STEPS):
            steps(model, optimizer, 1, replica=transport.replica, start=step)
            state = copy.deepcopy(optimizer.state_dict())
            saved.append((step + 1, state, copy.deepcopy(model.state_dict()), METHODS[name]))
        return saved, values(model)

    results = thinwire.run_replicas(3, replica_main)
    for step in (1, 4, 8):
        for unbroken, mine in zip(results, resumed([saved[step - 1] for saved, _ in results]), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(unbroken[1], mine, strict=True)), step


@pytest.mark.parametrize("name", ["plain", "momentum"])
def test_a_lost_message_fails_the_round_by_name_notes_nothing_and_a_checkpoint_heals_it(name):
    def replica_main(transport, *, is_broken):
        model = build("transformer")
        optimizer = wrap(model, transport, METHODS[name]())
        steps(model, optimizer, 4, replica=transport.replica)
        saved = (4, copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict()), METHODS[name])
        if not is_broken:
            steps(model, optimizer, STEPS - 4, replica=transport.replica, start=4)
            return values(model), None
        if transport.replica == 0:  # one message is lost: that to replica 1; replica 2 gets all of the round
            sent = []
            transport.tamper = lambda message: sent.append(0) or (None if len(sent) == 1 else message)
        before, twins_before = values(model), twins(optimizer)
        with pytest.raises(TransportError, match="replica"):
            steps(model, optimizer, STEPS - 4, replica=transport.replica, start=4)
        if transport.replica == 1:
            assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
            after = twins(optimizer)
            assert all(torch.equal(twins_before[key], after[key]) for key in after)
            with pytest.raises(TransportError):  # no checkpoint of a broken state
                optimizer.state_dict()
            with pytest.raises(DesyncError, match=r"failed on replica 1, .*resume all replicas from a checkpoint"):
                steps(model, optimizer, 1, replica=transport.replica, start=4)
        return values(model), saved

    unbroken = thinwire.run_replicas(3, lambda transport: replica_main(transport, is_broken=False))
    broken = thinwire.run_replicas(3, lambda transport: replica_main(transport, is_broken=True))
    for one, other in zip(unbroken, resumed([saved for _, saved in broken]), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[0], other, strict=True))


def test_a_twin_that_differs_is_named_although_parameters_agree():
    def replica_main(transport):
        model = build("linear")
        method = replace(ef21(codec=CODEC), view=Gradient(is_split=True, hash_interval=3))
        optimizer = wrap(model, transport, method)
        steps(model, optimizer, 2, replica=transport.replica)
        if transport.replica == 2:
            optimizer._engine.exchanges[0]._stages[0]["out"].state.shared[1] += 1e-6
        before = values(model)
        with pytest.raises(DesyncError, match=r"replica 2 disagrees with the others.*or what is remembered of them"):
            steps(model, optimizer, 1, replica=transport.replica, start=2)
        return before

    results = thinwire.run_replicas(3, replica_main)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_absent_replicas_keep_their_state_and_take_in_the_others():
    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, METHODS["participation"]())
        found = []
        for step in range(8):
            before = twins(optimizer)
            steps(model, optimizer, 1, replica=transport.replica, start=step)
            after = twins(optimizer)
            found.append((not torch.equal(before["own"], after["own"]), after["shared"], after["own"]))
        return found

    topology = METHODS["participation"]().topology
    for step, seen in enumerate(zip(*thinwire.run_replicas(3, replica_main), strict=True)):
        senders = topology.peers(round_id=2 * step, me=0, alive=range(3)).senders
        assert tuple(replica for replica in range(3) if seen[replica][0]) == senders
        for _, mean, _ in seen:
            assert torch.equal(mean, seen[0][1])
        torch.testing.assert_close(seen[0][1], sum(own for _, _, own in seen) / 3, rtol=1e-5, atol=1e-7)


def test_the_momentum_starts_as_the_first_gradient_and_absent_rounds_leave_it():
    memory = Shift(momentum=0.75)
    state = memory.init(3)
    first, second = torch.tensor([4.0, -8.0, 0.0]), torch.tensor([8.0, 8.0, 4.0])
    sent = memory.before(state, first)
    assert torch.equal(sent, first)
    memory.after(state, sent)
    memory.received(state, sent)
    memory.received(state, torch.zeros(3))  # a round without this member
    assert torch.equal(memory.before(state, second), 0.75 * first + 0.25 * second - first)
    # a round that fails before it is received leaves no trace
    assert torch.equal(memory.before(state, second), 0.75 * first + 0.25 * second - first)


def test_a_checkpoint_without_the_momentum_does_not_fit():
    model = build("linear")
    state = copy.deepcopy(wrap(model, None, METHODS["momentum"]()).state_dict())
    state["sync"]["exchanges"]["0"]["0"]["out"].pop("velocity")
    with pytest.raises(CheckpointError, match="velocity"):
        wrap(model, None, METHODS["momentum"]()).load_state_dict(state)


def test_a_star_refuses_a_memory_whose_receivers_need_the_mean_as_it_is():
    with pytest.raises(ValueError, match=r"use AllGather\(\) with Shift"):
        Star(codec=CODEC, server_codec=float32(), memory=Shift())
    with pytest.raises(ValueError, match="server must be one of the 2 replicas, got 3"):
        Star(codec=CODEC, server_codec=CODEC, server=3).bind([[torch.Size([2])]], replica=0, num_replicas=2)
