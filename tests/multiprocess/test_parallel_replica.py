"""Replica of several ranks with fixed replicas: every cut of a model trains as one process does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live_processes import send
from namespaces import ADDRESSES, CABLE, NAMES, Hosts
from processes import run, values
from torch._C._distributed_c10d import ProcessGroupGloo, _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import COMMAND, DEADLINE_S, DOCUMENTS, OPTIONS, Started, finish, result, with_slow_steps, worker_of

from thinwire.cli import plan as plan_command
from thinwire.shared_random import derive_seed
from thinwire.site.cost_model import Layout, ModelShape, sent_numbers
from thinwire.site.device_grid import Degrees
from thinwire.site.pipeline import StageLink, StageTimes, order_of, step_s
from thinwire.training.build import make_inner_optimizer
from thinwire.training.config import TrainConfig
from thinwire.training.loop import LocalPasses
from thinwire.training.parallel_passes import cut_model
from thinwire.training.skip_passes import deal_paths
from thinwire.transport.base import JSON_BYTES
from thinwire.transport.secret import make_secret
from thinwire.workloads.language.presets import TransformerConfig
from thinwire.workloads.language.streamed import streamed
from thinwire.workloads.language.transformer import TransformerStage, build_transformer, next_token_loss
from thinwire.workloads.sampler import PADDING

SHAPE = TransformerConfig(vocab_size=16, dim=16, layers=4, heads=4, max_seq_len=8)
LINEAR = replace(SHAPE, is_linear=True)
STEPS, BATCH = 2, 8
# Every degree that runs, alone and together; all with four ranks, so that one group of processes serves all.
CUTS: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"dp_shard": 4, "zero_stage": 1, "micro_batch": 1},
    "ZeRO-2 with recompute": {"dp_shard": 4, "zero_stage": 2, "micro_batch": 1, "recompute_layers": 3},
    "ZeRO-3": {"dp_shard": 4, "zero_stage": 3, "micro_batch": 2},
    "ZeRO-3 of two layers": {
        "dp_shard": 4,
        "zero_stage": 3,
        "micro_batch": 1,
        "unsharded_layers": 2,
        "recompute_layers": 3,
    },
    "copies of shards": {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3, "micro_batch": 1},
    "copies alone": {"dp_replicate": 4, "micro_batch": 2},
    "context parallel": {"cp": 4, "zero_stage": 1, "micro_batch": 4, "recompute_layers": 2},
    "context parallel with helpers": {"cp": 4, "zero_stage": 1, "micro_batch": 4, "cp_policy": "helper"},
    "context parallel in shards": {"cp": 2, "dp_shard": 2, "zero_stage": 3, "micro_batch": 2},
    "context parallel in copies": {
        "cp": 2,
        "dp_replicate": 2,
        "zero_stage": 2,
        "micro_batch": 1,
        "cp_policy": "zigzag",
    },
    "streamed context parallel": {"cp": 4, "zero_stage": 1, "micro_batch": 4, "stream_backward": 4},
    "streamed context parallel in shards": {
        "cp": 2,
        "dp_shard": 2,
        "zero_stage": 3,
        "micro_batch": 2,
        "stream_backward": 3,
    },
    "context and tensor parallel": {"cp": 2, "tp": 2, "zero_stage": 2, "micro_batch": 4},
    "pipeline of context parallel ranks": {"pp": 2, "cp": 2, "zero_stage": 1, "micro_batch": 2},
    "tensor parallel": {"tp": 4, "micro_batch": 4},
    "tensor parallel in shards": {"dp_shard": 2, "tp": 2, "zero_stage": 3, "micro_batch": 2, "recompute_layers": 1},
    "tensor parallel in copies": {"dp_replicate": 2, "tp": 2, "micro_batch": 4},
    "pipeline": {"pp": 4, "micro_batch": 1, "recompute_layers": 1},
    "eager pipeline": {"pp": 4, "micro_batch": 1, "eagerness": 2},
    "eager pipeline of shards": {"pp": 2, "dp_shard": 2, "zero_stage": 1, "micro_batch": 1, "eagerness": 3},
    "pipeline of shards": {"pp": 2, "dp_shard": 2, "zero_stage": 1, "micro_batch": 1},
    "interleaved pipeline of tensor parallel ranks": {"pp": 2, "tp": 2, "interleave": 2, "micro_batch": 2},
    "interleaved pipeline of copies": {"pp": 2, "dp_replicate": 2, "interleave": 2, "micro_batch": 1},
    # 4 layers in 6 chunks: the ends have the embedding and the head alone
    "uneven chunks of shards": {"pp": 2, "dp_shard": 2, "zero_stage": 1, "interleave": 3, "micro_batch": 1},
    # 7 layers in 8 chunks: one more a rank than torch holds together by itself
    "many chunks of shards": {"pp": 2, "dp_shard": 2, "zero_stage": 1, "interleave": 4, "micro_batch": 1},
    "uneven stages": {"pp": 4, "micro_batch": 1, "recompute_layers": 2},
    # 5 sequences: the second replica pads its last pass; 6 on four ranks: the last one has none
    "padded pipeline of shards": {"pp": 2, "dp_shard": 2, "zero_stage": 1, "micro_batch": 1, "batch_size": 5},
    "padded passes of a pipeline": {"pp": 2, "tp": 2, "micro_batch": 3},
    "padded shards": {"dp_shard": 4, "zero_stage": 3, "micro_batch": 1, "batch_size": 6},
}
SKIP: dict[str, Any] = {"pp": 4, "skip": 0.33, "micro_batch": 1}
LAYERS = {"many chunks of shards": 7, "uneven stages": 7}


# The same, on documents of unlike lengths: ranks have unlike rows and passes.
DOCUMENT_CUTS: dict[str, dict[str, Any]] = {
    "documents in shards": {"dp_shard": 4, "zero_stage": 3, "micro_batch": 1},
    "documents shared by context parallel ranks": {"cp": 2, "dp_replicate": 2, "micro_batch": 2},
    "documents in tensor parallel copies": {"dp_replicate": 2, "tp": 2, "micro_batch": 1, "recompute_layers": 2},
}
# The same with gated linear attention, whose states go from rank to rank.
LINEAR_CUT: dict[str, Any] = {"cp": 4, "zero_stage": 1, "micro_batch": 4, "recompute_layers": 2}
ROW_LENGTHS = (8, 1, 3, 8, 2, 5, 7, 1)


# Time of a micro-batch on each rank, in a time of the test's own, and passes of a step.
FORWARD_S, BACKWARD_S, PASSES = 1.0, 2.0, 8
# Direction and chunk of what this rank's stages have done.
DONE: list[tuple[str, int]] = []


class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, chunk: int) -> torch.Tensor:
        DONE.append(("forward", chunk))
        ctx.chunk = chunk
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        DONE.append(("backward", ctx.chunk))
        return grad, None


class NotingStage(torch.nn.Module):
    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        noted: torch.Tensor = _Noted.apply(values * self.weight, self.chunk)
        return noted


def work_of_step(mesh: Any, *, chunks: int) -> list[tuple[str, int]]:
    """Return what this rank does in a step of a pipeline, in its order."""
    stages = [NotingStage(chunk) for chunk in range(chunks)]
    order = order_of(num_stages=4, num_micro_batches=PASSES, interleave=chunks)
    schedule = mesh.pipeline(stages, order=order, loss=lambda found, wanted: (found - wanted).sum())
    rows = torch.zeros(PASSES, 2)
    for _ in range(2):  # the first step asks for shapes too
        DONE.clear()
        first = (rows,) if mesh.stage == 0 else ()
        schedule.step(*first, **({"target": rows, "losses": []} if mesh.stage == 3 else {}))
    return list(DONE)


def makespan(work: list[list[tuple[str, int]]], *, chunks: int) -> float:
    """Return when the last rank is done, where each does its work in its order as soon as it has what it needs."""
    last, left = len(work) * chunks - 1, [list(own) for own in work]
    free, ends = [0.0] * len(work), dict[tuple[str, int, int], float]()
    while any(left):
        before = len(ends)
        for rank, own in enumerate(left):
            while own:
                direction, stage = own[0][0], own[0][1] * len(work) + rank
                number = sum((direction, stage, one) in ends for one in range(PASSES))
                forward = ("forward", stage - 1, number) if stage else None
                needs = ("backward", stage + 1, number) if stage < last else ("forward", stage, number)
                needed = forward if direction == "forward" else needs
                if needed is not None and needed not in ends:
                    break
                took_s = (FORWARD_S if direction == "forward" else BACKWARD_S) / chunks
                free[rank] = max(free[rank], 0.0 if needed is None else ends[needed]) + took_s
                ends[direction, stage, number] = free[rank]
                own.pop(0)
        assert len(ends) > before, "ranks wait for each other"
    assert len(ends) == 2 * (last + 1) * PASSES
    return max(free)


class SentNumbers(TorchDispatchMode):
    """Count of the numbers that this rank sends in collectives, by axis; rings are assumed, as in the plan."""

    def __init__(self, axes: dict[Any, str]) -> None:
        super().__init__()
        self.axes = axes
        self.sent = dict.fromkeys(("data", "cp", "tp", "pp"), 0.0)
        self.order: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func.__name__, args, args[1 if isinstance(args[0], list) else 2])
        elif func.namespace == "_c10d_functional" and func.__name__.startswith("all_"):
            self._count(func.__name__, args, args[-1])
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any, group: Any) -> None:
        if isinstance(group, str):
            group = _resolve_process_group(group)
        elif isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        ranks, size = tuple(dist.get_process_group_ranks(group)), group.size()
        self.order.append(name.partition(".")[0])
        first = args[0][0] if isinstance(args[0], list) else args[0]
        # a step broadcasts two numbers, its losses
        times = {
            "_allgather_base_": 1, "_reduce_scatter_base_": size, "allreduce_": 2, "all_reduce": 2, "send": None,
            "all_gather_into_tensor": size, "all_to_all_single": None, "recv_": 0, "broadcast_": 0,
        }[name.partition(".")[0]]  # fmt: skip
        share = 1.0 if times is None else times * (size - 1) / size
        self.sent[self.axes.get(group.group_name) or self.axes.get(ranks, "data")] += share * first.numel()


def options(**more: Any) -> TrainConfig:
    common = {"batch_size": BATCH, "lr": 1e-2, "inner_optimizer": "adamw", "clip_norm": 0.05, "steps": STEPS}
    return TrainConfig.of(model="nano", **common | more)


def shape_of(name: str) -> TransformerConfig:
    return replace(SHAPE, layers=LAYERS.get(name, SHAPE.layers))


def batches(rows: int = BATCH) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    made = [torch.randint(16, (BATCH, 9), generator=generator)[:rows] for _ in range(STEPS)]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in made]


def documents() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches with the ends of rows missing, other rows in each."""
    found = []
    for number, (tokens, targets) in enumerate(batches()):
        lengths = torch.tensor(ROW_LENGTHS[number:] + ROW_LENGTHS[:number])
        found.append((tokens, targets.where(torch.arange(8) < lengths.unsqueeze(1), PADDING)))
    return found


