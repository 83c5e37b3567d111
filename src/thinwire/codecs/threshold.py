"""Threshold: every element whose magnitude reaches a given value.

Wire format: that of `thinwire.codecs.sparse_payload`. How many elements are sent depends on the tensor, from none to
all, so the payload's bound is that of a dense one.

Reference: N. Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015, which
sends the threshold itself in place of the value; here the values are sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from thinwire.codecs.block_codec import flatten
from thinwire.codecs.selection import at_least, magnitude_bits
from thinwire.codecs.sparse_payload import decode_chosen, encode_chosen, expected_bits_per_element, max_bytes
from thinwire.codecs.values import ValueFormat, check_format


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """Elements of a magnitude or more; use `threshold()`.

    Attributes:
        value: The least magnitude that is sent, as float32.
        values: How values are sent.

    Raises:
        ValueError: An argument is out of its range.
    """

    value: float = 1e-3
    values: ValueFormat = "float16"

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not (0 < self.value < math.inf):
            raise ValueError(f"value must be above 0 and finite, got {self.value}; magnitudes below it are not sent")
        check_format(self.values)

    @property
    def name(self) -> str:
        """`"threshold"`."""
        return "threshold"

    @property
    def wire_id(self) -> int:
        """13."""
        return 13

    @property
    def bits_per_element(self) -> float:
        """The most, where every element is sent: which ones will be depends on the tensor alone."""
        return expected_bits_per_element(1.0, values=self.values)

    @property
    def block(self) -> int:
        """1: a tensor may be cut anywhere."""
        return 1

    @property
    def is_lossless_for_float32(self) -> bool:
        """No."""
        return False

    @property
    def has_fixed_size(self) -> bool:
        """No."""
        return False

    @property
    def is_sparse(self) -> bool:
        """Always; with a value that is too small, in name only."""
        return True

    def payload_bytes(self, numel: int) -> int:
        return max_bytes(numel, count=numel, values=self.values)

    def encode(self, tensor: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        flat = flatten(tensor).to(torch.float32)
        least = int(torch.tensor([self.value], dtype=torch.float32).view(torch.int32))
        return encode_chosen(flat, at_least(magnitude_bits(flat), threshold=least), values=self.values)

    def decode(self, payload: torch.Tensor, *, numel: int) -> torch.Tensor:
        return decode_chosen(payload, numel=numel, count=numel, values=self.values, name=self.name)


def threshold(*, value: float = 1e-3, values: ValueFormat = "float16") -> Threshold:
    """Return the codec of all elements with a magnitude of `value` or more.

    Args:
        value: The least magnitude that is sent.
        values: `"float16"` (scaled, see `thinwire.codecs.values`), `"bfloat16"` or `"float32"`.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> codec = threshold(value=1.0)
        >>> codec.decode(codec.encode(torch.tensor([0.5, -1.0, 3.0])), numel=3).tolist()
        [0.0, -1.0, 3.0]
    """
    return Threshold(value=value, values=values)
