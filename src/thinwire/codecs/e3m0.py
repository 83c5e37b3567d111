"""E3M0: a sign, three bits of exponent and no mantissa, with a power-of-two scale shared by 64 elements.

Four bits are what Streaming DiLoCo sends its outer gradients in. The paper names the format but not the scale; blocks
of 64 with one byte of exponent are our choice, 4.125 bits an element together.

Wire format: the elements in row-major order, cut into blocks of 64, the last one filled up with zeros. Each block is 33
bytes: first its exponent byte E, then 32 bytes, of which byte j holds the code of element j in its low four bits and
the code of element j + 32 in its high four bits. Blocks follow one another without anything between them.

- E = 0: all elements of the block are zero, and all codes are 0.
- E = 8 to 254: the block's scale is `2**(E - 127)`.
- E = 255: an element was NaN, infinite, or too large for a scale; all codes are 0. Receivers refuse the payload.
- E = 1 to 7 is never sent. So every value but zero is a normal float32, which no device flushes to zero.

A code's low three bits c are 0 for zero, otherwise the magnitude is `scale * 2**(c - 7)`, 64 different ratios below
the scale; bit 3 is the sign. Code 8, a negative zero, is never sent, and read as zero.

```
c           0    1      2      3      4      5     6     7
magnitude   0    s/64   s/32   s/16   s/8    s/4   s/2   s
```

Nearest rounding rounds in the linear domain, ties away from zero, and the block's largest element becomes `scale`. An
element x is decoded with

- `|error| <= |x| / 3` where `|x| >= 3/4 * scale / 64`,
- `|error| <= scale / 128` below that,

except that no scale is below 2**-119, and that float32's subnormal numbers count as zero. Decoded tensors encode to the
same bytes again, and encoding commutes with multiplication by powers of two, within float32's normal range.

Stochastic rounding takes the block's scale as the power of two at or above the largest element, and rounds up or down
at random such that `E[decode] = x` (short of truncating elements below `scale / 64` to 2**-23 of that). Its error is
up to `|x|`, or `scale / 64`.

All of it is integer arithmetic on the bits of float32, so that CPUs and GPUs send the same bytes.

Reference: arXiv 2501.18512, section 2.4; the notation of the format is arXiv 2405.13938's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from thinwire.codecs.block_codec import NIBBLE_BYTES, NIBBLES_PER_BLOCK, BlockCodec, Fused, pack_nibbles, unpack_nibbles
from thinwire.errors import NonFiniteError, PayloadError
from thinwire.shared_random import derive_seed

# Random bits as a pure function of a key and a counter, the same on CPU and GPU. Shift and odd multiplier of each
# mixing step; the multipliers have no bit pattern, and tests check the statistics of the result.
_STEPS = ((15, 0x6C8E9CF5), (13, 0x3C6EF36B), (16, 0x2545F491))


def counter_keys(seed: int, *, start: int, device: torch.device) -> torch.Tensor:
    """Return the keys of the stream `seed` from counter `start` on.

    Args:
        seed: Selects the stream; any integer.
        start: The first counter.
        device: Where the random bits will be computed.

    Returns:
        int32, `(3,)`: two keys and the low 32 bits of `start`; its high bits are part of the keys.
    """
    # counters have 32 bits; the high bits of longer tensors select another key
    word = derive_seed(seed, "counter", start >> 32)
    values = [_as_int32(word), _as_int32(word >> 32), _as_int32(start)]
    return torch.tensor(values, dtype=torch.int32, device=device)


def random_bits(keys: torch.Tensor, *, count: int) -> torch.Tensor:
    """Return 23 random bits for each of `count` counters in a row.

    Three rounds of xor, shift and multiply. The second key enters between them: without it, two streams would be the
    same numbers in another order. Good enough for rounding, no cryptography. All arithmetic is on 32-bit words and
    wraps, so every device computes the same bits.

    Args:
        keys: From `counter_keys`.
        count: How many, below 2**31.

    Returns:
        int32, `(count,)`, each in [0, 2**23).
    """
    word = torch.arange(count, dtype=torch.int32, device=keys.device)
    word = word.add_(keys[2]).bitwise_xor_(keys[0])
    for step, (shift, multiplier) in enumerate(_STEPS):
        if step == 1:
            word = word.bitwise_xor_(keys[1])
        word = word.bitwise_xor_(_shift_right(word, shift)).mul_(multiplier)
    # the last xor lets the high bits, which multiplication mixes best, reach the low ones
    # 9 bits fall away: 23 are left, as many as a mantissa has
    word = word.bitwise_xor_(_shift_right(word, 16))
    return _shift_right(word, 9)


def _shift_right(word: torch.Tensor, bits: int) -> torch.Tensor:
    # int32 shifts copy the sign into the top; the mask makes the shift a logical one
    return word.bitwise_right_shift(bits).bitwise_and_((1 << (32 - bits)) - 1)


def _as_int32(value: int) -> int:
    return (value & 0xFFFFFFFF) - ((value & 0x80000000) << 1)


BLOCK = NIBBLES_PER_BLOCK
ROW_BYTES = 1 + NIBBLE_BYTES

_SMALLEST_EXPONENT = 8  # code 1 is then 2**-125: a normal number
_NON_FINITE = 255
_MANTISSA_BITS = 23
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1
_BEYOND_ALL = 1000  # taken off an element's half exponents, which are below 512, it leaves nothing

Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True, slots=True)
class E3M0(BlockCodec):
    """Signed powers of two in 4.125 bits an element; see the module for format and bounds.

    Args:
        rounding: `"nearest"`, or `"stochastic"`: unbiased, with a larger error.

    Raises:
        ValueError: Another rounding.

    Example:
        >>> codec = e3m0()
        >>> codec.decode(codec.encode(torch.tensor([1.0, -0.4, 0.02, 0.005, 0.0])), numel=5).tolist()
        [1.0, -0.5, 0.015625, 0.0, 0.0]
    """

    wire_id: ClassVar[int] = 6  # of both roundings: decoding is the same
    block: ClassVar[int] = BLOCK
    _row_bytes: ClassVar[int] = ROW_BYTES

    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding must be 'nearest' or 'stochastic', got {self.rounding!r}")

    @property
    def name(self) -> str:
        return "e3m0" if self.rounding == "nearest" else "e3m0-stochastic"

    def _encode_rows(self, x: torch.Tensor, rows: torch.Tensor, *, start: int, seed: int) -> None:
        if self.rounding == "nearest":
            _encode_nearest(x, rows)
        else:  # drawn by element number: equal seeds give equal bytes
            _encode_stochastic(x, rows, counter_keys(seed, start=start, device=x.device))

    def _decode_rows(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        _decode(rows, out)

    def _check_rows(self, table: torch.Tensor) -> None:
        # one transfer of two flags: on a GPU each transfer waits for the device
        foreign, non_finite = _flags(table).tolist()
        if foreign:
            raise PayloadError(
                f"{self.name}: a block's exponent is in 1 to {_SMALLEST_EXPONENT - 1}, which is never sent"
            )
        if non_finite:
            raise NonFiniteError(f"{self.name}: a block held NaN, infinity or a magnitude above 2.5e38")


e3m0 = E3M0


def _nearest(x: torch.Tensor, rows: torch.Tensor) -> None:
    """Encode float32 `(rows, 64)` to uint8 `(rows, 33)`.

    Works on the exponent and the first bit of the mantissa, nine bits that count "half exponents": rounding to the
    nearest power of two is adding one to them and halving. Each operation runs on the narrowest integers that hold its
    values, because on a CPU that is what its time goes by.
    """
    # sign, eight bits of exponent and the first bit of mantissa: int16 holds them
    top = x.view(torch.int32).bitwise_right_shift(_MANTISSA_BITS - 1).to(torch.int16)
    halves = top.bitwise_and(0x1FF)
    peak = halves.amax(dim=1, keepdim=True)
    # the power of two nearest to the largest element: half an exponent is rounded up
    exponent = ((peak + 1) >> 1).clamp_(_SMALLEST_EXPONENT, _NON_FINITE)
    # Code 7 is reached by the half exponents 2E-1 and 2E, code 6 by 2E-3 and 2E-2, and so on. A block without a normal
    # number lies below this floor too.
    floor = (2 * exponent - 15).masked_fill_(exponent == _NON_FINITE, _BEYOND_ALL)
    # below the floor an element is nearer to zero than to the smallest value
    halves = halves.sub_(floor).clamp_min_(0).to(torch.uint8)
    codes = halves.bitwise_right_shift(1)
    # 1 is half the smallest value or more, nearer to it than to zero; only this code takes three half exponents
    is_nonzero = halves.clamp_max_(1)
    codes = torch.maximum(codes, is_nonzero)
    # lt_ in place gives 0 and 1 in the tensor's own dtype; comparing into bools takes four times as long on a CPU
    is_negative = top.lt_(0).to(torch.uint8).bitwise_and_(is_nonzero)
    # bit 3 of a code is the sign; zero keeps none, so code 8 is never sent
    pack_nibbles(codes.add_(is_negative, alpha=8), out=rows[:, 1:])
    # half exponents 0 and 1 are zero and subnormal numbers: E = 0 marks the block as zero
    rows[:, :1] = exponent.masked_fill_(peak < 2, 0)


def _stochastic(x: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> None:
    """Encode as `_nearest` does, but round at random: add 23 random bits below the exponent and cut them off."""
    bits = x.view(torch.int32)
    magnitude = bits.bitwise_and(0x7FFFFFFF)
    peak = magnitude.amax(dim=1, keepdim=True).clamp_max_(_NON_FINITE << _MANTISSA_BITS)
    # the power of two at or above the largest element, so that rounding up never exceeds it
    exponent = (peak + _MANTISSA_MASK) >> _MANTISSA_BITS
    exponent = exponent.clamp_(_SMALLEST_EXPONENT, _NON_FINITE).masked_fill_(peak <= _MANTISSA_MASK, 0)
    unusable = (exponent == 0) | (exponent == _NON_FINITE)
    raw = magnitude.bitwise_right_shift(_MANTISSA_BITS)
    # Above code 1 the bits themselves, seen from the block's exponent, are the code with its fraction. Below, the
    # fraction is the element as a share of code 1's value, in fixed point: the significand, shifted. Of the two, the
    # larger is the right one: unshifted significands are below 2, and shifted ones above what `above` leaves of them.
    above = (magnitude - ((exponent - 7) << _MANTISSA_BITS)).clamp_min_(0)
    shift = (exponent - 6 - raw).clamp_(0, 31)
    # with the leading 1 that float32 leaves out
    significand = magnitude.bitwise_and(_MANTISSA_MASK).bitwise_or_(_MANTISSA_MASK + 1)
    fixed = torch.maximum(significand.bitwise_right_shift_(shift), above)
    # subnormal elements (raw exponent 0) count as zero before random bits are added
    fixed = fixed.mul_(raw.clamp_max_(1)).add_(random_bits(keys, count=x.numel()).view(x.shape))
    codes = fixed.bitwise_right_shift_(_MANTISSA_BITS).masked_fill_(unusable, 0)
    # from bit 31 of the float to bit 3 of the code, unless the code is zero
    signs = bits.bitwise_right_shift(28).bitwise_and_(8).mul_(codes.clamp(max=1))
    pack_nibbles(codes.add_(signs).to(torch.uint8), out=rows[:, 1:])
    rows[:, :1] = exponent


def _values(rows: torch.Tensor, out: torch.Tensor) -> None:
    """Decode uint8 `(rows, 33)` to float32 `(rows, 64)`.

    Magnitudes are built as the integers 0, 1, 2, 4 to 64 and multiplied by the scale of code 1, a power of two: exact,
    and several times as fast on a CPU as looking sixteen values up.
    """
    exponent = rows[:, :1].to(torch.int32)
    # scale / 64, the value of code 1, as the bits of a float32
    unit = (exponent - 6).clamp_(min=0).bitwise_left_shift_(_MANTISSA_BITS).view(torch.float32)
    codes = unpack_nibbles(rows[:, 1:])
    is_negative = codes.bitwise_right_shift(3).view(torch.int8)
    one = torch.ones((), dtype=torch.uint8, device=rows.device)
    magnitude = torch.bitwise_left_shift(one, codes.bitwise_and_(7)).bitwise_right_shift_(1).view(torch.int8)
    # m - 2 m s: the sign without a branch
    out.copy_(magnitude.sub_(is_negative.mul_(magnitude), alpha=2))
    out.mul_(unit)


def _find_flags(rows: torch.Tensor) -> torch.Tensor:
    """Return whether uint8 `(rows, 33)` hold an exponent that is never sent, and whether one of what is not finite."""
    exponents = rows[:, 0].contiguous()  # one strided pass over the payload in place of three
    is_foreign = (exponents > 0) & (exponents < _SMALLEST_EXPONENT)
    return torch.stack((is_foreign.any(), (exponents == _NON_FINITE).any()))


def _kernel(name: str) -> Callable[..., Any]:
    kernels = importlib.import_module("thinwire.codecs.e3m0_kernels")
    if not kernels.HAS_TRITON:
        raise ImportError("there is no Triton in this environment")
    found: Callable[..., Any] = getattr(kernels, name)
    return found


_encode_nearest = Fused(_nearest, kernel=lambda: _kernel("encode"))
_encode_stochastic = Fused(_stochastic)
_decode = Fused(_values, kernel=lambda: _kernel("decode"))
_flags = Fused(_find_flags, kernel=lambda: _kernel("flags"))
