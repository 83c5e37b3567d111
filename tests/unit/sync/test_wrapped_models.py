"""Models with parameters of other kinds: exchanged exactly, or refused at wrapping with a remedy that works."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire
from thinwire.codecs import float32
from thinwire.methods import all_reduce, diloco, iso_loco, streaming_diloco
from thinwire.sync.fragments import find_blocks
from thinwire.sync.model_checks import check_tensors
from thinwire.sync.outer_optimizer import PlainSGD

PAGE = Path(__file__).parents[3] / "docs" / "library.md"
MEAN = diloco(sync_interval=2, codec=float32(), outer_optimizer=PlainSGD(lr=1.0))


def sgd(model, *, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def trained(model, inner, method, transport, batches, loss_of):
    """Train on this replica's batches; return the model with the global parameters."""
    optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()
    optimizer.close(final_exchange=True)
    with optimizer.global_parameters():
        return [parameter.detach().to_dense().clone() for parameter in model.parameters()]


def points(transport, *, steps, shape, dtype=torch.float32):
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * transport.replica + step)
        yield torch.randn(shape, dtype=dtype, generator=generator)


@pytest.mark.parametrize(
    "method",
    [MEAN, iso_loco(sync_interval=2, overlap_steps=0), streaming_diloco(sync_interval=4), all_reduce()],
    ids=lambda method: method.name,
)
def test_real_and_imaginary_parts_of_complex_parameters_are_trained_together(method):
    def replica_main(transport):
        torch.manual_seed(0)
        model = nn.Linear(4, 4, bias=False, dtype=torch.cfloat)
        target = torch.eye(4, dtype=torch.cfloat) * (0.5 + 1j)
        batches = points(transport, steps=40, shape=(32, 4), dtype=torch.cfloat)
        loss_of = lambda x: (model(x) - x @ target.T).abs().pow(2).mean()  # noqa: E731
        (weight,) = trained(model, sgd(model), method, transport, batches, loss_of)
        assert (weight - target).abs().max() < 0.2
        return weight

    first, second = thinwire.run_replicas(2, replica_main)
    assert torch.equal(first, second)


def test_complex_parameters_are_refused_where_others_fetch_them_and_a_real_one_serves():
    class Rotation(nn.Module):
        def __init__(self, *, is_real):
            super().__init__()
            self.turn = nn.Parameter(torch.ones(3, 2) if is_real else torch.ones(3, dtype=torch.cfloat))

    with pytest.raises(ValueError, match=r"turn is torch.complex64 in an elastic run; .*view_as_complex"):
        check_tensors(Rotation(is_real=False), is_elastic=True)
    check_tensors(Rotation(is_real=True), is_elastic=True)


@pytest.mark.parametrize("method", [MEAN, iso_loco(sync_interval=2, overlap_steps=0)], ids=lambda method: method.name)
def test_float64_parameters_that_are_not_trained_stay_the_same_bits(method):
    def replica_main(transport):
        start = torch.tensor([[1.0, 2.0, 3.0]] * 2, dtype=torch.float64) + 1e-10
        model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False)).double()
        with torch.no_grad():
            model[0].weight.copy_(start)
        batches = points(transport, steps=4, shape=(2, 3), dtype=torch.float64)
        weight = trained(model, sgd(model, lr=0.0), method, transport, batches, lambda x: model(x).sum())[0]
        return torch.equal(weight, start) and torch.equal(model[0].weight, start)

    assert all(thinwire.run_replicas(2, replica_main))


def test_the_mean_of_float64_parameters_is_exact_beyond_float32():
    tiny = 2.0**-40

    def replica_main(transport):
        model = nn.Linear(1, 1, bias=False).double()
        with torch.no_grad():
            model.weight.fill_(1.0)
        move = -tiny * (1 + transport.replica)
        return trained(model, sgd(model, lr=1.0), MEAN, transport, [move] * 4, lambda m: (model.weight * m).sum())

    for (weight,) in thinwire.run_replicas(2, replica_main):
        assert weight.item() == 1.0 + 4 * 1.5 * tiny


@pytest.mark.parametrize("name", ["noloco", "eager", "dimat", "masha1"])
def test_float64_is_refused_where_parameters_themselves_travel_and_float32_is_taken(name):
    method = thinwire.sync.method.recipe(name)()
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)).double()
    with pytest.raises(ValueError, match=r"would round .*weight of torch.float64; convert the model with model.float"):
        thinwire.DistributedOptimizer(model, sgd(model), method=method)
    model.float()
    thinwire.DistributedOptimizer(model, sgd(model), method=method).abandon()


