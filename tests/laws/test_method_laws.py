"""What every method promises: replicas agree, the loss falls, a resumed run is the same run, bytes stay in bounds."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest

import thinwire
from tests.reference.every_method import ARGUMENTS, inner_of, one_step
from tests.reference.loops import same, values, wrap
from tests.reference.small_models import build
from thinwire.methods import RECIPES, recipe
from thinwire.transport.loopback import LoopbackTransport
from thinwire.transport.recording import RecordingTransport

STEPS = 12


@cache
def train(
    name: str, replicas: int, *, kind: str = "shallow", stops: tuple[int, ...] = (), ends: tuple[bool, ...] = ()
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
    assert not same(found[0]["values"], list(build("shallow").parameters()))
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
    whole, resumed = train(name, 3), train(name, 3, stops=(5, 11))
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
