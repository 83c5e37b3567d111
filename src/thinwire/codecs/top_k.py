"""Top-k and threshold: the largest magnitudes of the whole tensor, and where they are.

Wire format: that of `thinwire.codecs.sparse_payload`. Of k = max(1, ceil(density * numel)) elements, those that are
zero (or a subnormal number of float32) are not sent. Of equal magnitudes those with the lowest indices are.

Threshold: every element whose magnitude reaches a given value, in the same format. How many are sent depends on the
tensor, from none to all, so the payload's bound is that of a dense one.

A tensor that is cut into parts has the top k of each part, which are other elements than the whole's: parts are valid
by themselves, but their payloads do not concatenate to that of the whole.

Reference: arXiv 1712.01887 (Deep Gradient Compression) for the sampled threshold; top-k itself is older. N. Strom,
"Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015, for a threshold: it sends the
threshold itself in place of the value; here the values are sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from thinwire.codecs import clusters
from thinwire.codecs import selection as choose
from thinwire.codecs.base import Codec
from thinwire.codecs.block_codec import flatten, num_rows
from thinwire.codecs.sparse_payload import decode_chosen, encode_chosen, expected_bits_per_element, max_bytes
from thinwire.codecs.values import ValueFormat, check_format

Selection = Literal["exact", "sampled"]
TopKFormat = Literal["float16", "bfloat16", "float32", "clusters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK(Codec):
    """The largest magnitudes of a tensor.

    Args:
        density: Share of the elements that is sent, in (0, 1]; at least one element is.
        values: `"float16"` (scaled, see `thinwire.codecs.values`), `"bfloat16"`, `"float32"`, or `"clusters"`: one bit
            and two centroids a layer (FedZip, see `thinwire.codecs.clusters`); it needs error feedback.
        selection: `"exact"`, or `"sampled"`: between 0.8 of them and all, as Deep Gradient Compression does. It is
            hardly faster, since the exact selection uses a sample first, too.
        sizes: Of the layers that `"clusters"` selects and clusters apart; None for one vector of any size.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> codec = top_k(density=0.4)
        >>> codec.decode(codec.encode(torch.tensor([1.0, -3.0, 0.5, 2.0, 0.0])), numel=5).tolist()
        [0.0, -3.0, 0.0, 2.0, 0.0]
    """

    wire_id: ClassVar[int] = 10  # of both selections: decoding is the same
    has_fixed_size: ClassVar[bool] = False  # what indices cost depends on where they are
    is_sparse: ClassVar[bool] = True

    density: float = 0.01
    values: TopKFormat = "float16"
    selection: Selection = "exact"
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.values != "clusters":
            check_format(self.values)
        if self.selection not in ("exact", "sampled"):
            raise ValueError(f"selection must be 'exact' or 'sampled', got {self.selection!r}")

    @property
    def name(self) -> str:
        return "top-k" if self.selection == "exact" else "top-k-sampled"

    @property
    def block(self) -> int:
        # each part of a tensor that is cut sends its own largest; a layout cannot be cut
        return 1 if self.sizes is None else max(1, sum(self.sizes))

    @property
    def bits_per_element(self) -> float:
        # expected where positions are random; fewer where they cluster
        return expected_bits_per_element(self.density, values=self.values)

    def laid_out(self, shapes: Sequence[torch.Size]) -> TopK:
        if self.values != "clusters":
            return self
        return replace(self, sizes=tuple(math.prod(shape) for shape in shapes))

    def _layers(self, numel: int) -> tuple[int, ...]:
        if self.sizes is not None and sum(self.sizes) != numel:
            raise ValueError(
                f"the layout has {sum(self.sizes)} elements, got {numel}; lay the codec out for this fragment"
            )
        return (numel,) if self.sizes is None else self.sizes

    def _num_kept(self, numel: int) -> int:
        return sum(num_kept(size, density=self.density) for size in self._layers(numel))

    def payload_bytes(self, numel: int) -> int:
        if self.values == "clusters":
            num_rows(numel, block=1)  # refuses a negative one
            return clusters.most_bytes(self._layers(numel), count=self._num_kept(numel))
        return max_bytes(numel, count=num_kept(numel, density=self.density), values=self.values)

    def encode(self, tensor: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        flat = flatten(tensor).to(torch.float32)
        if flat.numel() == 0:
            return torch.empty(0, dtype=torch.uint8, device=flat.device)
        if self.values == "clusters":
            sizes = self._layers(flat.numel())
            layers = [self._chosen(part, seed=seed) for part in torch.split(flat, list(sizes))]
            return clusters.encode(flat, layers, sizes=sizes)
        return encode_chosen(flat, self._chosen(flat, seed=seed), values=self.values)

    def _chosen(self, flat: torch.Tensor, *, seed: int) -> torch.Tensor:
        magnitude, count = choose.magnitude_bits(flat), num_kept(flat.numel(), density=self.density)
        if count == 0:
            return torch.empty(0, dtype=torch.int64, device=flat.device)
        if self.selection == "exact":
            return choose.largest(magnitude, count=count)
        return choose.largest_by_sample(magnitude, count=count, density=self.density, seed=seed)

    def decode(self, payload: torch.Tensor, *, numel: int) -> torch.Tensor:
        if self.values == "clusters":
            count = self._num_kept(numel)
            return clusters.decode(payload, sizes=self._layers(numel), count=count, name=self.name)
        count = num_kept(numel, density=self.density)
        return decode_chosen(payload, numel=numel, count=count, values=self.values, name=self.name)


top_k = TopK


def check_density(density: float) -> None:
    """Refuse a density that is none.

    Raises:
        ValueError: It is not in (0, 1].
    """
    if not 0 < density <= 1:
        raise ValueError(f"density must be in (0, 1], got {density}; 0.001 to 0.01 is usual")


def num_kept(numel: int, *, density: float) -> int:
    """Return how many of `numel` elements are sent: at least one, except of none.

    Example:
        >>> num_kept(1000, density=0.0015), num_kept(5, density=0.001), num_kept(0, density=0.5)
        (2, 1, 0)
    """
    # 0.07 * 100 is a little more than 7 in floating point
    return min(numel, max(1, math.ceil(round(density * numel, 6))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold(Codec):
    """All elements with a magnitude of `value` or more.

    Args:
        value: The least magnitude that is sent, as float32.
        values: `"float16"` (scaled, see `thinwire.codecs.values`), `"bfloat16"` or `"float32"`.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> codec = threshold(value=1.0)
        >>> codec.decode(codec.encode(torch.tensor([0.5, -1.0, 3.0])), numel=3).tolist()
        [0.0, -1.0, 3.0]
    """

    name: ClassVar[str] = "threshold"
    wire_id: ClassVar[int] = 13
    block: ClassVar[int] = 1
    has_fixed_size: ClassVar[bool] = False
    is_sparse: ClassVar[bool] = True  # with a value that is too small, in name only

    value: float = 1e-3
    values: ValueFormat = "float16"

    def __post_init__(self) -> None:
        if not (0 < self.value < math.inf):
            raise ValueError(f"value must be above 0 and finite, got {self.value}; magnitudes below it are not sent")
        check_format(self.values)

    @property
    def bits_per_element(self) -> float:
        # the most, where every element is sent: which ones will be depends on the tensor alone
        return expected_bits_per_element(1.0, values=self.values)

    def payload_bytes(self, numel: int) -> int:
        return max_bytes(numel, count=numel, values=self.values)

    def encode(self, tensor: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        flat = flatten(tensor).to(torch.float32)
        least = int(torch.tensor([self.value], dtype=torch.float32).view(torch.int32))
        return encode_chosen(flat, choose.at_least(choose.magnitude_bits(flat), threshold=least), values=self.values)

    def decode(self, payload: torch.Tensor, *, numel: int) -> torch.Tensor:
        return decode_chosen(payload, numel=numel, count=numel, values=self.values, name=self.name)


threshold = Threshold
