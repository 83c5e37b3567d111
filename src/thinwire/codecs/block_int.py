"""Integers with a scale shared by a block: 8 bits in blocks of 256, 4 bits in blocks of 64.

Wire format: the elements in row-major order, cut into blocks, the last one filled up with zeros; a block is its scale
and then its integers, without anything between blocks. All numbers are little endian.

- int8: 256 elements in 260 bytes: the scale as float32, then 256 signed bytes, -127 to 127.
- int4: 64 elements in 34 bytes: the scale as bfloat16, then 32 bytes, of which byte j holds element j in its low four
  bits and element j + 32 in its high four bits, in two's complement, -7 to 7.

A value is its integer times the scale. The scale is the block's largest magnitude, times the float32 nearest to 1/127
or 1/7, rounded to the scale's format; integers are elements times the float32 nearest to 1/scale, rounded to the
nearest, ties to even. So `|error| <= scale / 2`, short of a millionth of it that is float32's own rounding. A block
with nothing above 2**-100 has scale 0 and becomes zero. A block with NaN, infinity or a
magnitude of 2**127 or more has scale infinity and integers 0, and receivers refuse the payload.

CPUs and GPUs send the same bytes, because each operation is one that IEEE 754 defines to the last bit. That is why the
scale is multiplied by a constant: dividing a GPU tensor by a Python number multiplies by its reciprocal, dividing a
CPU tensor does not. The one division, of tensor by tensor, stays outside the fused parts, since compilers fuse in
faster ones that may be off in the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.codecs.block_codec import NIBBLES_PER_BLOCK, BlockCodec, Fused, pack_nibbles, unpack_nibbles
from thinwire.errors import NonFiniteError, PayloadError

_SMALLEST_PEAK = 2.0**-100  # keeps the scale and its reciprocal normal numbers, which no device flushes to zero
_PEAK_LIMIT = 2.0**127  # keeps the largest integer times the scale finite, however the scale was rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInt(BlockCodec):
    """Integers times a scale a block; use `block_int8()` or `block_int4()`.

    Attributes:
        bits: 8 or 4.

    Raises:
        ValueError: Another number of bits.
    """

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits must be 8 or 4, got {self.bits}")

    @property
    def name(self) -> str:
        return f"block-int{self.bits}"

    @property
    def wire_id(self) -> int:
        return 4 if self.bits == 8 else 5

    @property
    def block(self) -> int:
        return 256 if self.bits == 8 else NIBBLES_PER_BLOCK

    @property
    def _scale_dtype(self) -> torch.dtype:
        # bfloat16 has float32's range: no gradient is too large or too small for a scale
        return torch.float32 if self.bits == 8 else torch.bfloat16

    @property
    def _row_bytes(self) -> int:
        return self._scale_dtype.itemsize + self.block * self.bits // 8

    @property
    def _largest(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def _encode_rows(self, x: torch.Tensor, rows: torch.Tensor, *, start: int, seed: int) -> None:
        # the scale is sent rounded, so integers are taken with the reciprocal of the rounded one
        stored, inverse = self._scales(_peaks(x))
        width = self._scale_dtype.itemsize
        rows[:, :width] = stored.view(torch.uint8)
        (_quantise_bytes if self.bits == 8 else _quantise_nibbles)(x, inverse, rows[:, width:])

    def _decode_rows(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        width = self._scale_dtype.itemsize
        scale = rows[:, :width].contiguous().view(self._scale_dtype).to(torch.float32)
        self._check_scales(scale)
        (_restore_bytes if self.bits == 8 else _restore_nibbles)(rows[:, width:], scale, out)

    def _scales(self, peak: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales as they are sent, and their float32 reciprocals, 0 where nothing is to be coded."""
        scale = (peak * self._step).masked_fill_(peak < _SMALLEST_PEAK, 0.0)
        scale = scale.masked_fill_(~(peak < _PEAK_LIMIT), torch.inf)  # NaN is not below the limit either
        stored = scale.to(self._scale_dtype)
        rounded = stored.to(torch.float32)
        inverse = torch.ones_like(rounded) / rounded  # 1 / infinity is 0
        return stored, inverse.masked_fill_(rounded == 0, 0.0)

    @property
    def _step(self) -> float:
        # exactly a float32, so that it does not matter in which precision a device takes a Python number
        return float(torch.tensor(1.0 / self._largest, dtype=torch.float32))

    def _check_scales(self, scale: torch.Tensor) -> None:
        limit = 1.5 * _PEAK_LIMIT * self._step  # above every scale that is sent, and 2**(bits-1) times it is finite
        is_fine = (scale >= 0) & (scale <= limit)
        is_infinite = scale == torch.inf
        fine, infinite = torch.stack((is_fine.all(), is_infinite.any())).tolist()
        if infinite:
            raise NonFiniteError(f"{self.name}: a block held NaN, infinity or a magnitude of 2**127 or more")
        if not fine:
            raise PayloadError(f"{self.name}: a block's scale is negative, NaN or above {limit:.3g}: never sent")


def block_int8() -> BlockInt:
    """Return the codec of 8.125 bits an element: error at most 1/254 of the block's largest magnitude.

    Example:
        >>> codec = block_int8()
        >>> codec.decode(codec.encode(torch.tensor([127.0, -63.6, 0.2])), numel=3)
        tensor([127., -64.,   0.])
    """
    return BlockInt(bits=8)


def block_int4() -> BlockInt:
    """Return the codec of 4.25 bits an element: error about 1/14 of the block's largest magnitude at most.

    Example:
        >>> codec = block_int4()
        >>> codec.decode(codec.encode(torch.tensor([7.0, -3.4, 0.2])), numel=3)
        tensor([ 7., -3.,  0.])
    """
    return BlockInt(bits=4)


@Fused
def _peaks(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(dim=1, keepdim=True)


def _integers(x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Return `round(x * inverse)` as int8; no clamp is needed, since the largest element gives the largest integer."""
    integers = (x * inverse).round_().to(torch.int8)
    # 0 * infinity is NaN, and what NaN is as an integer differs from device to device
    return integers.mul_((inverse > 0).to(torch.int8))


@Fused
def _quantise_bytes(x: torch.Tensor, inverse: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(_integers(x, inverse).view(torch.uint8))


@Fused
def _quantise_nibbles(x: torch.Tensor, inverse: torch.Tensor, out: torch.Tensor) -> None:
    # the low four bits of an int8 are the number in two's complement
    pack_nibbles(_integers(x, inverse).bitwise_and_(15).view(torch.uint8), out=out)


@Fused
def _restore_bytes(packed: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(packed.view(torch.int8))
    out.mul_(scale)


@Fused
def _restore_nibbles(packed: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    # two's complement: flipping the sign bit counts from -8, and 8 less is the number
    out.copy_(unpack_nibbles(packed).bitwise_xor_(8).view(torch.int8).sub_(8))
    out.mul_(scale)
