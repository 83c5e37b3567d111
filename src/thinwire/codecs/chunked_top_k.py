"""Chunked top-k: the largest magnitudes of each chunk of consecutive elements.

Wire format: the elements in row-major order, cut into chunks; a chunk is a row of `thinwire.codecs.chunked_top_k`, and
rows follow one another. The last chunk, if it is shorter, sends the same share of its elements, rounded up, with
indices of its own width. So the payload's size depends on the number of elements alone.

Next to the top k of the whole tensor, an index costs more (12 bits in chunks of 4096; at random positions one in 64 can
be had for 7.4) and the choice is worse where large elements cluster; but sizes are known, and chunks are independent.

SparseLoCo sends 64 of 4096 with `values="codebook2"`.

Reference: arXiv 2508.15706. Its published code chunks matrices by 64 x 64 and has one codebook for a tensor, in
float32; here chunks are consecutive and have a codebook each, in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire.codecs import bit_packing
from thinwire.codecs.base import Codec
from thinwire.codecs.block_codec import check_payload, elements_at_once, flatten, num_rows
from thinwire.codecs.selection import largest_of_rows, magnitude_bits
from thinwire.codecs.values import RowFormat, check_format, decode_values, encode_values, value_bytes
from thinwire.errors import PayloadError


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKRow:
    """The format of one row: indices of a few bits, then values.

    The k indices come in ascending order, `ceil(log2(size))` bits each; values are coded as `thinwire.codecs.values`
    says. So all rows of one size are the same number of bytes.

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
        return (self.size - 1).bit_length()

    @property
    def index_bytes(self) -> int:
        return bit_packing.packed_bytes(self.count, width=self.index_bits)

    @property
    def row_bytes(self) -> int:
        return self.index_bytes + value_bytes(self.count, values=self.values)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Encode float32 `(rows, size)` to uint8 `(rows, row_bytes)`."""
        chosen = largest_of_rows(magnitude_bits(x), count=self.count)
        # a width of ceil(log2(size)) bits suits any index; ascending order is checked by the receiver
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
        # strict order also rules out an index sent twice, which scatter would apply in any order
        if not bool((chosen[:, 1:] > chosen[:, :-1]).all() & (chosen[:, -1:] < self.size).all()):
            raise PayloadError(f"{name}: indices of a chunk do not ascend, or are {self.size} or more: never sent")
        found = decode_values(data[:, self.index_bytes :], count=self.count, values=self.values, name=name)
        return torch.zeros(data.shape[0], self.size, device=data.device).scatter_(1, chosen, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedTopK(Codec):
    """The largest magnitudes of each chunk.

    Args:
        k: Elements of a chunk that are sent.
        chunk: Elements of a chunk.
        values: `"float16"` (scaled, see `thinwire.codecs.values`), `"bfloat16"`, `"float32"`, or `"codebook2"`: 2 bits
            and four means a chunk, as SparseLoCo.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> codec = chunked_top_k(k=1, chunk=2)
        >>> codec.decode(codec.encode(torch.tensor([1.0, -3.0, 2.0, 0.5, 4.0])), numel=5).tolist()
        [0.0, -3.0, 2.0, 0.0, 4.0]
        >>> chunked_top_k().bits_per_element, chunked_top_k(values="codebook2").bits_per_element
        (0.439453125, 0.234375)
    """

    is_sparse: ClassVar[bool] = True

    k: int = 64
    chunk: int = 4096
    values: RowFormat = "float16"

    def __post_init__(self) -> None:
        if not 1 <= self.chunk <= 2**20:
            raise ValueError(f"chunk must be 1 to 2**20 elements, got {self.chunk}; 4096 is usual")
        if not 1 <= self.k <= self.chunk:
            raise ValueError(f"k must be 1 to chunk ({self.chunk}), got {self.k}; 64 of 4096 is usual")
        check_format(self.values, of_rows=True)

    @property
    def name(self) -> str:
        return "chunked-top-k-2bit" if self.values == "codebook2" else "chunked-top-k"

    @property
    def wire_id(self) -> int:
        return 16 if self.values == "codebook2" else 11

    @property
    def bits_per_element(self) -> float:
        return 8 * self._row.row_bytes / self.chunk

    @property
    def block(self) -> int:
        return self.chunk

    @property
    def _row(self) -> TopKRow:
        return TopKRow(size=self.chunk, count=self.k, values=self.values)

    def _last(self, size: int) -> TopKRow:
        return TopKRow(size=size, count=-(-self.k * size // self.chunk), values=self.values)

    def payload_bytes(self, numel: int) -> int:
        num_rows(numel, block=self.chunk)
        # the shorter last chunk has indices of its own width, and so a size of its own
        whole, rest = divmod(numel, self.chunk)
        return whole * self._row.row_bytes + (self._last(rest).row_bytes if rest else 0)

    def encode(self, tensor: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        flat = flatten(tensor)
        whole = flat.numel() // self.chunk * self.chunk
        parts = [
            self._row.encode(part.to(torch.float32).view(-1, self.chunk)).view(-1)
            for part in torch.split(flat[:whole], self._step(flat.device) * self.chunk)
            if part.numel()
        ]
        if whole < flat.numel():
            parts.append(self._last(flat.numel() - whole).encode(flat[whole:].to(torch.float32).view(1, -1)).view(-1))
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=flat.device)

    def decode(self, payload: torch.Tensor, *, numel: int) -> torch.Tensor:
        check_payload(payload, name=self.name, numel=numel, expected=self.payload_bytes(numel))
        whole = numel // self.chunk
        split = whole * self._row.row_bytes
        values = torch.empty(numel, dtype=torch.float32, device=payload.device)
        table = payload[:split].reshape(whole, self._row.row_bytes)
        step = self._step(payload.device)
        for first in range(0, whole, step):
            decoded = self._row.decode(table[first : first + step], name=self.name)
            values[first * self.chunk : first * self.chunk + decoded.numel()] = decoded.view(-1)
        if rest := numel - whole * self.chunk:
            values[numel - rest :] = self._last(rest).decode(payload[split:].reshape(1, -1), name=self.name).view(-1)
        return values

    def _step(self, device: torch.device) -> int:
        """Return how many whole chunks to handle at a time."""
        return max(1, elements_at_once(device) // self.chunk)


chunked_top_k = ChunkedTopK
