"""Any job of torch.distributed under `thinwire.watch`: the same bits as without it, and whoever breaks it is named."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Processes, run, values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.errors import TransportError
from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.findings import Finding
from thinwire.runlog.reader import Records
from thinwire.runlog.run_folder import read_files

pytestmark = pytest.mark.multiprocess

STEPS = 6
SOON_S = 600.0


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(13, 13) for _ in range(4)))


def train(wrapped: nn.Module) -> list[str]:
    """Return each step's loss and all parameters, as exact texts."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    seen = []
    for step in range(STEPS):
        torch.manual_seed(100 * step + dist.get_rank())
        loss = wrapped(torch.randn(5, 13)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item().hex())
    local = (getattr(p, "_local_tensor", p).detach() for p in wrapped.parameters())
    return [*seen, *(str(part.flatten().tolist()) for part in local)]


def train_both() -> list[str]:
    sharded = model()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return [*train(DistributedDataParallel(model(), bucket_cap_mb=0.001)), *train(sharded)]


def exchange_messages() -> list[Any]:
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    came = torch.zeros(3)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.full((3,), float(rank)), other), dist.P2POp(dist.irecv, came, other)]
    ):
        work.wait()
    total = torch.zeros(2)
    dist.reduce_scatter(total, [torch.full((2,), rank + 1.0)] * 2)
    waiting = dist.irecv(torch.zeros(1), other)
    try:
        waiting.wait(timedelta(milliseconds=1))
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    dist.barrier()
    dist.send(torch.ones(1), other)
    waiting.wait()
    return [came.tolist(), total.tolist(), said]


def train_plain_and_watched(folder: str) -> dict[str, Any]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    plain = train_both()
    with thinwire.watch(folder, probe_wires=True) as watching:  # of one host, which has no wires to others
        watched = train_both()
        messages = exchange_messages()
        watching.step(loss=float("nan"))
        try:
            thinwire.watch(folder + "-again")
            refused = ""
        except TransportError as error:
            refused = str(error)
        watching.pause()
        dist.broadcast(torch.ones(77), 0)
        watching.resume()
        dist.broadcast(torch.ones(78), 0)
    dist.all_reduce(torch.ones(79))
    dist.destroy_process_group()
    return {"is_equal": plain == watched, "messages": messages, "refused": refused, "lost": watching.lost}


def test_a_watched_job_computes_the_same_bits_and_all_its_calls_are_there(tmp_path: Path) -> None:
    outcomes = values(run(train_plain_and_watched, num_ranks=2, arguments={"folder": str(tmp_path / "run")}))
    for rank, outcome in enumerate(outcomes):
        assert outcome["is_equal"] and not outcome["lost"]
        assert outcome["messages"][:2] == [[1.0 - rank] * 3, [3.0, 3.0]]
        assert "Timed out waiting 1ms" in outcome["messages"][2]
        assert "watched already" in outcome["refused"]
    records = read_files([tmp_path / "run"])
    assert not records.num_refused
    done = [operation for operation in records.operations if operation.done_s is not None]
    for rank in (0, 1):
        own = [operation for operation in done if operation.rank == rank]
        kinds = {operation.kind for operation in own}
        assert kinds >= {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", "message"}
        assert {operation.site.partition(":")[0] for operation in own} == {Path(__file__).name}
        assert {operation.is_async for operation in own if operation.kind == "barrier" or operation.count == 78} == {
            False
        }
        assert any(operation.is_async for operation in own if operation.kind == "all_reduce"), "DDP goes on"
        counts = {operation.count for operation in own}
        assert 78 in counts and not {77, 79} & counts, "paused, then over"
        ends = {(end.operation, end.direction, end.peer, end.num_bytes) for end in records.transfers
                if end.rank == rank and end.done_s is not None}  # fmt: skip
        assert ends == {(n, way, 1 - rank, size) for n, size in ((0, 12), (1, 4)) for way in ("sent", "received")}
        assert len({operation.sequence for operation in own if operation.communicator == "0 default_pg"}) == len(
            [operation for operation in own if operation.communicator == "0 default_pg"]
        )
    assert [finding.kind for finding in diagnose(records)] == ["non-finite loss"]
    assert sorted(beat.rank for beat in records.beats if beat.is_last) == [0, 1]


def break_at(folder: str, fault: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    thinwire.watch(folder)
    rank = dist.get_rank()
    wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.001)
    for step in range(8):
        wrapped(torch.ones(3, 13)).sum().backward()
        if step == 5 and rank == 1:
            if fault == "skips a collective":
                continue
            if fault == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(9 if (fault, step, rank) == ("sends a wrong shape", 5, 1) else 5))
    if fault == "skips a collective":
        dist.barrier()


def first_finding(folder: Path, says: str) -> Finding:
    """Return what is found first, once it names one place and says what the rank does, as another one soon sees."""
    until_s = time.monotonic() + SOON_S
    found: list[Finding] = []
    while time.monotonic() < until_s and not (found and len(found[0].places) == 1 and says in found[0].text):
        time.sleep(0.2)
        records = read_files([folder]) if list(folder.glob("records-rank-*.jsonl")) else Records()
        found = diagnose(records)
    assert found, "nothing was found in time"
    return found[0]


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("skips a collective", "desync", ""),
        ("sends a wrong shape", "desync", "brings 9 elements where the others bring 5"),
        ("stops", "non-communication hang", "is stopped by a signal or a debugger"),
    ],
)
def test_the_rank_that_breaks_a_job_is_named_while_the_others_wait(
    tmp_path: Path, fault: str, kind: str, says: str
) -> None:
    with Processes(break_at, num_ranks=3, arguments={"folder": str(tmp_path), "fault": fault}):
        found = first_finding(tmp_path, says)
    assert (found.kind, found.where) == (kind, "rank 1")
    assert says in found.text
    assert found.confidence >= 0.9
