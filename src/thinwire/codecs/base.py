"""The codec protocol: a tensor becomes bytes and a tensor again; and sums in one fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class Codec(Protocol):
    """A (lossy) code of a float tensor, as bytes.

    A codec is a frozen value without memory. Its payload size depends on the number of elements alone, or has a bound
    that does, so that a receiver knows what to expect before it has read a byte. The same tensor gives the same bytes
    on CPU and GPU.

    Attributes:
        name: Short name, as the command line takes it, such as `"e3m0"`.
        wire_id: The number that stands for this codec in a message's header, 1 to 255, never reused.
        bits_per_element: Bits an element costs in the limit of long tensors, scales included.
        block: Elements that share a scale. A tensor may be cut at multiples of it into parts that are encoded by
            themselves; their payloads concatenate to the payload of the whole. (Stochastic rounding draws by an
            element's place in the tensor it is encoded in, so there the parts' payloads are valid parts, but not the
            same bytes. Codecs that choose or scale over all they are given, such as `top_k()` and `sign()` without a
            block, treat each part as a tensor of its own: parts are valid, but do not concatenate.)
        is_lossless_for_float32: Whether decode gives back every float32 bit.
        has_fixed_size: Whether every payload of so many elements has `payload_bytes` bytes; else that is the most.
        is_sparse: Whether most decoded elements (or coefficients of a transform) are zero, and which ones are not
            differs between replicas.
    """

    __slots__ = ()  # so that values which inherit from it can have slots alone

    @property
    def name(self) -> str: ...

    @property
    def wire_id(self) -> int: ...

    @property
    def bits_per_element(self) -> float: ...

    @property
    def block(self) -> int: ...

    @property
    def is_lossless_for_float32(self) -> bool:
        return False

    @property
    def has_fixed_size(self) -> bool:
        return True

    @property
    def is_sparse(self) -> bool:
        return False

    def payload_bytes(self, numel: int) -> int:
        """Return the payload size in bytes for a tensor of `numel` elements (0 for 0): exact, or the most it can be."""

    def encode(self, tensor: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        """Encode a floating tensor of any rank, size and layout.

        Args:
            tensor: float32, bfloat16, float16 or float64; read in row-major order.
            seed: Selects the random stream where rounding is stochastic; unused elsewhere.

        Returns:
            uint8, shape `(payload_bytes(tensor.numel()),)`, or fewer where the size is not fixed, on the tensor's
            device.
        """

    def decode(self, payload: torch.Tensor, *, numel: int) -> torch.Tensor:
        """Decode to float32, shape `(numel,)`, on the payload's device.

        Raises:
            PayloadError: The payload's size does not fit `numel`, or its content is not this codec's.
            NonFiniteError: The tensor held NaN or infinity, which the codec cannot carry.
        """


@runtime_checkable
class NeedsLayout(Protocol):
    """A codec that needs the shapes of the tensors in a vector: to follow its paper, or to lose less."""

    def laid_out(self, shapes: Sequence[torch.Size]) -> Codec:
        """Return the codec of vectors that are the concatenation of tensors of these shapes.

        Args:
            shapes: In order; tensors without elements may be among them.

        Returns:
            A codec for vectors of exactly that many elements.
        """


_SEGMENT = 2**16  # float64 elements of a segment stay in cache


def ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum rows in an order that depends on their length alone: the first half onto the second, again and again.

    torch.sum adds in an order that depends on device, threads and version, and float addition is not associative.

    Args:
        x: float64, `(rows, count)`.

    Returns:
        float64, `(rows, 1)`; 0 for rows without elements.

    Example:
        >>> ordered_sum(torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)).tolist()
        [[7.0]]
    """
    if x.shape[1] > _SEGMENT:
        # segments of a fixed length: the order still depends on the length of a row alone
        parts = [ordered_sum(part) for part in torch.split(x, _SEGMENT, dim=1)]
        return ordered_sum(torch.cat(parts, dim=1))
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0], 1)
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        # an odd last element is carried to the next level unadded
        total = x[:, :half] + x[:, half : 2 * half]
        x = total if x.shape[1] % 2 == 0 else torch.cat((total, x[:, -1:]), dim=1)
    return x
