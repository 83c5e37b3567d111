"""Rows of which the top k elements are sent: indices of few bits, and values.

A row of `size` elements is its k indices in ascending order, `ceil(log2(size))` bits each, and then its values as
`thinwire.codecs.values` says. So all rows of one size are the same number of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.codecs import bit_packing
from thinwire.codecs.selection import largest_of_rows, magnitude_bits
from thinwire.codecs.values import decode_values, encode_values, value_bytes
from thinwire.errors import PayloadError


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKRow:
    """How a row is sent.

    Attributes:
        size: Elements of a row, at least 1.
        count: How many are sent, 1 to `size`.
        values: How values are sent.
    """

    size: int
    count: int
    values: str

    @property
    def index_bits(self) -> int:
        """Bits of an index."""
        return (self.size - 1).bit_length()

    @property
    def index_bytes(self) -> int:
        """Bytes of a row's indices."""
        return bit_packing.packed_bytes(self.count, width=self.index_bits)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.index_bytes + value_bytes(self.count, values=self.values)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Encode float32 `(rows, size)` to uint8 `(rows, row_bytes)`."""
        chosen = largest_of_rows(magnitude_bits(x), count=self.count)
        packed = bit_packing.pack(chosen, width=self.index_bits)
        return torch.cat((packed, encode_values(x.gather(1, chosen), values=self.values)), dim=1)

    def decode(self, data: torch.Tensor, *, name: str) -> torch.Tensor:
        """Decode uint8 `(rows, row_bytes)` to float32 `(rows, size)`, zeros where nothing was sent.

        Raises:
            PayloadError: Indices are out of range or do not ascend, or values are never sent.
            NonFiniteError: The sender's tensor held NaN, infinity, or more than the format can carry.
        """
        packed = data[:, : self.index_bytes].contiguous()
        chosen = bit_packing.unpack(packed, count=self.count, width=self.index_bits, name=name)
        if not bool((chosen[:, 1:] > chosen[:, :-1]).all() & (chosen[:, -1:] < self.size).all()):
            raise PayloadError(f"{name}: indices of a chunk do not ascend, or are {self.size} or more: never sent")
        found = decode_values(data[:, self.index_bytes :], count=self.count, values=self.values, name=name)
        return torch.zeros(data.shape[0], self.size, device=data.device).scatter_(1, chosen, found)
