"""Admin commands to the coordinator of an elastic job: status, pause, resume, leave."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from thinwire.cli.argument_parsing import FAILED, command, parse_options
from thinwire.cli.output import log, print_error
from thinwire.errors import excluded, refusal

_DEADLINE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class StatusOptions:
    """Show state and members of a running job of `thinwire train --elastic`."""

    address: Annotated[str, tyro.conf.Positional] = ""
    """Address that the first host printed, - to read it from stdin, KEY@HOST:PORT of it with --secret, or the run's
    folder. Default: the environment's THINWIRE_JOIN."""
    secret: Path | None = None
    """File of the job's secret, if the address does not contain it. Default: the environment's
    THINWIRE_SECRET_FILE."""
    json: bool = False
    """Print one JSON object on stdout."""


@dataclass(frozen=True, kw_only=True)
class AdminOptions(StatusOptions):
    """Pause, resume or remove replicas of a running job of `thinwire train --elastic`."""

    replica: int | None = None
    """Number of the replica. Default: all; `leave` needs a replica or a host."""
    host: str | None = None
    """Host whose replicas are meant."""


@command("status")
def status(arguments: Sequence[str]) -> int:
    """Run the command; see `thinwire status --help`.

    Returns:
        0, 1 for an error while running, 2 for wrong options.
    """
    return _send("status", parse_options(StatusOptions, arguments, prog="thinwire status"), target="")


@command("pause")
def pause(arguments: Sequence[str]) -> int:
    """Run the command; see `thinwire pause --help`.

    Returns:
        0, 1 for an error while running, 2 for wrong options.
    """
    return _send_to_replicas("pause", arguments)


@command("resume")
def resume(arguments: Sequence[str]) -> int:
    """Run the command; see `thinwire resume --help`.

    Returns:
        0, 1 for an error while running, 2 for wrong options.
    """
    return _send_to_replicas("resume", arguments)


@command("leave")
def leave(arguments: Sequence[str]) -> int:
    """Run the command; see `thinwire leave --help`.

    Returns:
        0, 1 for an error while running, 2 for wrong options.
    """
    return _send_to_replicas("leave", arguments)


def _send_to_replicas(verb: str, arguments: Sequence[str]) -> int:
    options = parse_options(AdminOptions, arguments, prog=f"thinwire {verb}")
    if options.replica is not None and options.host is not None:
        raise excluded("--replica", "--host", why="one names a replica, the other all of a host", remedy="one of them")
    target = options.host or ("" if options.replica is None else str(options.replica))
    if verb == "leave" and not target:
        raise refusal("the replica that shall leave is missing", got="nothing", allowed="--replica N or --host NAME",
                      remedy="thinwire status, which lists the members")  # fmt: skip
    return _send(verb, options, target=target)


def _send(verb: str, options: StatusOptions, *, target: str) -> int:
    from thinwire.cli.secret import check_secret, read_address, secret_file
    from thinwire.elastic.invitation import read_invitation
    from thinwire.transport.secret import need_pyzmq, read_secret

    need_pyzmq()
    address, path = read_address(options.address, command=f"thinwire {verb}"), options.secret
    if Path(address).is_dir():
        address, path = _address_of_run(Path(address), path)
    invitation = read_invitation(address)
    path = secret_file(path, in_address=invitation.secret)
    check_secret(invitation.secret, path)
    secret = invitation.secret or read_secret(path or Path())
    from thinwire.cli.elastic_run import show_status
    from thinwire.elastic.coordinator_client import send_command

    answer = send_command(invitation, secret=secret, deadline_s=_DEADLINE_S, verb=verb, target=target)
    if verb == "status" or options.json:
        show_status(answer["status"], as_json=options.json)
    if not answer["ok"]:
        print_error(verb, answer["text"])
        return FAILED
    if answer["text"]:
        log(answer["text"])
    return 0


def _address_of_run(run_dir: Path, path: Path | None) -> tuple[str, Path]:
    """Return the address of the job of a run's folder, and its secret's file."""
    from thinwire.training.elastic.job import LOCAL_FILE

    try:
        settings = json.loads((run_dir / LOCAL_FILE).read_text())
        return str(settings["invitation"]), path or Path(settings["secret"])
    except (OSError, ValueError, KeyError):
        raise refusal(
            f"the folder is of no elastic run, for it has no {LOCAL_FILE}", got=run_dir,
            allowed="an address, or the folder of an elastic run", remedy="thinwire status ADDRESS",
        ) from None  # fmt: skip
