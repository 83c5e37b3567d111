"""Outer steps of trees of arrays: the bits of the torch path, by NumPy and by JAX; refusals with their remedies."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import thinwire
from thinwire.outer import OuterLoop

STEPS, RATE = 11, 2.0**-6  # a power of two, so that no order of operations rounds otherwise
METHODS = {
    "streaming": lambda: thinwire.methods.streaming_diloco(sync_interval=4, overlap_steps=2, num_fragments=2),
    "sparse": lambda: thinwire.methods.sparse_loco(sync_interval=3),
    "iso": lambda: thinwire.methods.iso_loco(sync_interval=4),
}


class Head(NamedTuple):
    weight: Any
    bias: Any


def first_values() -> dict[str, Any]:
    draw = np.random.default_rng(3)
    blocks = [{"w": draw.normal(size=(7, 5)).astype(np.float32)} for _ in range(3)]
    return {"blocks": blocks, "head": Head(draw.normal(size=33).astype(np.float32), np.float32(0.5))}


def flat(tree: dict[str, Any]) -> list[Any]:
    return [*(block["w"] for block in tree["blocks"]), *tree["head"]]


def gradients(step: int, replica: int) -> list[np.ndarray[Any, Any]]:
    draw = np.random.default_rng(100 * step + replica)
    return [draw.normal(size=np.shape(one)).astype(np.float32) for one in flat(first_values())]


class Model(nn.Module):
    """The same parameters, in the same order and blocks, as a torch model."""

    def __init__(self) -> None:
        super().__init__()
        values = [nn.Parameter(torch.tensor(one)) for one in flat(first_values())]
        self.blocks = nn.ModuleList([nn.ParameterList([one]) for one in values[:3]])
        self.head = nn.ParameterList(values[3:])


def by_torch(transport: Any, method: str) -> list[list[bytes]]:
    model, seen = Model(), []
    inner = torch.optim.SGD(model.parameters(), lr=RATE, foreach=False)
    optimizer = thinwire.DistributedOptimizer(model, inner, method=METHODS[method](), transport=transport)

    def note() -> None:
        seen.append([p.detach().numpy().tobytes() for p in model.parameters()])

    for step in range(STEPS):
        for parameter, gradient in zip(model.parameters(), gradients(step, transport.replica), strict=True):
            parameter.grad = torch.tensor(gradient)
        optimizer.step()
        note()
    optimizer.close(final_exchange=True)
    with optimizer.global_parameters():
        note()
    return seen


def by_arrays(transport: Any, method: str, xp: Any) -> list[list[bytes]]:
    """Train with NumPy, or with JAX, whose inner steps run in its own arrays."""
    outer = OuterLoop(first_values(), method=METHODS[method](), transport=transport)
    values, seen = outer.arrays(), []

    def note(tree: Any) -> None:
        seen.append([np.asarray(one).tobytes() for one in flat(tree)])

    for step in range(STEPS):
        new = iter(
            xp.asarray(one) - RATE * xp.asarray(gradient)
            for one, gradient in zip(flat(values), gradients(step, transport.replica), strict=True)
        )
        blocks, head = [{"w": next(new)} for _ in range(3)], Head(next(new), next(new))
        values = outer.step({"head": head, "blocks": blocks})  # keys may come in another order, as jax.tree sorts them
        note(values)
    note(outer.close())
    return seen


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("library", ["numpy", "jax.numpy"])
def test_every_step_has_the_bits_of_the_torch_path(library: str, method: str) -> None:
    xp = pytest.importorskip(library, reason="jax is not installed: pip install jax")
    found = thinwire.run_replicas(2, lambda transport: by_arrays(transport, method, xp))
    assert found == thinwire.run_replicas(2, lambda transport: by_torch(transport, method))
    assert found[0][-1] == found[1][-1] != found[0][-2]


def test_what_cannot_be_exchanged_is_refused_and_the_remedies_work() -> None:
    tree = first_values()
    with pytest.raises(ValueError, match=r"got int64; allowed float32.*try float32 parameters"):
        OuterLoop({"w": np.arange(3)}, method="diloco")
    with pytest.raises(ValueError, match="a tree without arrays"):
        OuterLoop({"blocks": []}, method="diloco")
    with pytest.raises(ValueError, match=r"exchanges gradients.*try method='streaming-diloco'"):
        OuterLoop(tree, method="all-reduce")
    one = np.ones(1, np.float32)
    for twice in ({"a/b": one, "a": {"b": one}}, {1: one, "1": one}):
        with pytest.raises(ValueError, match=r"two arrays of the tree have one name.*keys without /"):
            OuterLoop(twice, method="diloco")
    with OuterLoop({1: one, "2": one.astype(">f4")}, method="diloco") as outer:  # the remedy, and another host's order
        assert outer.step({1: one, "2": np.full(1, 3, ">f4")})["2"] == 3
    with OuterLoop(tree, method="streaming-diloco") as outer:  # the remedy
        with pytest.raises(ValueError, match="a difference in /head/0"):
            outer.step({"blocks": tree["blocks"]})
        with pytest.raises(ValueError, match=r"the array /blocks/0/w is another one.*got \(5, 7\)"):
            outer.step({**tree, "blocks": [{"w": one["w"].T} for one in tree["blocks"]]})
        assert isinstance(outer.step(tree)["head"], Head) and outer.optimizer.steps_done == 1
