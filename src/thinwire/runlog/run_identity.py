"""Identity of a run: its id, the hash of its options, and the incarnations that led to the present one.

A run keeps its id for good. Each time that an elastic run is resumed is a new incarnation, named by a random word that
is added to a list. Two survivors that both go on with a run have lists that differ in the last word,
so that their states and replicas are never mixed.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import CheckpointError, Refused
from thinwire.files import write_whole

RUN_FILE = "run.json"
_WORD = re.compile(r"[0-9a-f]{16}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)
# An elastic run that was resumed more often than this forgets its oldest incarnations.
_MOST_INCARNATIONS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Identity of a run.

    Attributes:
        run: The id: 16 hexadecimal digits, drawn at the run's start.
        config_digest: Hash of the options that change what is computed.
        incarnations: Names of the coordinators that led to the present one, which is the last.

    Example:
        >>> first = new_identity(config_digest=32 * "0")
        >>> again = first.next_incarnation()
        >>> again.run == first.run, again.descends_from(first), first.descends_from(again)
        (True, True, False)
    """

    run: str
    config_digest: str
    incarnations: tuple[str, ...]

    @property
    def incarnation(self) -> str:
        return self.incarnations[-1]

    def next_incarnation(self) -> RunIdentity:
        """Return the identity of the same run under a coordinator of its own."""
        incarnations = (*self.incarnations, secrets.token_hex(8))[-_MOST_INCARNATIONS:]
        return dataclasses.replace(self, incarnations=incarnations)

    def descends_from(self, other: RunIdentity) -> bool:
        """Return whether the other identity is this one, or one that it goes on from."""
        return self.run == other.run and other.incarnation in self.incarnations

    def stamp(self) -> dict[str, str]:
        """Return what a checkpoint states of the run that wrote it."""
        return {"id": self.run, "config": self.config_digest, "incarnation": self.incarnation}

    def foreign(self, stamp: object) -> str:
        """Return why a checkpoint with this stamp is not of this run, naming both; empty where it is."""
        if not isinstance(stamp, Mapping):
            return f"it names no run, and this is run {self.run}"
        run, config, incarnation = (str(stamp.get(name))[:64] for name in ("id", "config", "incarnation"))
        if run != self.run:
            return f"it is of run {run}, and this is run {self.run}"
        if config != self.config_digest:
            return f"it is of run {run} with options {config}, and this run's options are {self.config_digest}"
        if incarnation not in self.incarnations:
            return (
                f"it is of incarnation {incarnation} of run {run}, which went on apart, and this is incarnation "
                f"{self.incarnation}"
            )
        return ""

    def age(self, stamp: object) -> int:
        """Return the place of a stamp's incarnation in this run's list, 0 for the oldest."""
        incarnation = stamp.get("incarnation") if isinstance(stamp, Mapping) else None
        return self.incarnations.index(incarnation) if incarnation in self.incarnations else -1

    def to_json(self) -> dict[str, Any]:
        return {"run": self.run, "config_digest": self.config_digest, "incarnations": list(self.incarnations)}


def new_identity(*, config_digest: str) -> RunIdentity:
    """Return the identity of a run that begins now."""
    return RunIdentity(run=secrets.token_hex(8), config_digest=config_digest, incarnations=(secrets.token_hex(8),))


def identity_from_json(values: object) -> RunIdentity:
    """Take back what `RunIdentity.to_json` returned; it may come over the network.

    Raises:
        ValueError: It is no identity; names the field.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"a run's identity must be an object, got {type(values).__name__}")
    run, digest, incarnations = (values.get(name) for name in ("run", "config_digest", "incarnations"))
    if not isinstance(run, str) or not _WORD.fullmatch(run):
        raise ValueError(f"run must be 16 hexadecimal digits, got {str(run)[:40]!r}")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"config_digest must be 32 hexadecimal digits, got {str(digest)[:40]!r}")
    is_list = isinstance(incarnations, list) and 0 < len(incarnations) <= _MOST_INCARNATIONS
    if not is_list or not all(isinstance(word, str) and _WORD.fullmatch(word) for word in incarnations or ()):
        raise ValueError(
            f"incarnations must be 1 to {_MOST_INCARNATIONS} words of 16 hexadecimal digits, got "
            f"{str(incarnations)[:80]!r}"
        )
    return RunIdentity(run=run, config_digest=digest, incarnations=tuple(incarnations or ()))


def read_identity(run_dir: Path) -> RunIdentity:
    """Read the identity of the run in a folder.

    Raises:
        CheckpointError: The folder holds none, or it is damaged.
    """
    path = run_dir / RUN_FILE
    try:
        return identity_from_json(json.loads(path.read_bytes()))
    except FileNotFoundError:
        raise CheckpointError(
            f"{run_dir} holds no run id (no {RUN_FILE}): a thinwire before run ids wrote it, and nothing tells whose "
            f"checkpoints it would go on from; go on with that thinwire, or start a new run with --overwrite"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror}; let this user read it, or start a new run with --overwrite"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}); restore it, or start a new run with --overwrite"
        ) from error


def write_identity(run_dir: Path, identity: RunIdentity) -> None:
    """Write the identity into a run's folder.

    Raises:
        OSError: It cannot be written.
    """
    write_whole(run_dir / RUN_FILE, json.dumps(identity.to_json(), indent=1) + "\n")


def check_folder(run_dir: Path, job: RunIdentity) -> bool:
    """Check that a joining host's folder is new, or of a past of the job that is joined.

    Returns:
        Whether the folder states another past than the job, so that its identity is to be written.

    Raises:
        Refused: The folder is of another run or incarnation; names both and the remedy.
    """
    if not (run_dir / RUN_FILE).exists():
        return True
    own = read_identity(run_dir)
    if own.run != job.run:
        raise Refused(
            f"{run_dir} holds run {own.run}, and the coordinator runs {job.run}; join with another folder: --out FOLDER"
        )
    if not job.descends_from(own):
        raise Refused(
            f"{run_dir} holds incarnation {own.incarnation} of run {own.run}, and the coordinator is incarnation "
            f"{job.incarnation} of it, which does not descend from that one: two hosts went on with the run apart; "
            f"join the coordinator that this folder belongs to, or leave its state behind: --out NEW-FOLDER"
        )
    return own != job
