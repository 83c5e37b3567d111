"""`thinwire secret`, and the secret of a job as commands are given it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from thinwire.cli.argument_parsing import argument, command
from thinwire.transport.secret import SECRET_VARIABLE, Secret, make_secret


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretOptions:
    """Create the secret of a job: 32 random bytes in a file that only you can read.

    Give every host of the job the same file (`thinwire train --secret FILE`). Anyone who has it can join the job.
    """

    file: Path = argument("FILE")
    """File to write; an existing file is not changed."""


@command("secret", SecretOptions)
def main(options: SecretOptions) -> int:
    """Run `thinwire secret`."""
    file = options.file
    make_secret(file)
    print(
        f"The secret is in {file}; only you can read it.\n"
        f"Copy it to every other host by a safe way, as in: scp -p {file} HOST:{file}\n"
        f"Then give it to every replica, as in: thinwire train --secret {file}"
    )
    return 0


def secret_file(given: Path | None, *, in_address: Secret | None = None) -> Path | None:
    """Return the file of the secret: the option's, else the environment's where the address holds no secret."""
    inherited = os.environ.get(SECRET_VARIABLE)
    return Path(inherited) if given is None and in_address is None and inherited else given
