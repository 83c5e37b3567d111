"""The job of `torch_wires.py`: a rank over gloo that works, and calls collectives, until it is ended.

RANK=1 MASTER_ADDR=... python benchmarks/diagnosis/torch_wires_job.py FOLDER PATTERN NUMEL WORK_S PROBES
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

import thinwire

TIMEOUT_S = 60.0


def steps() -> dict[str, Callable[[int], None]]:
    """Return what a step calls, by the pattern's name; `numel` is what each rank brings, a multiple of their number."""
    size = dist.get_world_size()

    def all_reduce(numel: int) -> None:
        dist.all_reduce(torch.ones(numel))

    def buckets(numel: int) -> None:
        works = [dist.all_reduce(torch.ones(numel // 4), async_op=True) for _ in range(4)]
        for work in works:
            assert work is not None
            work.wait()
        dist.all_reduce(torch.ones(5))

    def sharded(numel: int) -> None:
        part = torch.empty(numel // size)
        dist.reduce_scatter_tensor(part, torch.ones(numel))
        dist.all_gather_into_tensor(torch.empty(numel), part)

    def all_gather(numel: int) -> None:
        own = torch.ones(numel // size)
        dist.all_gather([torch.empty_like(own) for _ in range(size)], own)

    def broadcast(numel: int) -> None:
        dist.broadcast(torch.ones(numel), src=0)

    def rooted(numel: int) -> None:
        own, is_root = torch.ones(numel // size), dist.get_rank() == 0
        dist.gather(own, [torch.empty_like(own) for _ in range(size)] if is_root else None, dst=0)
        dist.scatter(own, [own.clone() for _ in range(size)] if is_root else None, src=0)

    return {
        "all_reduce": all_reduce, "buckets": buckets, "sharded": sharded, "all_gather": all_gather,
        "broadcast": broadcast, "rooted": rooted,
    }  # fmt: skip


def main() -> None:
    """Run one rank; whoever started it ends it."""
    folder, pattern, numel, work_s, probes = sys.argv[1:]
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S))
    thinwire.watch(folder, probe_wires=probes == "True")
    step = steps()[pattern]
    while True:
        time.sleep(float(work_s))
        step(int(numel) // size * size)


if __name__ == "__main__":
    main()
