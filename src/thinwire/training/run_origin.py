"""Options and data that a run began with, kept in its folder: a run that goes on must have the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from thinwire.errors import CheckpointError, DataError, refusal
from thinwire.files import write_whole
from thinwire.runlog.run_identity import RunIdentity, read_identity
from thinwire.training.config import OPTIONS, TrainConfig, meaning

ORIGIN_FILE = "origin.json"


def write_origin(config: TrainConfig) -> None:
    """Keep the options of a run that begins."""
    _write(config.run_dir, {"options": meaning(config)})


def check_options(run_dir: Path, config: TrainConfig) -> None:
    """Refuse the options in a run's `config.json` where they are not those that the run began with."""
    began = _read(run_dir).get("options")
    if not isinstance(began, dict):
        return  # a folder of an older thinwire: `run_of` compares the hash of all options
    now, edited = json.loads(json.dumps(meaning(config))), []
    for name in (name for name in OPTIONS if name in now or name in began):
        usual = TrainConfig().option(name)  # of an option that an older thinwire did not know
        there, first = now.get(name, usual), began.get(name, usual)
        edited += [f"{name} {there!r} instead of {first!r}"] if there != first else []
    if edited:
        raise CheckpointError(
            f"config.json in {run_dir} has other options than the run began with: {', '.join(edited)}; restore them "
            f"there, or begin another run with --out NEW-FOLDER"
        )


def run_of(config: TrainConfig) -> RunIdentity:
    """Return the run that goes on in its folder; refuse other options, also where their hash alone tells."""
    run, run_dir = read_identity(config.run_dir), config.run_dir
    if "options" not in _read(run_dir) and run.config_digest != config.digest():
        raise CheckpointError(
            f"{run_dir} is of run {run.run} with options {run.config_digest}, and its config.json has options "
            f"{config.digest()}; restore config.json, or start a new run"
        )
    return run


def check_corpus(config: TrainConfig, sha256: str) -> None:
    """Refuse data whose content is not what the run began with."""
    if (began := _read(config.run_dir).get("corpus", sha256)) != sha256:
        raise DataError(str(refusal(
            f"the run in {config.run_dir} began with other data", got=f"{config.data.source} with hash {sha256[:16]}",
            allowed=f"data with hash {str(began)[:16]}",
            remedy="to give it the same files again, or to begin another run with --out NEW-FOLDER",
        )))  # fmt: skip


def keep_corpus(config: TrainConfig, sha256: str) -> None:
    """Check the data, and keep its hash where none is kept yet; see `check_corpus`."""
    check_corpus(config, sha256)
    found = _read(config.run_dir)
    if "corpus" not in found:
        _write(config.run_dir, {**found, "corpus": sha256})


def _read(run_dir: Path) -> dict[str, Any]:
    try:
        found = json.loads((run_dir / ORIGIN_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(run_dir: Path, values: dict[str, Any]) -> None:
    write_whole(run_dir / ORIGIN_FILE, json.dumps(values, indent=2) + "\n")
