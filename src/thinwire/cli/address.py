"""Address of a coordinator from the command line, stdin or the environment; the latter two keep it out of `ps`."""

from __future__ import annotations

import getpass
import os
import sys

VARIABLE = "THINWIRE_JOIN"
_MOST_CHARACTERS = 4096


def read_address(given: str, *, command: str) -> str:
    """Return the address of a coordinator.

    Args:
        given: The command's argument: an address, `-` for a line of stdin, or empty for the environment's variable.
        command: The command, for messages.

    Raises:
        ValueError: There is none.
    """
    # not for the processes that this one starts: they read the secret from its file
    inherited = os.environ.pop(VARIABLE, "")
    if given == "-":
        is_typed = sys.stdin.isatty()
        prompt = "address that the first host printed (not shown): "
        line = getpass.getpass(prompt) if is_typed else sys.stdin.readline(_MOST_CHARACTERS)
        if not line.strip():
            raise ValueError(
                f"stdin holds no address; paste the one that the first host printed: {command} - <<< ADDRESS"
            )
        return line.strip()
    if not (given or inherited):
        raise ValueError(
            f"{command} needs the address that the first host printed: as its argument, - to read it from stdin, or in "
            f"{VARIABLE}"
        )
    return given or inherited.strip()
