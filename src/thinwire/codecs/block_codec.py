"""Base of the block codecs: each block of elements becomes one row of bytes, and a payload is its rows in order.

Payloads of tensors that are cut at multiples of the block therefore concatenate to the payload of the whole. The last
block is padded with zeros.
"""

from __future__ import annotations

import contextlib
import warnings
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from thinwire.codecs.base import Codec
from thinwire.errors import PayloadError


class Fused:
    """A function over tensors that the compiler fuses where that pays.

    Operation by operation, a GPU would read and write its memory once for each of some twenty operations; fused, it
    does so once. On a CPU the operations run in chunks that stay in cache, and nothing is compiled: a start of several
    seconds and a C++ compiler are too dear for a few milliseconds a round.

    Compiling begins at the first call with a tensor on such a device, never at import. Where there is no working
    compiler, the plain function answers instead, slower but with the same bits, after one warning.

    Args:
        function: Takes tensors, the first of which names the device. It may write to its arguments, but must give the
            same result when it is run a second time.
        backend: The compiler, as `torch.compile` names it.
        device_types: Where to compile.
        kernel: Loads a function that does the same as a kernel of our own; an ImportError of its means that there is
            no Triton here, and the function is compiled.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        backend: str | Callable[..., Any] = "inductor",
        device_types: tuple[str, ...] = ("cuda",),
        kernel: Callable[[], Callable[..., Any]] | None = None,
    ) -> None:
        self._function = function
        self._load_kernel = kernel
        self._backend = backend
        self._device_types = device_types
        self._compiled: Callable[..., Any] | None = None
        self._is_broken = False

    def __call__(self, first: torch.Tensor, *rest: torch.Tensor) -> Any:
        """Run the function, compiled if the device of its first argument is one to compile for."""
        if self._is_broken or first.device.type not in self._device_types:
            return self._function(first, *rest)
        if self._compiled is None:
            self._compiled = self._compile()
        try:
            return self._compiled(first, *rest)
        except torch.OutOfMemoryError:
            raise  # a full device is not a compiler failure
        except Exception as failure:  # each backend has its own kinds of failure; the plain function decides
            result = self._function(first, *rest)
            self._is_broken = True
            warnings.warn(
                f"thinwire's codecs run unfused on {first.device}, because compiling failed: {failure}",
                RuntimeWarning,
                stacklevel=2,
            )
            return result

    def _compile(self) -> Callable[..., Any]:
        if self._load_kernel is not None:
            with contextlib.suppress(ImportError):
                return self._load_kernel()
        return torch.compile(self._function, backend=self._backend, dynamic=True, fullgraph=True)


FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Elements handled at once. On a CPU the temporaries of a chunk stay in the second-level cache, and a chunk is long
# enough to hide what an operation costs before it touches an element; a GPU only needs an end to its temporaries.
_CHUNK = {"cpu": 2**17}
_CHUNK_ELSEWHERE = 2**25


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in row-major order without their graph; shares memory where the layout allows.

    Raises:
        ValueError: The tensor's dtype is not one that codecs take.
    """
    if tensor.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"a codec encodes float32, bfloat16, float16 or float64, got {tensor.dtype}; convert the tensor first"
        )
    return tensor.detach().reshape(-1)


def check_payload(payload: torch.Tensor, *, name: str, numel: int, expected: int, has_fixed_size: bool = True) -> None:
    """Refuse a payload that cannot hold `numel` elements.

    Args:
        payload: What arrived.
        name: The codec's name, for the message.
        numel: Elements it should hold.
        expected: Bytes it should have.
        has_fixed_size: Whether it must have all of them; else it has so many at most.

    Raises:
        PayloadError: Its dtype, rank or size is wrong.
    """
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise PayloadError(
            f"{name}: a payload is uint8 of one dimension, got {payload.dtype} of shape {tuple(payload.shape)}"
        )
    if payload.numel() > expected or (has_fixed_size and payload.numel() < expected):
        raise PayloadError(
            f"{name}: {numel} elements take {expected} bytes{'' if has_fixed_size else ' at most'}, got "
            f"{payload.numel()}; the sender has another tensor or another codec"
        )


