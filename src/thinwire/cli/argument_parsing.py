"""Command-line arguments as a dataclass, and the exit codes of errors.

A command is a function of its arguments; `command` gives it the error line and the exit code that all commands share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import io
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from thinwire.cli.help_text import help_of_dataclass, is_help_wanted
from thinwire.cli.output import print_error
from thinwire.errors import ThinwireError, refusal, unknown_name
from thinwire.options import flag, rule_of

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


def parse_options(
    kind: type[Options], arguments: Sequence[str], *, prog: str, basic: Iterable[str] = (), also: Sequence[str] = ()
) -> Options:
    """Parse arguments into options.

    Args:
        kind: A dataclass; a field is an option, the text beside it its help.
        arguments: The arguments.
        prog: The command's name.
        basic: Options that the help lists first; all, where none is named.
        also: Options that the caller has taken already, for the suggestion where one is misspelt.

    Raises:
        ValueError: The arguments are no options of this command, or a value is outside of its rules; in one line.
        SystemExit: After `--help`.
    """
    if is_help_wanted(arguments):
        print(help_of_dataclass(kind, prog=prog, basic=basic))
        raise SystemExit(0)
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            options = tyro.cli(kind, prog=prog, args=list(arguments), config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as stop:
        if not stop.code:
            raise
        _explain(kind, arguments, prog=prog, also=also)
        raise ValueError(_one_line(stderr.getvalue(), prog=prog)) from None
    _check_rules(options)
    return options


def _check_rules(options: object) -> None:
    """Refuse values outside of the rules at their fields; of several values, each counts."""
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        rule, given = rule_of(field), getattr(options, field.name)
        for value in given if isinstance(given, tuple) else (given,):
            problem = rule.problem(flag(field.name), value, default=field.default)
            if rule.least is not None and isinstance(value, float) and not value < math.inf:
                problem = refusal(f"{flag(field.name)} is not finite", got=value, allowed=rule.allowed,
                                  remedy=f"{flag(field.name)} {field.default or max(1, rule.least)}")  # fmt: skip
            if problem is not None:
                raise problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """An option of a command line: the kind of its value, its default, and whether it has a name."""

    kind: Any
    default: Any
    is_named: bool


def _options_of(kind: Any) -> dict[str, _Option]:
    """Return the options of a dataclass and of the dataclasses in it, by the name on the command line."""
    plain = typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind
    hints = typing.get_type_hints(plain, include_extras=True)
    found: dict[str, _Option] = {}
    for field in dataclasses.fields(plain):
        marks = [hints[field.name]]
        while typing.get_origin(marks[0]) is Annotated:
            marks = [*typing.get_args(marks[0]), *marks[1:]]
        members = [part for part in typing.get_args(marks[0]) if part is not type(None)]
        is_union = typing.get_origin(marks[0]) in (typing.Union, types.UnionType)
        value = members[0] if is_union and len(members) == 1 else marks[0]
        if dataclasses.is_dataclass(value):
            found |= _options_of(value)
            continue
        is_named = tyro.conf.Positional not in marks[1:]
        word = "name" if is_named else "metavar"
        name = next((text for mark in marks[1:] if isinstance(text := getattr(mark, word, None), str)), field.name)
        found[f"--{name.replace('_', '-')}" if is_named else name] = _Option(
            kind=value, default=field.default, is_named=is_named
        )
    return found


def _explain(kind: Any, arguments: Sequence[str], *, prog: str, also: Sequence[str]) -> None:
    """Raise the error of the first argument that is wrong; return where the parser knows better.

    Raises:
        ValueError: Names the argument, its value, what is allowed and what to try.
    """
    options = _options_of(kind)
    named = {flag: option for flag, option in options.items() if option.is_named}
    switches = {flag: option for flag, option in named.items() if option.kind is bool}
    switches |= {f"--no-{flag[2:]}": option for flag, option in switches.items() if option.default is True}
    help_of = f"{prog} --help"
    words, num_plain = list(arguments), 0
    while words:
        word = words.pop(0)
        flag, sign, value = word.partition("=")
        flag = flag.replace("_", "-")
        if not word.startswith("--"):
            num_plain += 1
            if len(named) == len(options):
                raise refusal("an argument without an option", got=repr(word), allowed="options that begin with --",
                              remedy=help_of)  # fmt: skip
        elif flag in switches:
            continue
        elif flag not in named:
            near = difflib.get_close_matches(flag, [*also, *named, *switches], n=1)
            raise refusal(
                "unknown option", got=flag, allowed=f"those of {help_of}", remedy=near[0] if near else help_of
            )
        else:
            if not sign and (not words or words[0].startswith("--")):
                raise refusal(f"{flag} has no value", got="nothing", allowed=_allowed(named[flag].kind),
                              remedy=_example(flag, "", named[flag], help_of))  # fmt: skip
            _check_value(flag, value if sign else words.pop(0), named[flag], help_of=help_of)
    missing = [flag for flag, one in options.items() if not one.is_named and one.default is dataclasses.MISSING]
    if missing and not num_plain:
        raise refusal(f"{missing[0].upper()} is missing", got="nothing", allowed="an argument", remedy=help_of)


def _check_value(flag: str, text: str, option: _Option, *, help_of: str) -> None:
    kind = typing.get_args(option.kind)[0] if typing.get_origin(option.kind) is tuple else option.kind
    if typing.get_origin(kind) is typing.Literal and text not in typing.get_args(kind):
        raise unknown_name(flag, text, typing.get_args(kind))
    if kind in (int, float) and text != "None":
        try:
            kind(text)
        except ValueError:
            raise refusal(f"{flag} is {'no whole number' if kind is int else 'no number'}", got=repr(text),
                          allowed=_allowed(kind), remedy=_example(flag, text, option, help_of)) from None  # fmt: skip


def _allowed(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(typing.get_args(kind))
    kind = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind
    return {int: "a whole number", float: "a number", Path: "a path"}.get(kind, "a text")


def _example(flag: str, text: str, option: _Option, help_of: str) -> str:
    """Return the option with a value that it takes: the number that the text begins with, or the default."""
    number = re.match(r"[-+]?[0-9]+" if option.kind is int else r"[-+]?[0-9]*\.?[0-9]+(e[-+]?[0-9]+)?", text.lower())
    if number:
        return f"{flag} {number.group()}"
    is_known = option.default is not dataclasses.MISSING and option.default not in (None, ())
    return f"{flag} {option.default}" if is_known else help_of


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
