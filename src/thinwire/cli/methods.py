"""`thinwire methods`: the methods with one line each."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Print each method's name and the first line of its documentation."""
    if arguments and arguments[0] not in ("-h", "--help"):
        print(f"thinwire methods: takes no options, got {arguments[0]!r}", file=sys.stderr)
        return 2
    if arguments:
        print("usage: thinwire methods\n\nList the methods that `thinwire train --method` knows.")
        return 0
    from thinwire.methods import RECIPES

    width = max(map(len, RECIPES))
    for name, recipe in RECIPES.items():
        print(f"{name.ljust(width)}  {(recipe.__doc__ or '').strip().splitlines()[0]}")
    return 0
