"""The job of `peers.py`: three ranks over gloo train with DDP and all-reduce, until rank 1 or its wire breaks.

On one machine the ranks are forked by `peers.py`. In the lab each host runs

    RANK=1 MASTER_ADDR=... python benchmarks/diagnosis/peers_job.py FOLDER FAULT TOOL
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

ENDING = ("skips a collective", "sends a wrong shape", "stops", "is killed", "hangs in its own code")
SLOW = ("is slow", "stalls")
IN_LAB = ("black hole", "slow link", "slow sender")
TIMEOUT_S = 10.0
BARRIER_S = 2.0
STEP_S = 0.04
SLOWER, STALL_EVERY, STALL = 5, 8, 10
# The step at which a job breaks: who is to find it slow must know first what is usual.
BEGIN, BEGIN_SLOW = 5, 60
_MANY = 1_000_000
_LAB_NUMEL = 250_000  # a megabyte
_ASKED_S = 0.1
MODULES = ("torch._dynamo", "torch.distributed.fsdp", "thinwire.recording.torch_recorder")


def prepare() -> None:
    """Import what a rank would import in the middle of its first step."""
    for module in MODULES:
        importlib.import_module(module)


def job(rank: int, port: int, folder: str, fault: str, tool: str, victim: int = 1) -> None:
    """Run one rank that was forked on this machine."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    take_part(rank, folder, fault, tool, victim=victim)


def take_part(rank: int, folder: str, fault: str, tool: str, *, victim: int) -> None:
    """Run one rank, and write down the error that it ends by."""
    sys.stderr = (Path(folder) / f"stderr_{rank}").open("w")
    os.dup2(sys.stderr.fileno(), 2)
    prepare()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=3, timeout=timedelta(seconds=TIMEOUT_S))
    if tool == "thinwire":
        import thinwire

        thinwire.watch(folder, probe_wires=True)
    if tool == "Flight Recorder":
        threading.Thread(target=_dump_when_asked, args=(rank, Path(folder)), daemon=True).start()
    try:
        train(rank, folder, fault, with_barrier=tool == "monitored barrier", victim=victim)
    except Exception as error:
        told = {"at": time.time(), "said": str(error)}
        (Path(folder) / f"error_{rank}").write_text(json.dumps(told))
        if tool == "Flight Recorder":
            _dump(rank, Path(folder))
    os._exit(0)


def train(rank: int, folder: str, fault: str, *, with_barrier: bool, victim: int) -> None:
    """Train; what slows a job down goes on for ever."""
    import torch
    import torch.distributed as dist
    from torch import nn

    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(16, 16))
    numel = _LAB_NUMEL if fault in IN_LAB else 5
    begin = BEGIN if fault in ENDING else BEGIN_SLOW
    for step in range(8 if fault in ENDING else _MANY):
        time.sleep(own_s(fault, step - begin, is_victim=rank == victim))
        wrapped(torch.ones(3, 16)).sum().backward()
        if step == begin:
            _break(rank, Path(folder), fault, is_victim=rank == victim)
        if with_barrier:
            dist.monitored_barrier(timeout=timedelta(seconds=BARRIER_S), wait_all_ranks=True)
        if not (step == begin and rank == victim and fault == "skips a collective"):
            is_wrong = (rank, step, fault) == (victim, begin, "sends a wrong shape")
            dist.all_reduce(torch.ones(9 if is_wrong else numel))


def own_s(fault: str, after: int, *, is_victim: bool) -> float:
    """Return how long a rank's own code takes in a step, `after` steps after the fault."""
    if fault in ENDING:
        return 0.0
    if is_victim and after > 0 and fault == "is slow":
        return SLOWER * STEP_S
    if is_victim and after > 0 and fault == "stalls" and after % STALL_EVERY == 1:
        return STEP_S + STALL * STEP_S
    return STEP_S


def _break(rank: int, folder: Path, fault: str, *, is_victim: bool) -> None:
    import torch.distributed as dist

    if fault in ENDING:
        dist.barrier()
    # what breaks in the lab is broken from outside, once all have come so far
    (folder / f"{'settled' if fault in IN_LAB else 'fault'}_{rank}").write_text(str(time.time()))
    if is_victim and fault in ("stops", "is killed"):
        os.kill(os.getpid(), signal.SIGSTOP if fault == "stops" else signal.SIGKILL)
    if is_victim and fault == "hangs in its own code":
        time.sleep(4 * TIMEOUT_S)


def _dump(rank: int, folder: Path) -> None:
    import torch

    (folder / "dumps").mkdir(exist_ok=True)
    fresh = folder / f"dump_{rank}"
    fresh.write_bytes(torch._C._distributed_c10d._dump_fr_trace())
    fresh.rename(folder / "dumps" / f"trace_{rank}")


def _dump_when_asked(rank: int, folder: Path) -> None:
    """Dump a job that goes on, as one may by hand: where nothing fails, nothing else makes a dump."""
    while not (folder / "dump_now").exists():
        time.sleep(_ASKED_S)
    _dump(rank, folder)


if __name__ == "__main__":
    take_part(int(os.environ["RANK"]), *sys.argv[1:4], victim=1)
