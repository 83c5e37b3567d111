"""Arguments with which every method shows all its phases within 12 steps, and one step of any of them."""

from __future__ import annotations

from typing import Any

import torch

import thinwire
from tests.reference.small_models import loss_of
from thinwire.codecs import random_k, top_k

ARGUMENTS: dict[str, dict[str, Any]] = {
    "local-sgd": {"sync_interval": 4},
    "diloco": {"sync_interval": 4},
    "streaming-diloco": {"sync_interval": 5, "overlap_steps": 3, "layers_per_fragment": 2},
    "iso-loco": {"sync_interval": 5, "overlap_steps": 3, "layers_per_fragment": 2, "outer_lr": 1.0},
    "decoupled-diloco": {"sync_interval": 5, "overlap_steps": 3},
    "sparse-loco": {"sync_interval": 4, "k": 4, "chunk": 32},
    "streaming-sparse-loco": {"sync_interval": 5, "overlap_steps": 3, "k": 4, "chunk": 32, "layers_per_fragment": 2},
    "eager": {"sync_interval": 4},
    "muloco": {"sync_interval": 4},
    "slowmo": {"sync_interval": 4},
    "co2": {"sync_interval": 4},
    "noloco": {"sync_interval": 4},
    "power-sgd": {"rank": 2},
    "dgc": {"density": 0.1, "warmup_steps": 6, "clip_norm": 1.0, "nesterov": True},
    "one-bit-adam": {"warmup_steps": 5},
    "one-bit-lamb": {"warmup_steps": 10},
    "zero-one-adam": {"variance_steps": 6, "variance_updates": 2, "local_doubling_steps": 2, "max_local_steps": 4},
    "demo": {"k": 4, "chunk": 8},
    "ef21": {"codec": top_k(density=0.2)},
    "masha1": {"codec": random_k(density=0.5, scale=True)},
    "masha2": {"codec": top_k(density=0.5)},
    "dimat": {"sync_interval": 4},
}
SIGN_SGD_LR = 0.01
LR = {"dgc": 0.02, "demo": SIGN_SGD_LR, "masha1": 0.02, "masha2": 0.02}


def inner_of(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name in LR:
        return torch.optim.SGD(model.parameters(), lr=LR[name])
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def one_step(optimizer: thinwire.DistributedOptimizer, model: torch.nn.Module, *, data: int, replica: int) -> float:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, step=data, replica=replica)
        loss.backward()
        return loss

    if optimizer.needs_closure:
        loss = optimizer.step(closure)
    else:
        loss = closure()
        optimizer.step()
    return float(loss.detach())
