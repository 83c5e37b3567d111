"""Whole methods over real processes and sockets: the same bits as in one process, sharded or not."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run, values

import thinwire
from tests.reference.small_models import build, loss_of
from thinwire.averaging.exchange import AllGather, cheapest
from thinwire.codecs import by_name, float32
from thinwire.methods import all_reduce, co2, diloco, dimat, iso_loco, noloco, streaming_diloco
from thinwire.sync.method import Method
from thinwire.transport.message import HEADER_BYTES

pytestmark = pytest.mark.multiprocess
# the sources of this checkout, whichever one is installed
ROOT = f"{Path(__file__).parents[2]}:{Path(__file__).parents[2] / 'src'}"
STEPS = 14


def method_of(name: str) -> Method:
    return {
        "all-reduce": all_reduce,
        "diloco": lambda: diloco(sync_interval=4),
        "streaming": lambda: streaming_diloco(sync_interval=5, overlap_steps=3, layers_per_fragment=2),
        "iso-loco": lambda: iso_loco(sync_interval=4, overlap_steps=0, codec=float32(), num_fragments=1, outer_lr=1.0),
        "ring": lambda: dimat(sync_interval=4),
        "matched": lambda: dimat(sync_interval=4, batches=images()),
        "stochastic": lambda: streaming_diloco(sync_interval=5, codec=by_name("e3m0-stochastic")),
        "noloco": lambda: noloco(sync_interval=4, overlap_steps=1),
        "co2": lambda: co2(sync_interval=4),
        "two-phase": lambda: streaming_diloco(sync_interval=5, overlap_steps=2, exchange="two-phase"),
    }[name]()


def images() -> list[torch.Tensor]:
    return list(torch.randn(24, 1, 5, 5, generator=torch.Generator().manual_seed(7)).split(8))


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().float().contiguous().numpy().tobytes())
    return found.hexdigest()


def train(transport: Any, *, method: str, kind: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = build(kind)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer = thinwire.DistributedOptimizer(model, inner, method=method_of(method), transport=transport)
    for step in range(1, STEPS + 1):
        loss_of(model, step=step, replica=transport.replica).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close(final_exchange=True)
    result: dict[str, Any] = {"local": digest(model)}
    with optimizer.global_parameters():
        result["global"] = digest(model)
    view = optimizer._engine.view
    shapes = [view.shapes(fragment=f, channel=0) for f in range(optimizer.num_fragments)]
    result["sizes"] = [sum(shape.numel() for shape in found) for found in shapes]
    result["rounds"] = optimizer.statistics.rounds_launched
    return result


def train_in_a_process(cases: list[list[str]]) -> list[dict[str, Any]]:
    transport = thinwire.connect(deadline_s=600)
    results = []
    for method, kind in cases:
        before = transport.log.totals("sent")
        result = train(transport, method=method, kind=kind)
        after = transport.log.totals("sent")
        others = ("setup", "control")  # the start and the end of a run, apart from its rounds
        setup = [t for t in transport.log if t.direction == "sent" and t.kind in others]
        result["messages"] = after.messages - before.messages
        result["payload_bytes"] = after.payload_bytes - before.payload_bytes
        result["wire_bytes"] = after.wire_bytes - before.wire_bytes
        result["setup_bytes"] = sum(t.payload_bytes for t in setup) // (len(results) + 1)
        results.append(result)
    transport.close()
    return results


CASES = [
    ["all-reduce", "transformer"],
    ["diloco", "conv"],
    ["streaming", "transformer"],
    ["streaming", "lstm"],
    ["streaming", "unused"],
    ["two-phase", "untied"],
]


@pytest.mark.parametrize("replicas", [2, 3])
def test_real_processes_compute_the_same_bits_as_the_loopback_world_and_count_every_byte(replicas):
    by_rank = values(
        run(
            train_in_a_process, num_ranks=replicas, arguments={"cases": CASES}, environment={"PYTHONPATH": ROOT},
        )
    )  # fmt: skip
    for number, (method, kind) in enumerate(CASES):
        results = [results[number] for results in by_rank]
        expected = thinwire.run_replicas(replicas, lambda t, m=method, k=kind: train(t, method=m, kind=k))
        for one, other in zip(results, expected, strict=True):
            assert one["global"] == other["global"], (method, kind)
            assert one["local"] == other["local"], (method, kind)
        assert len({one["global"] for one in results}) == 1
        fragments = launched_fragments(method, num_fragments=len(results[0]["sizes"]))
        exchange = method_of(method).exchange(replicas)
        sizes = [results[0]["sizes"][fragment] for fragment in fragments]
        limit = sum(exchange.sent_bytes(size, num_replicas=replicas) for size in sizes)
        for one in results:
            assert one["rounds"] == len(fragments)
            assert one["wire_bytes"] == one["payload_bytes"] + HEADER_BYTES * one["messages"]
            sent = one["payload_bytes"] - one["setup_bytes"]
            if isinstance(exchange, AllGather):
                assert sent == limit
            else:  # the formula is for the replica with the largest shard; shards differ by a block
                block_bytes = exchange.codec.payload_bytes(exchange.codec.block)
                assert limit - len(fragments) * replicas * block_bytes <= sent <= limit


def test_pairs_rings_and_late_rounds_compute_the_same_bits_in_real_processes():
    cases = [["noloco", "lstm"], ["co2", "linear"], ["ring", "lstm"], ["matched", "conv"]]
    by_rank = values(
        run(
            train_in_a_process, num_ranks=4, arguments={"cases": cases}, environment={"PYTHONPATH": ROOT},
        )
    )  # fmt: skip
    for number, (method, kind) in enumerate(cases):
        expected = thinwire.run_replicas(4, lambda t, m=method, k=kind: train(t, method=m, kind=k))
        for results, other in zip(by_rank, expected, strict=True):
            assert results[number]["local"] == other["local"], method
            assert results[number]["local"] == by_rank[0][number]["local"], "one model at the end"


def launched_fragments(name: str, *, num_fragments: int) -> list[int]:
    method = method_of(name)
    steps = range(1, STEPS + 1)
    launched = [r.fragment for t in steps for r in method.schedule.launches(t, num_fragments=num_fragments)]
    has_final_exchange = method.update(2).program.has_local_steps
    return launched + (list(range(num_fragments)) if has_final_exchange else [])


def evaluate(model: torch.nn.Module) -> float:
    with torch.no_grad():
        return float(loss_of(model, step=999, replica=0))


def train_with_fsdp(method: str, replicas: int, shards: int) -> list[dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.set_num_threads(1)
    transport = thinwire.connect(ranks_per_replica=shards, deadline_s=600)
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replica", "shard"))
    model = build("transformer")
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer = thinwire.DistributedOptimizer(model, inner, method=method_of(method), transport=transport)
    sizes = [optimizer._engine.view.parameters.numel(f) for f in range(optimizer.num_fragments)]
    for step in range(1, STEPS + 1):
        # every rank of a replica sees the replica's whole batch: FSDP's mean over the shards changes nothing
        loss_of(model, step=step, replica=transport.replica).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    losses = []
    for _ in range(2):  # a forward without a backward must neither see nor leave behind the other values
        losses.append(evaluate(model))
        with optimizer.global_parameters():
            losses.append(evaluate(model))
    assert losses[:2] == losses[2:]
    assert method == "all-reduce" or losses[0] != losses[1]
    optimizer.close()
    with optimizer.global_parameters():
        full = {name: p.full_tensor().detach().flatten().tolist() for name, p in model.named_parameters()}
    transport.close()
    return [full, sizes]


def unsharded(transport: Any, *, method: str) -> dict[str, list[float]]:
    model = build("transformer")
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer = thinwire.DistributedOptimizer(model, inner, method=method_of(method), transport=transport)
    for step in range(1, STEPS + 1):
        loss_of(model, step=step, replica=transport.replica).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    with optimizer.global_parameters():
        return {name: p.detach().flatten().tolist() for name, p in model.named_parameters()}


@pytest.mark.parametrize("method", ["all-reduce", "diloco", "iso-loco"])
def test_a_replica_of_two_ranks_with_fsdp_equals_an_unsharded_one(method):
    results = values(
        run(
            train_with_fsdp, num_ranks=4, arguments={"method": method, "replicas": 2, "shards": 2},
            environment={"PYTHONPATH": ROOT},
        )
    )  # fmt: skip
    expected = thinwire.run_replicas(2, lambda t: unsharded(t, method=method))[0]
    for full, sizes in results:
        assert len(sizes) == 1
        assert full == results[0][0], "all ranks hold the same global values"
        for name, reference in expected.items():
            # FSDP adds gradients of its shards in another order than one process
            torch.testing.assert_close(torch.tensor(full[name]), torch.tensor(reference), rtol=1e-4, atol=1e-6)


def train_neighbours_with_fsdp() -> list[list[float]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    transport = thinwire.connect(ranks_per_replica=2, deadline_s=600)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = build("linear")
    fully_shard(model, mesh=mesh["shard"])
    found = step_in_a_ring(model, transport)
    with pytest.raises(ValueError, match=r"is a shard, .* merge without matching \('none'\)"):
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        method = dimat(matching="weights", batches=[torch.ones(2, 3)])
        thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)
    transport.close()
    return found


def step_in_a_ring(model: torch.nn.Module, transport: Any) -> list[list[float]]:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = thinwire.DistributedOptimizer(model, inner, method=dimat(sync_interval=4), transport=transport)
    for step in range(1, 11):
        loss_of(model, step=step, replica=transport.replica).backward()
        optimizer.step()
        optimizer.zero_grad()
    own = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [tensor.detach().flatten().tolist() for tensor in own]


def test_neighbours_exchange_shards_as_they_exchange_whole_models():
    found = values(run(train_neighbours_with_fsdp, num_ranks=4, environment={"PYTHONPATH": ROOT}))
    expected = thinwire.run_replicas(2, lambda t: step_in_a_ring(build("linear"), t))
    assert expected[0] != expected[1], "a model of its own for each replica"
    for rank, tensors in enumerate(found):
        for one, other in zip(tensors, expected[rank // 2], strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-5, atol=1e-7)


def train_with_more_shards_than_rows(method: str) -> list[int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    transport = thinwire.connect(ranks_per_replica=2, deadline_s=600)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 1), torch.nn.Linear(1, 1)
    )  # one row: the second rank's shard is empty
    fully_shard(model, mesh=mesh["shard"])
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = thinwire.DistributedOptimizer(model, inner, method=method_of(method), transport=transport)
    for step in range(1, 9):
        generator = torch.Generator().manual_seed(10 * step + transport.replica)
        model(torch.randn(4, 3, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    sizes = [optimizer._engine.view.parameters.numel(f) for f in range(optimizer.num_fragments)]
    with optimizer.global_parameters():
        total = sum(float(p.full_tensor().sum()) for p in model.parameters())
    transport.close()
    return [*sizes, total]


def test_an_empty_shard_takes_part_like_any_other():
    results = values(
        run(train_with_more_shards_than_rows, num_ranks=4, arguments={"method": "streaming"},
            environment={"PYTHONPATH": ROOT})
    )  # fmt: skip
    assert 0 in results[1]
    assert len({result[-1] for result in results}) == 1


def train_with_ddp() -> list[list[float]]:
    torch.set_num_threads(1)
    transport = thinwire.connect(deadline_s=600)
    found = []
    for wraps_ddp in (True, False):
        model = build("transformer")
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        if wraps_ddp:
            forward: Any = torch.nn.parallel.DistributedDataParallel(model)
            optimizer: Any = inner
        else:
            forward = model
            optimizer = thinwire.DistributedOptimizer(model, inner, method=all_reduce(), transport=transport)
        for step in range(1, 8):
            generator = torch.Generator().manual_seed(1000 * step + transport.replica)
            tokens = torch.randint(0, 11, (3, 7), generator=generator)
            logits = forward(tokens)[:, :-1].flatten(0, 1)
            torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]).tolist())
    transport.close()
    return found


def test_all_reduce_equals_torchs_distributed_data_parallel():
    for ddp, ours in values(run(train_with_ddp, num_ranks=2, environment={"PYTHONPATH": ROOT})):
        # both take the mean of two float32 gradients: a sum of two does not depend on its order
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(ddp), rtol=1e-6, atol=1e-7)


def test_the_cheapest_exchange_is_the_one_that_is_used():
    for replicas in (2, 8):
        assert method_of("streaming").exchange(replicas) == cheapest(by_name("e3m0"), num_replicas=replicas)
