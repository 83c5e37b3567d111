"""Step times of a pipeline over a thin border between two hosts of a lab, beside what the plan's simulator predicts.

    python benchmarks/planning/border_steps.py     # into benchmarks/results/border_steps.jsonl

Each host runs one stage, which sleeps instead of computing, so that a busy machine changes little; messages are coded,
sent and decoded as in training. The link is measured first: the rate of a long message and the latency of short ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.codec_specs import activation_bytes
from thinwire.codecs.activation_code import ActivationCode
from thinwire.lab.lab import Lab
from thinwire.lab.settings import Link
from thinwire.site.pipeline import StageLink, StageTimes, order_of, pipeline_s
from thinwire.training.summary import describe_machine
from thinwire.transport.collective_hooks import CollectiveHooks, GroupCall
from thinwire.transport.connect import connect
from thinwire.transport.replica_mesh import ReplicaMesh

RESULTS = Path(__file__).parents[1] / "results" / "border_steps.jsonl"
RATES, LATENCY_S, PASSES, NUMEL = ("1mbit", "5mbit", "20mbit"), 0.01, 8, 32_768
FORWARD_S, BACKWARD_S = 0.005, 0.01
CODES = (
    ("bfloat16/bfloat16", 1), ("bfloat16/bfloat16", 3), ("block-int8/block-int4", 1), ("block-int8/block-int4", 3),
    ("block-int4/block-int4", 3),
)  # fmt: skip


class SentBytes:
    """Observer of calls: bytes of messages that this rank sends."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def group(self, number: int, name: str, ranks: tuple[int, ...]) -> None:
        """Ignore groups."""

    def posted(self, call: GroupCall) -> None:
        """Add up sends."""
        self.num_bytes += call.num_bytes if call.kind == "send" else 0

    def ended(self, call: GroupCall) -> None:
        """Ignore ends."""


def median_s(work: Callable[[], object], repeats: int) -> float:
    """Return the median time of some work that both ranks begin together, without its first call."""
    found = []
    for _ in range(repeats + 1):
        dist.barrier()
        began_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - began_s)
    return statistics.median(found[1:])


def link(repeats: int) -> tuple[float, float]:
    """Return the bits a second of a long message and the seconds that a short one takes, both over gloo."""
    rank, small = dist.get_rank(), torch.zeros(1)

    def back_and_forth(tensor: torch.Tensor) -> None:
        for sender in (0, 1):
            dist.send(tensor, 1 - rank) if rank == sender else dist.recv(tensor, 1 - rank)

    latency_s = median_s(lambda: back_and_forth(small), 10) / 2
    # the difference of two long ones leaves what a queue swallows out
    short, long = torch.zeros(2**16, dtype=torch.uint8), torch.zeros(2**18, dtype=torch.uint8)
    took_s = [median_s(lambda tensor=tensor: back_and_forth(tensor), repeats) / 2 for tensor in (short, long)]
    return 8 * (long.numel() - short.numel()) / (took_s[1] - took_s[0]), latency_s


class Sleeping(torch.autograd.Function):
    """A pass that takes its time and no processor."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_S)
        return grad


class Stage(torch.nn.Module):
    """A stage of one weight that sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values, times the weight."""
        return Sleeping.apply(values * self.weight)


def order(eagerness: int) -> Any:
    """Return the order that the plan simulates and torch runs."""
    return order_of(num_stages=2, num_micro_batches=PASSES, eagerness=eagerness)


def work(repeats: int) -> None:
    """Time the steps of each code on this host, and print them."""
    torch.set_num_threads(1)
    transport = connect(solo=True, ranks_per_replica=2)
    rows = torch.randn(PASSES, NUMEL, generator=torch.Generator().manual_seed(1))
    observer = SentBytes()
    hooks = CollectiveHooks(observer)
    bandwidth, latency_s = link(2)
    mesh = ReplicaMesh(device=torch.device("cpu"), pp=2)
    first = (rows,) if mesh.stage == 0 else ()
    last = {"target": rows, "losses": []} if mesh.stage == 1 else {}
    for code, eagerness in CODES:
        schedule = mesh.pipeline([Stage()], order=order(eagerness), code=ActivationCode.parse(code),
                                 loss=lambda found, wanted: (found - wanted).pow(2).mean())  # fmt: skip
        schedule.step(*first, **last)  # asks for shapes too
        observer.num_bytes = 0
        step_s = median_s(lambda schedule=schedule: schedule.step(*first, **last), repeats)
        print(json.dumps({"code": code, "eagerness": eagerness, "step_s": step_s,
                          "sent": observer.num_bytes // (repeats + 1), "bandwidth_bits_per_s": bandwidth,
                          "latency_s": latency_s}), flush=True)  # fmt: skip
    mesh.close()
    hooks.close()
    transport.close()


def predicted_s(line: dict[str, Any]) -> float:
    """Return the simulated time of a step, from the link that was measured."""
    times_s = [8 * activation_bytes(name, NUMEL) / line["bandwidth_bits_per_s"] for name in line["code"].split("/")]
    way = StageLink(message_s=times_s[0], latency_s=line["latency_s"], less_back_s=times_s[0] - times_s[1])
    return pipeline_s(order(line["eagerness"]), [StageTimes(forward_s=FORWARD_S, backward_s=BACKWARD_S)] * 2, [way] * 2)


def main() -> None:
    """Run the lab once for each rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rate", action="append", help="of each host's access; by default 1, 5 and 20 Mbit/s")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.repeats)
        return
    machine, errors = describe_machine(torch.device("cpu")), []
    with options.results.open("w") as file:
        for rate in options.rate or RATES:
            with Lab(hosts=2, rate=rate, link=Link(latency_s=LATENCY_S)) as lab:
                command = [sys.executable, __file__, "--worker", "--repeats", str(options.repeats)]
                outputs = lab.run(command, deadline_s=1500)
            assert all(one.exit_code == 0 for one in outputs), [one.stderr for one in outputs]
            first, last = ([json.loads(text) for text in one.stdout.splitlines()] for one in outputs)
            plain_s = first[0]["step_s"]
            for line, other in zip(first, last, strict=True):
                # the rank that sends first also counts what a queue swallows
                line["bandwidth_bits_per_s"] = min(one["bandwidth_bits_per_s"] for one in (line, other))
                expected_s = predicted_s(line)
                error = expected_s / line["step_s"] - 1
                errors.append(abs(error))
                counted = [line.pop("sent"), other["sent"]]
                payloads = [PASSES * activation_bytes(name, NUMEL) for name in line["code"].split("/")]
                assert counted == payloads, (counted, payloads)
                print(
                    f"{rate:7} {line['code']:22} k {line['eagerness']}  {line['step_s']:7.3f} s, predicted {error:+.1%}"
                    f", {plain_s / line['step_s']:.2f} times as fast as bf16 stages; {counted} bytes", flush=True,
                )  # fmt: skip
                line |= {"rate": rate, "predicted_s": expected_s, "bytes": counted, "machine": machine}
                file.write(json.dumps(line) + "\n")
    print(f"largest error {max(errors):.1%}, median {statistics.median(errors):.1%}")


if __name__ == "__main__":
    main()
