"""Two bits an element, with four means a block: 2.0625 bits an element in blocks of 1024.

Wire format: a row a block, as `codebook2` has it: its four means as bfloat16, then the codes. The last block is padded
with zeros, and so is coded as one that holds zeros: zero stays zero, and all else becomes one of two means.

Two bits drop much of a tensor: use it with error feedback (arXiv 2505.23725 finds no loss with it, and much without).

Reference: arXiv 2508.15706 for the code, arXiv 2505.23725 for two bits of all elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.codecs import codebook2
from thinwire.codecs.block_codec import BlockCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class Block2Bit(BlockCodec):
    """Two bits an element; use `block_2bit()`.

    Attributes:
        block: Elements that share four means, a multiple of 4.

    Raises:
        ValueError: It is not.
    """

    block: int = 1024

    def __post_init__(self) -> None:
        """Check the size."""
        if self.block < 4 or self.block % 4:
            raise ValueError(f"block must be a positive multiple of 4, got {self.block}; 1024 costs 3 %")

    @property
    def name(self) -> str:
        """`"block-2bit"`."""
        return "block-2bit"

    @property
    def wire_id(self) -> int:
        """17."""
        return 17

    @property
    def _row_bytes(self) -> int:
        return codebook2.row_bytes(self.block)

    def _encode_rows(self, x: torch.Tensor, rows: torch.Tensor, *, start: int, seed: int) -> None:
        rows.copy_(codebook2.encode(x))

    def _decode_rows(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(codebook2.decode(rows, count=self.block, name=self.name))


def block_2bit(*, block: int = 1024) -> Block2Bit:
    """Return the codec of two bits an element; it needs error feedback.

    Args:
        block: Elements that share four means, a multiple of 4; both ends must use the same.

    Raises:
        ValueError: It is no multiple of 4.

    Example:
        >>> codec = block_2bit()
        >>> codec.decode(codec.encode(torch.tensor([4.0, 0.0, -2.0])), numel=3).tolist()
        [4.0, 0.0, -2.0]
    """
    return Block2Bit(block=block)