def train(config: TrainConfig, model: Any, passes: Any) -> list[float]:
    inner = make_inner_optimizer(config, model)
    losses = []
    windows = batches(config.data.batch_size or BATCH)
    for tokens, targets in documents() if config.data.sequences == "documents" else windows:
        losses.append(float(passes.backward(tokens, targets, factor=1.0)[0]))
        passes.clip()
        inner.step()
        inner.zero_grad(set_to_none=True)
    # six rows on four ranks: one of them has none of its own
    with torch.no_grad():
        losses.append(float(passes.held_out(*(part[:6] for part in batches()[0]))))
    return losses


def skipping_model(config: TrainConfig, model: Any) -> dict[str, Any]:
    """Return losses and gradients of a step in which micro-batches of one row skip stages of one layer each."""
    tokens, targets = batches()[0]
    own = config.parallel
    seed = derive_seed(config.run.seed, "skip", *(int(row.sum()) for row in tokens))
    paths = deal_paths(num_stages=own.pp, length=own.path_length, count=BATCH, seed=seed)
    total = 0.0
    for path, row, target in zip(paths, tokens.split(1), targets.split(1), strict=True):
        part = TransformerStage(model, range(0), has_embedding=True, has_head=True)
        part.blocks = torch.nn.ModuleDict({str(number): model.blocks[number] for number in path})
        loss = next_token_loss(part(row), target, z_loss=SHAPE.z_loss)[0] / BATCH
        loss.backward()
        total += loss.item()
    for number, block in enumerate(model.blocks):
        for parameter in block.parameters():
            parameter.grad *= BATCH / sum(number in path for path in paths)
    return {"loss": total, "gradients": {name: one.grad.flatten() for name, one in model.named_parameters()},
            "held out": float(model.loss(*batches()[0])[1]), "paths": paths}  # fmt: skip


