"""The wrapped optimizer behaves as an optimizer in everything a training loop does with one."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import warnings

import pytest
import torch
from live_processes import DEADLINE_S
from torch import nn

import thinwire
from tests.reference.loops import same, steps, values, wrap
from tests.reference.small_models import build, loss_of
from thinwire.errors import CheckpointError, DeadlineExceeded
from thinwire.methods import all_reduce, diloco, sparse_loco, streaming_diloco
from thinwire.sync.missing_steps import MissingStepsWarning

METHODS = {
    "all-reduce": all_reduce,
    "diloco": lambda: diloco(sync_interval=3),
    "streaming": lambda: streaming_diloco(sync_interval=4, overlap_steps=2, layers_per_fragment=2),
}
INNER = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adamw capturable": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("inner", INNER)
def test_any_inner_optimizer_trains_and_replicas_agree(method, inner):
    def replica_main(transport):
        model = build("transformer")
        before = values(model)
        optimizer = wrap(model, transport, METHODS[method](), INNER[inner](model.parameters()))
        steps(model, optimizer, 9, replica=transport.replica)
        optimizer.close()
        with optimizer.global_parameters():
            assert not same(before, values(model))
            return values(model)

    one, other = thinwire.run_replicas(2, replica_main)
    assert same(one, other)


def test_muon_inside_with_adamw_for_the_rest_is_one_optimizer_a_wrap():
    def replica_main(transport):
        model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))
        optimizer = wrap(model, transport, METHODS["streaming"](), torch.optim.Muon(model.parameters(), lr=0.02))
        for step in range(9):
            generator = torch.Generator().manual_seed(step * 2 + transport.replica)
            model(torch.randn(5, 6, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        with optimizer.global_parameters():
            return values(model)

    one, other = thinwire.run_replicas(2, replica_main)
    assert same(one, other)


def test_it_is_an_optimizer_and_shares_groups_and_state_with_the_inner_one():
    model = build("linear")
    inner = torch.optim.AdamW([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}])
    optimizer = wrap(model, None, diloco(sync_interval=2), inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    optimizer.param_groups[1]["lr"] = 0.3
    assert inner.param_groups[1]["lr"] == 0.3
    steps(model, optimizer, 1)
    assert optimizer.state[model.weight] is inner.state[model.weight]


@pytest.mark.parametrize("method", METHODS)
def test_a_scheduler_on_the_wrapper_sets_the_inner_learning_rate(method):
    model = build("linear")
    optimizer = wrap(model, None, METHODS[method]())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(model, optimizer, 3, scheduler=scheduler)
    assert optimizer.inner.param_groups[0]["lr"] == pytest.approx(0.05 / 4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("unscales_first", [False, True])
def test_a_step_that_a_grad_scaler_skips_on_one_replica_keeps_the_schedules_together(method, unscales_first):
    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, METHODS[method]())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
        skipped = 0
        for step in range(1, 13):
            scaler.scale(loss_of(model, step=step, replica=transport.replica)).backward()
            if step == 5 and transport.replica == 1:
                model.weight.grad[0, 0] = torch.inf
            if unscales_first:
                scaler.unscale_(optimizer)
            before = values(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            skipped += step == 5 and same(before, values(model))
        assert optimizer.steps_done == 12
        optimizer.close()
        with optimizer.global_parameters():
            return values(model), optimizer.statistics.rounds_applied, scaler.get_scale()

    (one, rounds_one, _), (other, rounds_other, scale) = thinwire.run_replicas(2, replica_main)
    assert rounds_one == rounds_other > 0
    assert scale == 4.0
    assert same(one, other)
    assert all(torch.isfinite(v).all() for v in one)


def test_scaled_gradients_give_the_same_step_as_unscaled_ones():
    results = []
    for scale in (None, 64.0):
        model = build("linear")
        optimizer = wrap(model, None, diloco(sync_interval=2))
        for step in range(1, 6):
            loss = loss_of(model, step=step, replica=0)
            if scale is None:
                loss.backward()
                optimizer.step()
            else:
                scaler = torch.amp.GradScaler("cpu", init_scale=scale)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
            optimizer.zero_grad()
        results.append(values(model))
    assert same(*results)


def test_gradient_accumulation_counts_steps_not_backward_passes():
    model = build("linear")
    optimizer = wrap(model, None, diloco(sync_interval=2))
    for step in range(1, 9):
        loss_of(model, step=step, replica=0).backward()
        if step % 2 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.steps_done == 4
    assert optimizer.statistics.rounds_applied == 2


@pytest.mark.parametrize("method", METHODS)
def test_a_closure_is_called_with_gradients_and_its_loss_comes_back(method):
    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, METHODS[method]())
        losses = []
        for step in range(1, 7):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, step=step, replica=transport.replica)
                loss.backward()
                return loss.detach()

            losses.append(float(optimizer.step(closure)))
        optimizer.close()
        with optimizer.global_parameters():
            return losses, values(model)

    (losses, one), (_, other) = thinwire.run_replicas(2, replica_main)
    assert len(losses) == 6
    assert same(one, other)


def test_an_inner_optimizer_that_calls_its_closure_several_times_gets_mean_gradients_each_time():
    def replica_main(transport):
        model = build("linear")
        inner = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, tolerance_grad=0, tolerance_change=0)
        optimizer = wrap(model, transport, all_reduce(), inner)
        for step in range(1, 4):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, step=step, replica=transport.replica)
                loss.backward()
                return loss.detach()

            optimizer.step(closure)
        return values(model)

    one, other = thinwire.run_replicas(2, replica_main)
    assert same(one, other)


@pytest.mark.parametrize("has_scaler", [False, True])
def test_gradients_averaged_before_clipping_are_clipped_as_one_processs_would_be(has_scaler):
    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, all_reduce())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=has_scaler)
        for step in range(1, 5):
            scaler.scale(loss_of(model, step=step, replica=transport.replica)).backward()
            scaler.unscale_(optimizer)
            optimizer.average_gradients()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert optimizer.statistics.rounds_applied == 4, "step() does not average a second time"
        return values(model)

    model = build("linear")
    reference = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(1, 5):
        (sum(loss_of(model, step=step, replica=r) for r in range(2)) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        reference.step()
        reference.zero_grad()
    for result in thinwire.run_replicas(2, replica_main):
        for one, other in zip(result, values(model), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_averaging_gradients_twice_a_step_is_refused_and_does_nothing_for_other_methods():
    model = build("linear")
    optimizer = wrap(model, None, all_reduce())
    loss_of(model, step=1, replica=0).backward()
    optimizer.average_gradients()
    with pytest.raises(RuntimeError, match="twice"):
        optimizer.average_gradients()
    other = wrap(model, None, diloco())
    other.average_gradients()
    other.average_gradients()


def test_adding_a_group_while_replicas_train_is_refused_with_the_remedy():
    optimizer = wrap(build("linear"), None, diloco())
    with pytest.raises(ValueError, match="before it is wrapped"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_wrapping_twice_and_foreign_parameters_are_refused():
    model = build("linear")
    optimizer = wrap(model, None, diloco())
    with pytest.raises(ValueError, match="already"):
        wrap(model, None, diloco(), optimizer)
    with pytest.raises(ValueError, match="holds 1 parameters that are not the model's"):
        wrap(model, None, diloco(), torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1))


def test_global_parameters_are_put_in_place_and_local_ones_come_back_bit_for_bit():
    model = build("transformer").to(torch.bfloat16)
    optimizer = wrap(model, None, diloco(sync_interval=4))
    at_start = values(model)
    steps(model, optimizer, 3)
    local = values(model)
    with optimizer.global_parameters():
        assert same(values(model), at_start)
        with pytest.raises(RuntimeError, match="leave the with block"):
            optimizer.step()
    assert same(values(model), local)
    with pytest.raises(KeyError), optimizer.global_parameters():
        raise KeyError
    assert same(values(model), local), "an error inside must not leave the global values behind"
    steps(model, optimizer, 1, start=3)


def test_close_flushes_rounds_in_flight_and_ends_training():
    def replica_main(transport):
        model = build("transformer")
        optimizer = wrap(model, transport, streaming_diloco(sync_interval=6, overlap_steps=5, layers_per_fragment=2))
        steps(model, optimizer, 9, replica=transport.replica)
        assert len(optimizer.rounds_in_flight) > 1
        optimizer.close()
        optimizer.close()
        assert optimizer.rounds_in_flight == ()
        assert optimizer.statistics.rounds_applied == optimizer.statistics.rounds_launched
        with pytest.raises(RuntimeError, match="after close"):
            optimizer.step()

    thinwire.run_replicas(2, replica_main)


def test_a_with_block_ends_with_the_final_exchange_and_nothing_is_missing():
    def replica_main(transport):
        model = build("linear")
        with wrap(model, transport, diloco(sync_interval=100)) as optimizer:
            steps(model, optimizer, 6, replica=transport.replica)
        with pytest.raises(RuntimeError, match="after close"):
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with optimizer.global_parameters():
                return values(model)

    one, other = thinwire.run_replicas(2, replica_main)
    assert same(one, other) and not same(one, values(build("linear")))


class Nobody:
    """A transport to a peer that never answers, driven in the background as a process group is."""

    runs_in_background, replica, num_replicas = True, 0, 2

    def send(self, payload, *, to, envelope):
        return self

    def receive(self, *, source, envelope):
        return self

    def done(self):
        return False

    def wait(self, *, deadline_s):
        raise DeadlineExceeded("nobody is there")


def test_a_with_block_that_raises_does_not_wait_for_the_others_and_gives_its_own_error(monkeypatch):
    monkeypatch.setattr("thinwire.sync.optimizer.handshake", lambda *_, **__: None)
    model = build("linear")
    method = streaming_diloco(sync_interval=4, overlap_steps=3)
    with pytest.raises(KeyError, match="the loop's own"), wrap(model, Nobody(), method) as optimizer:
        steps(model, optimizer, 5)
        assert optimizer.rounds_in_flight
        raise KeyError("the loop's own")
    assert optimizer.rounds_in_flight, "a round was waited for"
    with pytest.raises(RuntimeError, match="after close"):
        optimizer.step()


def test_steps_that_are_missing_in_the_global_parameters_are_counted_in_one_warning():
    model = build("linear")
    optimizer = wrap(model, None, diloco(sync_interval=10))
    steps(model, optimizer, 13)
    expected = r"^3 of 13 local steps are not in the global parameters; call close\(final_exchange=True\)"
    with pytest.warns(MissingStepsWarning, match=expected) as caught, optimizer.global_parameters():
        pass
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer.global_parameters():
            pass


@pytest.mark.parametrize(("method", "count"), [(diloco(sync_interval=5), 10), (all_reduce(), 3)])
def test_nothing_is_missing_after_an_exchange_of_the_last_step(method, count):
    model = build("linear")
    optimizer = wrap(model, None, method)
    steps(model, optimizer, count)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer.global_parameters():
            pass


def test_an_evaluation_between_two_exchanges_may_lag():
    model = build("linear")
    optimizer = wrap(model, None, diloco(sync_interval=10))
    steps(model, optimizer, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer.global_parameters(may_lag=True):
            pass
    optimizer.close()
    with pytest.warns(MissingStepsWarning, match="^3 of 3 local steps"), optimizer.global_parameters():
        pass


AT_EXIT = """
# begins with torch loaded
import sys, thinwire, torch
model = torch.nn.Linear(2, 1)
optimizer = thinwire.DistributedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), method="diloco")
for _ in range(57):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "warns"),
    [("del optimizer", True), ("optimizer.close(final_exchange=True)", False), ("raise KeyError('mine')", False)],
)
def test_a_process_that_ends_with_steps_missing_says_so_once(end, warns):
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT.format(end=end)], capture_output=True, text=True, timeout=DEADLINE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stderr.count("57 of 57 local steps are not in the global parameters; call close(final_e") == warns
    assert ("KeyError" in done.stderr) == ("KeyError" in end)