def num_rows(numel: int, *, block: int) -> int:
    """Return how many blocks `numel` elements fill, the last perhaps in part.

    Raises:
        ValueError: `numel` is negative.
    """
    if numel < 0:
        raise ValueError(f"numel must be at least 0, got {numel}")
    return -(-numel // block)


class BlockCodec(Codec):
    """Base of codecs that turn every block into a row of a fixed number of bytes.

    A subclass defines `name`, `wire_id`, `block`, the bytes of a row, and how rows are encoded and decoded.
    """

    __slots__ = ()
    has_fixed_size: ClassVar[bool] = True

    @property
    def bits_per_element(self) -> float:
        return 8 * self._row_bytes / self.block

    def payload_bytes(self, numel: int) -> int:
        return num_rows(numel, block=self.block) * self._row_bytes

    def encode(self, tensor: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        flat, block = flatten(tensor), self.block
        rows, whole = -(-flat.numel() // block), flat.numel() // block
        table = torch.empty(rows, self._row_bytes, dtype=torch.uint8, device=flat.device)
        step = _CHUNK.get(flat.device.type, _CHUNK_ELSEWHERE) // block
        for first in range(0, whole, step):
            last = min(whole, first + step)
            x = flat[first * block : last * block].to(torch.float32).view(-1, block)
            self._encode_rows(x, table[first:last], start=first * block, seed=seed)
        if whole < rows:
            padded = torch.zeros(1, block, dtype=torch.float32, device=flat.device)
            padded[0, : flat.numel() - whole * block] = flat[whole * block :]
            self._encode_rows(padded, table[whole:], start=whole * block, seed=seed)
        return table.view(-1)

    def decode(self, payload: torch.Tensor, *, numel: int) -> torch.Tensor:
        check_payload(payload, name=self.name, numel=numel, expected=self.payload_bytes(numel))
        table, block = payload.contiguous().view(-1, self._row_bytes), self.block
        self._check_rows(table)
        values = torch.empty(numel, dtype=torch.float32, device=payload.device)
        whole = numel // block
        step = _CHUNK.get(payload.device.type, _CHUNK_ELSEWHERE) // block
        for first in range(0, whole, step):
            last = min(whole, first + step)
            self._decode_rows(table[first:last], values[first * block : last * block].view(-1, block))
        if whole < table.shape[0]:
            padded = torch.empty(1, block, dtype=torch.float32, device=payload.device)
            self._decode_rows(table[whole:], padded)
            values[whole * block :] = padded[0, : numel - whole * block]
        return values

    @property
    @abstractmethod
    def _row_bytes(self) -> int:
        """Bytes of a row."""

    @abstractmethod
    def _encode_rows(self, x: torch.Tensor, rows: torch.Tensor, *, start: int, seed: int) -> None:
        """Fill uint8 `(rows, row_bytes)` from float32 `(rows, block)`, whose first element has the index `start`."""

    @abstractmethod
    def _decode_rows(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Fill float32 `(rows, block)` from uint8 `(rows, row_bytes)`."""

    def _check_rows(self, table: torch.Tensor) -> None:
        """Refuse all rows at once, where that is cheaper than checking each chunk of them."""


def elements_at_once(device: torch.device) -> int:
    """Return how many elements to handle at a time on a device; a multiple of 2**17."""
    return _CHUNK.get(device.type, _CHUNK_ELSEWHERE)


# Byte j of a block's 32 holds the code of element j in its low half and that of element j + 32 in its high half. Both
# halves of the block are contiguous, so packing is one vector operation without a shuffle.
NIBBLES_PER_BLOCK = 64
NIBBLE_BYTES = NIBBLES_PER_BLOCK // 2


def pack_nibbles(codes: torch.Tensor, *, out: torch.Tensor) -> None:
    """Pack codes below 16.

    Args:
        codes: uint8, `(rows, 64)`, each 0 to 15.
        out: uint8, `(rows, 32)`, any strides; is overwritten.
    """
    out.copy_(torch.add(codes[:, :NIBBLE_BYTES], codes[:, NIBBLE_BYTES:], alpha=16))


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes of packed bytes.

    Args:
        packed: uint8, `(rows, 32)`, any strides.

    Returns:
        uint8, `(rows, 64)`, each 0 to 15.

    Example:
        >>> codes = torch.arange(64, dtype=torch.uint8).remainder(16).view(1, 64)
        >>> packed = torch.empty(1, 32, dtype=torch.uint8)
        >>> pack_nibbles(codes, out=packed)
        >>> torch.equal(unpack_nibbles(packed), codes)
        True
    """
    packed = packed.contiguous()  # one strided read instead of two
    return torch.cat((packed.bitwise_and(15), packed.bitwise_right_shift(4)), dim=1)
