"""IsoLoCo against its equations in one process, and the flat spectrum against a singular value decomposition."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.reference.loops import same
from tests.reference.plain_replicas import Replica, assert_all_same, mean_of, train
from thinwire.codecs import float32
from thinwire.methods import default_outer_lr, iso_loco, streaming_diloco
from thinwire.methods.iso_loco import flatten_spectra, flatten_spectrum, product_of_integers

SHAPES = [(1, 1), (1, 7), (7, 1), (8, 8), (24, 8), (33, 130), (96, 384)]


def by_svd(matrix: torch.Tensor) -> torch.Tensor:
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    return left @ right * values.mean()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1e-12, 3e-3, 1e6])
def test_all_singular_values_become_their_mean(shape, scale):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * scale
    flat, expected = flatten_spectrum(matrix), by_svd(matrix)
    # the smallest singular value of a random square matrix is far below the others and converges last
    limit = 2e-2 if shape[0] == shape[1] else 1e-4
    assert float((flat - expected).norm() / expected.norm()) < limit


def test_a_matrix_of_zeros_stays_one_and_a_low_rank_stays_low():
    assert torch.equal(flatten_spectrum(torch.zeros(3, 5)), torch.zeros(3, 5))
    low = torch.outer(torch.arange(1.0, 5.0), torch.arange(2.0, 8.0))
    values = torch.linalg.svdvals(flatten_spectrum(low).double())
    assert float(values[1] / values[0]) < 1e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_integers_have_the_bits_of_float64(shape, monkeypatch):
    rows, columns = shape
    generator = torch.Generator().manual_seed(11)
    left, right = (
        torch.randint(-most, most, size, generator=generator).double() * 2.0**-24
        for most, size in ((2**20, (rows, columns)), (2**25, (columns, rows)))
    )
    assert torch.equal(product_of_integers(left, right), left @ right)
    large = torch.full((1, 4), 60.0, dtype=torch.float64)
    assert float(product_of_integers(-large, large.T)) == -4 * 60.0**2
    matrix = torch.randn(shape, generator=generator)
    expected = flatten_spectrum(matrix)
    module = sys.modules[flatten_spectrum.__module__]  # its name in the package is the function's
    monkeypatch.setattr(module, "_has_slow_float64", lambda device: True)
    assert torch.equal(flatten_spectrum(matrix), expected)


@pytest.mark.parametrize("shape", [(1, 1), (24, 8), (33, 130)])
def test_matrices_flattened_together_have_the_bits_of_each_alone(shape):
    generator = torch.Generator().manual_seed(7)
    matrices = [torch.randn(shape, generator=generator) * scale for scale in (1e-12, 1.0, 1e6)]
    for some in (matrices, [*matrices, torch.zeros(shape)], [*matrices, torch.full(shape, torch.inf)]):
        for one, other in zip(flatten_spectra(some), some, strict=True):
            assert torch.equal(one, flatten_spectrum(other))


@pytest.mark.parametrize("shape", [(96, 384), (200, 64)])
def test_the_order_of_additions_changes_no_bit(shape):
    """Columns in another order are added in another order, as another processor or number of threads would."""
    generator = torch.Generator().manual_seed(5)
    matrix = torch.randn(shape, generator=generator)
    expected = flatten_spectrum(matrix)
    for _ in range(3):
        columns, rows = torch.randperm(shape[1], generator=generator), torch.randperm(shape[0], generator=generator)
        other = flatten_spectrum(matrix[rows][:, columns])
        assert torch.equal(other, expected[rows][:, columns])
    plain = [(m := matrix[:, torch.randperm(shape[1], generator=generator)]) @ m.T for _ in range(4)]
    assert not all(torch.equal(one, plain[0]) for one in plain), "in float32 the order does change bits"


def reference_iso_loco(*, kind, replicas, count, interval, hidden, rest):
    everyone = [Replica(kind, number) for number in range(replicas)]
    for step in range(1, count + 1):
        for replica in everyone:
            replica.inner_step(step)
        if step % interval:
            continue
        mean = mean_of([replica.difference() for replica in everyone])
        for replica in everyone:
            for name, delta in mean.items():
                is_hidden = "blocks." in name and delta.dim() == 2
                lr, mu = hidden if is_hidden else rest
                step_from = flatten_spectrum(delta) if is_hidden else delta.clone()
                momentum = replica.momentum[name].mul_(mu).add_(step_from)
                replica.phi[name] = replica.phi[name].add(step_from.add_(momentum, alpha=mu), alpha=-lr)
            replica.start_again()
    return everyone


@pytest.mark.parametrize(("replicas", "interval", "count"), [(2, 5, 23), (3, 4, 24), (1, 4, 9)])
def test_iso_loco_is_its_equations_bit_for_bit(replicas, interval, count):
    method = iso_loco(
        sync_interval=interval, overlap_steps=0, codec=float32(), num_fragments=1, rest_lr=0.7, outer_lr=1.5
    )
    everyone = reference_iso_loco(
        kind="transformer", replicas=replicas, count=count, interval=interval, hidden=(1.5, 0.7), rest=(0.7, 0.9)
    )
    found = train(method, kind="transformer", replicas=replicas, count=count)
    assert_all_same(found, [replica.result() for replica in everyone])


def test_a_model_without_hidden_matrices_takes_the_step_of_streaming_diloco():
    found = train(iso_loco(sync_interval=4, overlap_steps=2, codec=float32()), kind="conv", count=14)
    plain = streaming_diloco(sync_interval=4, overlap_steps=2, blend=0, codec=float32(), outer_lr=default_outer_lr(2))
    assert_all_same(found, train(plain, kind="conv", count=14))


@pytest.mark.parametrize(("momentum", "keeps"), [((0, 0), False), ((0.8, 0), True), ((0, 0.9), True)])
def test_without_momentum_none_is_kept(momentum, keeps):
    method = iso_loco(outer_lr=2.1, outer_momentum=momentum[0], rest_momentum=momentum[1])
    assert method.update(2).optimizer.has_momentum == keeps


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"outer_lr": 0}, "outer lr"), ({"outer_momentum": 1.0}, "outer momentum"), ({"rest_lr": -1}, "outer lr"),
     ({"sync_interval": 4, "overlap_steps": 4}, "overlap_steps")],
)  # fmt: skip
def test_bad_arguments_are_refused_at_once(arguments, words):
    with pytest.raises(ValueError, match=words):
        iso_loco(**arguments)


def test_replicas_agree_at_uneven_overlaps():
    one, other = train(iso_loco(sync_interval=5, overlap_steps=(1, 3)), kind="transformer", count=22, final=True)
    assert same(one[1], other[1])
