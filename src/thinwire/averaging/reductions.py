"""Reductions over the replicas' vectors in one fixed order: the same bits on every device and number of threads.

Rules that compare whole vectors need only the small matrix of their inner products. It is summed in float64 in an
order that depends on the number of elements alone: not on threads, the processor or a library for matrices. The
product of two float32 is exact in float64, so it does not matter whether a processor fuses it with the addition.

Rules that treat each coordinate separately sort columns by a network of minima and maxima over whole rows (Batcher's
merge exchange, Knuth's volume 3, section 5.2.2, algorithm M). So the order of the replicas leaves no trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

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
    # one float64 sum for each lane and pair: the symmetric half is not computed
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
            if coefficient:  # 0 * NaN would be NaN
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


# The result does not depend on it: rows of this many columns stay in a core's cache while they are sorted.
_SORT_CHUNK = 1 << 15
_SORT_CHUNK_ON_DEVICE = 1 << 21


@lru_cache(maxsize=64)
def sorting_network(num_rows: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs of places that sort `num_rows` values when each pair is put in order, one after the other.

    Example:
        >>> sorting_network(3)
        ((0, 2), (0, 1), (1, 2))
    """
    pairs: list[tuple[int, int]] = []
    top = 1 << max(0, (num_rows - 1).bit_length() - 1)
    size = top if num_rows > 1 else 0
    while size:
        step, group, distance = top, 0, size  # q, r and d of algorithm M; size is its p
        while True:
            pairs += [(low, low + distance) for low in range(num_rows - distance) if low & size == group]
            if step == size:
                break
            step, group, distance = step // 2, size, step - size
        size //= 2
    return tuple(pairs)


def over_sorted_columns(stack: torch.Tensor, reduce: Callable[[list[torch.Tensor]], torch.Tensor]) -> torch.Tensor:
    """Sort every column and reduce it to one value.

    NaN counts as +infinity, so it lies at the end, where a robust rule cuts; -0 counts as 0.

    Args:
        stack: float32, `(num_replicas, numel)`.
        reduce: Gets the sorted rows of some columns, float32, the smallest values first; returns one value a column.

    Returns:
        float32, `(numel,)`.
    """
    numel = stack.shape[1]
    # columns are independent, so chunks bound the memory and change no bit
    result = torch.empty(numel, dtype=torch.float32, device=stack.device)
    chunk = _SORT_CHUNK if stack.device.type == "cpu" else _SORT_CHUNK_ON_DEVICE
    for start in range(0, numel, chunk):
        part = stack[:, start : start + chunk]
        clean = torch.nan_to_num(part, nan=math.inf, posinf=math.inf, neginf=-math.inf).add_(0.0)
        values = list(clean.unbind())
        for low, high in sorting_network(len(values)):
            first, second = values[low], values[high]
            values[low], values[high] = torch.minimum(first, second), torch.maximum(first, second)
        result[start : start + chunk] = reduce(values)
    return result


def mean_of(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of rows as float64, summed in their order."""
    total = values[0].to(torch.float64)
    for value in values[1:]:
        total = total + value
    return divided(total, len(values))


def median_of(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the median of sorted rows as float64: the central one, or the mean of the two central ones."""
    middle = len(values) // 2
    return mean_of(values[middle : middle + 1] if len(values) % 2 else values[middle - 1 : middle + 1])
