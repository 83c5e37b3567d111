"""Data parallelism beneath thinwire in real processes: refused where it can be seen, counted where it cannot."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from processes import run, values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.transport.connect import connect
from thinwire.transport.shared_models import SharedCollectivesWarning

pytestmark = pytest.mark.multiprocess


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def wrap(model: nn.Module, transport: object) -> thinwire.DistributedOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return thinwire.DistributedOptimizer(
        model, inner, method=thinwire.methods.diloco(sync_interval=50), transport=transport
    )  # type: ignore[arg-type]


def refusal_of(model: nn.Module, transport: object) -> str:
    try:
        wrap(model, transport)
    except ValueError as error:
        return str(error)
    return ""


def replicated(mesh: object) -> nn.Module:
    model = small()
    weight = model[0].weight  # type: ignore[index]
    model[0].weight = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Replicate()]))  # type: ignore[index, arg-type]
    return model


def wrap_in_all_ways() -> dict[str, str]:
    transport = connect(deadline_s=600)
    found = {"ddp": refusal_of(DistributedDataParallel(small()), transport)}
    found["ddp inside"] = refusal_of(nn.Sequential(DistributedDataParallel(small())), transport)
    found["fsdp"] = refusal_of(fully_shard(small()), transport)
    found["replicated"] = refusal_of(replicated(init_device_mesh("cpu", (2,))), transport)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    found["ddp in a replica"] = refusal_of(DistributedDataParallel(small(), process_group=alone), transport)
    transport.close()
    return found


def test_a_model_that_replicas_share_is_refused_with_the_cure() -> None:
    for found in values(run(wrap_in_all_ways, num_ranks=2)):
        assert found.pop("ddp in a replica") == ""
        for text in found.values():
            assert "got ranks 0, 1" in text and "connect(solo=True) first" in text
        assert found["ddp"].startswith("the model is wrapped in DistributedDataParallel")
        assert found["ddp inside"].startswith("0 is wrapped in DistributedDataParallel")
        assert found["fsdp"].startswith(found["replicated"].split(" is ")[0])


def train_beneath(kind: str) -> list[str]:
    transport = connect(deadline_s=600, solo=kind == "solo")
    model = small()
    optimizer = wrap(model, transport)
    # as accelerate does: wrapped after the optimizer was made
    whole = DistributedDataParallel(model) if kind == "ddp" else model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(8):
            whole(torch.ones(1, 4)).sum().backward()
            if kind == "barriers" and step % 3:  # two steps of three: no loop's habit
                dist.barrier()
            optimizer.step()
            optimizer.zero_grad()
    optimizer.abandon()
    # a reducer of DDP that outlives its group destroys it, which can hang in torch 2.13 (gloo's thread needs the GIL)
    del whole
    transport.close()
    return [str(one.message) for one in caught if one.category is SharedCollectivesWarning]


@pytest.mark.parametrize(("kind", "num_warnings"), [("ddp", 1), ("barriers", 0), ("solo", 0)])
def test_collectives_at_every_step_are_reported_once_with_their_number(kind: str, num_warnings: int) -> None:
    for found in values(run(train_beneath, num_ranks=2, arguments={"kind": kind})):
        assert len(found) == num_warnings
        for text in found:
            number = int(text.split()[0])
            assert number >= 3 and f"got {number}; allowed 0" in text and "connect(solo=True)" in text
