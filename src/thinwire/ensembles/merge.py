"""Weighted average of finished checkpoints of one shape, tensor by tensor from their files."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from thinwire.ensembles.finished_run import copy_checkpoint
from thinwire.errors import CheckpointError, refusal
from thinwire.files import make_readable, replace_whole


def merge_checkpoints(weights: Mapping[Path, float], out: Path) -> None:
    """Write sum_j w_j theta_j as a finished run, with options and tokenizer of the member of the largest weight.

    Sums are taken in float64 and rounded once, so that one member of weight 1 stays bit for bit. Tensors that are no
    floating-point numbers must be equal.

    Args:
        weights: Weight of each member's folder, above 0, with the sum 1.
        out: New or empty folder.

    Raises:
        ValueError: The shapes differ, or `out` is not empty.
        CheckpointError: A file cannot be read.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise refusal("--out is not empty", got=out, allowed="a new or empty folder", remedy=f"--out {out}-2")
    first = max(weights, key=lambda folder: weights[folder])
    names = {folder: sorted(path.name for path in (folder / "model").glob("*.safetensors")) for folder in weights}
    for folder, found in names.items():
        if found != names[first]:
            raise _unlike(first, folder, f"files {', '.join(found)}", f"files {', '.join(names[first])}")
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists():
        out.rmdir()
    merged = {name: _merged(name, weights, first) for name in names[first]}
    copy_checkpoint(first, out)
    try:
        for name, (tensors, metadata) in merged.items():
            path = out / "model" / name
            replace_whole(path, partial(safetensors.torch.save_file, tensors, metadata=metadata))
            make_readable(path)
    except OSError:
        shutil.rmtree(out, ignore_errors=True)  # its weights would be those of one member alone
        raise


def _merged(name: str, weights: Mapping[Path, float], first: Path) -> tuple[dict[str, Tensor], dict[str, str] | None]:
    with contextlib.ExitStack() as stack:
        files = {}
        for folder in weights:
            path = folder / "model" / name
            try:
                files[folder] = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} is damaged: {error}; copy it again from the run") from error
        shapes = {
            folder: {key: (file.get_slice(key).get_dtype(), *file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            for folder, file in files.items()
        }  # fmt: skip
        for folder, own in shapes.items():
            for key in sorted(shapes[first].keys() | own.keys()):
                if own.get(key) != shapes[first].get(key):
                    raise _unlike(first, folder, f"{key} {own.get(key)}", f"{key} {shapes[first].get(key)}")
        merged = {}
        for key in shapes[first]:
            base = files[first].get_tensor(key)
            if not base.is_floating_point():
                if any(not torch.equal(base, file.get_tensor(key)) for file in files.values()):
                    raise _unlike(first, "another member", f"different {key}", f"equal {key}")
                merged[key] = base
                continue
            total = torch.zeros(base.shape, dtype=torch.float64)
            for folder, file in files.items():
                total.add_(file.get_tensor(key).double(), alpha=weights[folder])
            merged[key] = total.to(base.dtype)
        return merged, files[first].metadata()


def _unlike(first: Path, other: Path | str, got: str, allowed: str) -> ValueError:
    return refusal(f"{other} has another shape than {first}, and only like shapes are averaged", got=got,
                   allowed=allowed, remedy="thinwire experts eval, which combines any shapes")  # fmt: skip