def test_a_method_may_be_a_name_and_what_is_neither_is_refused_with_the_remedy():
    model = build("linear")
    for name in ("streaming-diloco", "streaming_diloco", "Local-SGD"):
        assert wrap(model, None, name).method.name == name.replace("_", "-").lower()
    with pytest.raises(ValueError, match=r"unknown method; got 'streeming-diloco'; allowed .*; try streaming-diloco"):
        wrap(model, None, "streeming-diloco")
    with pytest.raises(TypeError, match=r"method is no Method; got <function diloco.*try thinwire.methods.diloco\(\)"):
        wrap(model, None, diloco)
    with pytest.raises(TypeError, match="method is no Method; got 3"):
        wrap(model, None, 3)


def trained(kind, *, stop):
    """Return what two replicas hold after 20 steps, where they stop once and go on in new objects, or never (0)."""
    method = streaming_diloco(sync_interval=5, overlap_steps=(1, 4), layers_per_fragment=2)

    def replica_main(transport):
        model = build(kind)
        optimizer = wrap(model, transport, method, torch.optim.AdamW(model.parameters(), lr=1e-2))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        if stop:
            steps(model, optimizer, stop, replica=transport.replica, scheduler=scheduler)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
            model = build(kind, seed=99)  # nothing of the old objects is left
            optimizer = wrap(model, transport, method, torch.optim.AdamW(model.parameters(), lr=1e-2))
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            scheduler.load_state_dict(saved[2])
        steps(model, optimizer, 20 - stop, replica=transport.replica, start=stop, scheduler=scheduler)
        optimizer.close()
        with optimizer.global_parameters():
            return values(model) + list(model.buffers())

    return thinwire.run_replicas(2, replica_main)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shallow", "conv"])
