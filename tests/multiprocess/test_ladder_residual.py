"""The example of ladder blocks: gradients of one process, and sums that need no half of a block to wait."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from live_processes import until
from processes import run, values
from torch import Tensor

RANKS = 2


def example() -> Any:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import ladder_residual

    return ladder_residual


def inputs(ladder: Any) -> Tensor:
    return torch.randn(3, 7, ladder.DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def loss_of(stream: Tensor) -> Tensor:
    return (stream.sin() * stream).mean()


def reference(ladder: Any, *, lag: int) -> tuple[float, Any]:
    """Return loss and model with gradients: half n works on the input and all sums but the latest `lag` - 1."""
    model = ladder.Model(lag=lag).double()
    start, sums = inputs(ladder), []
    for number, half in enumerate(model.halves):
        sums.append(half(start + sum(sums[: max(0, number + 1 - lag)])))
    loss = loss_of(start + sum(sums))
    loss.backward()
    return loss.item(), model


def rank() -> dict[str, Any]:
    ladder = example()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        ladder.main()
    found: dict[str, Any] = {"printed": printed.getvalue()}
    last = 2 * ladder.LAYERS - 1

    def waits_for_the_next_half(wire: Any) -> Callable[[int], None]:
        # the delay ends with an event, not after a time: usual blocks would never go on
        def delay(number: int) -> None:
            if number < last:
                until(lambda: ("computed", number + 1) in wire.events)

        return delay

    for lag in (1, 2):
        wires = [ladder.Wire(lambda _: None) for _ in range(2)]
        if lag == 2:
            for wire in wires:
                wire._delay = waits_for_the_next_half(wire)
        model = ladder.Model(lag=lag, rank=dist.get_rank(), num_ranks=RANKS).double()
        loss = model.run(inputs(ladder), loss_of, forward=wires[0], backward=wires[1])
        grads = {name: value.grad.tolist() for name, value in model.named_parameters()}
        found[f"lag {lag}"] = (loss.item(), [wire.num_hidden() for wire in wires], grads)
    dist.destroy_process_group()
    return found


def own_part(name: str, value: Tensor, place: int, ladder: Any) -> Tensor:
    """Return a rank's part of a whole gradient: its heads or columns."""
    if name.endswith("out"):
        return value.chunk(RANKS, dim=1)[place]
    parts = 3 if value.shape[0] == 3 * ladder.DIM else 1
    return torch.cat([one.chunk(RANKS)[place] for one in value.chunk(parts)])


def test_a_ladder_has_the_gradients_of_one_process_and_its_sums_arrive_while_the_next_half_computes() -> None:
    ladder = example()
    outcomes = values(run(rank, num_ranks=RANKS, arguments={}))
    assert re.search(r"usual: loss 1\.25\d+, 0 of 10 sums .*\nladder: loss 1\.25\d+, ", outcomes[0]["printed"])
    losses = []
    for lag, hidden in ((1, [0, 0]), (2, [5, 5])):
        expected, model = reference(ladder, lag=lag)
        losses.append(expected)
        for place, outcome in enumerate(outcomes):
            loss, found_hidden, grads = outcome[f"lag {lag}"]
            assert abs(loss - expected) < 1e-12 and found_hidden == hidden
            for name, parameter in model.named_parameters():
                whole = own_part(name, parameter.grad, place, ladder)
                found = torch.tensor(grads[name], dtype=torch.float64)
                torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)
    assert losses[0] != losses[1], "a ladder is another model"
