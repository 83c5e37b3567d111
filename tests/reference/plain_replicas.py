"""What papers' loops in one process are made of: replicas with plain dictionaries, and means of them."""

from __future__ import annotations

import torch

import thinwire
from tests.reference.loops import same, steps, values, wrap
from tests.reference.small_models import build, loss_of
from thinwire.sync.fragments import Pattern, find_blocks


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(method, *, kind="conv", replicas=2, count=23, final=False, dtype=None):
    """Train in the loopback world; return per replica (local parameters, global parameters)."""

    def replica_main(transport):
        model = build(kind).to(dtype)
        optimizer = wrap(model, transport, method, adamw(model))
        steps(model, optimizer, count, replica=transport.replica)
        if final:
            optimizer.close(final_exchange=True)
        local = values(model)
        with optimizer.global_parameters():
            return local, values(model)

    return thinwire.run_replicas(replicas, replica_main)


class Replica:
    """A model with its inner optimizer, one step at a time, and what a paper's loop keeps beside it."""

    def __init__(self, kind, number):
        self.model, self.number = build(kind), number
        by_name = dict(self.model.named_parameters())
        # in the order in which they are sent: it decides which values share a code's block
        names = Pattern(num_fragments=1).partition(find_blocks(self.model))[0]
        self.theta = {name: by_name[name] for name in names}
        self.phi = {name: p.detach().clone() for name, p in self.theta.items()}
        self.momentum = {name: torch.zeros_like(p) for name, p in self.phi.items()}
        self.inner = adamw(self.model)

    def inner_step(self, step):
        loss_of(self.model, step=step, replica=self.number).backward()
        self.inner.step()
        self.inner.zero_grad()

    def difference(self):
        return {name: self.phi[name] - p.detach() for name, p in self.theta.items()}

    @torch.no_grad()
    def start_again(self, blend=0.0):
        for name, p in self.theta.items():
            p.lerp_(self.phi[name], 1 - blend) if blend else p.copy_(self.phi[name])

    def result(self):
        trained = [p.detach() for p in self.model.parameters()]
        return trained, [self.phi.get(name, p.detach()) for name, p in self.model.named_parameters()]


def mean_of(vectors, codec=None):
    """Mean in the order given, each vector coded as a whole, as a list of parameters in one order."""
    names = list(vectors[0])
    flat = [torch.cat([vector[name].reshape(-1) for name in names]) for vector in vectors]
    total = torch.zeros_like(flat[0])
    for vector in flat:
        total += vector if codec is None else codec.decode(codec.encode(vector), numel=vector.numel())
    total /= len(vectors)
    sizes = [vectors[0][name].numel() for name in names]
    return {n: part.view(vectors[0][n].shape) for n, part in zip(names, total.split(sizes), strict=True)}


def assert_all_same(results, expected):
    for one, other in zip(results, expected, strict=True):
        assert same(one[0], other[0]), "local parameters"
        assert same(one[1], other[1]), "global parameters"
