"""Two optimizers on one transport never read each other's messages, in whichever order they step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire
from tests.reference.loops import same, values, wrap
from thinwire.errors import DesyncError
from thinwire.methods import all_reduce, diloco, noloco, streaming_diloco
from thinwire.transport.base import Envelope, OwnedTransport
from thinwire.transport.loopback import LoopbackWorld
from thinwire.transport.recording import RecordingTransport
from thinwire.transport.streams import ROUNDS

METHODS = {
    "all-reduce": all_reduce,
    "diloco": lambda: diloco(sync_interval=4),
    "streaming": lambda: streaming_diloco(sync_interval=4, overlap_steps=2, num_fragments=1),
    "noloco": lambda: noloco(sync_interval=4),
}


def two_models(value):
    models = nn.Linear(4, 4), nn.Linear(4, 4)
    with torch.no_grad():
        for model, start in zip(models, (value, 100 * value), strict=True):
            for parameter in model.parameters():
                parameter.fill_(start)
    return models


def train(models, optimizers, *, replica, is_swapped=False):
    """Train both, each on data of its own, and return the values of each."""
    for step in range(12):
        pairs = list(enumerate(zip(models, optimizers, strict=True)))
        for which, (model, optimizer) in reversed(pairs) if is_swapped else pairs:
            generator = torch.Generator().manual_seed(100 * which + 2 * step + replica)
            model(torch.randn(8, 4, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for optimizer in optimizers:
        optimizer.close(final_exchange=True)
    found = []
    for model, optimizer in zip(models, optimizers, strict=True):
        with optimizer.global_parameters():
            found.append(values(model))
    return found


@pytest.mark.parametrize("method", METHODS)
def test_two_optimizers_on_one_transport_train_as_each_would_alone(method):
    def together(transport):
        models = two_models(1.0)
        recording = RecordingTransport(transport)
        optimizers = [wrap(model, recording, METHODS[method]()) for model in models]
        return train(models, optimizers, replica=transport.replica)

    def alone(which):
        def replica_main(transport):
            models = list(two_models(1.0))
            optimizers = [wrap(m, transport if n == which else None, METHODS[method]()) for n, m in enumerate(models)]
            return train(models, optimizers, replica=transport.replica)[which]

        return thinwire.run_replicas(2, replica_main)

    found = thinwire.run_replicas(2, together)
    for which in (0, 1):
        one, other = alone(which)
        assert same(one, other)
        assert same(found[0][which], one) and same(found[1][which], one)


def test_with_overlap_replicas_may_step_the_two_in_different_orders():
    def replica_main(transport, is_swapped):
        models = two_models(1.0)
        optimizers = [wrap(model, transport, METHODS["streaming"]()) for model in models]
        return train(models, optimizers, replica=transport.replica, is_swapped=is_swapped)

    plain = thinwire.run_replicas(2, lambda t: replica_main(t, False))
    mixed = thinwire.run_replicas(2, lambda t: replica_main(t, t.replica == 1))
    for which in (0, 1):
        assert same(plain[0][which], plain[1][which])
        assert same(mixed[0][which], plain[0][which]) and same(mixed[1][which], plain[0][which])


def test_optimizers_built_in_different_orders_are_refused():
    def replica_main(transport):
        models = [nn.Linear(4, 4), nn.Linear(4, 2)]
        for model in reversed(models) if transport.replica else models:
            wrap(model, transport, diloco())

    with pytest.raises(DesyncError, match="another model; the first tensor that differs is number 1: weight"):
        thinwire.run_replicas(2, replica_main)


def test_owners_are_counted_on_each_transport_and_have_names():
    world = LoopbackWorld(2)
    owners = [OwnedTransport(RecordingTransport(world.transports[0])) for _ in range(4)]
    assert [one.owner for one in owners] == [0, 1, 2, 3]
    assert OwnedTransport(world.transports[1]).owner == 0
    envelopes = [Envelope(stream=ROUNDS, key=(7,), owner=one.owner) for one in owners[:2]]
    assert [one.describe() for one in envelopes] == ["round 7 (fragment 0)", "round 7 (fragment 0) of owner 2"]
