"""`thinwire checkpoints PATH_OR_URL`: list and verification of a run's checkpoints."""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.argument_parsing import argument, command
from thinwire.cli.output import log, printable
from thinwire.cli.tables import print_table
from thinwire.errors import CheckpointError
from thinwire.units import format_bytes, format_count

if TYPE_CHECKING:
    from thinwire.training.checkpoints.checkpoint_files import CheckpointFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsOptions:
    """List a run's checkpoints: step, size, tokens, and whether each is complete.

    The exit code is 1 if one is damaged or incomplete.
    """

    place: str = argument("PATH_OR_URL")
    """Folder of the run or of its checkpoints, or an fsspec URL such as s3://bucket/run."""
    verify: bool = False
    """Also check the SHA-256 of every file, not only sizes and JSON files."""
    json: bool = False
    """Print one JSON object on stdout instead of a table."""


@command("checkpoints", CheckpointsOptions)
def main(options: CheckpointsOptions) -> int:
    """Run `thinwire checkpoints`."""
    place = options.place
    if "://" not in place:
        folder = Path(place)
        if not folder.is_dir():
            raise CheckpointError(f"there is no folder {place}; name a run's folder, or a URL")
        inner = folder / "checkpoints"
        place = str(inner if inner.is_dir() else folder)
    from thinwire.training.checkpoints.checkpoint_files import open_storage
    from thinwire.training.checkpoints.global_checkpoints import global_files
    from thinwire.training.checkpoints.replica_checkpoints import replica_files

    storage = open_storage(place)
    # the state of an elastic run is of no replica, since all share it
    every: list[tuple[int | None, CheckpointFiles]] = [(None, global_files(storage)), *replica_files(storage).items()]
    found = [
        _row(files, step, verify=options.verify, replica=replica) for replica, files in every for step in files.steps()
    ]
    found.sort(key=lambda one: one["step"])
    if options.json:
        print(json_format.dumps({"place": storage.name, "checkpoints": found}))
    elif found:
        rows = (
            (
                one["step"], "-" if one["bytes"] is None else format_bytes(one["bytes"]),
                "-" if one["tokens"] is None else format_count(one["tokens"]),
                "all" if one["replica"] is None else one["replica"], one["run"] or "-",
                one["problem"] or ("verified" if one["is_verified"] else "complete, not verified"),
            )
            for one in found
        )  # fmt: skip
        heads = ("step", "size", f"{_samples(place)} seen", "replica", "run", "state")
        print_table(heads, rows, left=("replica", "run", "state"))
    else:
        log(f"{printable(storage.name)} holds no checkpoint", command="checkpoints")
    return int(any(one["problem"] for one in found))


def _samples(place: str) -> str:
    """Return what the run of these checkpoints counts, as far as its own folder tells."""
    from thinwire.training.config import read_config
    from thinwire.workloads.cards import card_of

    try:
        workload = read_config(Path(place).parent).run.workload
    except CheckpointError:
        return "samples"
    return "samples" if ":" in workload else card_of(workload).measures.samples  # a program's own is not run for this


def _row(files: CheckpointFiles, step: int, *, verify: bool, replica: int | None) -> dict[str, Any]:
    """Return what is known of a checkpoint: `problem` is empty where nothing is wrong, others None where unknown."""
    row: dict[str, Any] = {"step": step, "bytes": None, "tokens": None, "is_verified": False, "problem": "",
                           "run": None, "replica": replica}  # fmt: skip
    try:
        found = files.describe(step)
    except CheckpointError as error:
        return {**row, "problem": str(error)}
    problem = files.problem(step) if verify else ""
    tokens = found.note.get("tokens")
    return {
        **row, "bytes": found.num_bytes, "is_verified": verify and not problem, "problem": problem,
        "tokens": tokens if isinstance(tokens, int) and not isinstance(tokens, bool) else None,
        "run": None if found.run is None else found.run["id"],
    }  # fmt: skip
