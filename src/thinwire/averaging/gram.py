"""Gram matrix, norms and linear combinations of the replicas' vectors, with sums in one fixed order.

Rules that compare whole vectors need of them only the small matrix of their inner products. It is summed in float64 in
an order that depends on the number of elements alone: not on threads, the processor or a library for matrices. The
product of two float32 is exact in float64, so it does not matter either whether a processor fuses it with the addition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# Part of the result's definition: element `e` is added to the sum number `e % _LANES`.
_LANES = 4096
_CHUNK = 1 << 16


def gram(stack: torch.Tensor) -> list[list[float]]:
    """Return the inner products of all pairs of rows.

    Args:
        stack: float32, `(num_rows, numel)`.

    Returns:
        A symmetric matrix, `num_rows` by `num_rows`; infinity or NaN where a row holds such a value.
    """
    num_rows, numel = stack.shape
    shape = (min(_LANES, numel),)
    sums = [torch.zeros((num_rows - row, *shape), dtype=torch.float64, device=stack.device) for row in range(num_rows)]
    for start in range(0, numel, _LANES):
        part = stack[:, start : start + _LANES].to(torch.float64)
        for row, total in enumerate(sums):
            total[:, : part.shape[1]].addcmul_(part[row:], part[row])
    products = [_total(total) for total in sums]
    return [[products[min(row, column)][abs(row - column)] for column in range(num_rows)] for row in range(num_rows)]


def norms(stack: torch.Tensor) -> list[float]:
    """Return the length of each row; infinity for a row that holds infinity or NaN.

    Example:
        >>> norms(torch.tensor([[3.0, 4.0], [0.0, float("nan")]]))
        [5.0, inf]
    """
    num_rows, numel = stack.shape
    sums = torch.zeros((num_rows, min(_LANES, numel)), dtype=torch.float64, device=stack.device)
    for start in range(0, numel, _LANES):
        part = stack[:, start : start + _LANES].to(torch.float64)
        sums[:, : part.shape[1]].addcmul_(part, part)
    return [math.sqrt(square) if math.isfinite(square) else math.inf for square in _total(sums)]


def combine(stack: torch.Tensor, coefficients: Sequence[float], *, divisor: float = 1.0) -> torch.Tensor:
    """Return the sum of the rows with coefficients, divided: in float64, row after row, rounded once.

    A row with the coefficient 0 is not looked at, so it may hold anything.

    Args:
        stack: float32, `(num_rows, numel)`.
        coefficients: One for each row.
        divisor: What the sum is divided by.

    Returns:
        float32, `(numel,)`.
    """
    numel = stack.shape[1]
    result = torch.empty(numel, dtype=torch.float32, device=stack.device)
    for start in range(0, numel, _CHUNK):
        part = stack[:, start : start + _CHUNK]
        total = torch.zeros(part.shape[1], dtype=torch.float64, device=stack.device)
        for row, coefficient in zip(part, coefficients, strict=True):
            if coefficient:
                # two operations: one that may be fused would round differently from processor to processor
                total += row.to(torch.float64) * coefficient
        result[start : start + _CHUNK] = divided(total, divisor)
    return result


def divided(total: torch.Tensor, divisor: float) -> torch.Tensor:
    """Return a float64 tensor divided by a number, with the same bits on every device.

    Example:
        >>> divided(torch.ones(1, dtype=torch.float64), 4)
        tensor([0.2500], dtype=torch.float64)
    """
    # CUDA multiplies by the reciprocal of a plain number, which rounds twice; a tensor it divides by
    return total / torch.full((), divisor, dtype=torch.float64, device=total.device)


def _total(sums: torch.Tensor) -> list[float]:
    """Add the lanes of each row in a tree of halves."""
    width = sums.shape[1]
    if not width:
        return [0.0] * sums.shape[0]
    while width > 1:
        half = (width + 1) // 2
        sums[:, : width - half] += sums[:, half:width]
        width = half
    values: list[float] = sums[:, 0].tolist()
    return values
