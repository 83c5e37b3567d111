from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from thinwire.errors import CheckpointError, MissingExtra
from thinwire.training.checkpoints.global_state import GlobalState
from thinwire.training.checkpoints.places import LocalPlace, Place, UrlPlace, open_place
from thinwire.training.checkpoints.state_files import StateFiles


def state_of(step: int) -> GlobalState:
    return GlobalState(step=step, parameters={"w": torch.full((9,), float(step))})


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
    files = StateFiles(UrlPlace(store, str(tmp_path / "run")))
    files.write(state_of(1))
    store.error = error
    with pytest.raises(CheckpointError, match=named):
        files.write(state_of(2))
    assert files.steps() == [1] and list((tmp_path / "run").iterdir()) == [tmp_path / "run" / "step-00000001"]


def test_a_url_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(
        MissingExtra, match="s3fs is not installed, and s3:// needs it; install it with: pip install s3fs"
    ):
        open_place("s3://bucket/run")
    monkeypatch.setitem(sys.modules, "paramiko", None)
    with pytest.raises(MissingExtra, match=r'sftp:// cannot be opened: .*"paramiko"'):
        open_place("sftp://host/run")
    with pytest.raises(ValueError, match="zzz"):
        open_place("zzz://bucket/run")


def test_both_kinds_of_places_do_the_same(tmp_path: Path) -> None:
    places: list[Place] = [LocalPlace(tmp_path / "a" / "b"), UrlPlace(LocalFileSystem(), str(tmp_path / "c" / "d"))]
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
