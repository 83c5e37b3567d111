"""Several optimizers of one model step, save and load as one."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import thinwire
from tests.reference.small_models import build, loss_of
from thinwire.methods import muloco
from thinwire.training.build import check, make_inner_optimizer
from thinwire.training.config import TrainConfig, resolve
from thinwire.transport.loopback import LoopbackTransport
from thinwire.workloads.language import workload as language


def parts_of(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


def train(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> list[torch.Tensor]:
    for step in steps:
        loss_of(model, step=step, replica=0).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_it_steps_as_its_parts_do_and_goes_on_from_its_state() -> None:
    apart, joint = build("transformer"), build("transformer")
    expected = train(apart, parts_of(apart), range(1, 9))
    joined = thinwire.MultiOptimizer(parts_of(joint))
    train(joint, [joined], range(1, 5))
    saved = copy.deepcopy((joint.state_dict(), joined.state_dict()))
    again = build("transformer", seed=3)
    resumed = thinwire.MultiOptimizer(parts_of(again))
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for model, optimizer in ((joint, joined), (again, resumed)):
        found = train(model, [optimizer], range(5, 9))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_scheduler_reaches_all_parts_and_a_closure_runs_once() -> None:
    model = build("transformer")
    joined = thinwire.MultiOptimizer(parts_of(model))
    scheduler = torch.optim.lr_scheduler.LambdaLR(joined, lambda step: 0.5**step)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        joined.zero_grad()
        loss = loss_of(model, step=1, replica=0)
        loss.backward()
        return loss

    assert float(joined.step(closure)) > 0 and len(calls) == 1
    scheduler.step()
    assert [part.param_groups[0]["lr"] for part in joined.parts] == [0.005, 0.005]


def test_parameters_in_two_parts_and_later_groups_are_refused() -> None:
    model = build("transformer")
    matrices, others = parts_of(model)
    everything, some = torch.optim.SGD(model.parameters(), lr=1), list(model.parameters())[3:7]
    num_parameters = len(list(model.parameters()))
    for second, num_shared in ((everything, num_parameters), (torch.optim.SGD(some, lr=1), 4)):
        with pytest.raises(ValueError) as found:
            thinwire.MultiOptimizer([matrices, others, second])
        assert str(found.value) == (
            f"{num_shared} of {num_parameters} parameters are given more than once, and would be stepped as often; "
            f"leave each in one part alone, such as matrices in Muon's and all others in AdamW's"
        )
    for parts in ([], [torch.optim.SGD([{"params": []}], lr=1)]):
        with pytest.raises(ValueError, match=f"{len(parts)} parts hold no parameter; give at least one optimizer"):
            thinwire.MultiOptimizer(parts)
    joined = thinwire.MultiOptimizer(parts_of(model))
    with pytest.raises(ValueError, match="takes no more groups"):
        joined.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


def test_muon_gets_the_blocks_matrices_and_adamw_all_else() -> None:
    model = build("transformer")
    config = TrainConfig.of(inner_optimizer="muon", lr=0.01)
    inner = make_inner_optimizer(config, model)
    assert isinstance(inner, thinwire.MultiOptimizer)
    muon, adamw = inner.parts
    assert isinstance(muon, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)
    hidden = {id(p) for group in muon.param_groups for p in group["params"]}
    names = [name for name, p in model.named_parameters() if id(p) in hidden]
    assert names and all("embed" not in name and "head" not in name for name in names)
    everything = {id(p) for group in inner.param_groups for p in group["params"]}
    assert everything == {id(p) for p in model.parameters()}


def test_muon_is_refused_where_no_block_has_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = (
        "--inner-optimizer muon is for matrices of a model's blocks, and --model nano has none; got 4 trained "
        "tensors in blocks, none of two dimensions; allowed adamw, adam or sgd; try --inner-optimizer adamw"
    )
    config = resolve(TrainConfig.of(inner_optimizer="muon"), world_size=None, cores=1, home=Path("/home/someone"))
    with pytest.raises(ValueError) as found:
        make_inner_optimizer(config, build("conv"))
    assert str(found.value) == reason
    # its stages are of one class twice, a convolution: kernels of four dimensions, and a matrix in the head alone
    assert [p.ndim for p in build("conv").parameters()] == [4, 1, 1, 1, 4, 1, 1, 1, 2, 1]
    check(config)
    monkeypatch.setattr(language, "make_model", lambda *_, **__: build("conv"))
    with pytest.raises(ValueError, match=r"none of two dimensions; .*; try --inner-optimizer adamw"):
        check(config)  # before a worker starts
    check(config.replace(inner_optimizer="adamw"))


@pytest.mark.parametrize("inner_optimizer", ["adamw", "muon"])
def test_vectors_do_not_decay_and_frozen_parameters_are_in_no_group(inner_optimizer: str) -> None:
    model = build("transformer")
    frozen = model.get_parameter("blocks.0.mlp.0.weight")
    frozen.requires_grad_(False)
    inner = make_inner_optimizer(TrainConfig.of(inner_optimizer=inner_optimizer, lr=0.01, weight_decay=0.1), model)
    decay = {id(p): group["weight_decay"] for group in inner.param_groups for p in group["params"]}
    assert decay == {id(p): 0.1 if p.ndim >= 2 else 0.0 for p in model.parameters() if p is not frozen}


def test_muloco_with_muon_inside_trains_replicas_that_agree() -> None:
    def replica_main(transport: LoopbackTransport) -> list[torch.Tensor]:
        model = build("transformer")
        inner = thinwire.MultiOptimizer(parts_of(model))
        optimizer = thinwire.DistributedOptimizer(model, inner, method=muloco(sync_interval=3), transport=transport)
        for step in range(1, 10):
            loss_of(model, step=step, replica=transport.replica).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close(final_exchange=True)
        return [p.detach().clone() for p in model.parameters()]

    first, *others = thinwire.run_replicas(3, replica_main)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
