"""Two optimizers on one transport between real processes: each trains as it would alone, in either step order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run, values

import thinwire
from thinwire.methods import noloco, streaming_diloco
from thinwire.transport.base import Transport
from thinwire.transport.secret import make_secret

pytestmark = pytest.mark.multiprocess
STEPS = 12
# Without overlap, a step waits for the other replicas, so all step the two in the same order.
METHODS: dict[str, Any] = {
    "overlapped": lambda: streaming_diloco(sync_interval=4, overlap_steps=2, num_fragments=1),
    "waits": lambda: noloco(sync_interval=4),
}
CASES = [["waits", False], ["overlapped", False], ["overlapped", True]]


def train(transport: Transport, *, method: str, is_swapped: bool, alone: int | None = None) -> list[list[float]]:
    """Train two models of equal shape, and return the global parameters of each."""
    models = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)]
    for which, model in enumerate(models):
        torch.nn.init.constant_(model.weight, 1.0 + 100 * which)
        torch.nn.init.zeros_(model.bias)
    optimizers = [
        thinwire.DistributedOptimizer(
            model, torch.optim.SGD(model.parameters(), lr=0.05), method=METHODS[method](),
            transport=transport if alone in (None, which) else None,
        )
        for which, model in enumerate(models)
    ]  # fmt: skip
    for step in range(STEPS):
        for which in (1, 0) if is_swapped and transport.replica else (0, 1):
            draw = torch.Generator().manual_seed(1000 * which + 2 * step + transport.replica)
            models[which](torch.randn(4, 3, generator=draw)).square().mean().backward()
            optimizers[which].step()
            optimizers[which].zero_grad()
    for optimizer in optimizers:
        optimizer.close(final_exchange=True)
    found = []
    for model, optimizer in zip(models, optimizers, strict=True):
        with optimizer.global_parameters():
            found.append([float(value) for p in model.parameters() for value in p.detach().flatten()])
    return found


def train_in_a_process(secret: str | None) -> list[list[list[float]]]:
    transport = thinwire.connect(deadline_s=600, secret=None if secret is None else Path(secret))
    try:
        return [train(transport, method=method, is_swapped=is_swapped) for method, is_swapped in CASES]
    finally:
        transport.close()


@pytest.mark.parametrize("has_secret", [False, True], ids=["gloo", "wire"])
def test_two_optimizers_in_either_order_train_as_each_would_alone(tmp_path: Path, has_secret: bool) -> None:
    secret = tmp_path / "job.secret"
    make_secret(secret)
    by_rank = values(run(train_in_a_process, num_ranks=2, arguments={"secret": str(secret) if has_secret else None}))
    for number, (method, _) in enumerate(CASES):
        for which in (0, 1):
            expected = thinwire.run_replicas(
                2, lambda t, m=method, w=which: train(t, method=m, is_swapped=False, alone=w)[w]
            )
            assert expected[0] == expected[1]
            assert [results[number][which] for results in by_rank] == expected, (method, which)