@pytest.mark.parametrize(
    ("make", "message", "remedy"),
    [
        (lambda: nn.Linear(3, 1, device="meta"), r"2 of 2 tensors .* meta device .* weight; call model.to_empty",
         lambda model: model.to_empty(device="cpu").reset_parameters()),
        (lambda: nn.LazyLinear(1), r"2 of 2 tensors .* no shape yet, the first is weight; run a forward pass",
         lambda model: model(torch.ones(2, 3))),
    ],
)  # fmt: skip
def test_tensors_without_values_are_refused_and_the_remedy_trains(make, message, remedy):
    model = make()
    with pytest.raises(ValueError, match=message):
        thinwire.DistributedOptimizer(model, sgd(model), method="diloco")
    remedy(model)
    loss_of = lambda x: model(x).sum()  # noqa: E731
    trained(model, sgd(model), MEAN, thinwire.transport.loopback.single(), [torch.ones(2, 3)] * 3, loss_of)


def test_sparse_gradients_are_averaged_as_dense_ones_and_reach_the_optimizer_sparse():
    def replica_main(transport, *, is_sparse):
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(20, 4, sparse=is_sparse, mode="sum"), nn.Linear(4, 1))
        kind = torch.optim.SparseAdam if is_sparse else torch.optim.Adam
        inner = thinwire.MultiOptimizer([kind(model[0].parameters(), lr=0.01), sgd(model[1])])
        # every row occurs on some replica, so that Adam and SparseAdam step the same rows; replica 1 has half of them
        rows = torch.arange(20).view(10, 2)[:: 1 + transport.replica]
        return trained(model, inner, all_reduce(), transport, [rows] * 6, lambda x: (model(x) - 1).pow(2).mean())

    sparse = thinwire.run_replicas(2, lambda transport: replica_main(transport, is_sparse=True))
    dense = thinwire.run_replicas(2, lambda transport: replica_main(transport, is_sparse=False))
    for one in (*sparse, dense[1]):
        for tensor, expected in zip(one, dense[0], strict=True):
            torch.testing.assert_close(tensor, expected)


def compiled(model, how):
    if how == "whole":
        return torch.compile(model, backend="eager")
    if how == "layers":
        for index in range(0, len(model), 2):
            model[index] = torch.compile(model[index], backend="eager")
    return model


def layers(*widths):
    pairs = pairwise(widths)
    return nn.Sequential(*(part for pair in pairs for part in (nn.Linear(*pair), nn.GELU())))


@pytest.mark.parametrize("how", ["whole", "layers"])
def test_a_compiled_model_has_the_fragments_that_it_has_uncompiled(how):
    class TwoParts(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = nn.Linear(3, 2), nn.Embedding(4, 2)

    assert find_blocks(compiled(layers(4, 8, 8, 2), how)) == find_blocks(layers(4, 8, 8, 2))
    assert find_blocks(torch.compile(TwoParts(), backend="eager")) == find_blocks(TwoParts())


@pytest.mark.parametrize("how", ["whole", "layers"])
@pytest.mark.parametrize("method", [streaming_diloco(sync_interval=4, overlap_steps=1), all_reduce()])
def test_a_compiled_replica_trains_beside_one_that_is_not(how, method):
    def replica_main(transport):
        torch.manual_seed(0)
        model = layers(4, 8, 8, 2)
        model = compiled(model, how) if transport.replica == 0 else model
        batches = points(transport, steps=8, shape=(8, 4))
        return trained(model, sgd(model), method, transport, batches, lambda x: model(x).pow(2).mean())

    for one, other in zip(*thinwire.run_replicas(2, replica_main), strict=True):
        assert torch.equal(one, other)


def test_the_documented_way_to_save_writes_tied_tensors_once(tmp_path, monkeypatch):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

    from safetensors.torch import load_model

    monkeypatch.chdir(tmp_path)
    section = PAGE.read_text().partition("## Save the weights")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    model, again = Tied(), Tied()
    exec(code, {"model": model, "optimizer": thinwire.DistributedOptimizer(model, sgd(model), method="diloco")})
    load_model(again, "model.safetensors")
    assert torch.equal(again.head.weight, model.embed.weight)
