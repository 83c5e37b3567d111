"""Folders of weights: what `thinwire publish` reads, and what a follower writes."""

from __future__ import annotations

import re
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from thinwire.errors import DataError, refusal
from thinwire.files import make_readable, replace_whole, write_json
from thinwire.publish.manifest import MOST_FILE_BYTES, describe
from thinwire.publish.subscriber import Version

WEIGHTS = "model.safetensors"
RUN_OPTIONS = "run.json"
VERSION_FILE = "version.json"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


def read_model(path: Path) -> tuple[dict[str, Tensor], dict[str, bytes]]:
    """Return tensors by name and the small files beside them: of a file, of a folder of safetensors, or of a run.

    Raises:
        ValueError: There are no weights.
        DataError: A file cannot be read.
    """
    folder = path / "model" if (path / "model").is_dir() else path
    files = [path] if path.is_file() else sorted(folder.glob("*.safetensors"))
    if not files or any(file.suffix != ".safetensors" for file in files):
        raise refusal("there are no weights", got=path,
                      allowed="a safetensors file, a folder with one, or a finished run",
                      remedy=f"thinwire export {path} --to safetensors --out FOLDER")  # fmt: skip
    tensors: dict[str, Tensor] = {}
    try:
        for file in files:
            tensors.update(safetensors.torch.load_file(file))
        beside = [] if path.is_file() else [one for one in sorted(folder.iterdir()) if _is_beside(one)]
        found = {one.name: one.read_bytes() for one in beside}
        if folder != path and (path / "config.json").is_file():
            found[RUN_OPTIONS] = (path / "config.json").read_bytes()
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot read the weights of {path}: {error}; write them again") from error
    return tensors, found


def write_version(version: Version, files: dict[str, bytes], folder: Path) -> None:
    """Write weights, files and `version.json`, each whole or not at all; the last one says that the others are there.

    Raises:
        OSError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[int] = set()
    tensors = {}
    for name, tensor in version.tensors().items():  # the format has no tied tensors
        tensors[name] = tensor.clone() if id(tensor) in seen else tensor.contiguous()
        seen.add(id(tensor))

    def write(path: Path) -> None:
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
        make_readable(path)

    for name, content in files.items():
        if not (folder / name).is_file() or (folder / name).read_bytes() != content:
            replace_whole(folder / name, lambda path, content=content: path.write_bytes(content))  # type: ignore[misc]
    replace_whole(folder / WEIGHTS, write)
    write_json(folder / VERSION_FILE, describe(version.manifest))


def _is_beside(path: Path) -> bool:
    is_index = path.name.endswith(".index.json") or path.name == VERSION_FILE
    is_small = path.is_file() and path.stat().st_size <= MOST_FILE_BYTES and path.suffix != ".safetensors"
    return is_small and not is_index and _NAME.fullmatch(path.name) is not None
