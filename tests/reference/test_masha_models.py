"""MASHA around models of all kinds: their buffers, their parameters without gradient, and what the inner SGD says."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import thinwire
from tests.reference.convex_problems import Saddle
from thinwire.methods import masha1, masha2


def test_statistics_are_those_of_the_last_evaluation_alone():
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1, momentum=0.5))
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = thinwire.DistributedOptimizer(model, inner, method=masha2(refresh_probability=0.5))
    seen, inputs = [], torch.tensor([[1.0], [4.0]])

    def closure():
        optimizer.zero_grad()
        seen.append(model[0](inputs).mean().item())
        loss = model(inputs)[0].sum() + model[0](inputs).sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert seen[0] != seen[1] and seen[2] != seen[3]
    assert model[1].running_mean.item() == pytest.approx((0.5 * 0.5 * seen[1] + 0.5 * seen[3]), rel=1e-6)
    assert model[1].num_batches_tracked.item() == 2


def test_parameters_without_gradient_count_as_zero_and_frozen_ones_stay():
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "never": nn.Linear(2, 1), "frozen": nn.Linear(2, 1)})
    model["frozen"].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = thinwire.DistributedOptimizer(model, inner, method=masha2(refresh_probability=0.5))

    def closure():
        optimizer.zero_grad()
        loss = model["used"](torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    after = model.state_dict()
    changed = {name.split(".")[0] for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"used"}


@pytest.mark.parametrize("make", [masha1, masha2])
def test_weight_decay_is_a_part_of_every_replicas_operator_and_pulls_all_players_to_zero(make):
    problem = Saddle.random(replicas=3)

    def points(low, high, *, in_loss):
        def replica_main(transport):
            model = problem.model()
            decays = [(model.low.point, 0.0 if in_loss else low), (model.high.point, 0.0 if in_loss else high)]
            inner = torch.optim.SGD([{"params": [p], "weight_decay": decay} for p, decay in decays], lr=0.05)
            optimizer = thinwire.DistributedOptimizer(
                model, inner, method=make(refresh_probability=0.3, ascent=("high",)), transport=transport
            )

            def closure():
                optimizer.zero_grad()
                loss = problem.loss_of(model, transport.replica)
                if in_loss:  # the player that maximises is pulled too, so its term has the other sign
                    loss = loss + (low * model.low.point.square().sum() - high * model.high.point.square().sum()) / 2
                loss.backward()

            for step in range(12):
                optimizer.step(closure)
                if step == 5:  # groups are other objects once a state was loaded
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            return torch.cat([model.low.point, model.high.point]).detach().numpy()

        return thinwire.run_replicas(3, replica_main)[0]

    decayed = points(0.7, 0.3, in_loss=False)
    np.testing.assert_allclose(decayed, points(0.7, 0.3, in_loss=True), rtol=1e-4, atol=1e-6)
    assert not np.allclose(decayed, points(0.0, 0.0, in_loss=False), rtol=1e-2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: torch.optim.AdamW(m.parameters()), "the inner AdamW none; give torch.optim.SGD"),
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), "momentum=0.9 would do nothing"),
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, maximize=True), "maximize=True would do nothing"),
        (lambda m: torch.optim.SGD([m.low.point], lr=0.1), "lacks 1 of the model's trainable parameters"),
        (
            lambda m: torch.optim.SGD([{"params": [m.low.point], "lr": 0.1}, {"params": [m.high.point], "lr": 0.2}]),
            r"one number for all parameters, got the learning rates \[0.1, 0.2\]",
        ),
    ],
)
def test_an_inner_optimizer_that_says_more_than_the_step_size_is_refused(make, words):
    model = Saddle.random(replicas=1).model()
    with pytest.raises(ValueError, match=words):
        thinwire.DistributedOptimizer(model, make(model), method=masha1())