def skip_stages() -> dict[str, Any]:
    """Return the same of this rank's stage, where each has a rank."""
    from thinwire.training.parallel_passes import ParallelPasses, make_mesh, whole_parameters

    config = options(**SKIP)
    mesh = make_mesh(config, device=torch.device("cpu"))
    model: Any = cut_model(build_transformer(SHAPE, seed=3), config, mesh)
    whole = {name: one.flatten().tolist() for name, one in whole_parameters(model, mesh).items()}
    passes = ParallelPasses(config, model, mesh)
    loss = float(passes.backward(*batches()[0], factor=1.0)[0])
    gradients = {name.partition(".")[2]: one.grad.flatten().tolist() for name, one in model.named_parameters()}
    held_out = float(passes.held_out(*batches()[0]))
    mesh.close()
    return {"loss": loss, "gradients": gradients, "held out": held_out, "whole": whole}


def _share_gloo_device() -> None:
    """Let all groups of this process send through one device: each has a thread that wakes a hundred times a second."""
    settings = ProcessGroupGloo._Options()
    settings._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    settings._threads = 2

    make = ProcessGroupGloo.__init__

    def make_on_device(group: Any, store: Any, rank: int, size: int, timeout: Any) -> None:
        settings._timeout = timeout
        make(group, store, rank, size, settings)

    ProcessGroupGloo.__init__ = make_on_device  # type: ignore[assignment, method-assign]


