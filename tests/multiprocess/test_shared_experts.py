"""Experts that real processes share over gloo, as DTensors: exact, and known to torch's checkpoints by whole shapes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from processes import run, values

from thinwire import experts

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
