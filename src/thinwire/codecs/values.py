"""The values of a sparse payload: rows of numbers in 32 or 16 bits, or in 2 bits with a codebook a row.

| format | a row of k values is sent as |
| --- | --- |
| `float32` | k float32 |
| `bfloat16` | k bfloat16 |
| `float16` | an exponent byte E and k float16: the values times `2**(141 - E)` |
| `codebook2` | four bfloat16 and k codes of 2 bits; see `thinwire.codecs.codebook2` |

float16 alone would lose what is below 6e-8, which a gradient may be. So a row is multiplied by the power of two that
brings its largest magnitude, rounded to float16, into [2**14, 2**15): 11 bits of precision at every magnitude of
float32, down to 2**-29 of the row's largest. E is that magnitude's exponent as in float32. 0 stands for a row of zeros
and 255 for a row that cannot be carried; float32's subnormal numbers count as zero.

NaN and infinity are sent as such, or with E 255, and receivers refuse them.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from thinwire.codecs import codebook2
from thinwire.codecs.block_codec import num_rows
from thinwire.codecs.selection import magnitude_bits
from thinwire.errors import NonFiniteError, PayloadError

ValueFormat = Literal["float16", "bfloat16", "float32"]
RowFormat = Literal["float16", "bfloat16", "float32", "codebook2"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SMALLEST_NORMAL = 2.0**-126
_NON_FINITE = 255
_SCALED_EXPONENT = 14  # largest magnitudes are sent between 2**14 and 2**15


def check_format(values: str, *, of_rows: bool = False) -> None:
    """Refuse an unknown format.

    Args:
        values: The format's name.
        of_rows: Whether formats with a codebook a row are known too.

    Raises:
        ValueError: It is unknown.
    """
    known = get_args(RowFormat if of_rows else ValueFormat)
    if values not in known:
        raise ValueError(f"values must be one of {', '.join(known)}, got {values!r}")


def value_bytes(count: int, *, values: str) -> int:
    """Return the bytes of a row of `count` values; none for none.

    Example:
        >>> value_bytes(64, values="float16"), value_bytes(64, values="codebook2"), value_bytes(0, values="float16")
        (129, 24, 0)
    """
    if num_rows(count, block=1) == 0:
        return 0
    if values == "codebook2":
        return codebook2.row_bytes(count)
    return count * _DTYPES[values].itemsize + (values == "float16")


def bits_per_value(values: str) -> float:
    """Return the bits of a value in long rows.

    Example:
        >>> bits_per_value("codebook2"), bits_per_value("float16")
        (2.0, 16.0)
    """
    short = {"codebook2": 2.0, "clusters": 1.0}
    return short[values] if values in short else 8.0 * _DTYPES[values].itemsize


def encode_values(x: torch.Tensor, *, values: str) -> torch.Tensor:
    """Encode rows of values.

    Args:
        x: float32, `(rows, count)`, count at least 1.
        values: The format.

    Returns:
        uint8, `(rows, value_bytes(count))`.
    """
    if values == "codebook2":
        return codebook2.encode(x)
    if values != "float16":
        return x.to(_DTYPES[values]).contiguous().view(torch.uint8)
    magnitude = magnitude_bits(x)
    x = x.masked_fill(magnitude < 1 << 23, 0.0)
    # magnitudes of floats order as their bits do, as integers
    peak = magnitude.amax(dim=1, keepdim=True).to(torch.int64)
    exponent = (peak + 0x1000) >> 23  # float16 keeps 10 of 23 bits: half of the last one that stays may carry over
    exponent = exponent.clamp_max_(_NON_FINITE).masked_fill_(peak < 1 << 23, 0)
    scaled = x.to(torch.float64) * power_of_two(_SCALED_EXPONENT + 127 - exponent)
    scaled = scaled.masked_fill_(exponent == _NON_FINITE, 0.0)
    # the only rounding: float64 to float16, ties to even, on every device alike
    halves = scaled.to(torch.float16).view(torch.uint8)
    return torch.cat((exponent.to(torch.uint8), halves), dim=1)


def decode_values(data: torch.Tensor, *, count: int, values: str, name: str) -> torch.Tensor:
    """Decode rows of values.

    Args:
        data: uint8, `(rows, value_bytes(count))`, any strides.
        count: Values a row, at least 1.
        values: The format.
        name: The codec's name, for messages.

    Returns:
        float32, `(rows, count)`, finite.

    Raises:
        PayloadError: The bytes are never sent.
        NonFiniteError: The sender's tensor held NaN, infinity, or what the format cannot carry.
    """
    if values == "codebook2":
        return codebook2.decode(data, count=count, name=name)
    # a slice of a message may start anywhere
    aligned = data[:, int(values == "float16") :].clone(memory_format=torch.contiguous_format)
    x = aligned.view(_DTYPES[values])
    if values != "float16":
        x = x.to(torch.float32)
        if not bool(x.isfinite().all()):
            raise NonFiniteError(f"{name}: the tensor held NaN, infinity, or more than {values} can carry")
        return x
    exponent, halves = data[:, :1].to(torch.int64), x.to(torch.float64)
    within = halves.abs() < 2.0 ** (_SCALED_EXPONENT + 1)  # NaN is not within either
    fine, infinite = torch.stack((within.all(), (exponent == _NON_FINITE).any())).tolist()
    if infinite:
        raise NonFiniteError(f"{name}: the tensor held NaN, infinity, or a magnitude of 3.4e38 or more")
    if not fine:
        raise PayloadError(f"{name}: a value is 2**{_SCALED_EXPONENT + 1} or more before it is scaled: never sent")
    x = halves * power_of_two(exponent - 127 - _SCALED_EXPONENT)
    return x.masked_fill_(x.abs() < _SMALLEST_NORMAL, 0.0).to(torch.float32)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2 to int64 exponents as float64, from its bits: a device's power function need not be exact."""
    return ((exponent + 1023) << 52).view(torch.float64)
