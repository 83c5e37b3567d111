"""`thinwire leave`: see `thinwire.cli.admin_client`."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.cli.admin_client import control


def main(arguments: Sequence[str]) -> int:
    """Run the command; see `thinwire leave --help`.

    Returns:
        0, 1 for what went wrong while running, 2 for wrong options.
    """
    return control("leave", arguments)
