"""Sparse payloads: the set of indices of the elements that are sent, and then their values.

Wire format: the set of indices as Rice-coded gaps, then the values in ascending order of their indices as one row of
`thinwire.codecs.values`. A tensor without elements is a payload without bytes. Indices are, little endian and with bits
from the lowest of a byte:

| bytes | content |
| --- | --- |
| 5 | the number of indices |
| one for each 256 indices, or part of them | the Rice parameters r of these groups |
| the rest | the low r bits of each gap, then the high parts in unary; each of the two ends at a byte boundary |

A gap is the number of elements between an index and the one before it, `gap = high * 2**r + low`. Its high part is sent
as `high` zeros and a one. Low and high parts are stored apart, not interleaved, so that both ends need a few operations
over whole arrays, at the same number of bits. With r = 0 that is a bitmap up to the last index.

Rice's code is Golomb's for divisors that are powers of two: the best prefix code of geometric gaps, that is of
uniformly random positions, up to the choice of r. Each group takes its own best parameter, since real positions
cluster: one layer sends more than another.

Reference: S. W. Golomb, "Run-length encodings", 1966; R. F. Rice, JPL publication 79-22, 1979.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from thinwire.codecs.block_codec import check_payload, num_rows
from thinwire.codecs.values import bits_per_value, decode_values, encode_values, value_bytes
from thinwire.errors import PayloadError

HEADER_BYTES = 5
_GROUP = 256
_NUM_PARAMETERS = 48

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
        [2, 0, 0, 0, 0, 4, 35, 33]
    """
    count = len(indices)
    gaps = np.diff(indices, prepend=-1) - 1
    parameters = _best_parameters(gaps)
    widths = np.repeat(parameters, _GROUP)[:count]
    high_parts = gaps >> widths
    high = np.zeros(int(high_parts.sum()) + count, dtype=np.uint8)
    high[np.cumsum(high_parts) + np.arange(count)] = 1
    low = np.zeros(int(widths.sum()), dtype=np.uint8)
    for place, wide, at in _low_places(parameters, widths):
        low[at] = gaps[wide] >> place & 1
    header = np.frombuffer(count.to_bytes(HEADER_BYTES, "little"), dtype=np.uint8)
    packed = (np.packbits(part, bitorder="little") for part in (low, high))
    return np.concatenate((header, parameters.astype(np.uint8), *packed))


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
    num_groups = -(-count // _GROUP)
    body = data[HEADER_BYTES + num_groups :]
    parameters = data[HEADER_BYTES : HEADER_BYTES + num_groups].astype(np.int64)
    _check(len(parameters) == num_groups and bool((parameters < _NUM_PARAMETERS).all()), "parameters", name=name)
    widths = np.repeat(parameters, _GROUP)[:count]
    num_low_bits = int(widths.sum())
    split = -(-num_low_bits // 8)
    _check(len(body) >= split, f"{count} gaps in {len(body)} bytes", name=name)
    ones = np.flatnonzero(np.unpackbits(body[split:], bitorder="little"))
    _check(len(ones) == count, f"{len(ones)} gaps instead of {count}", name=name)
    length = int(ones[-1]) + 1 if count else 0
    _check(-(-length // 8) == len(body) - split, "bytes follow the last gap", name=name)
    bits = np.unpackbits(body[:split], bitorder="little")
    _check(not bits[num_low_bits:].any(), "a bit that fills up a byte is not zero", name=name)
    gaps = np.diff(ones, prepend=-1) - 1
    # in floating point first, which does not overflow: a gap's low part is below 2**48, and so are those of a payload
    _check(float((gaps * 2.0**widths).sum()) <= numel, "its gaps lead out of the tensor", name=name)
    gaps <<= widths
    for place, wide, at in _low_places(parameters, widths):
        gaps[wide] += bits[at].astype(np.int64) << place
    _check(bool((gaps < numel).all()), "its gaps lead out of the tensor", name=name)
    _check(float(gaps.sum(dtype=np.float64)) <= numel, "its gaps lead out of the tensor", name=name)
    indices: Indices = np.cumsum(gaps + 1) - 1
    _check(count == 0 or int(indices[-1]) < numel, "its gaps lead out of the tensor", name=name)
    return indices


def num_indices(data: Bytes, *, numel: int, name: str) -> int:
    """Return how many indices a payload claims to hold.

    Raises:
        PayloadError: The payload has no whole header, or its number is above `numel`.
    """
    _check(len(data) >= HEADER_BYTES, f"its header has {HEADER_BYTES} bytes, got {len(data)}", name=name)
    count = int.from_bytes(data[:HEADER_BYTES].tobytes(), "little")
    _check(count <= numel, f"{count} indices of {numel} elements", name=name)
    return count


def max_index_bytes(count: int, *, numel: int) -> int:
    """Return the most bytes that `count` or fewer indices of `numel` elements take, wherever they are.

    Example:
        >>> max_index_bytes(10, numel=1000), max_index_bytes(900, numel=1000)
        (18, 135)
    """
    # the sum of all gaps is at most numel - count, and with one parameter for all groups it would be this; fewer bits
    # for fewer indices, whatever the parameter; two parts each end at a byte
    bits = min(count * (parameter + 1) + (numel - count >> parameter) for parameter in range(_NUM_PARAMETERS))
    return HEADER_BYTES - (-count // _GROUP) + (bits + 14) // 8


def expected_bits_per_index(density: float) -> float:
    """Return the bits an index costs in the limit of many, at positions that are uniformly random.

    Example:
        >>> [round(expected_bits_per_index(density), 2) for density in (0.5, 0.1, 0.01, 0.001)]
        [2.03, 4.79, 8.14, 11.53]
    """
    if density >= 1:
        return 1.0 + 8 / _GROUP
    # a high part's zeros are geometric too: E[zeros + 1] = 1 / (1 - (1 - density)**(2**r))
    codes = (r - 1 / math.expm1(2**r * math.log1p(-density)) for r in range(_NUM_PARAMETERS))
    return min(codes) + 8 / _GROUP


def _best_parameters(gaps: Indices) -> Indices:
    """Return for each group the smallest of the parameters with the fewest bits."""
    starts = np.arange(0, len(gaps), _GROUP)
    if not len(starts):
        return starts
    sizes = np.diff(starts, append=len(gaps))
    best = np.zeros(len(starts), dtype=np.int64)
    rest = gaps.copy()
    least = np.add.reduceat(rest, starts)
    # bits as a function of the parameter are convex, so a parameter that helps no group is followed by none that does
    for parameter in range(1, _NUM_PARAMETERS):
        rest >>= 1
        bits = np.add.reduceat(rest, starts) + sizes * parameter
        is_less = bits < least
        if not is_less.any():
            break
        best[is_less], least[is_less] = parameter, bits[is_less]
    return best


def _low_places(parameters: Indices, widths: Indices) -> Iterator[tuple[int, Indices, Indices]]:
    """Yield each bit of the low parts: its place in a gap, the gaps that have it, and where it stands in the stream."""
    starts = np.cumsum(widths) - widths
    for place in range(int(parameters.max(initial=0))):
        wide = np.flatnonzero(widths > place)
        yield place, wide, starts[wide] + place


def _check(is_fine: bool, what: str, *, name: str) -> None:
    if not is_fine:
        raise PayloadError(f"{name}: {what}: never sent")


def max_bytes(numel: int, *, count: int, values: str) -> int:
    """Return the most bytes that `count` or fewer of `numel` elements take; 0 for a tensor without elements.

    Raises:
        ValueError: `numel` is negative.
    """
    if num_rows(numel, block=1) == 0:
        return 0
    return max_index_bytes(count, numel=numel) + value_bytes(count, values=values)


def expected_bits_per_element(density: float, *, values: str) -> float:
    """Return the bits an element costs in long tensors when the sent ones are at random positions.

    Example:
        >>> round(expected_bits_per_element(0.01, values="float16"), 3)
        0.241
    """
    return density * (expected_bits_per_index(density) + bits_per_value(values))


def encode_chosen(flat: torch.Tensor, chosen: torch.Tensor, *, values: str) -> torch.Tensor:
    """Encode the chosen elements.

    Args:
        flat: float32, `(numel,)`.
        chosen: int64, `(count,)`, strictly ascending, on the same device.
        values: The format of the values.

    Returns:
        uint8, on the same device.
    """
    if flat.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=flat.device)
    indices = torch.from_numpy(encode_indices(chosen.cpu().numpy(), numel=flat.numel())).to(flat.device)
    if chosen.numel() == 0:
        return indices
    return torch.cat((indices, encode_values(flat[chosen].view(1, -1), values=values).view(-1)))


def decode_chosen(payload: torch.Tensor, *, numel: int, count: int, values: str, name: str) -> torch.Tensor:
    """Decode to the whole tensor, zeros where nothing was sent.

    Args:
        payload: What arrived.
        numel: Elements of the tensor.
        count: The most elements that may be sent.
        values: The format of the values.
        name: The codec's name, for messages.

    Returns:
        float32, `(numel,)`, finite.

    Raises:
        PayloadError: The payload is none of `numel` elements.
        NonFiniteError: The sender's tensor held NaN, infinity, or more than the format can carry.
    """
    most = max_bytes(numel, count=count, values=values)
    check_payload(payload, name=name, numel=numel, expected=most, has_fixed_size=False)
    whole = torch.zeros(numel, dtype=torch.float32, device=payload.device)
    if numel == 0:
        return whole
    data = payload.cpu().contiguous().numpy()
    # a payload that is too short is refused by the index part, with its own message
    size = value_bytes(num_indices(data, numel=numel, name=name), values=values)
    indices = decode_indices(data[: max(0, len(data) - size)], numel=numel, name=name)
    if len(indices):
        row = payload[payload.numel() - size :].view(1, -1)
        found = decode_values(row, count=len(indices), values=values, name=name)
        whole[torch.from_numpy(indices).to(payload.device)] = found.view(-1)
    return whole
