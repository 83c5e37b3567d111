from __future__ import annotations

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.training.checkpoints.tensor_file import tensor_file

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
]  # fmt: skip


@given(
    shapes=st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=4),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
        max_size=5,
    ),
    chunk_bytes=st.integers(1, 40),
)
def test_the_files_are_what_safetensors_reads(
    shapes: dict[str, tuple[torch.dtype, list[int]]], chunk_bytes: int
) -> None:
    tensors = {name: (torch.randn(shape) * 50).to(dtype) for name, (dtype, shape) in shapes.items()}
    content = b"".join(tensor_file(tensors, chunk_bytes=chunk_bytes))
    again = safetensors.torch.load(content)
    assert set(again) == set(tensors)
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype and torch.equal(again[name], tensor)
    assert b"".join(tensor_file(dict(reversed(tensors.items())))) == content


def test_what_a_safetensors_file_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="__metadata__"):
        list(tensor_file({"__metadata__": torch.ones(1)}))
    with pytest.raises(ValueError, match="complex64"):
        list(tensor_file({"w": torch.ones(1, dtype=torch.complex64)}))
