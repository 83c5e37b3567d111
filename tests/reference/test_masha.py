"""MASHA1 and MASHA2 against plain loops, on the bilinear problem of their paper, and through closures of all kinds."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import thinwire
from tests.reference.convex_problems import LeastSquares, Saddle, top
from thinwire.codecs import by_name, float32, random_k, sign, top_k
from thinwire.errors import CheckpointError, DesyncError, NonFiniteError
from thinwire.methods import masha1, masha2
from thinwire.shared_random import derive_seed
from thinwire.sync.schedule import RandomRefresh

DENSITY = 0.3
TOP = top_k(density=DENSITY, values="float32")
RANDOM = random_k(density=DENSITY, values="float32", scale=True)
OPTIONS = {"refresh_probability": DENSITY, "ascent": ("high",), "seed": 4}
METHODS = {
    "masha1": lambda: masha1(codec=RANDOM, **OPTIONS),
    "masha1 both ways": lambda: masha1(codec=RANDOM, server_codec=RANDOM, **OPTIONS),
    "masha2": lambda: masha2(codec=TOP, **OPTIONS),
    "masha2 both ways": lambda: masha2(codec=TOP, server_codec=TOP, **OPTIONS),
}


def wrap(problem, transport, method, *, lr):
    model = problem.model()
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    return model, thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)


def closure_of(problem, model, optimizer, replica):
    def closure():
        optimizer.zero_grad()
        loss = problem.loss_of(model, replica)
        loss.backward()
        return loss

    return closure


def point_of(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double().numpy().copy()


def solve(problem, method, *, lr, steps):
    """Return the points after each step, the same on all replicas."""

    def replica_main(transport):
        model, optimizer = wrap(problem, transport, method, lr=lr)
        closure, points = closure_of(problem, model, optimizer, transport.replica), []
        for _ in range(steps):
            optimizer.step(closure)
            points.append(point_of(model))
        return np.array(points)

    results = thinwire.run_replicas(len(problem.matrices), replica_main)
    for other in results[1:]:
        assert np.array_equal(results[0], other)
    return results[0]


def gamma_of(problem):
    return np.sqrt(DENSITY) / (2 * problem.smoothness)


def plain_masha2(problem, *, lr, steps, count, coins, both_ways):
    """Run the paper's loop in float64; the refresh is done at the end of a step."""
    replicas, size = len(problem.matrices), 2 * problem.dim
    z, w, e, e_server = np.zeros(size), np.zeros(size), np.zeros((replicas, size)), np.zeros(size)
    at_w = np.array([problem.operator(m, w) for m in range(replicas)])
    points = []
    for step in range(1, steps + 1):
        half = (1 - DENSITY) * z + DENSITY * w - lr * at_w.mean(0)
        sent = []
        for m in range(replicas):
            wanted = lr * (problem.operator(m, half) - at_w[m]) + e[m]
            sent.append(top(wanted, count))
            e[m] = wanted - sent[-1]
        move = np.mean(sent, axis=0)
        if both_ways:
            wanted = move + e_server
            move = top(wanted, count)
            e_server = wanted - move
        z = half - move
        if coins(step):
            w = z
            at_w = np.array([problem.operator(m, w) for m in range(replicas)])
        points.append(z)
    return np.array(points)


@pytest.mark.parametrize("both_ways", [False, True])
def test_masha2_follows_the_plain_loop(both_ways):
    problem = Saddle.random()
    steps, lr = 60, gamma_of(problem)
    schedule = RandomRefresh(probability=DENSITY, seed=4)

    def coins(step):
        return any(round.channel == 1 for round in schedule.launches(step + 1, num_fragments=1))

    method = METHODS["masha2 both ways" if both_ways else "masha2"]()
    expected = plain_masha2(problem, lr=lr, steps=steps, count=6, coins=coins, both_ways=both_ways)
    # float32 against float64
    np.testing.assert_allclose(solve(problem, method, lr=lr, steps=steps), expected, rtol=1e-4, atol=1e-5)


