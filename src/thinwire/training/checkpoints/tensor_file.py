"""Tensors as a safetensors file that is made piece by piece: what writes or hashes it needs no second copy of them.

`safetensors.torch.load_file` reads it. The same tensors make the same bytes, in whatever order they stand.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.training.checkpoints.global_state import raw_bytes

_CHUNK_BYTES = 1 << 23
_ALIGNED = 8
_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
}


def tensor_file(tensors: Mapping[str, Tensor], *, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[memoryview]:
    """Yield the bytes of a safetensors file.

    Args:
        tensors: On the CPU, by name. Several names may share a tensor; it is written under each.
        chunk_bytes: How many bytes are yielded at once, at most; the header comes whole.

    Raises:
        ValueError: A name or a dtype has no place in such a file.

    Example:
        >>> import safetensors.torch
        >>> safetensors.torch.load(b"".join(tensor_file({"w": torch.ones(2)})))
        {'w': tensor([1., 1.])}
    """
    # large elements first: each tensor then begins at a multiple of its element's size
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        if name in header or tensor.dtype not in _KINDS:
            raise ValueError(f"a safetensors file cannot hold {tensor.dtype} as {name!r}")
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    yield memoryview(struct.pack("<Q", len(text)) + text)
    for name in names:
        raw = raw_bytes(tensors[name])
        for begin in range(0, len(raw), chunk_bytes):
            yield raw[begin : begin + chunk_bytes]
