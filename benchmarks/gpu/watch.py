"""`thinwire.watch` on nccl, two ranks on one GPU, and nccl's own dump of a time-out, read by `thinwire diagnose`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from records import Part, finish, part_from_command_line

ROOT = Path(__file__).parents[2]
_STUCK = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl", rank=0, world_size=1, init_method="tcp://127.0.0.1:" + sys.argv[1],
                        timeout=timedelta(seconds=3))
x = torch.ones(1024, device="cuda")
dist.all_reduce(x)
torch.cuda.synchronize()
torch.cuda._sleep(40_000_000_000)  # twenty seconds of a GPU's clock: the next call does not begin
dist.all_reduce(x)
print("waiting", flush=True)
torch.cuda.synchronize()
"""
_TWO = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
torch.cuda.set_device(0)
rank = int(sys.argv[2])
dist.init_process_group("nccl", rank=rank, world_size=2, init_method="tcp://127.0.0.1:" + sys.argv[1],
                        timeout=timedelta(seconds=12))
x = torch.ones(1024, device="cuda") * (rank + 1)
dist.all_reduce(x)
torch.cuda.synchronize()
print("sum", float(x[0]), flush=True)
os._exit(0)
"""


def recorded(part: Part) -> dict[str, Any]:
    """Record a job of one rank: each call must have an end, and none may be told too early."""
    if part.device.type == "cpu":
        return watched_on_gloo()
    command = [sys.executable, str(ROOT / "benchmarks" / "diagnosis" / "watch_nccl.py")]
    found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    print(found.stdout[-3000:], found.stderr[-3000:])
    if found.returncode:
        raise RuntimeError(f"{found.stdout[-800:]} {found.stderr[-800:]}")
    return {"last_line": found.stdout.strip().splitlines()[-1]}


def watched_on_gloo() -> dict[str, Any]:
    """Record a few calls of one rank over gloo, to try the part without a GPU."""
    import torch
    import torch.distributed as dist

    import thinwire
    from thinwire.runlog.run_folder import read_files

    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        with thinwire.watch(Path(folder, "records")):
            for _ in range(5):
                dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()
        return {"operations": len(read_files([Path(folder, "records")]).operations)}


def free_port() -> str:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def two_ranks(part: Part) -> dict[str, Any]:
    """Try two ranks on one GPU, which nccl may refuse: what it says is the result."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _TWO, port, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=25)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        said.append({"code": process.returncode, "out": out[-200:], "err": err[-600:]})
    return {"works": all(one["code"] == 0 for one in said), "ranks": said}


def dump_is_read(part: Part) -> dict[str, Any]:
    """Force a time-out of nccl; its Flight Recorder writes a dump, which `thinwire diagnose` must read and name."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ, "TORCH_NCCL_TRACE_BUFFER_SIZE": "200", "TORCH_FR_BUFFER_SIZE": "200",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{folder}/dump_",
            "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/dump_", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "20",
            "TORCH_NCCL_COORD_CHECK_MILSEC": "200",
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-c", _STUCK, free_port()], env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            output = process.communicate(timeout=25)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0]
        dumps = sorted(Path(folder).glob("dump_*"))
        if not dumps:
            raise RuntimeError(f"no dump after code {process.returncode}: {output[-1500:]}")
        read = subprocess.run(
            [sys.executable, "-m", "thinwire.cli.main", "diagnose", "--json", *map(str, dumps)],
            check=False, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        first = dumps[0].read_bytes()[:1]
        shutil.copy(dumps[0], part.folder / "dump_0")
        if read.returncode not in (0, 3):
            raise RuntimeError(f"dump of {dumps[0].stat().st_size} bytes, begins with {first!r}: {read.stderr[-800:]}")
        told = json.loads(read.stdout)
        return {
            "job_code": process.returncode, "dump_bytes": dumps[0].stat().st_size, "begins_with": repr(first),
            "diagnose_code": read.returncode, "findings": told.get("findings", told),
        }  # fmt: skip


def main() -> None:
    part = part_from_command_line("watch", __doc__ or "")
    part.measure("recorded", lambda: recorded(part))
    if part.device.type == "cuda":
        part.measure("dump", lambda: dump_is_read(part))
        part.measure("two ranks", lambda: two_ranks(part))
    finish(part)


if __name__ == "__main__":
    main()
