"""Words to the coordinator of a running elastic job: how it goes, and who is to pause, go on or leave."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from thinwire.cli.words import read_words
from thinwire.errors import ThinwireError

_DEADLINE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class StatusOptions:
    """Ask the coordinator of a running job of `thinwire train --elastic` how it goes."""

    address: Annotated[str, tyro.conf.Positional] = ""
    """The address that the first host printed, - to read it from stdin, HOST:PORT together with --secret, or the run's
    folder. Default: the environment's THINWIRE_JOIN."""
    secret: Path | None = None
    """File of the job's secret, where the address does not hold it."""
    json: bool = False
    """Print the job's state as one JSON object on stdout."""


@dataclass(frozen=True, kw_only=True)
class ControlOptions(StatusOptions):
    """Say something to the coordinator of a running job of `thinwire train --elastic`."""

    replica: int | None = None
    """The replica that is meant. Default: all (leave needs one, or a host)."""
    host: str | None = None
    """The host whose replicas are meant."""


def control(verb: str, arguments: Sequence[str]) -> int:
    """Run one of the commands.

    Args:
        verb: status, pause, resume or leave.
        arguments: The words behind it.

    Returns:
        0, 1 for what went wrong while running, 2 for wrong options.
    """
    try:
        if verb == "status":
            return _say(verb, read_words(StatusOptions, arguments, prog="thinwire status"), target="")
        options = read_words(ControlOptions, arguments, prog=f"thinwire {verb}")
        return _say(verb, options, target=_target(verb, options))
    except ValueError as error:
        return _fail(verb, 2, error)
    except ThinwireError as error:
        return _fail(verb, 1, error)


def _target(verb: str, options: ControlOptions) -> str:
    """Return who is meant, as the coordinator reads it; empty for all."""
    if options.replica is not None and options.host is not None:
        raise ValueError("give --replica or --host, not both")
    target = options.host or ("" if options.replica is None else str(options.replica))
    if verb == "leave" and not target:
        raise ValueError("thinwire leave needs --replica N or --host NAME; see who is there with: thinwire status")
    return target


def _say(verb: str, options: StatusOptions, *, target: str) -> int:
    from thinwire.cli.address import read_address
    from thinwire.cli.elastic_run import show_status, tell
    from thinwire.elastic.coordinator_client import send_command
    from thinwire.elastic.invitation import read_invitation
    from thinwire.transport.secret import need_pyzmq, read_secret

    need_pyzmq()
    words, path = read_address(options.address, command=f"thinwire {verb}"), options.secret
    if Path(words).is_dir():
        words, path = _of_folder(Path(words), path)
    invitation = read_invitation(words)
    secret = invitation.secret or (read_secret(path) if path is not None else None)
    if secret is None:
        raise ValueError(
            "the address holds no secret; give the whole address that the first host printed "
            "(thinwire://HOST:PORT/SECRET), or the secret's file by --secret"
        )
    answer = send_command(invitation, secret=secret, deadline_s=_DEADLINE_S, verb=verb, target=target)
    if verb == "status" or options.json:
        show_status(answer["status"], as_json=options.json)
    if not answer["ok"]:
        return _fail(verb, 1, answer["text"])
    if answer["text"]:
        tell(answer["text"])
    return 0


def _of_folder(run_dir: Path, path: Path | None) -> tuple[str, Path]:
    """Return where the job of a run's folder is, and its secret's file."""
    from thinwire.training.elastic.job import LOCAL_FILE

    try:
        settings = json.loads((run_dir / LOCAL_FILE).read_text())
        return str(settings["invitation"]), path or Path(settings["secret"])
    except (OSError, ValueError, KeyError):
        raise ValueError(f"{run_dir} is no folder of an elastic run (no {LOCAL_FILE})") from None


def _fail(verb: str, code: int, error: object) -> int:
    print(f"thinwire {verb}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return code
