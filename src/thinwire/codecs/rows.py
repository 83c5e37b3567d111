"""Payloads of block codecs as rows: each block of elements becomes one row of bytes, and rows follow one another.

So the payloads of tensors that are cut at multiples of the block concatenate to the payload of the whole. The last
block is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from thinwire.errors import PayloadError

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Elements handled at once. On a CPU the temporaries of a chunk stay in the second-level cache, and a chunk is long
# enough to hide what an operation costs before it touches an element; a GPU only needs an end to its temporaries.
_CHUNK = {"cpu": 2**17}
_CHUNK_ELSEWHERE = 2**25

EncodeRows = Callable[[torch.Tensor, torch.Tensor, int], None]
DecodeRows = Callable[[torch.Tensor, torch.Tensor], None]


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in row-major order without their graph; shares memory where the layout allows.

    Raises:
        ValueError: The tensor's dtype is not one that codecs take.
    """
    if tensor.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"a codec encodes float32, bfloat16, float16 or float64, got {tensor.dtype}; convert the tensor first"
        )
    return tensor.detach().reshape(-1)


def check_payload(payload: torch.Tensor, *, name: str, numel: int, expected: int) -> None:
    """Refuse a payload that cannot hold `numel` elements.

    Args:
        payload: What arrived.
        name: The codec's name, for the message.
        numel: Elements it should hold.
        expected: Bytes it should have.

    Raises:
        PayloadError: Its dtype, rank or size is wrong.
    """
    _check_is_bytes(payload, name=name)
    if payload.numel() != expected:
        raise PayloadError(
            f"{name}: {numel} elements take {expected} bytes, got {payload.numel()}; the sender has another tensor "
            f"or another codec"
        )


def check_size_at_most(payload: torch.Tensor, *, name: str, numel: int, limit: int) -> None:
    """Refuse a payload of varying size that no `numel` elements fill.

    Args:
        payload: What arrived.
        name: The codec's name, for the message.
        numel: Elements it should hold.
        limit: The most bytes it can have.

    Raises:
        PayloadError: Its dtype, rank or size is wrong.
    """
    _check_is_bytes(payload, name=name)
    if payload.numel() > limit:
        raise PayloadError(
            f"{name}: {numel} elements take {limit} bytes at most, got {payload.numel()}; the sender has another "
            f"tensor or another codec"
        )


def _check_is_bytes(payload: torch.Tensor, *, name: str) -> None:
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise PayloadError(
            f"{name}: a payload is uint8 of one dimension, got {payload.dtype} of shape {tuple(payload.shape)}"
        )


def num_rows(numel: int, *, block: int) -> int:
    """Return how many blocks `numel` elements fill, the last perhaps in part.

    Raises:
        ValueError: `numel` is negative.
    """
    if numel < 0:
        raise ValueError(f"numel must be at least 0, got {numel}")
    return -(-numel // block)


def encode_rows(tensor: torch.Tensor, *, block: int, row_bytes: int, encode: EncodeRows) -> torch.Tensor:
    """Encode a tensor block by block.

    Args:
        tensor: Floating, any rank, size and layout.
        block: Elements in a row.
        row_bytes: Bytes in a row.
        encode: Takes float32 `(rows, block)`, the uint8 `(rows, row_bytes)` to fill, and the first element's index.

    Returns:
        uint8, `(ceil(numel / block) * row_bytes,)`.
    """
    flat = flatten(tensor)
    rows = num_rows(flat.numel(), block=block)
    table = torch.empty(rows, row_bytes, dtype=torch.uint8, device=flat.device)
    whole = flat.numel() // block
    for first, last in _chunks(whole, block=block, device=flat.device):
        x = flat[first * block : last * block].to(torch.float32).view(-1, block)
        encode(x, table[first:last], first * block)
    if whole < rows:
        padded = torch.zeros(1, block, dtype=torch.float32, device=flat.device)
        padded[0, : flat.numel() - whole * block] = flat[whole * block :]
        encode(padded, table[whole:], whole * block)
    return table.view(-1)


def decode_rows(payload: torch.Tensor, *, numel: int, block: int, row_bytes: int, decode: DecodeRows) -> torch.Tensor:
    """Decode a payload row by row.

    Args:
        payload: uint8, of the size that `numel` needs.
        numel: Elements to return.
        block: Elements in a row.
        row_bytes: Bytes in a row.
        decode: Takes uint8 `(rows, row_bytes)` and the float32 `(rows, block)` to fill.

    Returns:
        float32, `(numel,)`, in memory of its own.
    """
    table = payload.contiguous().view(-1, row_bytes)
    values = torch.empty(numel, dtype=torch.float32, device=payload.device)
    whole = numel // block
    for first, last in _chunks(whole, block=block, device=payload.device):
        decode(table[first:last], values[first * block : last * block].view(-1, block))
    if whole < table.shape[0]:
        padded = torch.empty(1, block, dtype=torch.float32, device=payload.device)
        decode(table[whole:], padded)
        values[whole * block :] = padded[0, : numel - whole * block]
    return values


def _chunks(rows: int, *, block: int, device: torch.device) -> Iterator[tuple[int, int]]:
    step = _CHUNK.get(device.type, _CHUNK_ELSEWHERE) // block
    for first in range(0, rows, step):
        yield first, min(rows, first + step)
