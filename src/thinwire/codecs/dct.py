"""The discrete cosine transform of small matrices, the same bits on every device.

The transform is DCT-II with orthonormal basis, of rows and of columns; its inverse is the transpose. A matrix product
in floating point rounds in an order that depends on device, library and threads; replicas that decode a payload would
drift apart. So both factors are made integers that are small enough for every partial sum to be below 2**53: then a
product in float64 is exact, whatever the order. Elements are rounded to 2**-24 of the power of two above their matrix's
largest magnitude, and the basis, computed in float64, to 18 bits and more after the point (22 for 64 x 64): errors
near 1e-6 of the largest.
"""

from __future__ import annotations

import functools
import math

import torch

from thinwire.codecs.selection import magnitude_bits
from thinwire.codecs.values import power_of_two

_ELEMENT_BITS = 24
_EXACT_BITS = 52  # one below float64's 53, for the rounding of the basis


def transform(x: torch.Tensor) -> torch.Tensor:
    """Transform matrices.

    Args:
        x: float32, `(count, height, width)`, any strides; up to 1024 rows and columns.

    Returns:
        float32, `(count, height, width)`; NaN throughout a matrix that holds NaN or infinity, and infinity where a
        coefficient is beyond float32.

    Example:
        >>> transform(torch.ones(1, 2, 2)).tolist()
        [[[2.0, 0.0], [0.0, 0.0]]]
    """
    return _apply(x, is_inverse=False)


def inverse(x: torch.Tensor) -> torch.Tensor:
    """Transform finite numbers back; see `transform`.

    Example:
        >>> inverse(transform(torch.tensor([[[1.0, 2.0, 3.0]]]))).round(decimals=5).tolist()
        [[[1.0, 2.0, 3.0]]]
    """
    return _apply(x, is_inverse=True)


def _apply(x: torch.Tensor, *, is_inverse: bool) -> torch.Tensor:
    integers, exponent = _integers(x)
    bits = _ELEMENT_BITS
    for dim in (2, 1):
        size = x.shape[dim]
        if size == 1:
            continue
        growth = math.ceil(math.log2(size) / 2)  # a row of the basis adds up to sqrt(size) at most
        # what is left of float64's 53 bits once elements and sums have theirs
        fraction = _EXACT_BITS - bits - growth
        basis = _basis(size, fraction).to(x.device)
        basis = basis if is_inverse else basis.T
        # exact: every partial sum is an integer below 2**53 (times a power of two)
        product = integers @ basis if dim == 2 else basis.T @ integers
        # a product with a power of two is exact; what is rounded here is the same everywhere
        integers = (product * 2.0**-fraction).round_()
        bits += growth
    result = integers * power_of_two(exponent - _ELEMENT_BITS)
    # below 2**-126 float32 has fewer bits, and some devices none
    result = result.masked_fill_(result.abs() < 2.0**-126, 0.0)
    if is_inverse:  # what a peer sent must not become infinite
        largest = torch.finfo(torch.float32).max
        return result.clamp_(-largest, largest).to(torch.float32)
    return result.masked_fill_(exponent > 128, torch.nan).to(torch.float32)


def _integers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each matrix as integers below 2**24 in float64, and the exponent e of the power 2**e that is 2**24."""
    # above the largest; 129: not finite
    exponent = (magnitude_bits(x).amax(dim=(1, 2), keepdim=True) >> 23).to(torch.int64) - 126
    wide = x.to(torch.float64).masked_fill_(exponent > 128, 0.0)
    return (wide * power_of_two(_ELEMENT_BITS - exponent)).round_(), exponent


@functools.lru_cache(maxsize=64)
def _basis(size: int, fraction: int) -> torch.Tensor:
    """Return the basis times 2**fraction, rounded: row k is `sqrt(2 / size) cos(pi / size (j + 1/2) k)`.

    Python's cosine rather than a device's: the libraries behind it agree to the last bit but one, which the rounding
    takes away, except once in some millions of entries.
    """
    rows = []
    for k in range(size):
        weight = math.sqrt((1 if k == 0 else 2) / size)
        # reduced to a full turn in integers, so that the argument is as precise as it can be
        angles = (math.pi * ((2 * j + 1) * k % (4 * size)) / (2 * size) for j in range(size))
        rows.append([float(round(weight * math.cos(angle) * 2.0**fraction)) for angle in angles])
    return torch.tensor(rows, dtype=torch.float64)
