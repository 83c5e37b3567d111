"""What `thinwire.watch(gpu_calls=True)` records and costs on GPUs: steps of DDP on nccl with and without it, in turns.

    torchrun --nproc-per-node 2 benchmarks/diagnosis/watch_nccl.py    # a GPU for each rank
    python benchmarks/diagnosis/watch_nccl.py                         # one GPU: a job of one rank

One rank was run on an H200 (docs/benchmarks.md); several GPUs were not at hand, and were tried over gloo.

First a few collectives that are not asynchronous, plain ones and those of FSDP2, are recorded: they give no `Work`, so
that an event of ours marks their ends. None may pass by, and no end may be told before its call can have run.

Then blocks of steps with and without recording follow each other, so that what else the machine does falls on both; a
pair of blocks gives one ratio. The host waits for its GPU at the end of a block, not of a step, as a job would. After
each recorded block every rank reads its own records: each call must have an end, and there must be an all-reduce for
each step. The last line says so and the cost ratio; the exit status is 1 where a record is missing, has no end or an
early one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire
from thinwire.runlog.records import Operation
from thinwire.runlog.run_folder import read_files

WIDTH, LAYERS, ROWS, BUCKET_MB = 1024, 8, 128, 4
FEW_STEPS, PLAIN_CALLS = 5, 10
BUSY_CYCLES = 200_000_000  # of a GPU's clock: at least a tenth of a second below 2 GHz
EARLIEST_S = 0.05


def stepper(device: torch.device, *, is_sharded: bool = False) -> Callable[[], None]:
    """Return one step of a model of 8.4 M parameters under DDP, or under FSDP2."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))).to(device)
    wrapped: nn.Module = model
    if is_sharded:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.randn(ROWS, WIDTH, device=device)

    def step() -> None:
        wrapped(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Callable[[], None], device: torch.device, *, steps: int) -> float:
    """Return the seconds of a step, on average over a block at whose end the GPU is waited for."""
    dist.barrier()
    begin_s = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin_s) / steps


def own_records(folder: str) -> list[Operation]:
    found = read_files([Path(folder)])
    for error in {beat.error for beat in found.beats if beat.error}:
        print(f"rank {dist.get_rank()}: {error}", file=sys.stderr)
    return [one for one in found.operations if one.rank == dist.get_rank()]


def faults_of(own: list[Operation], *, least: dict[str, int]) -> list[str]:
    """Return what is wrong with this rank's records of a block, in which there are some calls of each kind."""
    rank = dist.get_rank()
    called = {(one.communicator, one.sequence): one.kind for one in own}
    # a call's end is told in a second record of it
    ended = {(one.communicator, one.sequence) for one in own if one.done_s is not None}
    endless = [f"{kind} {call[1]}" for call, kind in called.items() if call not in ended]
    faults = [f"rank {rank}: no end of {', '.join(endless[:5])}"] if endless else []
    counts = {kind: sum(one == kind for one in called.values()) for kind in least}
    return faults + [
        f"rank {rank}: {counts[kind]} of {kind}, not {number}"
        for kind, number in least.items()
        if counts[kind] < number
    ]


def faults_without_work(device: torch.device, folder: str) -> list[str]:
    """Return what is wrong with the records of collectives that are not asynchronous: plain ones and FSDP2's."""
    step, faults = stepper(device, is_sharded=True), list[str]()
    step()  # it makes its buffers, and nccl its connections, in the first
    with thinwire.watch(folder, gpu_calls=True) as watching:
        for _ in range(PLAIN_CALLS):
            if device.type == "cuda":
                torch.cuda._sleep(BUSY_CYCLES)  # the stream stands here, so that each call ends long after it was made
            dist.all_reduce(torch.ones(WIDTH, device=device))
    faults += faults_of(own := own_records(folder), least={"all_reduce": PLAIN_CALLS})
    early = [one.sequence for one in own if one.done_s is not None and one.done_s - one.posted_s < EARLIEST_S]
    if device.type == "cuda" and early:
        faults.append(f"rank {dist.get_rank()}: ends too early of {early[:5]}")
    passed_by = watching.num_passed_by
    with thinwire.watch(folder, gpu_calls=True) as watching:
        for _ in range(FEW_STEPS):
            step()
    least = FEW_STEPS * LAYERS if dist.get_world_size() > 1 else 0  # FSDP2 calls nothing where it is alone
    faults += faults_of(own_records(folder), least={"all_gather": least, "reduce_scatter": least})
    passed_by += watching.num_passed_by
    return [*faults, f"rank {dist.get_rank()}: {passed_by} calls passed by"] if passed_by else faults


def in_turns(device: torch.device, folder: str, *, pairs: int, steps: int) -> dict[str, Any]:
    """Return the seconds of a step in each block, with and without recording, and what is wrong with the records."""
    step, errors, passed_by = stepper(device), faults_without_work(device, folder), 0
    timed(step, device, steps=10)  # DDP makes its buckets anew after the first
    took: dict[str, list[float]] = {"without": [], "with": []}
    for pair in range(pairs):
        for kind in ("without", "with") if pair % 2 else ("with", "without"):
            watching = thinwire.watch(folder, gpu_calls=True) if kind == "with" else None
            took[kind].append(timed(step, device, steps=steps))
            if watching is not None:
                watching.close()
                passed_by += watching.num_passed_by
                errors += [f"rank {dist.get_rank()}: {watching.lost}"] if watching.lost else []
                errors += faults_of(own_records(folder), least={"all_reduce": steps})
    return {"took": took, "errors": errors, "passed_by": passed_by}


def verdict(told: dict[str, Any], device: torch.device) -> tuple[str, bool]:
    """Return the last line and whether all is well, the same on all ranks."""
    wrong = torch.tensor([len(told["errors"]), told["passed_by"]], dtype=torch.float64, device=device)
    dist.all_reduce(wrong)
    ratios = [b / a for a, b in zip(told["took"]["without"], told["took"]["with"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    per_step = [1000 * statistics.median(told["took"][kind]) for kind in ("without", "with")]
    num_wrong, passed_by = (int(number) for number in wrong.tolist())
    record = f"{num_wrong} faults" if num_wrong else "every call has its end"
    return (
        f"{dist.get_world_size()} ranks, torch {torch.__version__}: a step takes {per_step[0]:.2f} ms without and "
        f"{per_step[1]:.2f} ms with recording, ratio {middle:.3f} ({low:.3f} to {high:.3f}); {record}; {passed_by} "
        f"calls passed by"
    ), not num_wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        sys.exit("this needs a GPU and a torch with nccl, and here is none; nothing was measured")
    # torchrun gives these to each rank
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29400")):
        os.environ.setdefault(name, value)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    with tempfile.TemporaryDirectory() as folder:
        told = in_turns(device, folder, pairs=options.pairs, steps=options.steps)
    for error in told["errors"]:
        print(error, file=sys.stderr)
    line, is_well = verdict(told, device)
    if dist.get_rank() == 0:
        print(line)
    dist.destroy_process_group()
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
