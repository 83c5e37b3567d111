"""EF21 against plain loops, against what it must coincide with, and against its own theory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import thinwire
from tests.reference.convex_problems import LeastSquares, top
from tests.reference.small_models import build, loss_of
from thinwire.averaging.topology import Participation
from thinwire.codecs import float32, random_k, top_k
from thinwire.methods import all_reduce, ef21, ef21_step_size

EXACT = {"values": "float32"}


def train_small(method, *, kind="transformer", replicas=3, steps=8, inner=None):
    def replica_main(transport):
        model = build(kind)
        optimizer = thinwire.DistributedOptimizer(
            model, (inner or (lambda m: torch.optim.SGD(m.parameters(), lr=0.05)))(model), method=method,
            transport=transport,
        )  # fmt: skip
        for step in range(1, steps + 1):
            loss_of(model, step=step, replica=transport.replica).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    return thinwire.run_replicas(replicas, replica_main)


def solve(problem, method, *, lr, steps):
    """Return the points after each step, the same on all replicas."""

    def replica_main(transport):
        model = problem.model()
        inner = torch.optim.SGD(model.parameters(), lr=lr)
        optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)
        points = []
        for _ in range(steps):
            optimizer.zero_grad()
            problem.loss_of(model, transport.replica).backward()
            optimizer.step()
            points.append(model.x.detach().reshape(-1).double().numpy().copy())
        return np.array(points)

    results = thinwire.run_replicas(len(problem.matrices), replica_main)
    for other in results[1:]:
        assert np.array_equal(results[0], other)
    return results[0]


def plain_loop(problem, *, lr, steps, count, weights=None, momentum=0.0, senders=None):
    """EF21 (EF21-W with weights) in float64, word for word."""
    replicas, dim = len(problem.matrices), problem.matrices.shape[2]
    weights = np.full(replicas, 1 / replicas) if weights is None else weights
    x, g, v, points = np.zeros(dim), np.zeros((replicas, dim)), [None] * replicas, []
    for step in range(steps):
        for i in range(replicas):
            if senders is not None and i not in senders(step):
                continue
            gradient = problem.gradient(i, x) / (replicas * weights[i])
            v[i] = gradient if v[i] is None else momentum * v[i] + (1 - momentum) * gradient
            g[i] = g[i] + top(v[i] - g[i], count)
        x = x - lr * (weights @ g)
        points.append(x)
    return np.array(points)


@pytest.mark.parametrize("kind", ["transformer", "conv", "lstm", "unused", "linear"])
def test_ef21_without_compression_is_gradient_descent(kind):
    # g + (grad - g) rounds once more than grad does: equal up to float32, not bit for bit
    plain = train_small(all_reduce(), kind=kind)
    for ours, theirs in zip(train_small(ef21(codec=float32()), kind=kind), plain, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("participation", [1.0, 0.4])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_all_replicas_hold_the_same_bits_whatever_is_compressed(participation, momentum):
    method = ef21(codec=top_k(density=0.1), participation=participation, momentum=momentum)
    results = train_small(method, replicas=4, steps=9)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_ef21_follows_the_plain_loop(momentum, participation):
    problem = LeastSquares.random()
    lr, steps, count = 0.05, 60, 3
    coins = Participation(probability=participation, seed=5)

    def senders(step):
        return coins.peers(round_id=step, me=0, alive=range(4)).senders

    method = ef21(codec=top_k(density=count / 12, **EXACT), momentum=momentum, participation=participation, seed=5)
    expected = plain_loop(problem, lr=lr, steps=steps, count=count, momentum=momentum, senders=senders)
    # float32 against float64; no two magnitudes are so close that they change places
    np.testing.assert_allclose(solve(problem, method, lr=lr, steps=steps), expected, rtol=1e-4, atol=1e-5)


def test_ef21_w_computes_the_points_of_ef21_for_top_k():
    problem = LeastSquares.random(seed=3)
    smoothness = np.array(problem.smoothness)
    options = {"lr": ef21_step_size(problem.smoothness, 3 / 12), "steps": 200, "count": 3}
    plain = plain_loop(problem, **options)
    weighted = plain_loop(problem, weights=smoothness / smoothness.sum(), **options)
    np.testing.assert_allclose(weighted, plain, rtol=0, atol=1e-12)


def test_the_first_state_is_the_compressed_gradient():
    problem = LeastSquares.random()
    lr = 0.1
    first = solve(problem, ef21(codec=top_k(density=3 / 12, **EXACT)), lr=lr, steps=1)[0]
    expected = -lr * np.mean([top(problem.gradient(i, np.zeros(12)), 3) for i in range(4)], axis=0)
    np.testing.assert_allclose(first, expected, rtol=1e-6)


def theory(seed):
    """Return a problem, the step size of the theory, and the gap to the best loss that it allows after a step."""
    problem = LeastSquares.random(seed=seed)
    lowest, highest = problem.extremes
    assert lowest > 0
    lr = ef21_step_size(problem.smoothness, 3 / 12, joint_smoothness=highest)
    assert lr > ef21_step_size(problem.smoothness, 3 / 12, joint_smoothness=highest, mean="quadratic")
    first = problem.loss(np.zeros(12)) - problem.loss(problem.solution)
    # 2106.05203, PL: (1 - gamma mu)^t times the first Lyapunov value; its second term is of the first's order
    return problem, lr, lambda step: 10 * first * (1 - lr * lowest) ** step


@pytest.mark.parametrize("seed", range(2))
def test_the_error_of_the_plain_loop_falls_linearly_with_the_step_size_of_the_theory(seed):
    problem, lr, most = theory(seed)
    points = plain_loop(problem, lr=lr, steps=250, count=3)
    for t in range(50, 250, 50):
        assert problem.loss(points[t]) - problem.loss(problem.solution) <= most(t)


@pytest.mark.no_cover  # hundreds of steps through the lines that a few steps of the other tests trace
def test_the_error_falls_linearly_with_the_step_size_of_the_theory():
    problem, lr, most = theory(0)
    points = solve(problem, ef21(codec=top_k(density=3 / 12, **EXACT)), lr=lr, steps=151)
    for t in (50, 100, 150):
        assert problem.loss(points[t]) - problem.loss(problem.solution) <= most(t) + 1e-6 * most(0)


@pytest.mark.no_cover
def test_partial_participation_still_converges():
    problem = LeastSquares.random()
    method = ef21(codec=top_k(density=3 / 12, **EXACT), participation=0.5)
    points = solve(problem, method, lr=ef21_step_size(problem.smoothness, 3 / 12), steps=400)
    best = problem.loss(problem.solution)
    gaps = [problem.loss(x) - best for x in (np.zeros(12), points[199], points[399])]
    assert gaps[2] < 1e-2 * gaps[0]
    assert gaps[2] < 0.5 * gaps[1], "the error goes on falling: absent replicas leave no bias"


def test_the_step_size_is_that_of_the_papers():
    # n = 4, L = (1, 1, 1, 100), alpha = 1 - 1/4: xi = (1/2) / (1/2) = 1
    assert ef21_step_size([1, 1, 1, 100], 0.75) == pytest.approx(1 / (2 * 25.75))
    assert ef21_step_size([1, 1, 1, 100], 0.75, mean="quadratic") == pytest.approx(1 / (25.75 + 10003**0.5 / 2))
    assert ef21_step_size([2.0], 1.0) == 0.5
    alpha = 0.01
    xi = (1 + (1 - alpha) ** 0.5) / alpha - 1
    assert ef21_step_size([3.0], alpha, joint_smoothness=1) == pytest.approx(1 / (1 + 3 * xi))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ef21_step_size([], 0.5), "smoothness must be positive"),
        (lambda: ef21_step_size([1, -1], 0.5), "smoothness must be positive"),
        (lambda: ef21_step_size([1], 0), r"contraction must be in \(0, 1\], got 0"),
        (lambda: ef21_step_size([1], 0.5, mean="median"), "'arithmetic' or 'quadratic'"),
        (lambda: ef21_step_size([1], 0.5, joint_smoothness=0.0), "joint_smoothness must be positive"),
        (lambda: ef21(momentum=1.0), r"momentum must be in \[0, 1\)"),
        (lambda: ef21(participation=0.0), r"probability must be in \(0, 1\], got 0"),
        (lambda: ef21(codec=random_k(scale=True)), "scale=False, or top_k"),
    ],
)
def test_a_bad_argument_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_momentum_in_what_is_sent_refuses_momentum_in_the_inner_optimizer():
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="apply it twice"):
        thinwire.DistributedOptimizer(model, inner, method=ef21(momentum=0.9))
