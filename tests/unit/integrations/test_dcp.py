"""torch's checkpoint functions and storage with the optimizer of one replica, or of several in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import thinwire
from thinwire.errors import CheckpointError
from thinwire.integrations import dcp

INNER = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
}
METHODS = {
    "streaming": lambda: thinwire.methods.streaming_diloco(sync_interval=4, overlap_steps=2),
    "sparse": lambda: thinwire.methods.sparse_loco(sync_interval=3),
}


def build(transport: Any, inner: str = "adamw", method: str = "streaming", seed: int = 0) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2))
    return model, thinwire.DistributedOptimizer(
        model, INNER[inner](model.parameters()), method=METHODS[method](), transport=transport
    )


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + optimizer.transport.replica)
        model(torch.randn(4, 6, generator=generator)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("options", [{}, {"full_state_dict": True, "cpu_offload": True}], ids=["plain", "full"])
def test_torch_functions_carry_the_whole_state(inner: str, options: dict[str, bool]) -> None:
    def replica(transport: Any) -> bool:
        model, optimizer = build(transport, inner)
        train(model, optimizer, range(5))
        assert optimizer.rounds_in_flight
        settings = StateDictOptions(**options)
        states = (
            {name: tensor.clone() for name, tensor in get_model_state_dict(model, options=settings).items()},
            get_optimizer_state_dict(model, optimizer, options=settings),
        )
        torch.save(states[1], file := Path(f"{folder}/{transport.replica}.pt"))
        expected = train(model, optimizer, range(5, 11))
        other, resumed = build(transport, inner, seed=7)
        set_model_state_dict(other, states[0])
        set_optimizer_state_dict(other, resumed, torch.load(file, weights_only=True))
        assert resumed.steps_done == 5
        optimizer.abandon()
        found = train(other, resumed, range(5, 11))
        resumed.abandon()
        return found == expected

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        assert thinwire.run_replicas(2, replica) == [True, True]


@pytest.mark.parametrize("inner", INNER)
def test_making_the_state_of_a_fresh_optimizer_is_no_step(inner: str) -> None:
    model, optimizer = build(None, inner)
    before = [parameter.clone() for parameter in model.parameters()]
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.steps_done == 0 and optimizer.statistics.rounds_launched == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.param_groups[0]["lr"] > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_saved_replica_goes_on_bit_for_bit(method: str, tmp_path: Path) -> None:
    def replica(transport: Any) -> bool:
        model, optimizer = build(transport, method=method)
        train(model, optimizer, range(5))
        dcp.save(tmp_path, model, optimizer)
        expected = train(model, optimizer, range(5, 11))
        other, resumed = build(transport, method=method, seed=7)
        assert dcp.load(tmp_path, other, resumed) == ()
        optimizer.abandon()
        found = train(other, resumed, range(5, 11))
        resumed.abandon()
        return found == expected

    assert thinwire.run_replicas(2, replica) == [True, True]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_replicas_takes_the_global_values_over(before: int, after: int, tmp_path: Path) -> None:
    def global_values(model: nn.Module, optimizer: Any) -> list[float]:
        with optimizer.global_parameters(may_lag=True):
            return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]

    def first(transport: Any) -> list[float]:
        model, optimizer = build(transport)
        train(model, optimizer, range(5))
        dcp.save(tmp_path, model, optimizer)
        optimizer.abandon()
        return global_values(model, optimizer)

    def second(transport: Any) -> list[float]:
        model, optimizer = build(transport, seed=7)
        dcp.load(tmp_path, model, optimizer)
        assert optimizer.steps_done == 5
        found = global_values(model, optimizer)
        train(model, optimizer, range(5, 9))
        optimizer.abandon()
        return found

    expected = thinwire.run_replicas(before, first)
    assert thinwire.run_replicas(after, second) == [expected[0]] * after


def test_a_folder_without_a_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    model, optimizer = build(None)
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        dcp.load(tmp_path, model, optimizer)
    (tmp_path / "replica-0").mkdir()
    with pytest.raises(CheckpointError, match="holds no checkpoint of thinwire"):
        dcp.load(tmp_path, model, optimizer)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    model, optimizer = build(None)
    dcp.save(tmp_path, model, optimizer)
    other = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    foreign = thinwire.DistributedOptimizer(other, torch.optim.AdamW(other.parameters()), method="streaming-diloco")
    with pytest.raises(CheckpointError, match="does not fit this run: 'it lacks model/"):
        dcp.load(tmp_path, other, foreign)


def test_a_state_of_an_earlier_version_is_refused_with_what_to_do() -> None:
    _, optimizer = build(None)
    state = optimizer.state_dict() | {"version": 1}
    with pytest.raises(CheckpointError, match="version 1; this thinwire reads 2; resume with the thinwire that wrote"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("key", ["in_flight", "work", "global", "update", "exchanges"])
@pytest.mark.parametrize("take", ["load_state_dict", "adopt_state_dict"])
def test_a_state_that_lacks_a_key_is_refused_by_its_name(take: str, key: str) -> None:
    model, optimizer = build(None)
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    del state["sync"][key]
    with pytest.raises(CheckpointError, match=f"the state lacks '{key}'.*thinwire.integrations.dcp"):
        getattr(optimizer, take)(state)
