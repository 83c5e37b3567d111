"""The set of exchanged parameters is fixed at wrapping; what is trained beside it is named at once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import thinwire
from thinwire.codecs import float32
from thinwire.methods import all_reduce, diloco
from thinwire.methods.dimat import dimat
from thinwire.sync.outer_optimizer import PlainSGD

MEAN = diloco(sync_interval=4, codec=float32(), outer_optimizer=PlainSGD(lr=1.0))


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def train(model, optimizer, *, steps, seed=0):
    for step in range(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * seed + step))
        optimizer.zero_grad()
        (model(x) - 1).pow(2).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("is_held", [False, True], ids=["added to the inner optimizer", "held by it from the start"])
@pytest.mark.parametrize("method", [MEAN, all_reduce()], ids=lambda method: method.name)
def test_a_layer_unfrozen_later_is_refused_and_trains_after_wrapping_again(is_held, method):
    def replica_main(transport):
        model = layers()
        model[0].requires_grad_(False)
        inner = sgd(model.parameters() if is_held else model[1].parameters())
        optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)
        train(model, optimizer, steps=6, seed=transport.replica)
        model[0].requires_grad_(True)
        if not is_held:
            inner.add_param_group({"params": model[0].parameters()})
        with pytest.raises(ValueError, match=r"2 parameters are trained and not exchanged, the first is 0\.weight"):
            train(model, optimizer, steps=1)
        optimizer.close(final_exchange=True)
        optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)
        train(model, optimizer, steps=6, seed=transport.replica)
        optimizer.close(final_exchange=True)
        return [parameter.detach().clone() for parameter in model.parameters()]

    for one, other in zip(*thinwire.run_replicas(2, replica_main), strict=True):
        assert torch.equal(one, other)


def test_a_layer_that_is_unfrozen_for_its_gradients_alone_is_no_fault():
    model = layers()
    model[0].requires_grad_(False)
    optimizer = thinwire.DistributedOptimizer(model, sgd(model[1].parameters()), method=MEAN)
    model[0].requires_grad_(True)
    train(model, optimizer, steps=2)


def test_a_model_loaded_with_other_tensors_is_refused_and_one_loaded_in_place_goes_on():
    model = layers()
    optimizer = thinwire.DistributedOptimizer(model, sgd(model.parameters()), method=MEAN)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    replaced = model[0].weight
    model[0].load_state_dict({"weight": state["0.weight"], "bias": state["0.bias"]}, assign=True)
    with pytest.raises(ValueError, match=r"weight of shape \(4, 4\) is another tensor .*assign=False"):
        train(model, optimizer, steps=1)
    with pytest.raises(ValueError, match="another tensor"), optimizer.global_parameters(may_lag=True):
        raise AssertionError("stale values would be evaluated")
    again = layers()
    optimizer = thinwire.DistributedOptimizer(again, sgd(again.parameters()), method=MEAN)
    again.load_state_dict(state, assign=False)
    train(again, optimizer, steps=2)
    assert replaced is not model[0].weight


class Codebook(nn.Module):
    """An encoder with a codebook that follows the codes by moving averages, as in arXiv 1711.00937."""

    def __init__(self, *, is_moving=True):
        super().__init__()
        self.encoder, self.norm, self.is_moving = nn.Linear(4, 2), nn.BatchNorm1d(2), is_moving
        self.register_buffer("codes", torch.zeros(8, 2))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x):
        found = self.norm(self.encoder(x))
        self.cache += 1
        if self.is_moving:
            self.codes.data.lerp_(found.detach()[:8], 0.1)
        return found


def warned(*, replicas, method=MEAN, is_moving=True):
    """Return the warnings of a run, and each replica's codebook after `average_buffers`."""

    def replica_main(transport):
        model = Codebook(is_moving=is_moving)
        inner = sgd(model.parameters())
        optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)
        train(model, optimizer, steps=9, seed=transport.replica)
        optimizer.close()
        optimizer.average_buffers()
        return model.codes

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        codes = thinwire.run_replicas(replicas, replica_main)
    found = [one for one in found if "buffer" in str(one.message)]
    assert all(one.filename == __file__ for one in found)
    return [str(one.message) for one in found], codes


@pytest.mark.parametrize("method", [MEAN, all_reduce()], ids=lambda method: method.name)
def test_a_buffer_that_training_changes_causes_one_warning_whose_remedy_makes_it_equal(method):
    messages, (first, second) = warned(replicas=2, method=method)
    (message,) = messages
    assert message.startswith("training changes the buffer codes, ") and "call average_buffers()" in message
    assert torch.equal(first, second)


def test_statistics_constants_lone_replicas_and_exchanged_buffers_cause_no_warning():
    assert warned(replicas=2, is_moving=False)[0] == []
    assert warned(replicas=1)[0] == []
    assert getattr(dimat().view, "exchanges_buffers")  # noqa: B009
