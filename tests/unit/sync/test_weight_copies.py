"""Inner optimizers with weights of their own: Schedule-Free and master weights train rightly, others are refused."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import thinwire
from thinwire.codecs import float32
from thinwire.methods import all_reduce, diloco, streaming_diloco
from thinwire.sync.outer_optimizer import PlainSGD
from thinwire.sync.weight_copies import copies_of

MEAN = diloco(sync_interval=5, codec=float32(), outer_optimizer=PlainSGD(lr=1.0))


class ScheduleFree(torch.optim.Optimizer):
    """SGD with the average of arXiv 2405.15682: the parameters are y in training mode, and x in evaluation mode."""

    def __init__(self, parameters, *, lr, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def _turn(self, weight, *, is_training):
        for group in self.param_groups:
            if group["train_mode"] != is_training:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.data.lerp_(self.state[parameter]["z"], weight(group["beta"]))
                group["train_mode"] = is_training

    def train(self):
        self._turn(lambda beta: 1 - beta, is_training=True)

    def eval(self):
        self._turn(lambda beta: 1 - 1 / beta, is_training=False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() first")
            share = 1 / (group["k"] + 1)
            for y in (p for p in group["params"] if p.grad is not None):
                state = self.state[y]
                if "z" not in state:
                    state["z"], state["seen"] = y.clone(), torch.zeros(())
                y.lerp_(state["z"], share)
                y.add_(y.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                state["z"].sub_(y.grad, alpha=group["lr"])
                state["seen"] += 1
            group["k"] += 1


class MastersInState(torch.optim.Optimizer):
    def __init__(self, parameters, *, lr):
        super().__init__(parameters, {"lr": lr})

    def master(self, parameter):
        return self.state[parameter].setdefault("master_param", parameter.detach().float().clone())

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                master = self.master(parameter)
                master.sub_(parameter.grad.float(), alpha=self.param_groups[0]["lr"])
                parameter.copy_(master)


class MastersInList(MastersInState):
    def __init__(self, parameters, *, lr):
        super().__init__(parameters, lr=lr)
        everything = [p for group in self.param_groups for p in group["params"]]
        self.order = {p: index for index, p in enumerate(everything)}
        self.groups_of_masters = [{"params": [p.detach().float().clone() for p in everything]}]

    def master(self, parameter):
        return self.groups_of_masters[0]["params"][self.order[parameter]]


class Lookahead(torch.optim.SGD):
    """Slow weights of arXiv 1907.08610, every so many steps."""

    def __init__(self, parameters, *, every=5):
        super().__init__(parameters, lr=0.1)
        self.every = every

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            slow = state.setdefault("slow", parameter.detach().clone())
            state["steps"] = state.get("steps", 0) + 1
            parameter.sub_(parameter.grad, alpha=0.1)
            if state["steps"] % self.every == 0:
                parameter.copy_(slow.lerp_(parameter, 0.5))


def scalar(value=0.0, *, dtype=torch.float32):
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def pull(optimizer, weight, *, to):
    optimizer.zero_grad()
    (weight - to).pow(2).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("is_joined", [False, True], ids=["alone", "in a MultiOptimizer"])
def test_schedule_free_replicas_share_both_sets_of_weights_and_evaluate_the_average(is_joined):
    def replica_main(transport):
        model = nn.ModuleList([scalar(), scalar()])
        weight = model[0].weight
        free = ScheduleFree(model[0].parameters() if is_joined else model.parameters(), lr=0.1)
        rest = [torch.optim.SGD(model[1].parameters(), lr=0.1)]
        inner = thinwire.MultiOptimizer([free, *rest]) if is_joined else free
        optimizer = thinwire.DistributedOptimizer(model, inner, method=MEAN, transport=transport)
        optimizer.train()
        for _ in range(200):  # the mean of the optima of both replicas is 2
            pull(optimizer, weight, to=1.0 + 2 * transport.replica)
        optimizer.close(final_exchange=True)
        y, z = weight.item(), free.state[weight]["z"].item()
        with optimizer.global_parameters():
            x = weight.item()
        assert weight.item() == y
        optimizer.eval()
        assert weight.item() == x
        with optimizer.global_parameters():
            assert weight.item() == pytest.approx(x, abs=1e-6)
        assert y == pytest.approx(0.1 * z + 0.9 * x, abs=1e-5)
        return x, y, z

    first, second = thinwire.run_replicas(2, replica_main)
    assert first == second
    assert all(value == pytest.approx(2.0, abs=0.1) for value in first)


def test_wrapping_leaves_a_schedule_free_optimizer_as_before_its_first_step():
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    inner, expected = ScheduleFree(model.parameters(), lr=0.1), ScheduleFree(plain.parameters(), lr=0.1)
    optimizer = thinwire.DistributedOptimizer(model, inner, method=MEAN)
    assert not inner.param_groups[0]["train_mode"]
    optimizer.train(), expected.train()
    for step in range(4):
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.grad = torch.full_like(parameter, float(step))
        optimizer.step(), expected.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(inner.state[one]["z"], expected.state[other]["z"])
        assert inner.state[one]["seen"] == expected.state[other]["seen"]


def test_a_schedule_free_run_resumes_with_the_same_bits_and_another_replica_adopts_its_global_values():
    def make(transport):
        model = scalar()
        inner = ScheduleFree(model.parameters(), lr=0.1)
        return model, thinwire.DistributedOptimizer(model, inner, method=MEAN, transport=transport)

    def replica_main(transport, *, stops):
        model, optimizer = make(transport)
        for step in range(14):
            if stops and step == 7:
                optimizer.eval()  # as its authors ask for before a checkpoint
                states = model.state_dict(), optimizer.state_dict()
                model, optimizer = make(transport)
                model.load_state_dict(states[0])
                optimizer.load_state_dict(states[1])
            optimizer.train()
            pull(optimizer, model.weight, to=1.0 + 2 * transport.replica)
        optimizer.close(final_exchange=True)
        return model.weight.item(), optimizer.state[model.weight]["z"].item(), optimizer.state_dict()

    whole = thinwire.run_replicas(2, lambda transport: replica_main(transport, stops=False))
    halves = thinwire.run_replicas(2, lambda transport: replica_main(transport, stops=True))
    for one, other in zip(whole, halves, strict=True):
        assert one[:2] == pytest.approx(other[:2], abs=1e-6)

    def alone(transport):
        model, optimizer = make(transport)
        weight, _, state = whole[transport.replica % 2]
        model.load_state_dict({"weight": torch.full((1, 1), weight)})
        if transport.replica == 2:
            state["state"][0]["z"] = torch.full((1, 1), 50.0)  # as another replica's own would be between two rounds
        optimizer.adopt_state_dict(state)
        optimizer.train()
        return model.weight.item(), optimizer.state[model.weight]["z"].item()

    assert thinwire.run_replicas(3, alone)[2] == pytest.approx(whole[0][:2], abs=1e-6)


@pytest.mark.parametrize("kind", [MastersInState, MastersInList])
@pytest.mark.parametrize("method", [MEAN, streaming_diloco(sync_interval=5, overlap_steps=1, codec=float32())])
def test_master_weights_follow_the_outer_step_in_float32(kind, method):
    def replica_main(transport):
        model = scalar(256.0 + transport.replica, dtype=torch.bfloat16)
        inner = kind(model.parameters(), lr=1.0)
        optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)
        for _ in range(10):  # one bfloat16 step at 256 is 2: only the masters see these moves
            model.weight.grad = torch.full_like(model.weight, -0.25 * (1 + transport.replica))
            optimizer.step()
        optimizer.close(final_exchange=True)
        with optimizer.global_parameters():
            pass
        return inner.master(model.weight).item(), model.weight.item()

    first, second = thinwire.run_replicas(2, replica_main)
    assert first == second
    if method is MEAN:
        assert first == (256.0 + 10 * 0.375, 260.0)


def test_masters_outside_of_the_state_follow_a_loaded_model():
    model = scalar(1.0, dtype=torch.bfloat16)
    optimizer = thinwire.DistributedOptimizer(model, MastersInList(model.parameters(), lr=1.0), method=MEAN)
    pull(optimizer, model.weight, to=0.0)
    states = model.state_dict(), optimizer.state_dict()
    again = scalar(7.0, dtype=torch.bfloat16)
    inner = MastersInList(again.parameters(), lr=1.0)
    resumed = thinwire.DistributedOptimizer(again, inner, method=MEAN)
    again.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    assert inner.master(again.weight).item() == again.weight.item() == -1.0


def test_weights_of_an_unknown_kind_are_refused_by_name_and_serve_where_gradients_travel():
    def wrapped(method, every):
        model = scalar()
        return thinwire.DistributedOptimizer(model, Lookahead(model.parameters(), every=every), method=method), model

    for every in (5, 10, 100):
        with pytest.raises(ValueError, match=r"Lookahead keeps weights of its own: .* 50% is left .* all_reduce\(\)"):
            wrapped(MEAN, every)
    with pytest.warns(UserWarning, match=r"Lookahead keeps copies of the weights \(slow\) that no exchange changes"):
        wrapped(MEAN, 10_000)
    optimizer, model = wrapped(all_reduce(), 10)
    pull(optimizer, model.weight, to=1.0)


def test_schedule_free_is_refused_where_replicas_that_join_fetch_one_set_of_weights():
    model, comes_and_goes = scalar(), SimpleNamespace(has_fixed_replicas=False)
    inner = ScheduleFree(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"ScheduleFree keeps a second set .* take torch.optim.AdamW"):
        thinwire.DistributedOptimizer(model, inner, method=MEAN, catch_up=comes_and_goes)


def test_an_optimizer_that_the_test_cannot_step_causes_one_warning():
    class Stubborn(torch.optim.SGD):
        def step(self, closure=None):
            raise OSError("only in its own process")

    model = scalar()
    with pytest.warns(UserWarning, match="Stubborn could not be tested .*only in its own process"):
        thinwire.DistributedOptimizer(model, Stubborn(model.parameters()), method=MEAN)


def test_a_momentum_beside_weights_of_one_is_no_copy_of_them(recwarn):
    model = torch.nn.LayerNorm(3, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    assert thinwire.run_replicas(
        1, lambda t: thinwire.DistributedOptimizer(model, inner, method=MEAN, transport=t).eval()
    ) == [None]
    assert not [one for one in recwarn if "copies" in str(one.message)]


def test_a_model_without_elements_needs_no_test():
    model = nn.Linear(0, 3, bias=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        thinwire.DistributedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), method=MEAN)


def everything_of_torch():
    names = set(torch.optim.__all__) & set(vars(torch.optim))
    kinds = [vars(torch.optim)[name] for name in sorted(names)]
    return [
        k for k in kinds if isinstance(k, type) and issubclass(k, torch.optim.Optimizer) and k.__name__ != "Optimizer"
    ]


@pytest.mark.parametrize("kind", everything_of_torch(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("has_stepped", [False, True], ids=["new", "stepped"])
def test_every_optimizer_of_torch_steps_the_parameters_themselves_and_is_not_touched(kind, has_stepped):
    model = nn.Linear(5, 3, bias=False)
    inner = kind(model.parameters(), lr=0.01)
    if has_stepped:
        gradient = torch.ones_like(model.weight)
        model.weight.grad = gradient.to_sparse(1) if kind is torch.optim.SparseAdam else gradient
        inner.step(lambda: torch.zeros(()))
    before, random = repr(inner.state_dict()), torch.get_rng_state()
    weight = model.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = copies_of(inner)
        found.check()
    assert not found.tensors()
    assert torch.equal(weight, model.weight) and repr(inner.state_dict()) == before
    assert torch.equal(random, torch.get_rng_state())
