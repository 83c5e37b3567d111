"""DCT top-k: the largest coefficients of a discrete cosine transform, chunk by chunk, as DeMo sends its momentum.

The flat vector that is encoded is a concatenation of tensors, and a chunk is a part of one of them: 64 x 64 elements of
a matrix, 64 of a vector. So the codec must know the shapes: `dct_top_k().laid_out(shapes)`. Without them it takes what
it gets for one vector.

A dimension is cut into equal parts of its largest divisor up to `chunk`, as DeMo does. Where that is below half of
`chunk` (a prime of 1009 has 1, which would send everything), it is cut into parts of `chunk` and a shorter one instead.
A tensor of more than two dimensions counts as a matrix: the first dimension by all others. Without a layout, parts are
always `chunk` and a shorter one.

Wire format: tensor by tensor; in a tensor the equal chunks in row-major order, then those of the shorter parts (right
edge, bottom edge, corner); a chunk is a row of `thinwire.codecs.chunked_top_k`, of its coefficients in row-major order,
with k coefficients or all there are. Sizes follow from the shapes alone.

Nothing is zero in what is decoded. `is_sparse` is true all the same in the sense that matters to an exchange: replicas
keep different coefficients, so a mean does not fit into a payload again without loss of most of it, and with a layout
the vector cannot be cut: its one block is the whole.

Reference: arXiv 2411.19870 (DeMo). Its published code does the products in the parameters' dtype; here they are exact,
see `thinwire.codecs.dct`, since replicas must decode the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from thinwire.codecs import dct
from thinwire.codecs.base import Codec
from thinwire.codecs.block_codec import check_payload, elements_at_once, flatten, num_rows
from thinwire.codecs.chunked_top_k import TopKRow
from thinwire.codecs.values import RowFormat, check_format

_LARGEST_CHUNK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Region:
    """Equal chunks that tile a rectangle of a matrix inside the flat vector."""

    offset: int
    stride: int
    down: int
    across: int
    height: int
    width: int

    @property
    def count(self) -> int:
        return self.down * self.across

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the region's elements in the flat vector, `(down, height, across, width)`."""
        shape = (self.down, self.height, self.across, self.width)
        strides = (self.height * self.stride, self.stride, self.width, 1)
        return flat.as_strided(shape, strides, flat.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class DctTopK(Codec):
    """The largest coefficients of each chunk's cosine transform.

    Args:
        k: Coefficients of a chunk that are sent.
        chunk: The most elements of a chunk in each dimension, 2 to 1024.
        values: `"float16"` (scaled, see `thinwire.codecs.values`), `"bfloat16"`, `"float32"` or `"codebook2"`.
        shapes: The tensors that the vector is the concatenation of; None for one vector of any size.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> codec = dct_top_k(k=1).laid_out([torch.Size([4, 64])])
        >>> codec.decode(codec.encode(torch.full((4, 64), 0.5)), numel=256)[:3]
        tensor([0.5000, 0.5000, 0.5000])
        >>> dct_top_k().laid_out([torch.Size([64, 64])]).bits_per_element
        0.220703125
    """

    name: ClassVar[str] = "dct-top-k"
    wire_id: ClassVar[int] = 15
    is_sparse: ClassVar[bool] = True  # in the coefficients

    k: int = 32
    chunk: int = 64
    values: RowFormat = "float16"
    shapes: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.chunk <= _LARGEST_CHUNK:
            raise ValueError(f"chunk must be 2 to {_LARGEST_CHUNK}, got {self.chunk}; 64 is usual")
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}; 32 is usual")
        check_format(self.values, of_rows=True)

    def laid_out(self, shapes: Sequence[torch.Size]) -> DctTopK:
        return replace(self, shapes=tuple(tuple(int(size) for size in shape) for shape in shapes))

    @property
    def bits_per_element(self) -> float:
        if self.shapes is None:
            return 8 * self._row(self.chunk).row_bytes / self.chunk
        numel = self._numel
        return 8 * self.payload_bytes(numel) / numel if numel else 0.0

    @property
    def block(self) -> int:
        # a layout cannot be cut
        return self.chunk if self.shapes is None else max(1, self._numel)

    @property
    def _numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes or ())

    def payload_bytes(self, numel: int) -> int:
        num_rows(numel, block=1)  # refuses a negative one
        return sum(region.count * self._row(region.height * region.width).row_bytes for region in self._regions(numel))

    def encode(self, tensor: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        flat = flatten(tensor).to(torch.float32)
        parts = [torch.empty(0, dtype=torch.uint8, device=flat.device)]
        for region in self._regions(flat.numel()):
            chunks = region.view(flat).permute(0, 2, 1, 3).reshape(-1, region.height, region.width)
            row = self._row(region.height * region.width)
            for some in torch.split(chunks, max(1, elements_at_once(flat.device) // row.size)):
                parts.append(row.encode(dct.transform(some).view(-1, row.size)).view(-1))
        return torch.cat(parts)

    def decode(self, payload: torch.Tensor, *, numel: int) -> torch.Tensor:
        check_payload(payload, name=self.name, numel=numel, expected=self.payload_bytes(numel))
        values = torch.empty(numel, dtype=torch.float32, device=payload.device)
        start = 0
        for region in self._regions(numel):
            row = self._row(region.height * region.width)
            stop = start + region.count * row.row_bytes
            parts = []
            table = payload[start:stop].reshape(-1, row.row_bytes)
            for some in torch.split(table, max(1, elements_at_once(payload.device) // row.size)):
                coefficients = row.decode(some, name=self.name)
                parts.append(dct.inverse(coefficients.view(-1, region.height, region.width)))
            shape = (region.down, region.across, region.height, region.width)
            region.view(values).copy_(torch.cat(parts).view(shape).permute(0, 2, 1, 3))
            start = stop
        return values

    def _row(self, size: int) -> TopKRow:
        return TopKRow(size=size, count=min(self.k, size), values=self.values)

    def _regions(self, numel: int) -> Iterator[_Region]:
        if self.shapes is None:
            yield from _tile(0, numel, downs=[(0, 1, 1)], acrosses=_with_rest(numel, self.chunk))
            return
        if numel != self._numel:
            raise ValueError(f"the layout has {self._numel} elements, got {numel}; lay the codec out for this fragment")
        offset = 0
        for shape in self.shapes:
            size = math.prod(shape)
            rows = shape[0] if len(shape) > 1 and size else 1
            if size:
                columns = size // rows
                downs = _parts(rows, self.chunk) if len(shape) > 1 else [(0, 1, 1)]
                yield from _tile(offset, columns, downs=downs, acrosses=_parts(columns, self.chunk))
            offset += size


dct_top_k = DctTopK


def _tile(
    offset: int, columns: int, *, downs: list[tuple[int, int, int]], acrosses: list[tuple[int, int, int]]
) -> Iterator[_Region]:
    """Yield the regions of a matrix whose dimensions are cut into `(start, size, count)` of equal parts."""
    for top, height, down in downs:
        for left, width, across in acrosses:
            start = offset + top * columns + left
            yield _Region(offset=start, stride=columns, down=down, across=across, height=height, width=width)


def _parts(size: int, chunk: int) -> list[tuple[int, int, int]]:
    divisor = max(part for part in range(1, min(size, chunk) + 1) if size % part == 0)
    if 2 * divisor >= min(size, chunk):
        return [(0, divisor, size // divisor)]
    return _with_rest(size, chunk)


def _with_rest(size: int, chunk: int) -> list[tuple[int, int, int]]:
    whole, rest = divmod(size, chunk)
    parts = [(0, chunk, whole)] if whole else []
    return parts + ([(whole * chunk, rest, 1)] if rest else [])
