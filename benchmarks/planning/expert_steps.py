"""Times of a layer of experts whose tokens travel in chunks between two hosts of a lab, beside the schedule's.

    python benchmarks/planning/expert_steps.py     # into benchmarks/results/expert_steps.jsonl

Experts sleep instead of computing, so that a busy machine changes little; rows are sent as in training, uncoded. A step
is a forward and a backward pass. The link is measured first, and the schedule gets its rate and latency.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from border_steps import link
from site_steps import median_s

from thinwire import experts
from thinwire.lab.lab import Lab
from thinwire.lab.settings import Link
from thinwire.site.expert_schedule import DEGREES, ChunkDegrees, Cost, LayerCosts, schedules
from thinwire.training.summary import describe_machine
from thinwire.transport.connect import connect
from thinwire.transport.group_peers import GroupPeers

RESULTS = Path(__file__).parents[1] / "results" / "expert_steps.jsonl"
RATE, LATENCY_S, ROWS, WIDTH, START_S = "20mbit", 0.01, 512, 512, 0.002
# seconds of the experts' forward pass on all rows, beside 0.21 s in which half of the rows cross
WORKS_S = (0.05, 0.2, 0.5)


class Sleeping(torch.autograd.Function):
    """Experts that take their time and no processor."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, whole_s: float) -> torch.Tensor:
        ctx.seconds = START_S + whole_s * len(rows) / ROWS
        time.sleep(ctx.seconds)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


def work(repeats: int) -> None:
    """Time the passes of all degrees on this host, and print them."""
    torch.set_num_threads(1)
    transport = connect(solo=True, ranks_per_replica=2)
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    counts = [ROWS // 8] * 8
    bandwidth, latency_s = link(2)
    peers = GroupPeers(dist.group.WORLD)
    for whole_s in WORKS_S:

        def compute(arrived: torch.Tensor, own: Sequence[int], whole_s: float = whole_s) -> torch.Tensor:
            return Sleeping.apply(arrived, whole_s)

        ranks = experts.ExpertRanks(name="layer", num_experts=8, compute=compute, device=rows.device, peers=peers)
        start_s = a_chunk_s(ranks, repeats)
        for chunks in ((one, other) for one in DEGREES for other in DEGREES):
            policy = experts.tokens(chunks=chunks)

            def both(policy: Any = policy, ranks: Any = ranks) -> None:
                policy(rows, counts, ranks).sum().backward()

            line = {"whole_s": whole_s, "chunks": chunks, "step_s": median_s(both, repeats),
                    "start_s": start_s, "bandwidth_bits_per_s": bandwidth, "latency_s": latency_s}  # fmt: skip
            print(json.dumps(line), flush=True)
    transport.close()


def a_chunk_s(ranks: experts.ExpertRanks, repeats: int) -> float:
    """Return what a chunk costs in a forward pass, of so few numbers that none of their times shows."""
    rows, counts = torch.zeros(64, 16).requires_grad_(), [8] * 8
    took_s = []
    for policy in (experts.tokens(chunks=1), experts.tokens(chunks=8)):
        took_s.append(median_s(lambda own=policy: own(rows, counts, ranks).sum().backward(), 2 * repeats))
    return (took_s[1] - took_s[0]) / 7 / 3  # a backward pass has twice the work


def predicted(line: dict[str, Any]) -> dict[tuple[int, int], ChunkDegrees]:
    """Return the simulated schedules of a layer, from the link that was measured."""
    crossing_s = 32 * ROWS / 2 * WIDTH / line["bandwidth_bits_per_s"]
    costs = LayerCosts(
        all_to_all=Cost(whole_s=crossing_s), latency_s=line["latency_s"], ready_s=line["latency_s"],
        experts=Cost(start_s=line["start_s"], whole_s=line["whole_s"]),
    )  # fmt: skip
    return {(one.forward, one.backward): one for one in schedules(costs)}


def main() -> None:
    """Run the lab, and print each time beside the simulated one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.repeats)
        return
    with Lab(hosts=2, rate=RATE, link=Link(latency_s=LATENCY_S)) as lab:
        command = [sys.executable, __file__, "--worker", "--repeats", str(options.repeats)]
        outputs = lab.run(command, deadline_s=1500)
    assert all(one.exit_code == 0 for one in outputs), [one.stderr for one in outputs]
    first, last = ([json.loads(text) for text in one.stdout.splitlines()] for one in outputs)
    for line, other in zip(first, last, strict=True):
        # the rank that sends first also counts what a queue swallows
        line["bandwidth_bits_per_s"] = min(one["bandwidth_bits_per_s"] for one in (line, other))
        for key in ("step_s", "start_s"):
            line[key] = max(line[key], other[key])
        line["predicted_s"] = predicted(line)[tuple(line["chunks"])].seconds
        line |= {"rate": RATE, "machine": describe_machine(torch.device("cpu"))}
    options.results.write_text("".join(json.dumps(line) + "\n" for line in first))
    report(first)


def report(lines: list[dict[str, Any]]) -> None:
    """Print the table, and for each layer the chosen degrees beside the best measured ones."""
    errors = []
    for whole_s in WORKS_S:
        own = [line for line in lines if line["whole_s"] == whole_s]
        for line in own:
            errors.append(abs(line["predicted_s"] / line["step_s"] - 1))
            one, other = line["chunks"]
            print(f"experts {whole_s:.2f} s  chunks {one}, {other}  {line['step_s']:.3f} s, predicted "
                  f"{line['predicted_s']:.3f} s ({line['predicted_s'] / line['step_s'] - 1:+.1%})")  # fmt: skip
        best, chosen = (min(own, key=lambda line: line[key]) for key in ("step_s", "predicted_s"))
        whole = next(line for line in own if line["chunks"] == [1, 1])
        print(f"experts {whole_s:.2f} s: chosen {chosen['chunks']} takes {chosen['step_s']:.3f} s, the best measured "
              f"{best['chunks']} {best['step_s']:.3f} s, unchunked {whole['step_s']:.3f} s")  # fmt: skip
    print(f"largest error {max(errors):.1%}, median {statistics.median(errors):.1%}")


if __name__ == "__main__":
    main()
