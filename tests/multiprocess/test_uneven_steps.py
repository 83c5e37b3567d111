"""Replicas that do different numbers of steps learn of it at once and by name, also between real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import run, values

import thinwire
from thinwire.errors import DesyncError
from thinwire.transport.secret import make_secret

pytestmark = pytest.mark.multiprocess


def train(counts: list[int], overlap_steps: int, secret: str | None) -> str:
    torch.manual_seed(0)
    transport = thinwire.connect(deadline_s=60, secret=None if secret is None else Path(secret))
    model = torch.nn.Linear(4, 1)
    optimizer = thinwire.DistributedOptimizer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), transport=transport, minimum_deadline_s=600,
        method=thinwire.methods.streaming_diloco(sync_interval=5, overlap_steps=overlap_steps, num_fragments=1),
    )  # fmt: skip
    try:
        for step in range(counts[transport.replica]):
            generator = torch.Generator().manual_seed(2 * step + transport.replica)
            model(torch.randn(8, 4, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close(final_exchange=True)
    except DesyncError as error:
        return str(error)
    finally:
        transport.close()
    return ""


@pytest.mark.parametrize(("has_secret", "counts", "overlap_steps"), [(True, [22, 30], 0), (False, [20, 19], 2)])
def test_both_step_counts_are_in_the_errors_of_both_replicas(tmp_path, has_secret, counts, overlap_steps):
    secret = tmp_path / "job.secret"
    make_secret(secret)
    found = values(
        run(
            train, num_ranks=2,
            arguments={
                "counts": counts, "overlap_steps": overlap_steps, "secret": str(secret) if has_secret else None,
            },
        )
    )  # fmt: skip
    early = counts.index(min(counts))
    for text in found:
        assert f"replica {early} ended after {min(counts)} steps" in text
        assert f"replica {1 - early} " in text
