"""What `thinwire.watch` costs: steps of DDP on gloo with and without it, in turns, and the time of one small call.

    python benchmarks/diagnosis/watch_cost.py             # a few minutes on two cores; writes the results
    python benchmarks/diagnosis/watch_cost.py --sites     # the call sites alone: microseconds of each call, in seconds
    python benchmarks/diagnosis/watch_cost.py --report    # the table of what is stored

Two ranks, a thread each, on one machine. Blocks of steps with and without recording follow each other, so that what
else the machine does falls on both; a pair of blocks gives one ratio. The recording is begun and ended for each block.
CPU time is that of the whole process, with gloo's and the recorder's own threads: other work on the machine is not in
it, and it counts all that recording costs, also what is hidden beside a wait.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "watch_cost.json"
# width, layers, rows of a batch, MB of a bucket (torch's default is 25)
MODELS = {
    "12.6 M parameters, 25 MB buckets": (1024, 12, 128, 25),
    "1.6 M parameters, 1 MB buckets": (512, 6, 64, 1),
}


def timed(work: Callable[[], Any], *, times: int) -> tuple[float, float]:
    """Return the seconds of the clock in the middle, and of the CPU on average, that one call of `work` takes."""
    wall = []
    begin_cpu_s = time.process_time()
    for _ in range(times):
        begin_s = time.perf_counter()
        work()
        wall.append(time.perf_counter() - begin_s)
    return statistics.median(wall), (time.process_time() - begin_cpu_s) / times


def in_turns(work: Callable[[], Any], folder: str, *, pairs: int, times: int) -> dict[str, list[tuple[float, float]]]:
    """Return what `timed` tells of `work`, block by block, with and without recording."""
    import torch.distributed as dist

    import thinwire

    found: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    for pair in range(pairs):
        for kind in ("without", "with") if pair % 2 else ("with", "without"):
            watching = thinwire.watch(folder) if kind == "with" else None
            dist.barrier()
            found[kind].append(timed(work, times=times))
            if watching is not None:
                watching.close()
    return found


def measure(rank: int, port: int, folder: str, pairs: int, steps: int, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    told: dict[str, Any] = {}
    for name, (width, layers, batch, bucket_mb) in MODELS.items():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
        optimizer = torch.optim.AdamW(model.parameters())
        rows = torch.randn(batch, width)

        def step(wrapped: Any = wrapped, optimizer: Any = optimizer, rows: Any = rows) -> None:
            wrapped(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        timed(step, times=10)
        told[name] = in_turns(step, folder, pairs=pairs, times=steps)
    one = torch.ones(16)
    told["all_reduce of 16 elements"] = in_turns(lambda: dist.all_reduce(one), folder, pairs=pairs, times=100)
    dist.destroy_process_group()
    if rank == 0:
        Path(out).write_text(json.dumps(told))


def site_cost(port: int) -> str:
    """Return the cost of a call's place in the code: the fastest of many repeats, in the real stack of a call."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist

    import thinwire
    from thinwire.transport import collective_hooks

    made: dict[str, Any] = {"user_site": collective_hooks.user_site, "clock": time.perf_counter, "best": {}, "sys": sys}
    # a frame of the library around it, since the place of a frame of this file would be found at once
    code = compile(SITE_TIMER, collective_hooks.__file__, "exec")
    exec(code, made)
    collective_hooks.user_site = made["timed_site"]
    dist.init_process_group("gloo", rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    with tempfile.TemporaryDirectory() as folder, thinwire.watch(folder):
        for _ in range(20):
            dist.all_reduce(torch.ones(16))
            model(torch.ones(2, 64)).sum().backward()
    dist.destroy_process_group()
    lines = ["| frames above the call's kernel | microseconds |", "| --- | --- |"]
    return "\n".join(lines + [f"| {depth} | {1e6 * took_s:.2f} |" for depth, took_s in sorted(made["best"].items())])


SITE_TIMER = """
def timed_site():
    begin = clock()
    for _ in range(2000):
        user_site()
    took_s, depth, frame = (clock() - begin) / 2000, 0, sys._getframe(1)
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    best[depth] = min(best.get(depth, 1.0), took_s)
    return user_site()
"""


def table(told: dict[str, Any]) -> str:
    lines = ["| with two ranks | clock, without | with | ratio (quartiles) | CPU, without | with | ratio (quartiles) |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for name, found in told["measured"].items():
        cells = [name]
        for which in (0, 1):
            without, recorded = ([one[which] for one in found[kind]] for kind in ("without", "with"))
            low, middle, high = statistics.quantiles([b / a for a, b in zip(without, recorded, strict=True)], n=4)
            cells += [f"{1e3 * statistics.median(values):.3f} ms" for values in (without, recorded)]
            cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--sites", action="store_true")
    options = parser.parse_args()
    if options.sites:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        print(site_cost(port))
        return
    if not options.report:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "told.json")
            arguments = (port, folder, options.pairs, options.steps, out)
            context = multiprocessing.get_context("spawn")
            ranks = [context.Process(target=measure, args=(rank, *arguments)) for rank in range(2)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join(900)
            told = {"measured": json.loads(Path(out).read_text())}
        told |= {"cores": os.cpu_count(), "load": os.getloadavg()[0], "pairs": options.pairs, "steps": options.steps}
        RESULTS.write_text(json.dumps(told) + "\n")
    print(table(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