def test_masha1_follows_the_plain_loop():
    problem = Saddle.random(replicas=3)
    steps, lr, size = 40, gamma_of(problem), 2 * problem.dim
    schedule = RandomRefresh(probability=DENSITY, seed=4)

    def sent(m, step, change):
        seed = derive_seed(0, "round", 2 * step - 1, m)
        return RANDOM.decode(RANDOM.encode(torch.from_numpy(change), seed=seed), numel=size).double().numpy()

    z, expected = np.zeros(size), []
    for step in range(1, steps + 1):
        if len(schedule.launches(step, num_fragments=1)) == 2:
            w = z
            at_w = np.array([problem.operator(m, w) for m in range(3)])
        half = (1 - DENSITY) * z + DENSITY * w - lr * at_w.mean(0)
        z = half - lr * np.mean([sent(m, step, problem.operator(m, half) - at_w[m]) for m in range(3)], axis=0)
        expected.append(z)
    np.testing.assert_allclose(solve(problem, METHODS["masha1"](), lr=lr, steps=steps), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [masha1, masha2])
def test_without_compression_and_with_a_refresh_at_every_step_it_is_the_extragradient_method(make):
    problem = Saddle.random(replicas=3)
    method = make(codec=float32(), ascent=("high.point",))
    assert method.schedule.probability == 1
    lr, steps = 0.5 / problem.smoothness, 40
    z, expected = np.zeros(2 * problem.dim), []
    for _ in range(steps):
        half = z - lr * np.mean([problem.operator(m, z) for m in range(3)], axis=0)
        z = z - lr * np.mean([problem.operator(m, half) for m in range(3)], axis=0)
        expected.append(z)
    np.testing.assert_allclose(solve(problem, method, lr=lr, steps=steps), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.no_cover  # thousands of steps through the lines that a dozen steps of the other tests trace
@pytest.mark.parametrize("name", METHODS)
def test_the_error_falls_linearly_on_the_bilinear_problem_of_the_paper(name):
    problem = Saddle.random()
    # random-k both ways has the variance of both: the theory's step size shrinks with it
    lr = gamma_of(problem) * (0.5 if name == "masha1 both ways" else 1)
    points = solve(problem, METHODS[name](), lr=lr, steps=201)
    errors = np.linalg.norm(points - problem.solution, axis=1) / np.linalg.norm(problem.solution)
    for t in range(0, 200, 100):  # the same factor in each stretch, until float32 ends it
        assert errors[t + 100] < 0.55 * errors[t] or errors[t + 100] < 1e-5


@pytest.mark.no_cover
def test_it_solves_a_minimisation_too():
    problem = LeastSquares.random(replicas=3, rows=12)
    lr = np.sqrt(DENSITY) / (2 * max(problem.smoothness))
    points = solve(problem, masha2(codec=TOP, refresh_probability=DENSITY), lr=lr, steps=200)
    best = problem.loss(problem.solution)
    assert problem.loss(points[-1]) - best < 0.05 * (problem.loss(np.zeros(12)) - best)


@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_ends_with_the_bits_of_one_never_stopped(name):
    problem = Saddle.random(replicas=3)

    def replica_main(transport):
        model, optimizer = wrap(problem, transport, METHODS[name](), lr=0.1)
        closure, saved = closure_of(problem, model, optimizer, transport.replica), []
        for step in range(1, 13):
            optimizer.step(closure)
            if step % 3 == 0:
                saved.append((step, copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())))
        unbroken = point_of(model)
        for step, state, values in saved:
            model, optimizer = wrap(problem, transport, METHODS[name](), lr=0.1)
            model.load_state_dict(values)
            optimizer.load_state_dict(state)
            closure = closure_of(problem, model, optimizer, transport.replica)
            for _ in range(step, 12):
                optimizer.step(closure)
            assert np.array_equal(point_of(model), unbroken), step
        return unbroken

    thinwire.run_replicas(3, replica_main)


def test_a_failed_exchange_leaves_the_parameters_as_they_were():
    problem = Saddle.random(replicas=2)

    def replica_main(transport):
        model, optimizer = wrap(problem, transport, METHODS["masha2"](), lr=0.1)
        closure = closure_of(problem, model, optimizer, transport.replica)
        for _ in range(3):
            optimizer.step(closure)
        before = point_of(model)
        transport.tamper = lambda message: None
        with pytest.raises(thinwire.ThinwireError):
            optimizer.step(closure)
        return np.array_equal(before, point_of(model))

    assert thinwire.run_replicas(2, replica_main) == [True, True]