def rank(cuts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    from thinwire.training.parallel_passes import ParallelPasses, make_mesh, whole_parameters
    from thinwire.transport.connect import connect
    from thinwire.transport.shards import local_shard

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that no one has written holds NaN
    transport = connect(solo=True, ranks_per_replica=4)
    _share_gloo_device()
    found = {}
    for name, cut in cuts.items():
        config = options(**cut)
        mesh = make_mesh(config, device=torch.device("cpu"))
        whole_model = build_transformer(shape_of(name), seed=3).double()
        if config.model.stream_backward:
            streamed(whole_model, chunks=config.model.stream_backward)
        model = cut_model(whole_model, config, mesh)
        held = sum(local_shard(parameter).numel() for parameter in model.parameters())
        passes = ParallelPasses(config, model, mesh)
        losses = train(config, model, passes)
        whole = whole_parameters(model, mesh)
        found[name] = {"losses": losses, "held": held, "whole": {n: t.flatten().tolist() for n, t in whole.items()}}
        axes: dict[Any, str] = {
            tuple(dist.get_process_group_ranks(mesh._mesh.get_group(axis))): axis
            for axis in ("tp", "pp") if mesh.size_of(axis) > 1
        }  # fmt: skip
        part = dist.get_rank(mesh.context_group) if mesh.size_of("cp") > 1 else 0
        if mesh.size_of("cp") > 1:  # FSDP2 may have a group of the same ranks
            axes[mesh.context_group.group_name] = "cp"
        with SentNumbers(axes) as sent:
            passes.backward(*batches(config.data.batch_size or BATCH)[0], factor=1.0)
        found[name] |= {"sent": sent.sent, "order": sent.order, "stage": mesh.stage, "part": part}
        mesh.close()
    for name, cut in {**DOCUMENT_CUTS, "linear": LINEAR_CUT}.items():
        config = options(**cut) if name == "linear" else options(sequences="documents", **cut)
        mesh = make_mesh(config, device=torch.device("cpu"))
        model = cut_model(build_transformer(LINEAR if name == "linear" else SHAPE, seed=3).double(), config, mesh)
        losses = train(config, model, ParallelPasses(config, model, mesh))
        whole = whole_parameters(model, mesh)
        found[name] = {"losses": losses, "whole": {n: t.flatten().tolist() for n, t in whole.items()}}
        mesh.close()
    config = options(cp=4, zero_stage=1, micro_batch=4, autocast="bf16")
    mesh = make_mesh(config, device=torch.device("cpu"))
    model = cut_model(build_transformer(SHAPE, seed=3), config, mesh)
    found["losses in bfloat16"] = train(config, model, ParallelPasses(config, model, mesh))
    mesh.close()
    found["skip"] = skip_stages()
    mesh = make_mesh(options(pp=4), device=torch.device("cpu"))
    found["work"] = {str(chunks): work_of_step(mesh, chunks=chunks) for chunks in (1, 2)}
    mesh.close()
    transport.close()
    return found


@pytest.fixture(scope="module")
def cut_runs() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = values(run(rank, num_ranks=4, arguments={"cuts": CUTS}))
    return found


@cache
def alone(shape: TransformerConfig = SHAPE, **more: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    config = options(**more)
    model = build_transformer(shape, seed=3).double()
    losses = train(config, model, LocalPasses(config, model, device=torch.device("cpu")))
    return losses, {name: parameter.detach().flatten() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", [*CUTS, *DOCUMENT_CUTS, "linear"])
def test_a_cut_model_trains_as_one_process(name: str, cut_runs: list[dict[str, Any]]) -> None:
    more = {"sequences": "documents"} if name in DOCUMENT_CUTS else {}
    batch_size = CUTS.get(name, {}).get("batch_size", BATCH)
    shape = LINEAR if name == "linear" else shape_of(name)
    losses, parameters = alone(shape, batch_size=batch_size, **more)
    for found in cut_runs:
        # losses are reported in float32
        assert found[name]["losses"] == pytest.approx(losses, abs=1e-6)
        assert found[name]["whole"].keys() == parameters.keys()
        for parameter, value in parameters.items():
            error = (torch.tensor(found[name]["whole"][parameter], dtype=torch.float64) - value).abs().max()
            assert error < 1e-9, parameter


def test_micro_batches_that_skip_stages_train_as_one_process_without_these(cut_runs: list[dict[str, Any]]) -> None:
    model: Any = build_transformer(SHAPE, seed=3)
    expected = skipping_model(options(**SKIP), model)
    assert {len(path) for path in expected["paths"]} == {3} and len(set(expected["paths"])) > 1
    held = set()
    for found in (one["skip"] for one in cut_runs):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["held out"] == pytest.approx(expected["held out"], rel=1e-5)
        for name, gradient in found["gradients"].items():
            torch.testing.assert_close(torch.tensor(gradient), expected["gradients"][name], rtol=1e-5, atol=1e-7)
        held |= found["gradients"].keys()
        assert found["whole"] == {name: one.flatten().tolist() for name, one in model.named_parameters()}
    assert held == expected["gradients"].keys()


def test_sequences_are_shared_in_bfloat16_too(cut_runs: list[dict[str, Any]]) -> None:
    config = options(autocast="bf16")
    model = build_transformer(SHAPE, seed=3)
    losses = train(config, model, LocalPasses(config, model, device=torch.device("cpu")))
    for found in cut_runs:
        assert found["losses in bfloat16"] == pytest.approx(losses, rel=1e-2)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_step_of_a_pipeline_takes_as_long_as_predicted(chunks: int, cut_runs: list[dict[str, Any]]) -> None:
    predicted_s = step_s(
        [StageTimes(forward_s=FORWARD_S / chunks, backward_s=BACKWARD_S / chunks)] * 4 * chunks, [StageLink()] * 4,
        num_micro_batches=PASSES, interleave=chunks,
    )  # fmt: skip
    work = [[(direction, chunk) for direction, chunk in found["work"][str(chunks)]] for found in cut_runs]
    assert makespan(work, chunks=chunks) == pytest.approx(predicted_s, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "copies"), [("ZeRO-1", 1), ("ZeRO-2 with recompute", 1), ("ZeRO-3", 1), ("copies of shards", 2),
                         ("copies alone", 4)],
)  # fmt: skip
def test_the_ranks_hold_as_many_copies_of_the_parameters_as_planned(
    name: str, copies: int, cut_runs: list[dict[str, Any]]
) -> None:
    assert sum(found[name]["held"] for found in cut_runs) == copies * SHAPE.num_parameters


@pytest.mark.parametrize("name", CUTS)
def test_each_rank_sends_what_the_plan_counts(name: str, cut_runs: list[dict[str, Any]]) -> None:
    cut = CUTS[name]
    degrees = Degrees(**{axis: cut[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp") if axis in cut})
    zero_stage = 0 if degrees.shards == 1 else cut["zero_stage"]  # without shards there is no stage
    layout = Layout(
        degrees=degrees, global_batch=cut.get("batch_size", BATCH), micro_batch=cut["micro_batch"],
        zero_stage=zero_stage,
        interleave=cut.get("interleave", 1), recomputed_layers=cut.get("recompute_layers", 0),
        unsharded_layers=cut.get("unsharded_layers", 0), cp_policy=cut.get("cp_policy", "auto"),
    )  # fmt: skip
    embedding, shape = SHAPE.vocab_size * SHAPE.dim, shape_of(name)
    per_layer = (shape.num_parameters - embedding) / shape.layers
    # the embedding is whole on each tensor-parallel rank
    model = ModelShape(
        layers=shape.layers, width=SHAPE.dim, heads=SHAPE.heads, vocab_size=SHAPE.vocab_size, seq_len=SHAPE.max_seq_len,
        layer_parameters=per_layer, embedding_parameters=embedding * degrees.tp, head_parameters=embedding,
        is_head_tied=True,
    )  # fmt: skip
    for found in cut_runs:
        planned = sent_numbers(model, layout, stage=found[name]["stage"], part=found[name]["part"])
        for axis, count in found[name]["sent"].items():
            # norms are whole on each tensor-parallel rank, the last one is in one stage, and losses are summed
            assert count == pytest.approx(planned[axis], rel=0.02, abs=32), (axis, found[name]["stage"])


@pytest.mark.parametrize("name", ["pipeline of shards", "uneven chunks of shards", "many chunks of shards"])
def test_stages_gather_before_the_first_pass_and_sum_after_the_last(name: str, cut_runs: list[dict[str, Any]]) -> None:
    for found in cut_runs:
        order: list[str] = found[name]["order"]
        kinds = [kind for kind in order if kind in ("_allgather_base_", "send", "recv_", "_reduce_scatter_base_")]
        # the last stage gets the embedding of its tied head first, and returns its gradient at the end
        ends = {"send", "recv_"} if found[name]["stage"] in (0, 1) else set()
        gathers = [place for place, kind in enumerate(kinds) if kind == "_allgather_base_"]
        sums = [place for place, kind in enumerate(kinds) if kind == "_reduce_scatter_base_"]
        passed = [place for place, kind in enumerate(kinds) if kind in ends]
        assert len([place for place in passed if place < gathers[-1]]) <= 1, kinds
        assert len([place for place in passed if place > sums[0]]) <= 1, kinds


TWO_DEVICES = {
    "format": "thinwire-site", "version": 1,
    "nodes": [
        {"name": "box", "devices": 2, "memory_bytes": "16 GB", "flops_per_s": 1e11, "bandwidth_bits_per_s": "20gbit",
         "latency_s": "50us"},
    ],
}  # fmt: skip


@pytest.mark.parametrize("is_of_documents", [False, True], ids=["windows", "documents"])
def test_train_runs_the_plan_of_a_site_as_one_rank_would_and_resumes_it(tmp_path: Path, is_of_documents: bool) -> None:
    site, plan, texts = tmp_path / "site.json", tmp_path / "plan.json", tmp_path / "texts"
    site.write_text(json.dumps(TWO_DEVICES))
    texts.mkdir()
    for number, text in enumerate(DOCUMENTS):
        (texts / f"{number}.txt").write_text(text)
    words = ["--inside", str(site), "--model", "nano", "--seq-len", "16", "--global-batch", "64", "--out", str(plan)]
    if is_of_documents:
        counts = {"format": "thinwire-lengths", "version": 1, "counts": {"40": 1, "16": 2, "4": 2}}
        (tmp_path / "lengths.json").write_text(json.dumps(counts))
        words += ["--lengths", str(tmp_path / "lengths.json")]
    assert plan_command.main(words) == 0
    planned = json.loads(plan.read_text())
    assert planned["degrees"]["dp_shard"] == 2 and planned["zero_stage"] == 2
    batch = planned["lengths"]["pieces"] if is_of_documents else 4
    more = ["--steps", "8", "--data", str(texts), "--cache-dir", str(texts / ".cache"), "--method", "streaming-diloco",
            "--codec", "float32", "--no-samples", *OPTIONS]  # fmt: skip
    more = [word for place, word in enumerate(more) if "--batch-size" not in more[max(0, place - 1) : place + 1]]
    out, alone_out = tmp_path / "run", tmp_path / "alone"
    cut = finish(Started(["--plan", str(plan), "--out", str(out), *more]))
    sequences = "documents" if is_of_documents else "windows"
    whole = finish(Started(["--batch-size", str(batch), "--sequences", sequences, "--out", str(alone_out), *more]))
    assert result(cut)["val_loss"] == pytest.approx(result(whole)["val_loss"], abs=1e-3)
    full = 2 * 8 * batch * 16
    assert result(cut)["tokens"] == result(whole)["tokens"]
    assert result(cut)["tokens"] < full if is_of_documents else result(cut)["tokens"] == full
    # shard by shard, each parameter crosses once, as it does whole; the second rank adds notes of its own
    more_bytes = result(cut)["payload_bytes"] - result(whole)["payload_bytes"]
    assert 0 <= more_bytes <= 4 * JSON_BYTES
    for folder in (out, out / "ranks" / "1"):
        shutil.rmtree(folder / "checkpoints" / "step-00000008")
    (out / "summary.json").unlink()
    resumed = finish(Started(["--resume", str(out), "--quiet", "--json"]))
    assert result(resumed)["global_parameters_sha256"] == result(cut)["global_parameters_sha256"]


def test_two_replicas_over_a_border_survive_the_loss_of_one_and_need_no_clear_text(tmp_path: Path) -> None:
    plan, texts, words = tmp_path / "plan.json", tmp_path / "texts", ["--rate", "5mbit", "--latency", "1ms"]
    for name in ("attic", "office"):  # nano's states need 49 MB
        node = {"name": name, "devices": 1, "memory_bytes": "45 MB", "flops_per_s": 1e11}
        (tmp_path / f"{name}.json").write_text(json.dumps({"format": "thinwire-site", "version": 1, "nodes": [node]}))
        words += ["--inside", str(tmp_path / f"{name}.json")]
    texts.mkdir()
    for number, text in enumerate(DOCUMENTS):
        (texts / f"{number}.txt").write_text(text)
    words += ["--model", "nano", "--seq-len", "16", "--batch-size", "4", "--out", str(plan)]
    assert plan_command.main(words) == 0
    planned = json.loads(plan.read_text())
    assert planned["degrees"]["pp"] == 2 and planned["activation_code"] == "block-int8/block-int4"
    more = ["--steps", "8", "--data", str(texts), "--cache-dir", str(texts / ".cache"), "--method", "streaming-diloco",
            "--codec", "float32", "--no-samples", *OPTIONS]  # fmt: skip
    more = [word for place, word in enumerate(more) if "--batch-size" not in more[max(0, place - 1) : place + 1]]
    out, plain_out = tmp_path / "run", tmp_path / "plain"
    coded = finish(Started(["--plan", str(plan), "--out", str(out), *[word for word in more if word != "--quiet"]]))
    assert "thinwire: warning: activations and gradients cross between sites in the clear" in coded.stderr
    plain = finish(Started(["--batch-size", "4", "--out", str(plain_out), *more]))
    # eight steps on a few sentences
    assert result(coded)["val_loss"] == pytest.approx(result(plain)["val_loss"], rel=2e-2)
    assert result(coded)["val_loss"] != result(plain)["val_loss"], "the code was used"
    # the same run, encrypted; a whole replica is lost at step 6, the run says so, and goes on from step 4
    lost, secret, held_at = tmp_path / "lost", tmp_path / "secret", tmp_path / "held-at"
    make_secret(secret)
    held_at.write_text("6")
    started = Started(["--plan", str(plan), "--out", str(lost), "--secret", str(secret), *more],
                      environment=with_slow_steps(held_at=held_at))  # fmt: skip
    for folder in (lost, lost / "ranks" / "1"):
        for replica in (0, 1):
            started.wait_for(folder / "checkpoints" / "step-00000004" / f"replica-{replica}.json")
    for worker in [worker_of(started, rank) for rank in (2, 3)]:
        assert send(worker, signal.SIGKILL)
    assert started.end() == 1
    assert "error: replica 1" in started.stderr and f"thinwire train --resume {lost}" in started.stderr, started.stderr
    held_at.unlink()
    resumed = finish(Started(["--resume", str(lost), "--quiet", "--json"]))
    assert result(resumed)["global_parameters_sha256"] == result(coded)["global_parameters_sha256"]


def test_a_replica_of_two_hosts_trains_as_planned_and_a_rank_on_the_wrong_one_is_refused(
    tmp_path: Path, hosts: Hosts
) -> None:
    plan, texts = tmp_path / "plan.json", tmp_path / "texts"
    node = {"devices": 1, "memory_bytes": "16 GB", "flops_per_s": 1e11, "bandwidth_bits_per_s": "10gbit",
            "latency_s": "50us"}  # fmt: skip
    site = {"format": "thinwire-site", "version": 1, "nodes": [{"name": name, **node} for name in NAMES],
            "between_nodes": {"bandwidth_bits_per_s": "10gbit", "latency_s": "50us"}}  # fmt: skip
    (tmp_path / "site.json").write_text(json.dumps(site))
    texts.mkdir()
    for number, text in enumerate(DOCUMENTS):
        (texts / f"{number}.txt").write_text(text)
    words = ["--inside", str(tmp_path / "site.json"), "--model", "nano", "--seq-len", "16", "--global-batch", "64"]
    assert plan_command.main([*words, "--out", str(plan)]) == 0
    assert json.loads(plan.read_text())["rank_order"] == [f"{name}/0" for name in NAMES]
    more = ["--steps", "4", "--data", str(texts), "--cache-dir", str(texts / ".cache"), "--method", "streaming-diloco",
            "--no-samples", *OPTIONS]  # fmt: skip
    more = [word for place, word in enumerate(more) if "--batch-size" not in more[max(0, place - 1) : place + 1]]

    def start(rank: int, *, host: int) -> subprocess.Popen[str]:
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
               "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29401", "GLOO_SOCKET_IFNAME": CABLE}  # fmt: skip
        enter = ["nsenter", f"--net={hosts.place(host)[0]}", "unshare", "--uts", "sh", "-c",
                 'hostname "$0" && exec "$@"', NAMES[host]]  # fmt: skip
        line = [*enter, *COMMAND, "--plan", str(plan), "--out", str(tmp_path / f"host-{rank}"), *more]
        piped = subprocess.PIPE
        return subprocess.Popen(line, env={**os.environ, **own}, stdout=piped, stderr=piped, text=True)

    wrong = start(1, host=0)
    stderr = wrong.communicate(timeout=DEADLINE_S)[1]
    assert wrong.returncode == 2 and f"rank 1 on another host; got {NAMES[0]}; allowed {NAMES[1]}" in stderr, stderr
    both = [start(rank, host=rank) for rank in (0, 1)]
    said = [one.communicate(timeout=DEADLINE_S) for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    whole = finish(Started(["--batch-size", "4", "--replicas", "1", "--out", str(tmp_path / "alone"), *more]))
    assert json.loads(said[0][0])["val_loss"] == pytest.approx(result(whole)["val_loss"], abs=1e-3)


@pytest.mark.parametrize(("rank", "name"), [(1, "replica 0 rank 1"), (2, "replica 1")])
def test_a_killed_rank_of_a_replica_of_two_ends_the_run_with_one_error_that_names_it(
    tmp_path: Path, rank: int, name: str
) -> None:
    texts, out = tmp_path / "texts", tmp_path / "run"
    texts.mkdir()
    for number, text in enumerate(DOCUMENTS):
        (texts / f"{number}.txt").write_text(text)
    words = " ".join(OPTIONS).replace("--batch-size 1", "--batch-size 2").split()
    started = Started([
        "--replicas", "2", "--dp-shard", "2", "--steps", "100000", "--data", str(texts), "--out", str(out),
        "--cache-dir", str(texts / ".cache"), "--no-samples", *words,
    ])  # fmt: skip
    started.wait_for(out / "checkpoints" / "step-00000008")
    assert send(worker_of(started, rank), signal.SIGKILL)
    assert started.end() == 1
    assert f"error: {name} was ended by SIGKILL" in started.stderr, started.stderr
    assert f"thinwire train --resume {out}" in started.stderr and "Traceback" not in started.stderr
    assert not started.family(), "no rank of either replica is left"
