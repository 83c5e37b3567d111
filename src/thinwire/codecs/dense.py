"""Every element as it is, in 32 or 16 bits.

Wire format: the elements in row-major order, each little endian, without anything between them. NaN and infinity pass;
rounding to 16 bits is IEEE's nearest-even, so float16 turns magnitudes of 65520 and above into infinity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire.codecs.base import Codec
from thinwire.codecs.block_codec import check_payload, flatten, num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense(Codec):
    """Elements as plain floating-point numbers; use `float32()`, `bfloat16()` or `float16()`.

    Attributes:
        dtype: What is sent.
        name: As the command line takes it.
        wire_id: The number in a message's header.
    """

    block: ClassVar[int] = 1

    dtype: torch.dtype
    name: str
    wire_id: int

    @property
    def bits_per_element(self) -> float:
        return 8.0 * self.dtype.itemsize

    @property
    def is_lossless_for_float32(self) -> bool:
        return self.dtype == torch.float32

    def payload_bytes(self, numel: int) -> int:
        return num_rows(numel, block=1) * self.dtype.itemsize

    def encode(self, tensor: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        # copy=True: the payload may still be on its way when the caller's tensor changes
        return flatten(tensor).to(self.dtype, copy=True).view(torch.uint8)

    def decode(self, payload: torch.Tensor, *, numel: int) -> torch.Tensor:
        check_payload(payload, name=self.name, numel=numel, expected=self.payload_bytes(numel))
        aligned = payload.clone(memory_format=torch.contiguous_format)  # a slice of a message may start anywhere
        return aligned.view(self.dtype).to(torch.float32)


def float32() -> Dense:
    """Return the lossless codec: 32 bits an element.

    Example:
        >>> float32().decode(float32().encode(torch.tensor([0.1, -2.0])), numel=2)
        tensor([ 0.1000, -2.0000])
    """
    return Dense(dtype=torch.float32, name="float32", wire_id=1)


def bfloat16() -> Dense:
    """Return the codec with 16 bits an element: float32's range, relative error at most 2**-8.

    Example:
        >>> bfloat16().payload_bytes(1000)
        2000
    """
    return Dense(dtype=torch.bfloat16, name="bfloat16", wire_id=2)


def float16() -> Dense:
    """Return the codec with 16 bits an element: range up to 65504, relative error at most 2**-11 down to 6.1e-5.

    Example:
        >>> float16().payload_bytes(1000)
        2000
    """
    return Dense(dtype=torch.float16, name="float16", wire_id=3)
