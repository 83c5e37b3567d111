"""`thinwire checkpoints PATH_OR_URL`: list and verification of a run's checkpoints."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.table import Table

from thinwire.cli.argument_parsing import command, parse_options
from thinwire.cli.output import log, printable
from thinwire.cli.tables import plain, print_wide
from thinwire.errors import CheckpointError
from thinwire.units import format_bytes, format_count

if TYPE_CHECKING:
    from thinwire.training.checkpoints.checkpoint_files import CheckpointFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsOptions:
    """List a run's checkpoints: step, size, tokens, and whether each is complete.

    The exit code is 1 if one is damaged or incomplete.
    """

    place: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH_OR_URL")]
    """Folder of the run or of its checkpoints, or an fsspec URL such as s3://bucket/run."""
    verify: bool = False
    """Also check the SHA-256 of every file, not only sizes and JSON files."""
    json: bool = False
    """Print one JSON object on stdout instead of a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One checkpoint as it is listed.

    Attributes:
        step: Its step.
        bytes: Of its tensors' files; None where it does not say.
        tokens: Tokens, or other samples, seen by all replicas together, where its note says.
        is_verified: Whether every file was read and is as it was written.
        problem: What is wrong with it, or an empty text.
        run: Id of the run that wrote it; None where it names none.
        replica: The replica whose state it is; None for the state of an elastic run, which all replicas share.
    """

    step: int
    bytes: int | None
    tokens: int | None
    is_verified: bool
    problem: str
    run: str | None = None
    replica: int | None = None


@command("checkpoints")
def main(arguments: Sequence[str]) -> int:
    """Run the command; see `thinwire checkpoints --help`.

    Returns:
        0, 1 where a checkpoint is damaged or the place cannot be read, 2 for wrong options.
    """
    options = parse_options(CheckpointsOptions, arguments, prog="thinwire checkpoints")
    place = _place(options.place)
    from thinwire.training.checkpoints.checkpoint_files import open_storage
    from thinwire.training.checkpoints.global_checkpoints import global_files
    from thinwire.training.checkpoints.replica_checkpoints import replica_files

    storage = open_storage(place)
    elastic = global_files(storage)
    found = [_listed(elastic, step, verify=options.verify) for step in elastic.steps()]
    for replica, files in replica_files(storage).items():
        found += [_listed(files, step, verify=options.verify, replica=replica) for step in files.steps()]
    found.sort(key=lambda one: one.step)
    if options.json:
        print(json_format.dumps({"place": storage.name, "checkpoints": [asdict(one) for one in found]}))
    elif found:
        print_wide(_table(found, samples=_samples(place)))
    else:
        log(f"{printable(storage.name)} holds no checkpoint", command="checkpoints")
    return int(any(one.problem for one in found))


def _place(text: str) -> str:
    if "://" in text:
        return text
    folder = Path(text)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {text}; name a run's folder, or a URL")
    inner = folder / "checkpoints"
    return str(inner if inner.is_dir() else folder)


def _listed(files: CheckpointFiles, step: int, *, verify: bool, replica: int | None = None) -> Listed:
    try:
        found = files.describe(step)
    except CheckpointError as error:
        return Listed(step=step, bytes=None, tokens=None, is_verified=False, problem=str(error), replica=replica)
    problem = files.problem(step) if verify else ""
    tokens = found.note.get("tokens")
    return Listed(
        step=step,
        bytes=found.num_bytes,
        tokens=tokens if isinstance(tokens, int) and not isinstance(tokens, bool) else None,
        is_verified=verify and not problem,
        problem=problem,
        run=None if found.run is None else found.run["id"],
        replica=replica,
    )


def _samples(place: str) -> str:
    """Return what the run of these checkpoints counts, as far as its own folder tells."""
    from thinwire.training.config import read_config
    from thinwire.workloads.cards import card_of

    try:
        workload = read_config(Path(place).parent).run.workload
    except CheckpointError:
        return "samples"
    return "samples" if ":" in workload else card_of(workload).measures.samples  # a program's own is not run for this


def _table(found: list[Listed], *, samples: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("step", "size", f"{samples} seen"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("replica", no_wrap=True)
    table.add_column("run", no_wrap=True)
    table.add_column("state")
    for one in found:
        table.add_row(
            str(one.step),
            "-" if one.bytes is None else format_bytes(one.bytes),
            "-" if one.tokens is None else format_count(one.tokens),
            "all" if one.replica is None else str(one.replica),
            one.run or "-",
            plain(one.problem or ("verified" if one.is_verified else "complete, not verified")),
        )
    return table
