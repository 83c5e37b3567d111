"""Eigenvectors by rotations, and inner products in a fixed order, against exact ones."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from thinwire.averaging import reductions
from thinwire.averaging.reductions import combine, gram, norms, sorting_network
from thinwire.methods.robust.flag import eigenvectors


@pytest.mark.parametrize("size", [0, 1, 2, 7, 15])
@pytest.mark.parametrize("rank", [1, 4, 30])
def test_eigenvectors_are_orthonormal_sorted_and_rebuild_the_matrix(size: int, rank: int) -> None:
    factor = torch.randn(size, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(size + rank))
    matrix = factor @ factor.T
    values, vectors = eigenvectors(((matrix + matrix.T) / 2).tolist())
    assert values == sorted(values, reverse=True)
    rows = torch.tensor(vectors, dtype=torch.float64).reshape(size, size)
    torch.testing.assert_close(rows @ rows.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)
    spectrum = torch.diag(torch.tensor(values, dtype=torch.float64))
    torch.testing.assert_close(rows.T @ spectrum @ rows, matrix, rtol=0, atol=1e-12 * (1 + size * rank))
    torch.testing.assert_close(
        torch.tensor(values, dtype=torch.float64), torch.linalg.eigvalsh(matrix).flip(0), rtol=0, atol=1e-11
    )


def test_entries_of_unlike_sizes_and_signs_are_no_trouble() -> None:
    matrix = [[1e12, 1e3, 0.0], [1e3, -1e-6, 1e-9], [0.0, 1e-9, 0.0]]
    values, vectors = eigenvectors(matrix)
    assert values[0] == pytest.approx(1e12) and all(map(math.isfinite, itertools.chain(values, *vectors)))
    assert eigenvectors([[0.0, 0.0], [0.0, 0.0]]) == ([0.0, 0.0], [[1.0, 0.0], [0.0, 1.0]])


@pytest.mark.parametrize("numel", [0, 1, 5, reductions._LANES, reductions._LANES + 1, 5 * reductions._LANES + 77])
def test_inner_products_are_right_and_the_same_in_every_order_of_the_rows(numel: int) -> None:
    stack = torch.randn(5, numel, generator=torch.Generator().manual_seed(numel))
    products = gram(stack)
    exact = [[math.fsum((a.double() * b.double()).tolist()) for b in stack] for a in stack]
    for a, b in itertools.product(range(5), repeat=2):
        assert products[a][b] == pytest.approx(exact[a][b], rel=1e-13, abs=1e-11)
        assert products[a][b] == products[b][a]
    order = [3, 0, 4, 1, 2]
    assert gram(stack[order]) == [[products[a][b] for b in order] for a in order]
    assert norms(stack) == [math.sqrt(products[a][a]) for a in range(5)]
    coefficients = [1.0, 0.0, -2.5, 1e-3, 7.0]
    expected = sum(c * row.double() for c, row in zip(coefficients, stack, strict=True))
    assert torch.equal(combine(stack, coefficients, divisor=3.0), (expected / 3.0).float())  # type: ignore[operator]


def test_the_largest_and_smallest_float32_neither_overflow_nor_vanish() -> None:
    tiny, huge = 1e-45, torch.finfo(torch.float32).max
    stack = torch.tensor([[tiny, tiny], [huge, huge]])
    assert norms(stack)[0] == pytest.approx(stack[0, 0].item() * math.sqrt(2))
    assert norms(stack)[1] == pytest.approx(huge * math.sqrt(2))
    assert combine(stack, [0.0, 0.5], divisor=0.5)[0].item() == huge


@pytest.mark.parametrize("num_rows", range(10))
def test_the_network_sorts_all_zeros_and_ones_and_so_everything(num_rows: int) -> None:
    # a network that sorts every sequence of zeros and ones sorts every sequence
    for values in itertools.product((0, 1), repeat=num_rows):
        column = list(values)
        for low, high in sorting_network(num_rows):
            assert low < high
            column[low], column[high] = min(column[low], column[high]), max(column[low], column[high])
        assert column == sorted(values)


@pytest.mark.parametrize("num_rows", [15, 16, 17, 33, 64])
def test_the_network_sorts_many_rows(num_rows: int) -> None:
    for seed in range(50):
        column = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed)).tolist()
        for low, high in sorting_network(num_rows):
            column[low], column[high] = min(column[low], column[high]), max(column[low], column[high])
        assert column == list(range(num_rows))
