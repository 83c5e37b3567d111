"""Experts that real processes share over gloo, as DTensors: exact, and known to torch's checkpoints by whole shapes."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run, values
from test_parallel_replica import BATCH, options, train
from training_runs import DOCUMENTS, OPTIONS, Started, finish, result

from thinwire import experts
from thinwire.codec_specs import DEFAULT_EXPERT_CODE
from thinwire.training.loop import LocalPasses
from thinwire.workloads.language.presets import TransformerConfig
from thinwire.workloads.language.transformer import build_transformer

COUNTS = (5, 0, 3, 4)  # tokens of each rank


def layer_and_tokens() -> tuple[experts.ExpertLayer, torch.Tensor]:
    torch.manual_seed(3)
    layer = experts.ExpertLayer(6, 10, 8, 2).double()
    return layer, torch.randn(sum(COUNTS), 6, dtype=torch.float64)


def share(folder: str) -> dict[str, Any]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layer, tokens = layer_and_tokens()
    experts.parallelize(layer, init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))["ep"])
    own: Any = torch.split(tokens, list(COUNTS))[dist.get_rank()].clone().requires_grad_()
    for _ in range(2):  # gradients add up
        made = layer(own)
        made.sin().sum().backward()
    dcp.save(layer.state_dict(), checkpoint_id=folder)
    found = {"output": made, "inputs": own.grad, "up": layer.up.grad.to_local(), "down": layer.down.grad.to_local()}
    dist.destroy_process_group()
    return {name: one.tolist() for name, one in found.items()} | {"router": layer.router.weight.grad.tolist()}


def test_experts_shared_over_gloo_are_exact_and_saved_whole(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    ranks = values(run(share, num_ranks=4, arguments={"folder": str(tmp_path)}))
    layer, tokens = layer_and_tokens()
    tokens.requires_grad_()
    for _ in range(2):
        made = layer(tokens)
        made.sin().sum().backward()
    wanted = {"output": made, "inputs": tokens.grad, "up": layer.up.grad, "down": layer.down.grad}
    for name, whole in wanted.items():
        found = torch.cat([torch.tensor(one[name], dtype=torch.float64).reshape(-1, *whole.shape[1:]) for one in ranks])
        assert (found * (4 if name in ("up", "down") else 1) - whole).abs().max() < 1e-9, name
    router = sum(torch.tensor(one["router"], dtype=torch.float64) for one in ranks)
    assert (router - layer.router.weight.grad).abs().max() < 1e-9
    empty = {name: torch.zeros_like(value) for name, value in copy.deepcopy(layer).state_dict().items()}
    dcp.load(empty, checkpoint_id=str(tmp_path), no_dist=True)
    assert all(torch.equal(value, layer.state_dict()[name]) for name, value in empty.items())


SHAPE = TransformerConfig(
    vocab_size=16, dim=16, layers=2, heads=4, max_seq_len=8, mlp_dim=8, num_experts=8, balance=0.5
)
# Four ranks each, and one pass a step, since the counts of a pass decide the balance loss.
CUTS: dict[str, dict[str, Any]] = {
    "all share experts": {"ep": 4, "recompute_layers": 1},
    "two share experts, of shards": {"ep": 2, "dp_shard": 4, "zero_stage": 3},
    "two share experts, of copies": {"ep": 2, "dp_replicate": 2, "zero_stage": 1},
    "ranks of sequences share experts": {"ep": 4, "dp_shard": 2, "cp": 2},
    "one has no rows": {"ep": 4, "batch_size": 6},
    # one pass a step: the same counts
    "weights are streamed": {"ep": 2, "dp_shard": 4, "stream_experts": 2, "balance_over": "global-batch"},
    "none share experts": {"dp_shard": 4, "expert_code": DEFAULT_EXPERT_CODE},
}


def train_cuts() -> dict[str, Any]:
    from thinwire.training.parallel_passes import ParallelPasses, cut_model, make_mesh, whole_parameters
    from thinwire.transport.connect import connect
    from thinwire.transport.shards import local_shard

    torch.set_num_threads(1)
    transport = connect(solo=True, ranks_per_replica=4)
    found = {}
    for name, cut in CUTS.items():
        config = options(**{"expert_code": "none"} | cut)
        mesh = make_mesh(config, device=torch.device("cpu"))
        whole: Any = build_transformer(SHAPE, seed=3).double()
        whole.balance_over = config.parallel.balance_over
        model = cut_model(whole, config, mesh)
        held = sum(local_shard(p).numel() for n, p in model.named_parameters() if n.endswith((".up", ".down")))
        losses = train(config, model, ParallelPasses(config, model, mesh))
        trained = {n: t.flatten().tolist() for n, t in whole_parameters(model, mesh).items()}
        found[name] = {"losses": losses, "whole": trained, "held": held}
        mesh.close()
    transport.close()
    return found


def test_cut_mixtures_train_as_one_process_clipping_and_balance_loss_included() -> None:
    alone = {}
    for batch_size in (BATCH, 6):
        config, model = options(batch_size=batch_size), build_transformer(SHAPE, seed=3).double()
        losses = train(config, model, LocalPasses(config, model, device=torch.device("cpu")))
        alone[batch_size] = losses, dict(model.named_parameters())
    for of_rank in values(run(train_cuts, num_ranks=4)):
        for name, found in of_rank.items():
            losses, parameters = alone[CUTS[name].get("batch_size", BATCH)]
            assert found["losses"] == pytest.approx(losses, abs=1e-6), name
            for parameter, value in parameters.items():
                whole = torch.tensor(found["whole"][parameter], dtype=torch.float64).view_as(value)
                assert (whole - value).abs().max() < 1e-9, (name, parameter)
            if "ep" in CUTS[name]:
                assert found["held"] == 2 * 2 * 8 * 16 * 8 // CUTS[name]["ep"]


def test_replicas_exchange_shards_of_experts_and_resume_bit_for_bit(tmp_path: Path) -> None:
    texts, out = tmp_path / "texts", tmp_path / "run"
    texts.mkdir()
    for number, text in enumerate(DOCUMENTS):
        (texts / f"{number}.txt").write_text(text)
    more = ["--steps", "8", "--data", str(texts), "--cache-dir", str(texts / ".cache"), "--no-samples", *OPTIONS]
    more += ["--model", "moe-tiny", "--batch-size", "2", "--replicas", "2"]
    sharded = finish(Started(["--out", str(tmp_path / "sharded"), "--dp-shard", "2", *more]))
    shared = finish(Started(["--out", str(out), "--ep", "2", "--stream-experts", "1", *more]))
    # tokens travel in 4 bits
    assert result(shared)["val_loss"] == pytest.approx(result(sharded)["val_loss"], rel=1e-2)
    assert result(shared)["payload_bytes"] == result(sharded)["payload_bytes"], "no expert is exchanged twice"
    for folder in (out, *(out / "ranks").iterdir()):
        shutil.rmtree(folder / "checkpoints" / "step-00000008")
    (out / "summary.json").unlink()
    resumed = finish(Started(["--resume", str(out), "--quiet", "--json"]))
    assert result(resumed)["global_parameters_sha256"] == result(shared)["global_parameters_sha256"]
