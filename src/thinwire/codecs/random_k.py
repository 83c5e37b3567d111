"""Random-k: elements at random positions, which both ends derive from eight bytes.

Wire format: a seed of 8 bytes, below 2**63, little endian, and k = max(1, ceil(density * numel)) values in ascending
order of their positions as one row of `thinwire.codecs.values`. Positions cost nothing else.

The positions are those of a uniformly random set of k: numbers are drawn from PCG64 with that seed, 53 bits each,
scaled to [0, numel); numbers that came before are passed over until k are found. For more than half of the elements,
the rest is drawn. numpy promises that the raw bits of PCG64 stay what they are from version to version, which it does
not for anything drawn with its help.

With `scale`, values are multiplied by numel / k, so that the expected decoded tensor is the tensor (short of the
values' own rounding).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from thinwire.codecs.base import Codec
from thinwire.codecs.block_codec import check_payload, flatten, num_rows
from thinwire.codecs.selection import magnitude_bits
from thinwire.codecs.sparse_payload import Indices
from thinwire.codecs.top_k import check_density, num_kept
from thinwire.codecs.values import ValueFormat, bits_per_value, check_format, decode_values, encode_values, value_bytes
from thinwire.errors import PayloadError
from thinwire.shared_random import derive_seed

_SEED_BYTES = 8
_INFINITY_BITS = 0x7F800000


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomK(Codec):
    """Elements at random positions.

    Args:
        density: Share of the elements that is sent, in (0, 1]; at least one element is.
        values: `"float16"` (scaled, see `thinwire.codecs.values`), `"bfloat16"` or `"float32"`.
        scale: Whether to multiply by numel / k: unbiased, with a larger error. Leave it off with error feedback.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> codec = random_k(density=0.5)
        >>> codec.decode(codec.encode(torch.ones(6), seed=3), numel=6).sum().item(), codec.payload_bytes(6)
        (3.0, 15)
    """

    name: ClassVar[str] = "random-k"
    wire_id: ClassVar[int] = 12
    block: ClassVar[int] = 1  # each part of a tensor that is cut draws its own indices
    is_sparse: ClassVar[bool] = True  # replicas with equal seeds keep the same elements

    density: float = 0.01
    values: ValueFormat = "float16"
    scale: bool = False

    def __post_init__(self) -> None:
        check_density(self.density)
        check_format(self.values)

    @property
    def bits_per_element(self) -> float:
        return self.density * bits_per_value(self.values)

    def payload_bytes(self, numel: int) -> int:
        if num_rows(numel, block=1) == 0:
            return 0
        return _SEED_BYTES + value_bytes(num_kept(numel, density=self.density), values=self.values)

    def encode(self, tensor: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        flat = flatten(tensor).to(torch.float32)
        if flat.numel() == 0:
            return torch.empty(0, dtype=torch.uint8, device=flat.device)
        own = derive_seed(seed, "random-k")
        count = num_kept(flat.numel(), density=self.density)
        row = flat[self._positions(own, numel=flat.numel()).to(flat.device)].view(1, -1)
        if self.scale:  # in float64, in which every device multiplies alike
            row = (row.to(torch.float64) * (flat.numel() / count)).to(torch.float32)
        # a tensor that has diverged is an error, even where this round would not send the bad element
        is_unusable = magnitude_bits(flat).amax() >= _INFINITY_BITS
        data = encode_values(row.masked_fill(is_unusable, torch.nan), values=self.values).view(-1)
        head = np.frombuffer(bytearray(own.to_bytes(_SEED_BYTES, "little")), dtype=np.uint8)
        return torch.cat((torch.from_numpy(head).to(flat.device), data))

    def decode(self, payload: torch.Tensor, *, numel: int) -> torch.Tensor:
        check_payload(payload, name=self.name, numel=numel, expected=self.payload_bytes(numel))
        whole = torch.zeros(numel, dtype=torch.float32, device=payload.device)
        if numel == 0:
            return whole
        seed = int.from_bytes(bytes(payload[:_SEED_BYTES].tolist()), "little")
        if seed >= 2**63:
            raise PayloadError(f"{self.name}: the seed is {seed}, 2**63 or more: never sent")
        count = num_kept(numel, density=self.density)
        row = decode_values(payload[_SEED_BYTES:].view(1, -1), count=count, values=self.values, name=self.name)
        whole[self._positions(seed, numel=numel).to(payload.device)] = row.view(-1)
        return whole

    def _positions(self, seed: int, *, numel: int) -> torch.Tensor:
        count = num_kept(numel, density=self.density)
        # draw the smaller of the two sets: those that are sent, or those that are not
        if 2 * count <= numel:
            return torch.from_numpy(random_set(seed, count=count, numel=numel))
        is_kept = np.ones(numel, dtype=np.bool_)
        is_kept[random_set(seed, count=numel - count, numel=numel)] = False
        return torch.from_numpy(np.flatnonzero(is_kept))


random_k = RandomK


def random_set(seed: int, *, count: int, numel: int) -> Indices:
    """Return a uniformly random set of indices, the same for the same arguments everywhere.

    Args:
        seed: In [0, 2**63).
        count: Size of the set, at most half of `numel`.
        numel: Elements to choose from.

    Returns:
        int64, `(count,)`, strictly ascending, each in [0, `numel`).

    Example:
        >>> random_set(0, count=3, numel=1000).tolist()
        [40, 269, 636]
    """
    stream = np.random.PCG64(seed)
    drawn = np.empty(0, dtype=np.int64)
    while True:
        raw = stream.random_raw(count + count // 4 + 16) >> np.uint64(11)
        # 53 bits are exact in float64, and the product's rounding is the same everywhere
        drawn = np.concatenate((drawn, (raw.astype(np.float64) * (numel * 2.0**-53)).astype(np.int64)))
        # keep each index where it was drawn first, so that more draws do not change the set
        first = np.unique(drawn, return_index=True)[1]
        if len(first) >= count:
            return np.sort(drawn[np.sort(first)[:count]])
