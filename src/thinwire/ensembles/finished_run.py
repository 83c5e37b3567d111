"""Finished runs on the disk, read and copied without torch: options, weights and tokenizer."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from thinwire.errors import CheckpointError
from thinwire.files import open_regular


def check_finished(run: Path, *, remedy: str) -> None:
    """Refuse a folder without the model that a run writes at its end."""
    if not (run / "config.json").is_file() or not any((run / "model").glob("*.safetensors")):
        raise CheckpointError(f"{run} holds no finished run (config.json and model/*.safetensors); {remedy}")


def tokenizer_hash(run: Path) -> str:
    """Return the SHA-256 of a run's tokenizer, whatever the spaces and the order of keys in its file."""
    path = run / "model" / "tokenizer.json"
    try:
        with open_regular(path) as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; give the --out of a finished run on texts") from error
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def count_weights(run: Path) -> int:
    """Return the number of weights in a run's model, from the headers of its files."""
    total = 0
    for path in sorted((run / "model").glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is damaged: {error}; copy it again from the run") from error
    return total


def trained_tokens(run: Path) -> int:
    """Return the tokens of a run's summary; 0 where it says none."""
    try:
        found: Any = json.loads((run / "summary.json").read_bytes())["tokens"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0
    return found if type(found) is int and 0 <= found <= 1 << 53 else 0


def copy_checkpoint(run: Path, out: Path) -> None:
    """Copy options and model of a finished run, without its logs and checkpoints, into a new folder."""
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(run / "model", partial / "model")
        shutil.copyfile(run / "config.json", partial / "config.json")
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