def test_a_resumed_run_continues_bit_for_bit_at_every_phase_of_a_round(kind):
    straight = trained(kind, stop=0)
    for stop in range(5, 14):
        for one, other in zip(trained(kind, stop=stop), straight, strict=True):
            assert same(one, other), f"stopped after step {stop}"


def test_a_state_of_another_run_is_refused_with_a_remedy_that_works():
    def load(state, *, method=diloco, change=lambda state: None, model=None, **options):
        state = copy.deepcopy(state)
        change(state)
        model = build("linear") if model is None else model
        wrap(model, None, method(**options)).load_state_dict(state)

    def state_of(method, **options):
        model = build("linear")
        optimizer = wrap(model, None, method(**options))
        steps(model, optimizer, 3)
        return optimizer.state_dict()

    def change(key, value):
        return lambda state: state.update({key: value})

    state = state_of(diloco, sync_interval=3)
    for wrong, told in [
        ({"sync_interval": 4}, r"method is .*; adopt_state_dict\(\) goes on with other options"),
        ({"change": lambda state: state.clear()}, r"it lacks .*; load what its state_dict\(\) returned"),
        ({"change": change("version", 99)}, r"version 99; .*; resume with the thinwire that wrote it"),
        ({"model": nn.Linear(5, 5)}, r"fragment 0 has .* elements, this run's 30; resume with its model"),
        (
            {"change": lambda state: state["sync"]["global"].clear()},
            r"for 0 fragments, this run has 1; resume with its",
        ),
    ]:
        with pytest.raises(CheckpointError, match=told):
            load(state, **{"sync_interval": 3, **wrong})
    load(state, sync_interval=3)
    state = state_of(sparse_loco, sync_interval=3)
    vectors = next(iter(state["sync"]["exchanges"]["0"]["0"].values()))
    for wrong, told in [
        (lambda state: residuals(state).clear(), r"keeps nothing here, this run residual; resume with its method"),
        (
            lambda state: residuals(state).update({next(iter(vectors)): torch.zeros(1)}),
            r"has the shape \(1,\), .*; resume with",
        ),
    ]:
        with pytest.raises(CheckpointError, match=told):
            load(state, method=sparse_loco, sync_interval=3, change=wrong)
    load(state, method=sparse_loco, sync_interval=3)


def residuals(state):
    return next(iter(state["sync"]["exchanges"]["0"]["0"].values()))
