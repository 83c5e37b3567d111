"""Times of shared attention over two sites of two ranks in a lab, beside the simulator's.

    python benchmarks/planning/sequence_steps.py     # into benchmarks/results/sequence_steps.jsonl

Each host of the lab is a site with two ranks. A step is a forward and a backward pass of one layer, whose blocks sleep
instead of computing. The link is measured first; the simulator gets it, and the table's messages.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from site_steps import median_s
from torch import Tensor

from thinwire import sequences
from thinwire.lab.lab import Lab
from thinwire.lab.settings import Link
from thinwire.sequences.block_attention import BlockMask
from thinwire.simulate.fluid_network import FluidFlow, SimLink
from thinwire.simulate.task_graph import ComputeTask, Task, TransferTask, run_tasks
from thinwire.training.summary import describe_machine

RESULTS = Path(__file__).parents[1] / "results" / "sequence_steps.jsonl"
SITES, SEQ_LEN, HEADS, HEAD_DIM = (0, 0, 1, 1), 1024, 8, 32
POLICIES = ("ring", "two-level", "heads+sites")
RATE, LATENCY_S = "20mbit", 0.01
BLOCK_S = (0.04, 0.05)  # of a block of all heads between two parts of a ring, forward and backward


def link(repeats: int) -> tuple[float, float]:
    """Return the bits a second of a long message between sites and the seconds that a short one takes."""
    rank = dist.get_rank()

    def cross(tensor: torch.Tensor) -> None:
        if rank == 0:
            dist.send(tensor, 2)
        elif rank == 2:
            dist.recv(tensor, 0)

    barrier_s = median_s(lambda: None, repeats)
    short, long = torch.zeros(2**17, dtype=torch.uint8), torch.zeros(2**20, dtype=torch.uint8)
    took_s = [median_s(lambda tensor=tensor: cross(tensor), repeats) for tensor in (short, long)]
    return 8 * (long.numel() - short.numel()) / (took_s[1] - took_s[0]), barrier_s


def sleep_in_blocks() -> None:
    """Let blocks sleep instead of computing: four ranks on two cores would take each other's time."""

    def slept(query: Tensor, key: Tensor, mask: BlockMask, whole_s: float) -> None:
        share = query.shape[1] * query.shape[2] * key.shape[2] / (HEADS * (SEQ_LEN // 4) ** 2)
        time.sleep(whole_s * share * (0.5 if mask.is_causal else 1.0))

    def forward(query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: BlockMask) -> tuple[Tensor, Tensor]:
        slept(query, key, mask, BLOCK_S[0])
        return torch.zeros_like(query), query.new_zeros(query.shape[:3])

    def backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Tensor, scale: float,
                 mask: BlockMask) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        slept(query, key, mask, BLOCK_S[1])
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    module = importlib.import_module("thinwire.sequences.block_attention")
    module.attend, module.attend_backward = forward, backward  # type: ignore[attr-defined]


def work(repeats: int) -> None:
    """Time the steps of each policy on this rank; rank 0 prints them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bandwidth, barrier_s = link(repeats)
    sleep_in_blocks()
    for policy in POLICIES:
        shared: Any = sequences.attention(dist.group.WORLD, heads=HEADS, policy=policy, sites=SITES)
        inputs = [torch.randn(1, HEADS, SEQ_LEN // 4, HEAD_DIM, requires_grad=True) for _ in range(3)]
        step_s = median_s(lambda shared=shared, inputs=inputs: shared(*inputs).sum().backward(), repeats)
        if dist.get_rank() == 0:
            print(json.dumps({"policy": policy, "step_s": step_s, "bandwidth_bits_per_s": bandwidth,
                              "barrier_s": barrier_s, "block_s": BLOCK_S}), flush=True)  # fmt: skip
    dist.destroy_process_group()


def simulated_s(policy: str, *, bandwidth_bits_per_s: float, block_s: tuple[float, float]) -> float:
    """Return the simulator's time of a step; messages inside a site take no time."""
    plan = sequences.sequence_plan(policy, sites=SITES, heads=HEADS)
    size = plan.group_size
    part = SEQ_LEN // len(plan.table.owners) * (HEADS // size) * HEAD_DIM * 32
    unit = len(SITES) ** 2 / len(plan.table.owners) ** 2 * size  # heads fewer, parts longer
    tasks: list[Task] = []
    begin: dict[tuple[int, int], tuple[int, ...]] = {}
    for messages, whole_s in zip((plan.table.forward, plan.table.backward), block_s, strict=True):
        last = 1 + max([plan.table.num_steps, *(one.step for one in messages)])
        for place in range(size):
            numbers, arrivals = {}, dict[tuple[int, int], list[int]]()
            first = len(tasks)
            for step in range(last):
                for group in range(plan.table.num_ranks):
                    numbers[group, step] = len(numbers) + first
            for offset, message in enumerate(messages):
                arrivals.setdefault((message.target, message.step), []).append(first + len(numbers) + offset)
            for (group, step), _ in numbers.items():
                own = [one for one in plan.table.blocks if (one.rank, one.step) == (group, step)]
                seconds = sum(0.5 if one.row == one.column else 1.0 for one in own) * whole_s * unit / size**2
                before = (numbers[group, step - 1],) if step else begin.get((group, place), ())
                tasks.append(ComputeTask(processor=(group, place), seconds=seconds,
                                         after=(*before, *arrivals.get((group, step), ()))))  # fmt: skip
            for message in messages:
                is_border = plan.table.is_border(message)
                flow = FluidFlow(
                    size_bits=2 * part if is_border else 0.0, latency_s=LATENCY_S if is_border else 0.0,
                    loads=((plan.table.sites[message.source], 1.0),),
                )  # fmt: skip
                after = (numbers[message.source, message.posted - 2],) if message.posted > 1 else begin.get(
                    (message.source, place), ())  # fmt: skip
                come = [n for step in range(message.posted) for n in arrivals.get((message.source, step), ())]
                tasks.append(TransferTask(flow=flow, after=(*after, *come)))
            for group in range(plan.table.num_ranks):
                begin[group, place] = (numbers[group, last - 1],)
    return run_tasks(tasks, links=[SimLink(bandwidth_bits_per_s=bandwidth_bits_per_s)] * 2).makespan_s


def launch(repeats: int) -> int:
    """Start the two ranks of this host."""
    host = int(os.environ["RANK"])
    line = [sys.executable, __file__, "--work", "--repeats", str(repeats)]
    ranks = [
        subprocess.Popen(line, env={**os.environ, "RANK": str(2 * host + place), "WORLD_SIZE": "4"})
        for place in (0, 1)
    ]  # fmt: skip
    return max(rank.wait() for rank in ranks)


def main() -> int:
    """Run the lab, and write measured and simulated times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", action="store_true")
    parser.add_argument("--launch", action="store_true")
    options = parser.parse_args()
    if options.work:
        work(options.repeats)
        return 0
    if options.launch:
        return launch(options.repeats)
    with Lab(hosts=2, rate=RATE, link=Link(latency_s=LATENCY_S)) as lab:
        line = [sys.executable, __file__, "--launch", "--repeats", str(options.repeats)]
        results = lab.run(line, deadline_s=400)
    if any(result.exit_code for result in results):
        sys.exit("\n".join(result.stderr for result in results))
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        for text in results[0].stdout.splitlines():
            measured = json.loads(text)
            predicted_s = simulated_s(measured["policy"], bandwidth_bits_per_s=measured["bandwidth_bits_per_s"],
                                      block_s=tuple(measured["block_s"]))  # fmt: skip
            row = {**measured, "simulated_s": predicted_s, "load": os.getloadavg()[0]}
            file.write(json.dumps({**row, "machine": describe_machine(torch.device("cpu"))}) + "\n")
            print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
