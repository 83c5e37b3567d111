"""Two 4-bit codes in one byte.

Byte j of a block's 32 holds the code of element j in its low half and the code of element j + 32 in its high half:
both halves of the block are contiguous, so packing is one vector operation without a shuffle.
"""

from __future__ import annotations

import torch

BLOCK = 64
BYTES = BLOCK // 2


def pack(codes: torch.Tensor, *, out: torch.Tensor) -> None:
    """Pack codes below 16.

    Args:
        codes: uint8, `(rows, 64)`, each 0 to 15.
        out: uint8, `(rows, 32)`, any strides; is overwritten.
    """
    out.copy_(torch.add(codes[:, :BYTES], codes[:, BYTES:], alpha=16))


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes of packed bytes.

    Args:
        packed: uint8, `(rows, 32)`, any strides.

    Returns:
        uint8, `(rows, 64)`, each 0 to 15.

    Example:
        >>> codes = torch.arange(64, dtype=torch.uint8).remainder(16).view(1, 64)
        >>> packed = torch.empty(1, 32, dtype=torch.uint8)
        >>> pack(codes, out=packed)
        >>> torch.equal(unpack(packed), codes)
        True
    """
    packed = packed.contiguous()  # one strided read instead of two
    return torch.cat((packed.bitwise_and(15), packed.bitwise_right_shift(4)), dim=1)
