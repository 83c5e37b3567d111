"""`thinwire secret`, and the secret of a job as commands are given it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from thinwire.cli.argument_parsing import argument, command
from thinwire.errors import refusal
from thinwire.transport.secret import JOIN_VARIABLE, SECRET_VARIABLE, Secret, make_secret, need_pyzmq, read_secret


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretOptions:
    """Create the secret of a job: 32 random bytes in a file that only you can read.

    Give every host of the job the same file (`thinwire train --secret FILE`). Anyone who has it can join the job.
    """

    file: Path = argument("FILE")
    """File to write; an existing file is not changed."""
    coordinator: str | None = argument("HOST:PORT", None, is_positional=False)
    """For loops of your own (`thinwire.join`), on the host HOST: give the coordinator there a key of its own, and print
    the address that names it. FILE may exist already."""


@command("secret", SecretOptions)
def main(options: SecretOptions) -> int:
    """Run `thinwire secret`."""
    file = options.file
    if options.coordinator is not None:
        return _make_coordinator_key(file, options.coordinator)
    make_secret(file)
    print(
        f"The secret is in {file}; only you can read it.\n"
        f"Copy it to every other host by a safe way, as in: scp -p {file} HOST:{file}\n"
        f"Then give it to every replica, as in: thinwire train --secret {file}"
    )
    return 0


def _make_coordinator_key(file: Path, place: str) -> int:
    need_pyzmq()
    from thinwire.elastic.coordinator_server import coordinator_keys, own_key
    from thinwire.elastic.invitation import read_invitation
    from thinwire.transport.addresses import is_own

    given = read_invitation(place)
    if given.secret is not None or given.coordinator_key or not is_own(given.host):
        raise refusal(
            "--coordinator takes the address of this host for others", got=repr(place[:60]),
            allowed="HOST:PORT with a name or address of this host", remedy="that, on the host of the coordinator",
        )  # fmt: skip
    if file.exists():
        read_secret(file)
    else:
        make_secret(file)
    given.loop_folder.mkdir(parents=True, exist_ok=True)
    key = own_key(given.loop_folder, is_made=True)
    assert key is not None
    address = replace(given, coordinator_key=coordinator_keys(key).public_bytes).text()
    print(
        f"The secret is in {file}, the coordinator's key in {given.loop_folder}; only you can read them.\n"
        f"Copy the secret alone to every other host by a safe way, as in: scp -p {file} HOST:{file}\n"
        f"Then start your loops, here in this folder, with both variables:\n"
        f"export {JOIN_VARIABLE}={address}\n"
        f"export {SECRET_VARIABLE}={file}"
    )
    return 0


def secret_file(given: Path | None, *, in_address: Secret | None = None) -> Path | None:
    """Return the file of the secret: the option's, else the environment's where the address holds no secret."""
    inherited = os.environ.get(SECRET_VARIABLE)
    return Path(inherited) if given is None and in_address is None and inherited else given
