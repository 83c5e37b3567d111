"""`thinwire secret FILE`: makes the secret of a job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from thinwire.cli.argument_parsing import parse_options
from thinwire.transport.secret import make_secret

USAGE, FAILED = 2, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretOptions:
    """Make the secret of a job: 32 random bytes in a file that only you can read.

    Every host of the job is given the same file (`thinwire train --secret FILE`). Whoever has it can join the job.
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Where the secret goes; a file that exists is left alone."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; see `thinwire secret --help`.

    Returns:
        0, 1 where the file cannot be written, 2 for wrong options.
    """
    try:
        file = parse_options(SecretOptions, arguments, prog="thinwire secret").file
        make_secret(file)
    except ValueError as error:
        return _fail(USAGE, error)
    except OSError as error:
        return _fail(FAILED, f"{error.strerror}: {file}")
    except SystemExit:  # after --help
        return 0
    print(
        f"The secret is in {file}; only you can read it.\n"
        f"Copy it to every other host by a safe way, as in: scp -p {file} HOST:{file}\n"
        f"Then give it to every replica, as in: thinwire train --secret {file}"
    )
    return 0


def _fail(code: int, error: object) -> int:
    print(f"thinwire secret: error: {error}", file=sys.stderr)
    return code
