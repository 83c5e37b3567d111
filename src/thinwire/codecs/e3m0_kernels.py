"""E3M0 on GPUs as two Triton kernels: each reads its input once and writes its output once.

The same integer arithmetic as `thinwire.codecs.e3m0`, which has the format and is the reference: both give the same
bits. Compiled from single operations, the input is read twice, since both halves of a block meet in one byte.

Only `thinwire.codecs.e3m0` imports this module, and only where there is a GPU: importing Triton takes a second.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's builds without CUDA bring none
    triton = None

HAS_TRITON = triton is not None
_jit: Any = triton.jit if HAS_TRITON else lambda function: function

# Rows of a program: 32 rows of 64 elements are 8 KiB, enough loads in flight for each multiprocessor.
_ROWS = 32
_FLAG_ROWS = 1024  # of which one byte each is read


def encode(x: torch.Tensor, rows: torch.Tensor) -> None:
    """Encode with nearest rounding.

    Args:
        x: float32, `(rows, 64)`, contiguous, on a GPU.
        rows: uint8, `(rows, 33)`, contiguous; is overwritten.
    """
    _launch(_encode, x.view(torch.int32), rows)


def decode(rows: torch.Tensor, out: torch.Tensor) -> None:
    """Decode.

    Args:
        rows: uint8, `(rows, 33)`, contiguous, on a GPU, with exponents that have been checked.
        out: float32, `(rows, 64)`, contiguous; is overwritten.
    """
    _launch(_decode, rows, out.view(torch.int32))


def flags(rows: torch.Tensor) -> torch.Tensor:
    """Look for exponents that are never sent, and for those of blocks that are not finite.

    Args:
        rows: uint8, `(rows, 33)`, contiguous, on a GPU.

    Returns:
        int32, `(2,)`: 1 where there is one of the first kind, and of the second.
    """
    found = torch.zeros(2, dtype=torch.int32, device=rows.device)
    if count := rows.shape[0]:
        _flag[(-(-count // _FLAG_ROWS),)](rows, found, count, ROWS=_FLAG_ROWS)
    return found


def _launch(kernel, source: torch.Tensor, target: torch.Tensor) -> None:
    if not (source.is_contiguous() and target.is_contiguous()):
        raise ValueError("the kernels take contiguous tensors, got strides; call contiguous() first")
    count = source.shape[0]
    if count:
        kernel[(-(-count // _ROWS),)](source, target, count, ROWS=_ROWS)


@_jit
def _code(bits, floor):
    # half exponents above the block's floor; code 1 also takes the one below it
    halves = tl.maximum(((bits >> 22) & 0x1FF) - floor, 0)
    is_nonzero = tl.minimum(halves, 1)
    return tl.maximum(halves >> 1, is_nonzero) + 8 * (((bits >> 31) & 1) & is_nonzero)


@_jit
def _encode(source, target, count, ROWS: tl.constexpr):
    """Encode `(count, 64)` bits of float32 to `(count, 33)` bytes."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    lane = tl.arange(0, 32)[None, :]
    is_inside = row < count
    low = tl.load(source + row * 64 + lane, mask=is_inside, other=0)
    high = tl.load(source + row * 64 + 32 + lane, mask=is_inside, other=0)
    peak = tl.max(tl.maximum((low >> 22) & 0x1FF, (high >> 22) & 0x1FF), axis=1, keep_dims=True)
    exponent = tl.minimum(tl.maximum((peak + 1) >> 1, 8), 255)
    floor = tl.where(exponent == 255, 1000, 2 * exponent - 15)
    packed = _code(low, floor) + 16 * _code(high, floor)
    tl.store(target + row * 33 + 1 + lane, packed.to(tl.uint8), mask=is_inside)
    tl.store(target + row * 33, tl.where(peak < 2, 0, exponent).to(tl.uint8), mask=is_inside)


@_jit
def _bits(codes, unit):
    # the value of code 1 has the exponent `unit`; code c adds c - 1 to it, and code 0 is zero
    magnitude = codes & 7
    bits = ((unit + magnitude - 1) << 23) | ((codes & 8) << 28)
    return tl.where(magnitude == 0, 0, bits)


@_jit
def _decode(source, target, count, ROWS: tl.constexpr):
    """Decode `(count, 33)` bytes to `(count, 64)` bits of float32."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    lane = tl.arange(0, 32)[None, :]
    is_inside = row < count
    exponent = tl.load(source + row * 33, mask=is_inside, other=0).to(tl.int32)
    packed = tl.load(source + row * 33 + 1 + lane, mask=is_inside, other=0).to(tl.int32)
    unit = exponent - 6
    # exponent 0 marks a block of zeros
    low = tl.where(exponent == 0, 0, _bits(packed & 15, unit))
    high = tl.where(exponent == 0, 0, _bits(packed >> 4, unit))
    tl.store(target + row * 64 + lane, low, mask=is_inside)
    tl.store(target + row * 64 + 32 + lane, high, mask=is_inside)


@_jit
def _flag(source, target, count, ROWS: tl.constexpr):
    """Set two flags by the exponents of `(count, 33)` bytes; all programs that set one write the same."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exponent = tl.load(source + row * 33, mask=row < count, other=0).to(tl.int32)
    is_foreign = tl.max(tl.where((exponent > 0) & (exponent < 8), 1, 0), axis=0)
    is_infinite = tl.max(tl.where(exponent == 255, 1, 0), axis=0)
    tl.store(target, 1, mask=is_foreign > 0)
    tl.store(target + 1, 1, mask=is_infinite > 0)
