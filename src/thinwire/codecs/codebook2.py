"""Two bits a value: four bins, each decoded to the mean of what it took, with the four means sent along.

The bins of a row are cut at -1.5, 0 and 1.5 of its root mean square: four bins of equal width over three times that to
both sides, the outermost ones open. A row of k values is its four means as bfloat16, from the most negative bin on,
and then the codes, 2 bits each. All numbers are little endian.

A row that holds zeros has another use for the two inner bins: they take its zeros, and the outer ones all else, so that
zero stays zero. A row with NaN, infinity or a magnitude of 2**127 or more has four infinite means, and receivers refuse
it.

SparseLoCo's published code (tplr-ai/templar) cuts a whole tensor by its mean and standard deviation, rounds to bins
whose centres are -3, -1.5, 0 and 1.5 deviations, so that positive values mostly share one of the four, and sends means
in float32. Here bins mirror one another: the opposite values decode to the opposite.

`block_2bit()` codes all elements so, a row a block: 2.0625 bits an element in blocks of 1024. The last block is padded
with zeros, and so is coded as one that holds zeros: all that is not zero becomes one of two means. Two bits drop much
of a tensor: use it with error feedback (arXiv 2505.23725 finds no loss with it, and much without).

Reference: arXiv 2508.15706 for the code, arXiv 2505.23725 for two bits of all elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire.codecs import bit_packing
from thinwire.codecs.base import ordered_sum
from thinwire.codecs.block_codec import BlockCodec
from thinwire.errors import NonFiniteError, PayloadError

_MEANS_BYTES = 8
_EDGE_SQUARED = 2.25  # of the mean square: bins are 1.5 root mean squares wide
_LIMIT = 2.0**127


def row_bytes(count: int) -> int:
    """Return the bytes of a row of `count` values.

    Example:
        >>> row_bytes(64)
        24
    """
    return _MEANS_BYTES + bit_packing.packed_bytes(count, width=2)


def encode(x: torch.Tensor) -> torch.Tensor:
    """Encode rows.

    Args:
        x: float32, `(rows, count)`, count at least 1.

    Returns:
        uint8, `(rows, row_bytes(count))`.

    Example:
        >>> decode(encode(torch.tensor([[4.0, 1.0, -2.0, 1.0, -1.0, 1.0]])), count=6, name="codebook2").tolist()
        [[4.0, 1.0, -1.5, 1.0, -1.5, 1.0]]
    """
    is_unusable = ~(x.abs().amax(dim=1, keepdim=True) < _LIMIT)  # NaN is not below the limit either
    wide = x.to(torch.float64).masked_fill_(is_unusable, 0.0)
    codes = _codes(wide)
    sums, counts = [], []
    for code in range(4):
        inside = codes == code
        sums.append(ordered_sum(torch.where(inside, wide, 0.0)))
        # an empty bin has sum 0: divided by 1 its mean is 0, not NaN
        counts.append(inside.sum(dim=1, keepdim=True).clamp_min_(1))
    means = torch.cat(sums, dim=1) / torch.cat(counts, dim=1).to(torch.float64)
    stored = means.masked_fill_(is_unusable, torch.inf).to(torch.bfloat16).view(torch.uint8)
    return torch.cat((stored, bit_packing.pack(codes, width=2)), dim=1)


def decode(data: torch.Tensor, *, count: int, name: str) -> torch.Tensor:
    """Decode rows.

    Args:
        data: uint8, `(rows, row_bytes(count))`, any strides.
        count: Values a row.
        name: The codec's name, for messages.

    Returns:
        float32, `(rows, count)`, finite.

    Raises:
        PayloadError: The bytes are never sent.
        NonFiniteError: A row held NaN, infinity or a magnitude of 2**127 or more.
    """
    means = data[:, :_MEANS_BYTES].clone(memory_format=torch.contiguous_format).view(torch.bfloat16).to(torch.float32)
    is_fine = means.abs() <= _LIMIT
    fine, infinite = torch.stack((is_fine.all(), (means == torch.inf).any())).tolist()
    if infinite:
        raise NonFiniteError(f"{name}: a block held NaN, infinity or a magnitude of 2**127 or more")
    if not fine:
        raise PayloadError(f"{name}: the mean of a bin is NaN, -infinity or above 2**127: never sent")
    codes = bit_packing.unpack(data[:, _MEANS_BYTES:].contiguous(), count=count, width=2, name=name)
    return means.gather(1, codes)


def _codes(x: torch.Tensor) -> torch.Tensor:
    mean_square = ordered_sum(x * x) / torch.full_like(x[:, :1], x.shape[1])
    # squares are compared, so no square root has to agree between devices
    is_outer = x * x >= mean_square * _EDGE_SQUARED
    is_zero = x == 0
    is_outer = (is_outer | is_zero.any(dim=1, keepdim=True)) & ~is_zero
    # from the most negative bin on: outer 0, inner 1, inner 2, outer 3
    return torch.where(x < 0, 1 - is_outer.to(torch.int64), 2 + is_outer.to(torch.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block2Bit(BlockCodec):
    """Two bits an element; it needs error feedback.

    Args:
        block: Elements that share four means, a multiple of 4; both ends must use the same.

    Raises:
        ValueError: It is no multiple of 4.

    Example:
        >>> codec = block_2bit()
        >>> codec.decode(codec.encode(torch.tensor([4.0, 0.0, -2.0])), numel=3).tolist()
        [4.0, 0.0, -2.0]
    """

    name: ClassVar[str] = "block-2bit"
    wire_id: ClassVar[int] = 17

    block: int = 1024

    def __post_init__(self) -> None:
        if self.block < 4 or self.block % 4:
            raise ValueError(f"block must be a positive multiple of 4, got {self.block}; 1024 costs 3 %")

    @property
    def _row_bytes(self) -> int:
        return row_bytes(self.block)

    def _encode_rows(self, x: torch.Tensor, rows: torch.Tensor, *, start: int, seed: int) -> None:
        rows.copy_(encode(x))

    def _decode_rows(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(decode(rows, count=self.block, name=self.name))


block_2bit = Block2Bit
