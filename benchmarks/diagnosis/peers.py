"""What is said of a broken job, and when: torch's default timeout, its monitored barrier and Flight Recorder, and ours.

    python benchmarks/diagnosis/peers.py             # a minute; writes the results
    python benchmarks/diagnosis/peers.py --report    # the table of what is stored

Three ranks over gloo on one machine train with DDP and all-reduce; at the sixth step rank 1 breaks. The group's timeout
is 10 s here instead of torch's 30 minutes, so that waiting for it ends: what would take until then is told as such. The
monitored barrier stands before each all-reduce, with a timeout of 2 s. Times count from the fault.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "peers.jsonl"
FAULTS = ("skips a collective", "sends a wrong shape", "stops")
TOOLS = ("default timeout", "monitored barrier", "Flight Recorder", "thinwire")
TIMEOUT_S = 10.0
BARRIER_S = 2.0


def job(rank: int, port: int, folder: str, fault: str, tool: str, victim: int = 1) -> None:
    sys.stderr = (Path(folder) / f"stderr_{rank}").open("w")
    os.dup2(sys.stderr.fileno(), 2)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=3, timeout=timedelta(seconds=TIMEOUT_S))
    if tool == "thinwire":
        import thinwire

        thinwire.watch(folder)
    try:
        train(rank, folder, fault, with_barrier=tool == "monitored barrier", victim=victim)
    except Exception as error:
        told = {"at": time.time(), "said": str(error)}
        (Path(folder) / f"error_{rank}").write_text(json.dumps(told))
        if tool == "Flight Recorder":
            (Path(folder) / "dumps").mkdir(exist_ok=True)
            dump = torch._C._distributed_c10d._dump_fr_trace()
            (Path(folder) / "dumps" / f"trace_{rank}").write_bytes(dump)
    os._exit(0)


def train(rank: int, folder: str, fault: str, *, with_barrier: bool, victim: int) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(16, 16))
    for step in range(8):
        wrapped(torch.ones(3, 16)).sum().backward()
        if step == 5:
            dist.barrier()
            (Path(folder) / f"fault_{rank}").write_text(str(time.time()))
            if rank == victim and fault in ("stops", "is killed"):
                os.kill(os.getpid(), signal.SIGSTOP if fault == "stops" else signal.SIGKILL)
            if rank == victim and fault == "hangs in its own code":
                time.sleep(4 * TIMEOUT_S)
        if with_barrier:
            dist.monitored_barrier(timeout=timedelta(seconds=BARRIER_S), wait_all_ranks=True)
        if not (step == 5 and rank == victim and fault == "skips a collective"):
            dist.all_reduce(torch.ones(9 if (rank, step, fault) == (victim, 5, "sends a wrong shape") else 5))


def play(fault: str, tool: str, *, victim: int = 1) -> dict[str, Any]:
    """Return what a tool said of a fault: when first, whom it named, and the words."""
    for module in ("torch._dynamo", "torch.distributed.fsdp", "thinwire.training.watching"):
        importlib.import_module(module)  # once for all ranks, which are forked
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=job, args=(rank, port, name, fault, tool, victim)) for rank in range(3)]
        for process in ranks:
            process.start()
        try:
            told = _watch_ours(folder) if tool == "thinwire" else _wait_for_words(folder, ranks, tool)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        begun = min(float(path.read_text()) for path in folder.glob("fault_*"))
        return {"fault": fault, "tool": tool, "after_s": round(told.pop("at") - begun, 2), **told}


def _watch_ours(folder: Path) -> dict[str, Any]:
    from thinwire.diagnosis.diagnose import diagnose
    from thinwire.diagnosis.sources import read_files

    until_s = time.monotonic() + 2 * TIMEOUT_S
    while time.monotonic() < until_s:
        time.sleep(0.1)
        if list(folder.glob("records-rank-*.jsonl")) and (findings := diagnose(read_files([folder]))):
            first = findings[0]
            return {"at": time.time(), "said": f"{first.kind}: {first.where}. {first.text}", "names": first.where}
    return {"at": time.time(), "said": "nothing", "names": ""}


def _wait_for_words(folder: Path, ranks: list[Any], tool: str) -> dict[str, Any]:
    until_s = time.monotonic() + 2 * TIMEOUT_S
    while time.monotonic() < until_s and sum(process.is_alive() for process in ranks) > 1:
        time.sleep(0.1)
    errors = [json.loads(path.read_text()) for path in sorted(folder.glob("error_*"))]
    died = [path.read_text() for path in sorted(folder.glob("stderr_*")) if "what():" in path.read_text()]
    at = min((error["at"] for error in errors), default=time.time())
    if tool == "Flight Recorder":
        words = [
            "-W",
            "ignore",
            "-m",
            "torch.distributed.flight_recorder.fr_trace",
            "--allow-incomplete-ranks",
            str(folder / "dumps"),
        ]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=False)
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        num_dumps = len(list((folder / "dumps").glob("*")))
        said = f"{num_dumps} dumps of 3; its analyser: {said}"
    else:
        said = " / ".join([*(error["said"] for error in errors), *(re.sub(r"\s+", " ", text) for text in died)])
    named = sorted(set(re.findall(r"[Rr]anks?:? (\d+(?:, ?\d+)*)", said)))
    return {"at": at, "said": said[:1500], "names": ", ".join(named)}


def table(lines: list[dict[str, Any]]) -> str:
    rows = ["| fault of rank 1 | tool | first word after | names | says |", "| --- | --- | --- | --- | --- |"]
    for line in lines:
        said = re.sub(r"\[[^\]]*\] ?", "", line["said"]).replace("|", "/").replace("\n", " ")
        names = line["names"] or "nobody"
        rows.append(f"| {line['fault']} | {line['tool']} | {line['after_s']:.1f} s | {names} | {said[:220]} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    if not options.report:
        lines = [play(fault, tool) for fault in FAULTS for tool in TOOLS]
        RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(table([json.loads(line) for line in RESULTS.read_text().splitlines()]))


if __name__ == "__main__":
    main()
