"""Bit packing: rows of numbers of a fixed, small width; bit j of a row is bit `j % 8` of its byte `j // 8`.

A row ends at a byte boundary; the padding bits of its last byte are zero.
"""

from __future__ import annotations

import numpy as np
import torch

from thinwire.errors import PayloadError


def packed_bytes(count: int, *, width: int) -> int:
    """Return the bytes that `count` numbers of `width` bits take.

    Example:
        >>> packed_bytes(64, width=12), packed_bytes(3, width=1), packed_bytes(5, width=0)
        (96, 1, 0)
    """
    return -(-count * width // 8)


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Pack bits.

    Args:
        bits: bool or uint8 of 0 and 1, `(rows, count)`.

    Returns:
        uint8, `(rows, ceil(count / 8))`, on the same device.

    Example:
        >>> pack_bits(torch.tensor([[1, 0, 0, 0, 0, 0, 0, 1, 1]], dtype=torch.uint8)).tolist()
        [[129, 1]]
    """
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy(), axis=1, bitorder="little"))
    # numpy packs on a CPU; on a GPU eight shifted planes are combined
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.shape[1] % 8)).view(bits.shape[0], -1, 8)
    packed = padded[..., 0].clone()
    for place in range(1, 8):
        packed |= padded[..., place] << place
    return packed


def unpack_bits(packed: torch.Tensor, *, count: int, name: str) -> torch.Tensor:
    """Unpack bits.

    Args:
        packed: uint8, `(rows, ceil(count / 8))`.
        count: Bits a row.
        name: The codec's name, for the message.

    Returns:
        uint8 of 0 and 1, `(rows, count)`, on the same device.

    Raises:
        PayloadError: A bit that fills up a row is not zero.
    """
    if packed.device.type == "cpu":
        bits = torch.from_numpy(np.unpackbits(packed.numpy(), axis=1, bitorder="little"))
    else:
        places = torch.arange(8, dtype=torch.uint8, device=packed.device)
        bits = (packed.unsqueeze(-1) >> places).bitwise_and_(1).view(packed.shape[0], -1)
    if bits.shape[1] > count and bool(bits[:, count:].any()):
        raise PayloadError(f"{name}: a bit that fills up a byte is not zero, which is never sent")
    return bits[:, :count]


def pack(numbers: torch.Tensor, *, width: int) -> torch.Tensor:
    """Pack numbers, the lowest bit first.

    Args:
        numbers: Integers below `2**width`, `(rows, count)`.
        width: Bits a number; 0 packs to nothing.

    Returns:
        uint8, `(rows, packed_bytes(count, width=width))`.

    Example:
        >>> pack(torch.tensor([[3, 0, 1]]), width=3).tolist()
        [[67, 0]]
    """
    if width == 0:
        return numbers.new_empty(numbers.shape[0], 0, dtype=torch.uint8)
    places = torch.arange(width, dtype=numbers.dtype, device=numbers.device)
    bits = (numbers.unsqueeze(-1) >> places).bitwise_and_(1).to(torch.uint8)
    return pack_bits(bits.view(numbers.shape[0], -1))


def unpack(packed: torch.Tensor, *, count: int, width: int, name: str) -> torch.Tensor:
    """Unpack numbers.

    Args:
        packed: uint8, `(rows, packed_bytes(count, width=width))`.
        count: Numbers a row.
        width: Bits a number.
        name: The codec's name, for the message.

    Returns:
        int64, `(rows, count)`, each in [0, `2**width`).

    Raises:
        PayloadError: A bit that fills up a row is not zero.
    """
    bits = unpack_bits(packed, count=count * width, name=name).reshape(packed.shape[0], count, width)
    numbers = torch.zeros(packed.shape[0], count, dtype=torch.int64, device=packed.device)
    for place in range(width):
        # one plane at a time: a (rows, count, width) int64 tensor would take 8 times the memory
        numbers += bits[..., place].to(torch.int64) << place
    return numbers
