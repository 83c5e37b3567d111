"""Weights that FSDP2 shards over two real processes, published by both and committed by one manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run, values
from torch import nn

import thinwire
from thinwire.carriers.folder import FolderCarrier

pytestmark = pytest.mark.multiprocess


class Failing(FolderCarrier):
    """A folder that one rank cannot write to for a while."""

    is_full = False

    def put(self, name: str, payload: object, *, only_new: bool) -> bool:
        if self.is_full and name.startswith("blobs"):
            raise OSError("no room")
        return super().put(name, payload, only_new=only_new)  # type: ignore[arg-type]

    def pause(self, seconds: float) -> None:
        super().pause(min(seconds, 0.01))


def publish_shards(folder: str) -> list[object]:
    """Publish a sharded model while it changes; return versions, and whether each reader has the whole weights."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    reader = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    fully_shard(model)
    carrier = Failing(Path(folder))
    problems: list[str] = []
    publisher = thinwire.WeightPublisher(model, to=carrier, anchor_every=3, on_problem=problems.append)
    subscriber = thinwire.WeightSubscriber(carrier)
    found: list[object] = []
    for step in range(6):
        carrier.is_full = step == 2 and dist.get_rank() == 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * (step + 1))
        version = publisher.publish(step)
        state: dict[str, Any] = model.state_dict()
        whole = {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in state.items()}
        held = subscriber.update(reader)
        own = reader.state_dict()
        equal = all(torch.equal(own[name], one.to(torch.bfloat16).to(one.dtype)) for name, one in whole.items())
        found.append((version, held, equal))
    found.append(len(problems))
    sharded = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    fully_shard(sharded)
    subscriber.update(sharded)
    pairs = zip(sharded.parameters(), reader.parameters(), strict=True)
    found.append(all(torch.equal(one.full_tensor(), other) for one, other in pairs))
    dist.destroy_process_group()
    return found


def test_shards_of_two_ranks_become_whole_versions(tmp_path: Path) -> None:
    """Parameters that do not divide evenly, and buffers of the first rank; a rank that fails fails the version."""
    expected = [(0, 0, True), (1, 1, True), (None, 1, False), (2, 2, True), (3, 3, True), (4, 4, True)]
    for found in values(run(publish_shards, num_ranks=2, arguments={"folder": str(tmp_path / "store")})):
        *versions, num_problems, is_sharded_equal = found
        assert [tuple(one) for one in versions] == expected
        assert num_problems == 1
        assert is_sharded_equal
