"""Replicas that do different numbers of steps learn of it at once and by name, also between real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import run, values

import thinwire
from thinwire.errors import DesyncError
from thinwire.transport.base import Transport
from thinwire.transport.secret import make_secret

pytestmark = pytest.mark.multiprocess


def train(counts: list[int], overlap_steps: int, secret: str | None) -> list[str]:
    torch.manual_seed(0)
    transport = thinwire.connect(deadline_s=600, secret=None if secret is None else Path(secret))
    try:
        found = [train_once(transport, counts=[10, 10], overlap_steps=0, votes=transport.replica == 1)]
        return [*found, train_once(transport, counts=counts, overlap_steps=overlap_steps)]
    finally:
        transport.close()


def train_once(transport: Transport, *, counts: list[int], overlap_steps: int, votes: bool = False) -> str:
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
            if votes or step < 3:
                optimizer.should_stop()
        optimizer.close(final_exchange=True)
    except DesyncError as error:
        return str(error)
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
    for text, _ in found:  # at the same step, replica 0 ends and replica 1 asks for votes
        assert "replica 0 ended after 10 steps with close(final_exchange=True)" in text
        assert "replica 1 waits in should_stop() after 10 steps" in text
    for _, text in found:
        assert f"replica {early} ended after {min(counts)} steps" in text
        assert f"replica {1 - early} " in text
