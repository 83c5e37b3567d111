from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import CheckpointError, MissingExtra
from thinwire.training.checkpoints.checkpoint_files import (
    CheckpointFiles,
    LocalStorage,
    Storage,
    UrlStorage,
    open_storage,
    safetensors_chunks,
)
from thinwire.training.checkpoints.global_checkpoints import MODEL_FILE, OUTER_FILE, global_files


def write(files: CheckpointFiles, step: int) -> None:
    files.write(step, {MODEL_FILE: {"w": torch.full((9,), float(step))}, OUTER_FILE: {}}, {})


class Failing(LocalFileSystem):
    """Fails at a file's writing, after some of its bytes."""

    error: Exception | None = None
    cachable = False

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        stream = super().open(path, mode, **options)
        if self.error is not None and mode == "wb":
            stream.write(b"half of")
            stream.close()
            raise self.error
        return stream


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "make room there"),
        (PermissionError(errno.EACCES, "Permission denied"), "let this user write there"),
        (RuntimeError("SlowDown: reduce your request rate\nand more"), "reduce your request rate; see that the place"),
    ],
)
def test_whatever_a_store_raises_is_told_with_a_remedy(tmp_path: Path, error: Exception, named: str) -> None:
    store = Failing()
    files = global_files(UrlStorage(store, str(tmp_path / "run")))
    write(files, 1)
    store.error = error
    with pytest.raises(CheckpointError, match=named):
        write(files, 2)
    assert files.steps() == [1] and list((tmp_path / "run").iterdir()) == [tmp_path / "run" / "step-00000001"]


def test_a_url_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(
        MissingExtra, match="s3fs is not installed, and s3:// needs it; install it with: pip install s3fs"
    ):
        open_storage("s3://bucket/run")
    monkeypatch.setitem(sys.modules, "paramiko", None)
    with pytest.raises(MissingExtra, match=r'sftp:// cannot be opened: .*"paramiko"'):
        open_storage("sftp://host/run")
    with pytest.raises(ValueError, match="zzz"):
        open_storage("zzz://bucket/run")


def test_both_kinds_of_places_do_the_same(tmp_path: Path) -> None:
    places: list[Storage] = [
        LocalStorage(tmp_path / "a" / "b"),
        UrlStorage(LocalFileSystem(), str(tmp_path / "c" / "d")),
    ]
    for place in places:
        assert place.folders() == []
        for text in (b"long before", b"now"):
            place.write("x", "f", [memoryview(text[:2]), memoryview(text[2:])])
        place.write("x", "g", [])
        assert place.folders() == ["x"] and place.sizes("x") == {"f": 3, "g": 0}
        assert b"".join(place.read("x", "f")) == b"now"
        place.remove("x", ["f", "none"])
        assert place.sizes("x") == {"g": 0}
        place.remove("x", ["g"])
        assert place.folders() == []
        with pytest.raises(FileNotFoundError):
            place.sizes("x")
        with pytest.raises(FileNotFoundError):
            list(place.read("x", "f"))


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
    content = b"".join(safetensors_chunks(tensors, chunk_bytes=chunk_bytes))
    again = safetensors.torch.load(content)
    assert set(again) == set(tensors)
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype and torch.equal(again[name], tensor)
    assert b"".join(safetensors_chunks(dict(reversed(tensors.items())))) == content


def test_what_a_safetensors_file_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="__metadata__"):
        list(safetensors_chunks({"__metadata__": torch.ones(1)}))
    with pytest.raises(ValueError, match="complex128"):
        list(safetensors_chunks({"w": torch.ones(1, dtype=torch.complex128)}))
