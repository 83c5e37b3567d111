"""Sums that are the same bits on every device and with every number of threads."""

from __future__ import annotations

import torch

_SEGMENT = 2**16  # float64 elements of a segment stay in cache


def ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum rows in an order that depends on their length alone: the first half onto the second, again and again.

    torch.sum adds in an order that depends on device, threads and version, and float addition is not associative.

    Args:
        x: float64, `(rows, count)`.

    Returns:
        float64, `(rows, 1)`; 0 for rows without elements.

    Example:
        >>> ordered_sum(torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)).tolist()
        [[7.0]]
    """
    if x.shape[1] > _SEGMENT:
        # segments of a fixed length: the order still depends on the length of a row alone
        parts = [ordered_sum(part) for part in torch.split(x, _SEGMENT, dim=1)]
        return ordered_sum(torch.cat(parts, dim=1))
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0], 1)
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        # an odd last element is carried to the next level unadded
        total = x[:, :half] + x[:, half : 2 * half]
        x = total if x.shape[1] % 2 == 0 else torch.cat((total, x[:, -1:]), dim=1)
    return x
