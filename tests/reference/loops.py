"""The training loop that tests share, and how they compare what came of it."""

from __future__ import annotations

import torch

import thinwire
from tests.reference.small_models import loss_of


def wrap(model, transport, method, inner=None):
    inner = inner or torch.optim.SGD(model.parameters(), lr=0.05)
    return thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def steps(model, optimizer, count, *, replica=0, start=0, scheduler=None):
    for step in range(start + 1, start + count + 1):
        loss_of(model, step=step, replica=replica).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
