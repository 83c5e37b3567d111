"""Sign: one bit an element, and one magnitude for all of them or for each block.

Wire format: a block is its scale as float32, little endian, and then one bit an element, the lowest of a byte first: 1
for a negative element, 0 for a positive one or zero. The bits end at a byte, filled up with zeros. Without `block`, the
tensor is one block; with it, the last one may be shorter.

The scale is the root mean square, as in 1-bit Adam, or the mean magnitude, which leaves the least square error of all.
Both are computed in float64 in a fixed order, so that every device sends the same bytes. A block with NaN or infinity
has scale infinity and receivers refuse it.

One bit has no code for zero: a tensor with zeros in it decodes to numbers of magnitude `scale` there. Sparse gradients,
such as those of an embedding, need a mask or error feedback in the method.

Reference: arXiv 2102.02888 (1-bit Adam); arXiv 1802.04434 (signSGD) for signs, with 1901.09847 for the mean as scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from thinwire.codecs import bit_packing
from thinwire.codecs.base import Codec, ordered_sum
from thinwire.codecs.block_codec import check_payload, elements_at_once, flatten, num_rows
from thinwire.errors import NonFiniteError, PayloadError

_SCALE_BYTES = 4

Scale = Literal["l2", "mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign(Codec):
    """One bit an element; use `sign()`.

    Attributes:
        scale: `"l2"` (root mean square) or `"mean"` (mean magnitude).
        elements_per_scale: Elements that share a scale, a multiple of 8; None for one scale a tensor.

    Raises:
        ValueError: An argument is out of its range.
    """

    wire_id: ClassVar[int] = 14  # of both scales: decoding is the same

    scale: Scale = "l2"
    elements_per_scale: int | None = None

    def __post_init__(self) -> None:
        if self.scale not in ("l2", "mean"):
            raise ValueError(f"scale must be 'l2' or 'mean', got {self.scale!r}")
        if self.elements_per_scale is not None and (self.elements_per_scale < 8 or self.elements_per_scale % 8):
            raise ValueError(f"block must be a positive multiple of 8, got {self.elements_per_scale}; 1024 costs 3 %")

    @property
    def name(self) -> str:
        return "sign" if self.scale == "l2" else "sign-mean"

    @property
    def bits_per_element(self) -> float:
        return 1.0 if self.elements_per_scale is None else 1.0 + 8 * _SCALE_BYTES / self.elements_per_scale

    @property
    def block(self) -> int:
        # With one scale a tensor it is 8, the elements of a byte: there the tensor may be cut, and each part then has a
        # scale of its own, which is how the two-phase exchange of 1-bit Adam works. Payloads of such parts do not
        # concatenate to that of the whole.
        return 8 if self.elements_per_scale is None else self.elements_per_scale

    def payload_bytes(self, numel: int) -> int:
        size = self.elements_per_scale or max(numel, 1)
        return num_rows(numel, block=size) * _SCALE_BYTES + -(-numel // 8)

    def encode(self, tensor: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        flat = flatten(tensor)
        if flat.numel() == 0:
            return torch.empty(0, dtype=torch.uint8, device=flat.device)
        size, whole = self._whole(flat.numel())
        step = max(1, elements_at_once(flat.device) // size) * size
        parts = []
        # in parts that fit the cache: whole blocks first
        for part in torch.split(flat[:whole], step) if whole else ():
            parts.append(self._encode_rows(part.view(-1, size)).view(-1))
        if whole < flat.numel():
            parts.append(self._encode_rows(flat[whole:].view(1, -1)).view(-1))
        return torch.cat(parts)

    def decode(self, payload: torch.Tensor, *, numel: int) -> torch.Tensor:
        check_payload(payload, name=self.name, numel=numel, expected=self.payload_bytes(numel))
        if numel == 0:
            return torch.empty(0, dtype=torch.float32, device=payload.device)
        size, whole = self._whole(numel)
        row_bytes = _SCALE_BYTES + size // 8
        split = whole // size * row_bytes
        values = torch.empty(numel, dtype=torch.float32, device=payload.device)
        if whole:
            values[:whole] = self._decode_rows(payload[:split].reshape(-1, row_bytes), size).view(-1)
        if whole < numel:
            values[whole:] = self._decode_rows(payload[split:].reshape(1, -1), numel - whole).view(-1)
        return values

    def _whole(self, numel: int) -> tuple[int, int]:
        """Return the elements of a block, and those in whole blocks; one scale a tensor is a last, shorter block."""
        size = self.elements_per_scale or 8 * (numel // 8 + 1)
        return size, numel // size * size

    def _encode_rows(self, x: torch.Tensor) -> torch.Tensor:
        sums, bits = [], []
        for part in torch.split(x, elements_at_once(x.device), dim=1):  # a multiple of 8, so bits of parts concatenate
            narrow = part.to(torch.float32)
            wide = narrow.to(torch.float64)
            sums.append(ordered_sum(wide.abs() if self.scale == "mean" else wide * wide))
            bits.append(bit_packing.pack_bits(narrow < 0))
        mean = ordered_sum(torch.cat(sums, dim=1)) / torch.full_like(sums[0], x.shape[1])
        scale = (mean if self.scale == "mean" else mean.sqrt()).to(torch.float32)
        # NaN becomes infinity too, the one mark that receivers look for
        scale = scale.masked_fill_(~scale.isfinite(), torch.inf)
        return torch.cat((scale.view(torch.uint8), *bits), dim=1)

    def _decode_rows(self, data: torch.Tensor, count: int) -> torch.Tensor:
        scale = data[:, :_SCALE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)
        # one transfer of two flags: on a GPU each transfer waits for the device
        fine, infinite = torch.stack((((scale >= 0) & scale.isfinite()).all(), (scale == torch.inf).any())).tolist()
        if infinite:
            raise NonFiniteError(f"{self.name}: a block held NaN, infinity, or magnitudes beyond float32")
        if not fine:
            raise PayloadError(f"{self.name}: a block's scale is negative or NaN: never sent")
        bits = bit_packing.unpack_bits(data[:, _SCALE_BYTES:].contiguous(), count=count, name=self.name)
        return torch.where(bits.bool(), -scale, scale)


def sign(scale: Scale = "l2", *, block: int | None = None) -> Sign:
    """Return the codec of 1 bit an element.

    Args:
        scale: `"l2"`: the root mean square, as 1-bit Adam; `"mean"`: the mean magnitude, the least square error.
        block: Elements that share a scale, a multiple of 8; None for one scale a tensor.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> codec = sign("mean")
        >>> codec.decode(codec.encode(torch.tensor([1.0, -3.0, 2.0, 0.0])), numel=4).tolist()
        [1.5, -1.5, 1.5, 1.5]
    """
    return Sign(scale=scale, elements_per_scale=block)
