"""What every method promises: replicas agree, the loss falls, a resumed run is the same run, bytes stay in bounds."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

import thinwire
from tests.reference.loops import same, values, wrap
from tests.reference.small_models import build, loss_of
from thinwire.codecs import random_k, top_k
from thinwire.methods import RECIPES, recipe
from thinwire.transport.loopback import LoopbackTransport
from thinwire.transport.recording import RecordingTransport

# Arguments that let a method show all its phases within 12 steps, and its inner optimizer.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "local-sgd": {"sync_interval": 4},
    "diloco": {"sync_interval": 4},
    "streaming-diloco": {"sync_interval": 5, "overlap_steps": 3, "layers_per_fragment": 2},
    "iso-loco": {"sync_interval": 5, "overlap_steps": 3, "layers_per_fragment": 2, "outer_lr": 1.0},
    "pier": {"sync_interval": 3, "lazy_steps": 3, "total_steps": 12, "overlap_steps": 1, "layers_per_fragment": 2},
    "decoupled-diloco": {"sync_interval": 5, "overlap_steps": 3},
    "sparse-loco": {"sync_interval": 4, "k": 4, "chunk": 32},
    "streaming-sparse-loco": {"sync_interval": 5, "overlap_steps": 3, "k": 4, "chunk": 32, "layers_per_fragment": 2},
    "eager": {"sync_interval": 4},
    "muloco": {"sync_interval": 4},
    "slowmo": {"sync_interval": 4},
    "co2": {"sync_interval": 4},
    "noloco": {"sync_interval": 4},
    "power-sgd": {"rank": 2},
    "dgc": {"density": 0.1, "warmup_steps": 6, "clip_norm": 1.0, "nesterov": True},
    "one-bit-adam": {"warmup_steps": 5},
    "one-bit-lamb": {"warmup_steps": 10},
    "zero-one-adam": {"variance_steps": 6, "variance_updates": 2, "local_doubling_steps": 2, "max_local_steps": 4},
    "demo": {"k": 4, "chunk": 8},
    "ef21": {"codec": top_k(density=0.2)},
    "masha1": {"codec": random_k(density=0.5, scale=True)},
    "masha2": {"codec": top_k(density=0.5)},
    "dimat": {"sync_interval": 4},
}
SIGN_SGD_LR = 0.01
LR = {"dgc": 0.02, "demo": SIGN_SGD_LR, "masha1": 0.02, "masha2": 0.02}
STEPS = 12


def inner_of(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name in LR:
        return torch.optim.SGD(model.parameters(), lr=LR[name])
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def one_step(optimizer: thinwire.DistributedOptimizer, model: torch.nn.Module, *, data: int, replica: int) -> float:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, step=data, replica=replica)
        loss.backward()
        return loss

    if optimizer.method.view.moment == "around_closure":
        loss = optimizer.step(closure)
    else:
        loss = closure()
        optimizer.step()
    return float(loss.detach())


@cache
def train(
    name: str, replicas: int, *, kind: str = "transformer", stops: tuple[int, ...] = (), ends: tuple[bool, ...] = ()
) -> list[dict[str, Any]]:
    """Train; after each of `stops`, go on in new objects from the state there.

    With `ends` the run is closed before that, with a final exchange or without.
    """

    def replica_main(loopback: LoopbackTransport) -> dict[str, Any]:
        transport, model = RecordingTransport(loopback), build(kind)
        optimizer = wrap(model, transport, recipe(name)(**ARGUMENTS.get(name, {})), inner_of(name, model))
        losses = []
        for step in range(1, STEPS + 1):
            losses.append(one_step(optimizer, model, data=step % 3, replica=transport.replica))
            if step in stops:
                for final_exchange in ends:
                    optimizer.close(final_exchange=final_exchange)
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                model = build(kind, seed=5)
                model.load_state_dict(saved[0])
                method = recipe(name)(**ARGUMENTS.get(name, {}))
                optimizer = wrap(model, transport, method, inner_of(name, model))
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
        optimizer.close(final_exchange=True)
        with optimizer.global_parameters():
            return {"values": values(model), "losses": losses, "sent": transport.log.totals("sent").payload_bytes}

    return list(thinwire.run_replicas(replicas, replica_main))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("replicas", [1, 3])
def test_replicas_end_with_the_same_bits_and_a_lower_loss(name: str, replicas: int) -> None:
    found = train(name, replicas)
    assert all(same(found[0]["values"], other["values"]) for other in found)
    assert not same(found[0]["values"], list(build("transformer").parameters()))
    first, last = (sum(sum(r["losses"][part]) for r in found) for part in (slice(0, 3), slice(-3, None)))
    assert last < first, f"{first} -> {last}"
    assert (found[0]["sent"] == 0) == (replicas == 1)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", ["unused", "conv", "linear"])
def test_models_with_convolutions_and_without_gradients_train(name: str, kind: str) -> None:
    one, other = train(name, 2, kind=kind)
    assert same(one["values"], other["values"])


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_run_that_goes_on_from_its_states_ends_with_the_same_bits(name: str) -> None:
    whole, resumed = train(name, 2), train(name, 2, stops=(5, 11))
    for one, other in zip(whole, resumed, strict=True):
        assert same(one["values"], other["values"])


ENDED = [(name, False) for name in RECIPES] + [
    (name, True) for name in ("streaming-diloco", "eager", "noloco", "dimat")
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "final_exchange"), ENDED)
def test_a_run_that_was_ended_can_go_on_from_its_state(name: str, final_exchange: bool) -> None:
    """What was in flight came in early, and is not waited for when it would have been due."""
    found = train(name, 2, stops=(6,), ends=(final_exchange,))
    assert same(found[0]["values"], found[1]["values"])
    assert sum(found[0]["losses"][-3:]) < sum(found[0]["losses"][:3])
