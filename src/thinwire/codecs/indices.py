"""Which elements were sent: a set of indices as the smaller of a bitmap and of Rice-coded gaps.

Wire format, little endian, bits from the lowest of a byte:

| bytes | holds |
| --- | --- |
| 1 | mode: 0 for a bitmap, 1 for gaps |
| 1 | the Rice parameter r, 0 for a bitmap |
| 6 | the number of indices |
| the rest | bitmap: one bit an element. Gaps: the low r bits of each gap, then the high parts in unary |

A gap is the number of elements between an index and the one before it, `gap = high * 2**r + low`. Its high part is sent
as so many zeros and a one. Low and high parts stand in two places, not by turns, so that both sides are a few
operations over whole arrays, at the same number of bits.

Rice's code is that of Golomb for divisors that are powers of two, which is the best prefix code of geometric gaps up to
the choice of r: of positions that are uniformly random. r is chosen from the density, and moved as long as that makes
this set shorter, since real positions cluster.

Reference: S. W. Golomb, "Run-length encodings", 1966; R. F. Rice, JPL publication 79-22, 1979.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire.errors import PayloadError

HEADER_BYTES = 8
_BITMAP, _GAPS = 0, 1

Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]


def encode_indices(indices: Indices, *, numel: int) -> Bytes:
    """Encode a set of indices.

    Args:
        indices: int64, `(count,)`, strictly ascending, each in [0, `numel`).
        numel: Elements to choose from.

    Returns:
        uint8, at most `max_index_bytes(count, numel=numel)`.

    Example:
        >>> encode_indices(np.array([3, 70], dtype=np.int64), numel=100).tolist()
        [1, 5, 2, 0, 0, 0, 0, 0, 67, 0, 9]
    """
    count = len(indices)
    gaps = np.diff(indices, prepend=-1) - 1
    parameter = _descend(gaps, start=_parameter(count, numel=numel))
    low_bytes = _bytes(count * parameter)
    high_bits = int((gaps >> parameter).sum()) + count
    if _bytes(numel) < low_bytes + _bytes(high_bits):
        bitmap = np.zeros(numel, dtype=np.uint8)
        bitmap[indices] = 1
        return np.concatenate((_header(_BITMAP, 0, count), np.packbits(bitmap, bitorder="little")))
    places = np.arange(parameter, dtype=np.int64)
    low = (gaps[:, None] >> places & 1).astype(np.uint8)
    high = np.zeros(high_bits, dtype=np.uint8)
    high[np.cumsum(gaps >> parameter) + np.arange(count)] = 1
    packed = (np.packbits(part.reshape(-1), bitorder="little") for part in (low, high))
    return np.concatenate((_header(_GAPS, parameter, count), *packed))


def decode_indices(data: Bytes, *, numel: int, name: str) -> Indices:
    """Decode a set of indices.

    Args:
        data: uint8, exactly the bytes of `encode_indices`.
        numel: Elements to choose from.
        name: The codec's name, for messages.

    Returns:
        int64, `(count,)`, strictly ascending, each in [0, `numel`).

    Raises:
        PayloadError: The bytes are no such set.
    """
    count = num_indices(data, numel=numel, name=name)
    mode, parameter, body = int(data[0]), int(data[1]), data[HEADER_BYTES:]
    if mode == _BITMAP and parameter == 0:
        if len(body) != _bytes(numel):
            raise PayloadError(f"{name}: a bitmap of {numel} elements has {_bytes(numel)} bytes, got {len(body)}")
        found = np.flatnonzero(np.unpackbits(body, bitorder="little"))
        _check(len(found) == count, f"its bitmap marks {len(found)} elements instead of {count}", name=name)
        _check(count == 0 or int(found[-1]) < numel, f"its bitmap marks elements beyond {numel}", name=name)
        return found
    _check(mode == _GAPS, f"mode {mode} with parameter {parameter} is none", name=name)
    # encoders stay below this, and so no sum below can overflow
    _check(parameter < 48 and count << parameter < 2 * numel, f"parameter {parameter} is too large", name=name)
    return _decode_gaps(body, count=count, parameter=parameter, numel=numel, name=name)


def num_indices(data: Bytes, *, numel: int, name: str) -> int:
    """Return how many indices a payload says it starts with.

    Raises:
        PayloadError: The payload has no whole header, or its number is above `numel`.
    """
    _check(len(data) >= HEADER_BYTES, f"its header has {HEADER_BYTES} bytes, got {len(data)}", name=name)
    count = int.from_bytes(data[2:HEADER_BYTES].tobytes(), "little")
    _check(count <= numel, f"{count} indices of {numel} elements", name=name)
    return count


def max_index_bytes(count: int, *, numel: int) -> int:
    """Return the most bytes that `count` or fewer indices of `numel` elements take, wherever they are.

    Example:
        >>> max_index_bytes(10, numel=1000), max_index_bytes(900, numel=1000)
        (20, 133)
    """
    # fewer bits for fewer indices, whatever the parameter; the two parts each end at a byte
    gaps = (_most_bits(count, _parameter(count, numel=numel), numel=numel) + 14) // 8
    return HEADER_BYTES + min(_bytes(numel), gaps)


def expected_bits_per_index(density: float) -> float:
    """Return the bits an index costs in the limit of many, at positions that are uniformly random.

    Example:
        >>> [round(expected_bits_per_index(density), 2) for density in (0.5, 0.1, 0.01, 0.001)]
        [2.0, 4.76, 8.11, 11.49]
    """
    if density >= 1:
        return 1.0
    # a high part's zeros are geometric too: E[zeros + 1] = 1 / (1 - (1 - density)**(2**r))
    codes = (r - 1 / math.expm1(2**r * math.log1p(-density)) for r in range(48))
    return min(1 / density, *codes)


def _decode_gaps(body: Bytes, *, count: int, parameter: int, numel: int, name: str) -> Indices:
    split = _bytes(count * parameter)
    _check(len(body) >= split, f"{count} gaps take more than {len(body)} bytes", name=name)
    ones = np.flatnonzero(np.unpackbits(body[split:], bitorder="little"))
    _check(len(ones) == count, f"{len(ones)} gaps instead of {count}", name=name)
    length = int(ones[-1]) + 1 if count else 0
    _check(_bytes(length) == len(body) - split, "bytes follow the last gap", name=name)
    _check(length - count <= numel >> parameter, "its gaps lead out of the tensor", name=name)
    bits = np.unpackbits(body[:split], bitorder="little")
    _check(not bits[count * parameter :].any(), "a bit that fills up a byte is not zero", name=name)
    gaps = np.diff(ones, prepend=-1) - 1 << parameter
    for place in range(parameter):
        gaps += bits[place : count * parameter : parameter].astype(np.int64) << place
    indices: Indices = np.cumsum(gaps + 1) - 1
    _check(count == 0 or int(indices[-1]) < numel, "its gaps lead out of the tensor", name=name)
    return indices


def _most_bits(count: int, parameter: int, *, numel: int) -> int:
    # the sum of all gaps is at most numel - count
    return count * (parameter + 1) + (numel - count >> parameter)


def _parameter(count: int, *, numel: int) -> int:
    """Return the smallest of the parameters with the least bound of bits."""
    return min(range(48), key=lambda parameter: _most_bits(count, parameter, numel=numel))


def _descend(gaps: npt.NDArray[np.int64], *, start: int) -> int:
    """Walk from `start` to the nearest parameter whose neighbours are no shorter."""

    def bits(parameter: int) -> int:
        return int((gaps >> parameter).sum()) + len(gaps) * parameter

    best, least = start, bits(start)
    for step in (-1, 1):
        while best + step >= 0 and (here := bits(best + step)) < least:
            best, least = best + step, here
    return best


def _bytes(bits: int) -> int:
    return -(-bits // 8)


def _header(mode: int, parameter: int, count: int) -> npt.NDArray[Any]:
    return np.frombuffer(bytes((mode, parameter)) + count.to_bytes(6, "little"), dtype=np.uint8)


def _check(is_fine: bool, what: str, *, name: str) -> None:
    if not is_fine:
        raise PayloadError(f"{name}: {what}: never sent")
