"""1-bit Adam and its relatives over real processes and sockets: the same bits as in one process, sharded or not."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run, values

import thinwire
from tests.reference.small_models import build, loss_of
from thinwire.methods import one_bit_adam, one_bit_lamb, zero_one_adam
from thinwire.sync.method import Method
from thinwire.transport.message import HEADER_BYTES

pytestmark = pytest.mark.multiprocess
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
STEPS = 14


def method_of(name: str) -> Method:
    return {
        "one-bit-adam": lambda: one_bit_adam(warmup_steps=5),
        "one-bit-lamb": lambda: one_bit_lamb(warmup_steps=10),
        "lamb": lambda: one_bit_lamb(warmup_steps=STEPS),
        "zero-one-adam": lambda: zero_one_adam(
            variance_steps=7, variance_updates=2, local_doubling_steps=2, max_local_steps=4
        ),
    }[name]()


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99))


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().float().contiguous().numpy().tobytes())
    return found.hexdigest()


def train(transport: Any, *, method: str, kind: str) -> list[str]:
    torch.set_num_threads(1)
    model = build(kind)
    optimizer = thinwire.DistributedOptimizer(model, adamw(model), method=method_of(method), transport=transport)
    for step in range(1, STEPS + 1):
        loss_of(model, step=step, replica=transport.replica).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    local = digest(model)
    with optimizer.global_parameters():
        return [local, digest(model)]


CASES = [
    ["one-bit-adam", "transformer"],
    ["one-bit-adam", "unused"],
    ["zero-one-adam", "conv"],
    ["one-bit-lamb", "conv"],
]


def train_in_a_process(cases: list[list[str]]) -> list[Any]:
    transport = thinwire.connect(deadline_s=600)
    results: list[Any] = [train(transport, method=method, kind=kind) for method, kind in cases]
    sent = transport.log.totals("sent")
    transport.close()
    return [*results, sent.wire_bytes - sent.payload_bytes - HEADER_BYTES * sent.messages]


@pytest.mark.parametrize("replicas", [2, 3])
def test_real_processes_compute_the_same_bits_as_the_loopback_world(replicas):
    by_rank = values(
        run(
            train_in_a_process, num_ranks=replicas, arguments={"cases": CASES}, environment=ENVIRONMENT,
        )
    )  # fmt: skip
    for number, (method, kind) in enumerate(CASES):
        expected = thinwire.run_replicas(replicas, lambda t, m=method, k=kind: train(t, method=m, kind=k))
        assert [results[number] for results in by_rank] == expected, (method, kind)
        assert len({shared for _, shared in expected}) == 1
    assert all(results[-1] == 0 for results in by_rank)


def train_with_fsdp(method: str) -> dict[str, list[float]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    transport = thinwire.connect(ranks_per_replica=2, deadline_s=600)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = build("conv")  # its last layer has 3 rows, and a bias of 3 elements
    fully_shard(model, mesh=mesh["shard"])
    optimizer = thinwire.DistributedOptimizer(model, adamw(model), method=method_of(method), transport=transport)
    for step in range(1, STEPS + 1):
        loss_of(model, step=step, replica=transport.replica).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    with optimizer.global_parameters():
        full = {name: p.full_tensor().detach().flatten().tolist() for name, p in model.named_parameters()}
    transport.close()
    return full


@pytest.mark.parametrize("method", ["one-bit-adam", "zero-one-adam", "one-bit-lamb"])
def test_sharded_replicas_agree_and_train(method):
    results = values(
        run(
            train_with_fsdp, num_ranks=4, arguments={"method": method}, environment=ENVIRONMENT,
        )
    )  # fmt: skip
    before = {name: p.detach().flatten() for name, p in build("conv").named_parameters()}
    for full in results:
        assert full == results[0], "all ranks hold the same global values"
        for name, value in full.items():
            moved = (torch.tensor(value) - before[name]).abs()
            assert 0 < float(moved.max()) < 1, name


def test_lamb_takes_the_norms_of_whole_layers_where_ranks_hold_shards():
    """In the warm-up nothing is coded, so sharded replicas step as whole ones do, but for the order of sums."""

    def whole(transport: Any) -> dict[str, list[float]]:
        model = build("conv")
        optimizer = thinwire.DistributedOptimizer(model, adamw(model), method=method_of("lamb"), transport=transport)
        for step in range(1, STEPS + 1):
            loss_of(model, step=step, replica=transport.replica).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: p.detach().flatten().tolist() for name, p in model.named_parameters()}

    expected = thinwire.run_replicas(2, whole)[0]
    results = values(run(train_with_fsdp, num_ranks=4, arguments={"method": "lamb"}, environment=ENVIRONMENT))
    for full in results:
        assert full == results[0]
        for name, value in full.items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(expected[name]), rtol=1e-4, atol=1e-5)
