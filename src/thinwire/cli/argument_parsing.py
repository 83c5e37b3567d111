"""From the words of a command line to a dataclass; what is wrong with them in one line."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from typing import TypeVar

import tyro

Options = TypeVar("Options")


def parse_options(kind: type[Options], arguments: Sequence[str], *, prog: str) -> Options:
    """Turn words into options.

    Args:
        kind: A dataclass; a field is an option, the text beside it its help.
        arguments: The words.
        prog: The command's name.

    Raises:
        ValueError: The words are no options of this command; in one line.
        SystemExit: After `--help`.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, prog=prog, args=list(arguments), config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(_one_line(said.getvalue(), prog=prog)) from None


def _one_line(text: str, *, prog: str) -> str:
    """Press the parser's panel into one line: what is wrong, and what was meant perhaps."""
    lines = [re.sub(r"^[│|]?\s*(.*?)\s*[│|]?$", r"\1", line) for line in text.splitlines()]
    parts = re.split(r"^[─-]{3,}$", "\n".join(line for line in lines if not line.startswith(("╭", "╰"))), flags=re.M)
    # where stdout is not UTF-8, the panel has no frame: a rule stands between its title and what is wrong
    wrong = parts[0] if "╭" in text else parts[min(1, len(parts) - 1)]
    problem = " ".join(wrong.split()).partition(" Got errors")[0].replace("{None}|", "")
    meant = re.search(r"Perhaps you meant:\s*(--[\w-]+)", text.replace("│", " "))
    hint = f"; did you mean {meant.group(1)}?" if meant else ""
    return f"{problem}{hint}; see {prog} --help"
