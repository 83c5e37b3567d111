"""Selection of the largest magnitudes: exact, or by a threshold estimated from a sample.

Magnitudes are compared as integers, the bits of float32 without the sign. That order is exact on every device, and puts
infinity and NaN above all numbers, so that a tensor that holds one also sends it. Of equal magnitudes those with the
lowest indices are taken. Zeros and float32's subnormal numbers are never taken: they need not be sent.

Only comparisons of integers decide, so every device and every number of threads takes the same elements.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from thinwire.shared_random import derive_seed

_SMALLEST_NORMAL = 1 << 23
_WHOLE = 2**15  # tensors up to this size are not worth a sample
_MAX_ROUNDS = 10


def magnitude_bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of float32 magnitudes as int32 of the same shape: they are ordered as the magnitudes are."""
    return x.contiguous().view(torch.int32).bitwise_and(0x7FFFFFFF)


def largest(magnitude: torch.Tensor, *, count: int) -> torch.Tensor:
    """Return where the largest magnitudes are.

    A sample gives a threshold that pre-selects candidates; if these are too few, all elements are candidates. So the
    result does not depend on the sample, only the time does.

    Args:
        magnitude: int32 from `magnitude_bits`, `(numel,)`.
        count: How many, 1 to numel.

    Returns:
        int64, ascending: `(count,)`, or fewer where the tensor has fewer non-zeros.

    Example:
        >>> largest(magnitude_bits(torch.tensor([1.0, -3.0, 0.0, 3.0, 2.0])), count=2).tolist()
        [1, 3]
    """
    numel = magnitude.numel()
    if numel > _WHOLE and 8 * count < numel:
        stride = max(1, numel // max(_WHOLE, numel // 64))
        sample = magnitude[stride // 2 :: stride]
        expected = count * sample.numel() / numel
        # four deviations more than expected are nearly always enough
        guess = _kth_largest(sample, k=min(sample.numel(), math.ceil(expected + 4 * math.sqrt(expected)) + 8))
        candidates = at_least(magnitude, threshold=guess)
        if candidates.numel() >= count:
            return candidates[_largest_of(magnitude[candidates], count=count)]
    return _largest_of(magnitude, count=count)


def largest_by_sample(magnitude: torch.Tensor, *, count: int, density: float, seed: int) -> torch.Tensor:
    """Return where about the largest magnitudes are, by Deep Gradient Compression's sampled threshold.

    Every so manieth element from a random one on is looked at, 1 % of the tensor or more; the threshold is what the
    share `density` of them reaches. If 0.8 `count` elements do not reach it, it is lowered by a fifth, up to ten times.
    If more than `count` do, the largest of those are taken, so the result is then exact.

    Changed from the authors' code: it takes up to 1.3 `count` elements before it selects anew, and then drops those
    with the highest indices; and where ten rounds do not suffice it sends what it has, where this takes the exact ones.

    Args:
        magnitude: int32 from `magnitude_bits`, `(numel,)`.
        count: How many, 1 to numel.
        density: `count` as a share of the tensor.
        seed: Selects where the sample starts.

    Returns:
        int64, ascending: 0.8 `count` to `count` indices, or all non-zeros where there are fewer than `count`.

    Reference: arXiv 1712.01887, section 3.
    """
    numel = magnitude.numel()
    num_wanted = max(0.01 * numel, 2 / density)
    if num_wanted >= numel:
        return largest(magnitude, count=count)
    stride = math.ceil(numel / num_wanted / 32) * 32 + 1  # odd, so that it does not walk down one column of a matrix
    sample = magnitude[derive_seed(seed, "sampled-threshold") % min(stride, numel) :: stride]
    threshold = _kth_largest(sample, k=max(1, min(sample.numel(), math.ceil(density * sample.numel()))))
    for _ in range(_MAX_ROUNDS):
        found = at_least(magnitude, threshold=threshold)
        if found.numel() > count:
            return found[_largest_of(magnitude[found], count=count)]
        if found.numel() >= 0.8 * count:
            return found
        threshold = int((torch.tensor([threshold], dtype=torch.int32).view(torch.float32) * 0.8).view(torch.int32))
    return largest(magnitude, count=count)


def at_least(magnitude: torch.Tensor, *, threshold: int) -> torch.Tensor:
    """Return the ascending indices of non-zero magnitudes that are `threshold` or more, int64."""
    reached = magnitude >= max(threshold, _SMALLEST_NORMAL)
    if reached.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(reached.numpy()))  # several times as quick as torch's on sparse masks
    return reached.nonzero().view(-1)


def largest_of_rows(magnitude: torch.Tensor, *, count: int) -> torch.Tensor:
    """Return where the largest magnitudes of each row are.

    Args:
        magnitude: int32 from `magnitude_bits`, `(rows, size)`.
        count: How many a row, 1 to size.

    Returns:
        int64, `(rows, count)`, ascending in each row; zeros are taken, lowest indices first, where a row has too few
        others.
    """
    rows, size = magnitude.shape
    if count == size:
        return torch.arange(size, device=magnitude.device).expand(rows, size)
    if magnitude.device.type == "cpu":
        table = np.partition(magnitude.numpy(), size - count, axis=1)
        threshold = torch.from_numpy(table[:, size - count : size - count + 1])
    else:
        threshold = magnitude.topk(count, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    taken = magnitude >= threshold
    is_tied = taken.sum(dim=1) > count
    if bool(is_tied.any()):
        part, limit = magnitude[is_tied], threshold[is_tied]
        above, equal = part > limit, part == limit
        taken[is_tied] = above | (equal & (equal.cumsum(dim=1) <= count - above.sum(dim=1, keepdim=True)))
    return taken.nonzero()[:, 1].view(rows, count)


def _largest_of(magnitude: torch.Tensor, *, count: int) -> torch.Tensor:
    if count >= magnitude.numel():
        return at_least(magnitude, threshold=0)
    threshold = max(_kth_largest(magnitude, k=count), _SMALLEST_NORMAL)
    found = at_least(magnitude, threshold=threshold)
    if found.numel() <= count:
        return found
    reached = magnitude[found]
    taken = reached > threshold
    ties = (~taken).nonzero().view(-1)
    taken[ties[: count - int(taken.sum())]] = True
    return found[taken]


def _kth_largest(magnitude: torch.Tensor, *, k: int) -> int:
    if magnitude.device.type == "cpu":
        place = magnitude.numel() - k
        return int(np.partition(magnitude.numpy(), place)[place])
    return int(magnitude.topk(k, sorted=False).values.min())
