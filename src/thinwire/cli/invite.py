"""`thinwire invite FOLDER`: prints an invitation that admits one replica, on the first host of an elastic run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from thinwire.cli.argument_parsing import command, parse_options
from thinwire.errors import refusal


@dataclass(frozen=True, kw_only=True)
class InviteOptions:
    """Print an address that admits one replica of another host, once.

    Run it on the first host of a job that was started with thinwire train --elastic --invite-only. A leaked
    invitation admits one replica, and a used one none.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folder of the run on its first host."""


@command("invite")
def main(arguments: Sequence[str]) -> int:
    """Run the command; see `thinwire invite --help`.

    Returns:
        0, 1 where the folder cannot be written, 2 for wrong options.
    """
    from thinwire.elastic.coordinator_server import client_keys, coordinator_keys, own_key
    from thinwire.elastic.invitation import Invitation
    from thinwire.elastic.one_time_invitations import add_invitation
    from thinwire.training.elastic.coordinator_process import JOB_FILE, read_port
    from thinwire.training.elastic.job import LocalSettings
    from thinwire.transport.secret import need_pyzmq

    need_pyzmq()
    run_dir = parse_options(InviteOptions, arguments, prog="thinwire invite").folder
    key, found = own_key(run_dir), read_port(run_dir)
    if key is None or found is None:
        raise refusal(
            "the folder is of no elastic run whose first host is this one", got=run_dir,
            allowed="the run's folder on its first host", remedy="thinwire invite there, with the folder of --out",
        )  # fmt: skip
    if not json.loads((run_dir / JOB_FILE).read_text()).get("is_invite_only"):
        raise refusal(
            "anyone who has the run's address can join it, so an invitation would limit nothing", got=run_dir,
            allowed="a run that was started with --invite-only",
            remedy="thinwire train --elastic --invite-only; a run goes on so with --resume too",
        )  # fmt: skip
    listen = LocalSettings.load(run_dir).listen()
    assert listen is not None, "the first host has written where it listens"
    shown = listen.advertised(found[1])
    place = Invitation(host=shown.host, port=shown.port, coordinator_key=coordinator_keys(key).public_bytes)
    ticket = add_invitation(run_dir, public_of=lambda secret: client_keys(secret).public_bytes)
    print(dataclasses.replace(place, secret=ticket).text())
    return 0
