"""Coordinate-wise sorting of the replicas' vectors, for aggregation rules that treat each coordinate separately.

The columns are sorted by a network of minima and maxima over whole rows (Batcher's merge exchange, Knuth's volume 3,
section 5.2.2, algorithm M). So the order of the replicas leaves no trace, not even in the last bit, and a CPU, a GPU
and any number of threads give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from thinwire.averaging.gram import divided

# The result does not depend on it: rows of this many columns stay in a core's cache while they are sorted.
_CHUNK = 1 << 15
_CHUNK_ON_DEVICE = 1 << 21


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
    result = torch.empty(numel, dtype=torch.float32, device=stack.device)
    chunk = _CHUNK if stack.device.type == "cpu" else _CHUNK_ON_DEVICE
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