def test_an_error_in_the_closure_leaves_the_parameters_as_they_were():
    problem = Saddle.random(replicas=1)
    model, optimizer = wrap(problem, None, METHODS["masha2"](), lr=0.1)
    closure = closure_of(problem, model, optimizer, 0)
    optimizer.step(closure)
    before, calls = point_of(model), []

    def failing():
        calls.append(0)
        if len(calls) == 2:
            raise KeyError("no batch")
        return closure()

    with pytest.raises(KeyError, match="no batch"):
        optimizer.step(failing)
    assert np.array_equal(before, point_of(model))


def test_replicas_that_hold_other_parameters_are_named():
    problem = Saddle.random(replicas=3)

    def replica_main(transport):
        model, optimizer = wrap(problem, transport, METHODS["masha2"](), lr=0.01)
        closure = closure_of(problem, model, optimizer, transport.replica)
        for step in range(51):
            if step == 40 and transport.replica == 1:
                with torch.no_grad():
                    model.low.point[0] += 1e-3
            optimizer.step(closure)

    with pytest.raises(DesyncError, match="replica 1 disagrees with the others"):
        thinwire.run_replicas(3, replica_main)


def test_a_gradient_that_is_not_finite_names_its_replica():
    problem = Saddle.random(replicas=2)

    def replica_main(transport):
        model, optimizer = wrap(problem, transport, METHODS["masha1"](), lr=0.1)
        closure = closure_of(problem, model, optimizer, transport.replica)

        def broken():
            loss = closure()
            if transport.replica == 1:
                model.low.point.grad.fill_(float("nan"))
            return loss

        optimizer.step(broken)

    with pytest.raises(NonFiniteError, match="replica 1 sent NaN or infinity"):
        thinwire.run_replicas(2, replica_main)


def test_a_step_without_closure_is_refused_with_what_to_do():
    problem = Saddle.random(replicas=1)
    model, optimizer = wrap(problem, None, masha1(), lr=0.1)
    problem.loss_of(model, 0).backward()
    optimizer.average_gradients()  # one loop serves all methods
    with pytest.raises(ValueError, match=r"masha1 asks for gradients at points of its own choice.*step\(closure\)"):
        optimizer.step()
    assert optimizer.steps_done == 0


def test_the_closure_returns_through_step_and_is_called_twice_a_step():
    problem = Saddle.random(replicas=1)
    model, optimizer = wrap(problem, None, masha1(codec=RANDOM, **OPTIONS), lr=0.1)
    closure, calls = closure_of(problem, model, optimizer, 0), []

    def counting():
        calls.append(torch.is_grad_enabled())
        return closure()

    assert optimizer.step(counting).requires_grad
    optimizer.step(counting)
    assert calls == [True] * 4
    optimizer.close(final_exchange=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: masha1(codec=TOP), r"top-k is biased.*random_k\(scale=True\)"),
        (lambda: masha1(server_codec=random_k()), "random-k is biased"),
        (lambda: masha1(codec=sign()), "sign is biased"),
        (lambda: masha2(codec=RANDOM), "scale=False"),
        (lambda: masha2(server_codec=RANDOM), "scale=False"),
        (lambda: masha1(refresh_probability=0.0), r"refresh_probability must be in \(0, 1\], got 0.0"),
        (lambda: masha2(refresh_probability=1.5), "got 1.5"),
    ],
)
def test_a_bad_argument_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_ascent_that_names_nothing_is_refused():
    model = Saddle.random(replicas=1).model()
    with pytest.raises(ValueError, match="ascent names 'hig', but the model has no trainable parameter"):
        thinwire.DistributedOptimizer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), method=masha1(ascent=("hig",))
        )


def test_a_checkpoint_of_another_method_does_not_fit():
    problem = Saddle.random(replicas=1)
    _, optimizer = wrap(problem, None, masha1(), lr=0.1)
    state = copy.deepcopy(optimizer.state_dict())
    state["sync"]["update"] = {}
    with pytest.raises(CheckpointError, match="keeps nothing here, this run mean, reference"):
        optimizer.load_state_dict(state)


def test_a_stochastic_code_goes_with_masha1_and_refreshes_cost_as_much_as_the_rest():
    method = masha1(codec=by_name("e3m0-stochastic"))
    assert method.schedule.probability == pytest.approx(4.125 / 32)
    assert method.update(2).present_weight == 1 - method.schedule.probability
