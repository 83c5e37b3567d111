"""Step times of small real models on two or four ranks of this machine, beside what a plan inside a site predicts.

    python benchmarks/planning/site_steps.py     # into benchmarks/results/site_steps.jsonl

Each rank is a process with one thread, so there should be a core for each, and nothing else to do. Speed and links are
measured in the same run: passes of the whole model on every rank at once without messages, for each micro-batch, an
all-reduce, and a small message. The prediction gets these numbers and nothing of the steps that it predicts. It is made
twice: as the plan makes it, where messages overlap with work, and with messages after work, since ranks without a core
to spare send with the core that computes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.site.cost_model import Layout, StepCost, decoder_shape, sent_numbers
from thinwire.site.device_grid import Degrees
from thinwire.site.search import starts
from thinwire.site.site_file import Site, SiteNode
from thinwire.training.config import TrainConfig
from thinwire.training.parallel_passes import ParallelPasses, cut_model, make_mesh
from thinwire.training.summary import describe_machine
from thinwire.workloads.language.transformer import TransformerConfig, build_transformer

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "multiprocess"))

from processes import run, values

RESULTS = Path(__file__).parents[1] / "results" / "site_steps.jsonl"
MODELS = {
    "2m": TransformerConfig(vocab_size=512, dim=192, layers=4, heads=4, max_seq_len=128),
    "7m": TransformerConfig(vocab_size=512, dim=320, layers=6, heads=4, max_seq_len=128),
}
BATCH = 16
# What `thinwire train --plan` runs on two ranks.
CUTS: tuple[dict[str, int], ...] = (
    {"dp_replicate": 2, "micro_batch": 8}, {"dp_replicate": 2, "micro_batch": 2},
    {"dp_shard": 2, "zero_stage": 1, "micro_batch": 4}, {"dp_shard": 2, "zero_stage": 2, "micro_batch": 4},
    {"dp_shard": 2, "zero_stage": 3, "micro_batch": 4}, {"dp_shard": 2, "zero_stage": 3, "micro_batch": 8},
    {"dp_shard": 2, "zero_stage": 2, "micro_batch": 4, "recompute_layers": 4},
    {"tp": 2, "micro_batch": 16}, {"tp": 2, "micro_batch": 4},
    {"pp": 2, "micro_batch": 4}, {"pp": 2, "micro_batch": 2}, {"pp": 2, "interleave": 2, "micro_batch": 2},
)  # fmt: skip


def median_s(work: Callable[[], object], repeats: int) -> float:
    """Return the median time of some work that all ranks begin together, without its first call."""
    found = []
    for _ in range(repeats + 1):
        dist.barrier()
        began_s = time.perf_counter()
        work()
        dist.barrier()
        found.append(time.perf_counter() - began_s)
    return statistics.median(found[1:])


def measure(shape: dict[str, Any], cuts: list[dict[str, int]], repeats: int) -> dict[str, Any]:
    """Time every cut on this rank, and what a prediction needs."""
    from thinwire.transport.connect import connect

    torch.set_num_threads(1)
    transport = connect(solo=True, ranks_per_replica=2)
    model = TransformerConfig(**shape)
    tokens = torch.randint(model.vocab_size, (BATCH, model.max_seq_len))
    whole = build_transformer(model, seed=0)
    found: dict[str, Any] = {}
    make_mesh(TrainConfig.of(model="nano", dp_replicate=2, batch_size=BATCH), device=torch.device("cpu"))

    def alone(rows: int) -> None:
        for _ in range(BATCH // 2 // rows or 1):
            whole.loss(tokens[:rows], tokens[:rows])[0].backward()
        whole.zero_grad()

    found["alone_s"] = {}
    for rows in sorted({cut["micro_batch"] for cut in cuts}):
        passes = BATCH // 2 // rows or 1
        found["alone_s"][str(rows)] = median_s(lambda rows=rows: alone(rows), repeats) / passes
    numbers = torch.zeros(2**20)
    found["bandwidth_bits_per_s"] = 32 * numbers.numel() / median_s(lambda: dist.all_reduce(numbers), repeats)
    small = torch.zeros(1)
    found["latency_s"] = median_s(lambda: [dist.all_reduce(small) for _ in range(20)], repeats) / 40
    found["steps_s"] = []
    for cut in cuts:
        config = TrainConfig.of(model="nano", batch_size=BATCH, clip_norm=0.0, **cut)
        mesh = make_mesh(config, device=torch.device("cpu"))
        own = cut_model(build_transformer(model, seed=0), config, mesh)
        passes = ParallelPasses(config, own, mesh)

        def step(passes: ParallelPasses = passes, own: torch.nn.Module = own) -> None:
            passes.backward(tokens, tokens, factor=1.0)
            own.zero_grad()

        found["steps_s"].append(median_s(step, repeats))
        mesh.close()
    transport.close()
    return found


def predicted_s(model: TransformerConfig, cut: dict[str, int], measured: dict[str, Any]) -> tuple[float, float]:
    """Return the step time of the cost model, with messages that overlap with work, and with those that do not."""
    shape = decoder_shape(
        layers=model.layers, width=model.dim, heads=model.heads, vocab_size=model.vocab_size,
        seq_len=model.max_seq_len, is_head_tied=True,
    )  # fmt: skip
    # messages are float32 here, and 16 bits in the model
    bandwidth = measured["bandwidth_bits_per_s"] / 2

    def cost(layout: Layout, flops_per_s: float, devices: int, *, bandwidth: float = bandwidth) -> StepCost:
        node = SiteNode(
            name="box", devices=devices, memory_bytes=1e12, flops_per_s=flops_per_s, bandwidth_bits_per_s=bandwidth,
            latency_s=measured["latency_s"],
        )  # fmt: skip
        return StepCost(model=shape, layout=layout, placement=starts(Site(nodes=(node,)), layout.degrees)[0])

    rows = cut["micro_batch"]
    alone = Layout(degrees=Degrees(), global_batch=rows, micro_batch=rows)
    speed = cost(alone, 1e9, 1).step_s / measured["alone_s"][str(rows)] * 1e9
    degrees = Degrees(**{name: cut[name] for name in ("pp", "dp_replicate", "dp_shard", "tp") if name in cut})
    layout = Layout(
        degrees=degrees, global_batch=BATCH, micro_batch=rows, interleave=cut.get("interleave", 1),
        zero_stage=cut.get("zero_stage", 0), recomputed_layers=cut.get("recompute_layers", 0),
    )  # fmt: skip
    data = sent_numbers(shape, layout, stage=0)["data"] * 16 / bandwidth
    without = cost(replace(layout, zero_stage=min(layout.zero_stage, 1)), speed, 2, bandwidth=1e15).step_s
    if degrees.dp_replicate * degrees.dp_shard == 1:  # nothing overlaps
        return (cost(layout, speed, 2).step_s,) * 2
    return cost(layout, speed, 2).step_s, without + data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    errors = []
    with options.results.open("w") as file:
        for name, model in MODELS.items():
            cuts = [cut for cut in CUTS if model.layers % (cut.get("pp", 1) * cut.get("interleave", 1)) == 0]
            arguments = {"shape": asdict(model), "cuts": cuts, "repeats": options.repeats}
            measured = values(run(measure, num_ranks=2, arguments=arguments, deadline_s=900))[0]
            for cut, step_s in zip(cuts, measured["steps_s"], strict=True):
                expected = predicted_s(model, cut, measured)
                errors.append([abs(one / step_s - 1) for one in expected])
                what = " ".join(f"{key} {value}" for key, value in cut.items())
                off = ", ".join(f"{one / step_s - 1:+.1%}" for one in expected)
                print(f"{name}  {what:55} {1e3 * step_s:8.1f} ms  predicted {off}", flush=True)
                line = {
                    "model": name, "cut": cut, "step_s": step_s, "predicted_s": expected[0],
                    "predicted_without_overlap_s": expected[1],
                    "bandwidth_bits_per_s": measured["bandwidth_bits_per_s"], "latency_s": measured["latency_s"],
                    "alone_s": measured["alone_s"], "repeats": options.repeats,
                    "machine": describe_machine(torch.device("cpu")),
                }  # fmt: skip
                file.write(json.dumps(line) + "\n")
    for name, own in zip(("with overlap", "without"), zip(*errors, strict=True), strict=True):
        print(f"{name}: median error {statistics.median(own):.1%}, largest {max(own):.1%}")


if __name__ == "__main__":
    main()
