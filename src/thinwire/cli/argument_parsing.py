"""Command-line arguments as a dataclass, and the exit codes of errors.

A command is a function of its arguments; `command` gives it the error line and the exit code that all commands share.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import tyro

from thinwire.cli.help_text import help_of_dataclass, is_help_wanted
from thinwire.cli.output import print_error
from thinwire.errors import ThinwireError

FAILED, USAGE = 1, 2

Options = TypeVar("Options")
_Command = Callable[[Sequence[str]], int]


def command(name: str, *, remedy: str = "") -> Callable[[_Command], _Command]:
    """Return a decorator that turns the errors of a command into a line on stderr and an exit code.

    Args:
        name: The command, such as "plan".
        remedy: Advice where a file cannot be written.
    """

    def decorate(run: _Command) -> _Command:
        @functools.wraps(run)
        def main(arguments: Sequence[str]) -> int:
            try:
                return run(arguments)
            except ValueError as error:
                # the ranks of a host are given the same arguments: the first one reports what is wrong with them
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    print_error(name, error)
                return USAGE
            except ThinwireError as error:
                print_error(name, error)
            except BrokenPipeError:
                raise  # the reader of stdout has gone
            except OSError as error:
                print_error(name, _file_error(error, remedy))
            except SystemExit as stop:
                if stop.code:
                    raise
                return 0  # after --help
            return FAILED

        return main

    return decorate


def _file_error(error: OSError, remedy: str) -> str:
    if not error.filename:
        return str(error)
    reason = error.strerror or str(error)
    return f"cannot write {error.filename}: {reason}; {remedy}" if remedy else f"{reason}: {error.filename}"


def parse_options(kind: type[Options], arguments: Sequence[str], *, prog: str, basic: Iterable[str] = ()) -> Options:
    """Parse arguments into options.

    Args:
        kind: A dataclass; a field is an option, the text beside it its help.
        arguments: The arguments.
        prog: The command's name.
        basic: Options that the help lists first; all, where none is named.

    Raises:
        ValueError: The arguments are no options of this command; in one line.
        SystemExit: After `--help`.
    """
    if is_help_wanted(arguments):
        print(help_of_dataclass(kind, prog=prog, basic=basic))
        raise SystemExit(0)
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            return tyro.cli(kind, prog=prog, args=list(arguments), config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(_one_line(stderr.getvalue(), prog=prog)) from None


def _one_line(text: str, *, prog: str) -> str:
    """Return the parser's panel as one line: the problem, and the option that was perhaps meant."""
    lines = [re.sub(r"^[│|]?\s*(.*?)\s*[│|]?$", r"\1", line) for line in text.splitlines()]
    parts = re.split(r"^[─-]{3,}$", "\n".join(line for line in lines if not line.startswith(("╭", "╰"))), flags=re.M)
    # where stdout is not UTF-8, the panel has no frame: a rule stands between its title and the problem
    wrong = parts[0] if "╭" in text else parts[min(1, len(parts) - 1)]
    problem = " ".join(wrong.split()).partition(" Got errors")[0].replace("{None}|", "")
    meant = re.search(r"Perhaps you meant:\s*(--[\w-]+)", text.replace("│", " "))
    hint = f"; did you mean {meant.group(1)}?" if meant else ""
    return f"{problem}{hint}; see {prog} --help"
