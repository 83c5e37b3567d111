"""`thinwire secret`, and the secret and address of a job as commands are given them."""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from thinwire.cli.argument_parsing import command, parse_options
from thinwire.errors import refusal
from thinwire.transport.secret import JOIN_VARIABLE, SECRET_VARIABLE, Secret, make_secret

_MAX_CHARACTERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretOptions:
    """Create the secret of a job: 32 random bytes in a file that only you can read.

    Give every host of the job the same file (`thinwire train --secret FILE`). Anyone who has it can join the job.
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """File to write; an existing file is not changed."""


@command("secret")
def main(arguments: Sequence[str]) -> int:
    """Run the command; see `thinwire secret --help`.

    Returns:
        0, 1 where the file cannot be written, 2 for wrong options.
    """
    file = parse_options(SecretOptions, arguments, prog="thinwire secret").file
    make_secret(file)
    print(
        f"The secret is in {file}; only you can read it.\n"
        f"Copy it to every other host by a safe way, as in: scp -p {file} HOST:{file}\n"
        f"Then give it to every replica, as in: thinwire train --secret {file}"
    )
    return 0


def read_address(given: str, *, command: str) -> str:
    """Return the address of a coordinator; stdin and the environment keep it out of `ps`.

    Args:
        given: The command's argument: an address, `-` for a line of stdin, or empty for the environment's variable.
        command: The command, for messages.

    Raises:
        ValueError: There is none.
    """
    # not for the processes that this one starts: they read the secret from its file
    inherited = os.environ.pop(JOIN_VARIABLE, "")
    if given == "-":
        prompt = "address that the first host printed (not shown): "
        line = getpass.getpass(prompt) if sys.stdin.isatty() else sys.stdin.readline(_MAX_CHARACTERS)
        if not line.strip():
            raise refusal("stdin holds no address", got="nothing", allowed="the address that the first host printed",
                          remedy=f"{command} - <<< ADDRESS")  # fmt: skip
        return line.strip()
    if not (given or inherited):
        raise refusal(
            "the address is missing", got="nothing", allowed=f"an argument, - for stdin, or {JOIN_VARIABLE}",
            remedy=f"{command} - <<< ADDRESS, with the address that the first host printed",
        )  # fmt: skip
    return given or inherited.strip()


def secret_file(given: Path | None, *, in_address: Secret | None = None) -> Path | None:
    """Return the file of the secret: the option's, else the environment's where the address holds no secret."""
    inherited = os.environ.get(SECRET_VARIABLE)
    return Path(inherited) if given is None and in_address is None and inherited else given


def check_secret(in_address: Secret | None, path: Path | None) -> None:
    """Check that a job's secret is in its address or in a file.

    Raises:
        ValueError: It is in neither.
    """
    if in_address is None and path is None:
        raise refusal(
            "the address holds no secret", got="HOST:PORT alone",
            allowed="thinwire://HOST:PORT/SECRET, or --secret FILE",
            remedy="the whole address that the first host printed",
        )  # fmt: skip
