"""Command lines: options as fields of a dataclass, their help, how arguments are read, and exit codes of errors.

The string below a field is the option's help. A command is a function of its options; `command` reads them, and gives
all commands the same error line and exit codes.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import math
import os
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, TypeVar

from thinwire.cli.output import ReaderGone, print_error
from thinwire.errors import ThinwireError, refusal, unknown_name
from thinwire.options import flag, rule_of

FAILED, USAGE = 1, 2
_MAX_COLUMNS = 100
_NAME_COLUMNS = 24
# How the help writes a kind of value, and how an error does.
_METAVARS: dict[Any, str] = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
_VALUES: dict[Any, str] = {int: "a whole number", float: "a number", Path: "a path"}
_Kind = TypeVar("_Kind")


def argument(metavar: str, default: Any = MISSING, *, is_positional: bool = True) -> Any:
    """Return a dataclass field for an argument without a name, or an option whose value the help calls `metavar`."""
    return dataclasses.field(default=default, metadata={"metavar": metavar, "is_positional": is_positional})


def command(
    name: str, kind: type[Any] | None = None, *, prog: str = "", basic: str = "", remedy: str = ""
) -> Callable[[Callable[[Any], int]], Callable[[Sequence[str]], int]]:
    """Return a decorator that makes a command of a function: from arguments to an exit code.

    Wrong options end with 2 and other errors of thinwire with 1, after a line on stderr.

    Args:
        name: The command in errors, such as "plan".
        kind: Dataclass of the options, which the function gets; without one it gets the arguments.
        prog: The command as the help shows it; "thinwire" and the name by default.
        basic: Names of options that the help lists first; all, where none is named.
        remedy: Advice where a file cannot be written.
    """

    def decorate(run: Callable[[Any], int]) -> Callable[[Sequence[str]], int]:
        @functools.wraps(run)
        def main(arguments: Sequence[str]) -> int:
            try:
                if kind is None:
                    return run(arguments)
                return run(parse_options(kind, arguments, prog=prog or f"thinwire {name}", basic=basic))
            except SystemExit as stop:
                if stop.code:
                    raise
                return 0  # after --help
            except ReaderGone:
                raise
            except (ValueError, ThinwireError, OSError) as error:
                return _report(name, error, remedy=remedy)

        return main

    return decorate


def _report(name: str, error: Exception, *, remedy: str) -> int:
    """Print an error, and return the exit code that belongs to it."""
    if isinstance(error, ValueError):
        # the ranks of a host are given the same arguments: the first one reports what is wrong with them
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print_error(name, error)
        return USAGE
    print_error(name, file_error(error, remedy=remedy) if isinstance(error, OSError) else error)
    return FAILED


def file_error(error: OSError, *, remedy: str = "") -> str:
    """Return what the system refused, with the file."""
    if not error.filename:
        return str(error)
    reason = error.strerror or str(error)
    return f"cannot write {error.filename}: {reason}; {remedy}" if remedy else f"{reason}: {error.filename}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a command line, or an argument without a name.

    Attributes:
        owner: Dataclass with its field.
        field: Name of the field.
        flag: As it is typed; of an argument the metavar.
        kind: Type of a value.
        default: Its value where it is not given; MISSING where it must be.
        metavar: What the help calls a value.
        is_many: Whether it takes several values, as a tuple.
        is_positional: Whether it has no name.
        can_be_none: Whether the word None is a value.
    """

    owner: Any
    field: str
    flag: str
    kind: Any
    default: Any
    metavar: str
    is_many: bool
    is_positional: bool
    can_be_none: bool


def options_of(kind: type[Any]) -> dict[str, Option]:
    """Return the options of a dataclass, by their names with underscores."""
    hints, found = typing.get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        value, can_be_none = hints[field.name], False
        if typing.get_origin(value) in (typing.Union, types.UnionType):
            value, can_be_none = next(part for part in typing.get_args(value) if part is not types.NoneType), True
        is_many = typing.get_origin(value) is tuple
        value = typing.get_args(value)[0] if is_many else value
        is_literal = typing.get_origin(value) is typing.Literal
        usual = "|".join(typing.get_args(value)) if is_literal else _METAVARS.get(value, "")
        name, metavar = rule_of(field).name or field.name, field.metadata.get("metavar", usual)
        is_positional = field.metadata.get("is_positional", False)
        found[name] = Option(
            owner=kind, field=field.name, flag=metavar if is_positional else flag(name), kind=value,
            default=field.default, metavar=metavar, is_many=is_many, is_positional=is_positional,
            can_be_none=can_be_none,
        )  # fmt: skip
    return found


def parse_options(kind: type[_Kind], arguments: Sequence[str], *, prog: str, basic: str = "") -> _Kind:
    """Read arguments into options.

    Args:
        kind: A dataclass.
        arguments: The arguments.
        prog: The command, such as "thinwire plan".
        basic: Names of options that the help lists first; all, where none is named.
    """
    known = options_of(kind)
    if is_help_wanted(arguments):
        named = {name: option for name, option in known.items() if not option.is_positional}
        first = basic.split() or list(named)
        groups = {
            "Arguments": [option for option in known.values() if option.is_positional],
            "Options": [named[name] for name in first],
            "More options": [option for name, option in named.items() if name not in first],
        }
        print(format_help(prog, inspect.getdoc(kind) or "", groups=groups))
        raise SystemExit(0)
    options = kind(**read_arguments(known, arguments, prog=prog))
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        rule, given = rule_of(field), getattr(options, field.name)
        for value in given if isinstance(given, tuple) else (given,):
            problem = rule.problem(flag(field.name), value, default=field.default)
            if rule.least is not None and isinstance(value, float) and not value < math.inf:
                problem = refusal(f"{flag(field.name)} is not finite", got=value, allowed=rule.allowed,
                                  remedy=f"{flag(field.name)} {field.default or max(1, rule.least)}")  # fmt: skip
            if problem is not None:
                raise problem
    return options


def read_arguments(options: Mapping[str, Option], arguments: Sequence[str], *, prog: str) -> dict[str, Any]:
    """Return the value of each option that the arguments name, by its name; of several, the last one counts."""
    help_of = f"{prog} --help"
    positional = [name for name, option in options.items() if option.is_positional]
    named = {
        f"--no-{option.flag[2:]}" if option.kind is bool and option.default else option.flag: name
        for name, option in options.items() if not option.is_positional
    }  # fmt: skip
    found: dict[str, Any] = {}
    words = list(arguments)
    while words:
        head, sign, text = words.pop(0).partition("=")
        if not head.startswith("-") or head == "-":
            if not positional:
                raise refusal("an argument without an option", got=repr(head + sign + text),
                              allowed="options that begin with --", remedy=help_of)  # fmt: skip
            name = positional[0] if options[positional[0]].is_many else positional.pop(0)
            sign, text = "=", head + sign + text
        else:
            head = head.replace("_", "-")
            if head not in named:
                near = difflib.get_close_matches(head, named, n=1)
                raise refusal("unknown option", got=head, allowed=f"those of {help_of}", remedy=(near or [help_of])[0])
            name = named[head]
        if not sign and options[name].kind is not bool:
            if not words or words[0].startswith("--"):
                raise refusal(f"{head} has no value", got="nothing", allowed=_allowed(options[name].kind),
                              remedy=_example(options[name], "", help_of))  # fmt: skip
            sign, text = "=", words.pop(0)
        value = _value(options[name], text if sign else None, help_of=help_of)
        found[name] = (*found.get(name, ()), value) if options[name].is_many else value
    for name, option in options.items():
        if option.default is MISSING and option.is_many:
            found.setdefault(name, ())
        elif option.default is MISSING and name not in found:
            raise refusal(f"{option.flag} is missing", got="nothing", remedy=help_of,
                          allowed="an argument" if option.is_positional else _allowed(option.kind))  # fmt: skip
    return found


def _value(option: Option, text: str | None, *, help_of: str) -> Any:
    if option.kind is bool:
        if text is not None:
            raise refusal(f"{option.flag} takes no value", got=repr(text), allowed="the option alone",
                          remedy=option.flag)  # fmt: skip
        return not option.default
    assert text is not None
    if text == "None" and option.can_be_none:
        return None
    if typing.get_origin(option.kind) is typing.Literal:
        if text not in (choices := typing.get_args(option.kind)):
            raise unknown_name(option.flag, text, choices)
        return text
    try:
        return option.kind(text)
    except ValueError:
        raise refusal(f"{option.flag} is {'no whole number' if option.kind is int else 'no number'}", got=repr(text),
                      allowed=_allowed(option.kind), remedy=_example(option, text, help_of)) from None  # fmt: skip


def _allowed(kind: Any) -> str:
    is_literal = typing.get_origin(kind) is typing.Literal
    return ", ".join(typing.get_args(kind)) if is_literal else _VALUES.get(kind, "a text")


def _example(option: Option, text: str, help_of: str) -> str:
    """Return the option with a value that it takes: the number that the text begins with, or the default."""
    number = re.match(r"[-+]?[0-9]+" if option.kind is int else r"[-+]?[0-9]*\.?[0-9]+(e[-+]?[0-9]+)?", text.lower())
    if number:
        return f"{option.flag} {number.group()}"
    return help_of if option.default in (MISSING, None, ()) else f"{option.flag} {option.default}"


def is_help_wanted(arguments: Sequence[str]) -> bool:
    """Return whether the arguments ask for the help of a command."""
    return "-h" in arguments or "--help" in arguments


def format_help(prog: str, about: str, *, groups: Mapping[str, Sequence[Option]]) -> str:
    """Return a help text.

    Args:
        prog: The command.
        about: Its description: paragraphs.
        groups: Options by heading; the first group of options with a name also gets `--help`.
    """
    width = min(_MAX_COLUMNS, shutil.get_terminal_size().columns)
    shown = {heading: [_help_of(option) for option in options] for heading, options in groups.items()}
    lines = [" ".join([f"usage: {prog} [OPTIONS]", *(name for name, _ in shown.get("Arguments", ()))])]
    for paragraph in about.split("\n\n"):
        lines += ["", *textwrap.wrap(" ".join(paragraph.split()), width, break_on_hyphens=False)]
    shown[next(heading for heading in shown if heading != "Arguments")].append(("-h, --help", "Show this help."))
    indent = " " * (_NAME_COLUMNS + 4)
    for heading, rows in shown.items():
        lines += ["", f"{heading}:"] if rows else []
        for name, text in rows:
            first, *rest = textwrap.wrap(text, max(20, width - len(indent)), break_on_hyphens=False) or [""]
            if len(name) > _NAME_COLUMNS:
                lines += [f"  {name}", f"{indent}{first}"]
            else:
                lines.append(f"  {name.ljust(_NAME_COLUMNS)}  {first}")
            lines += [f"{indent}{line}" for line in rest]
    return "\n".join(lines)


def _help_of(option: Option) -> tuple[str, str]:
    """Return an option as it is typed, with its metavar, and its help with the default."""
    text, default = " ".join(_texts_below_fields(option.owner).get(option.field, "").split()), option.default
    if option.is_positional:
        shown = f"{option.metavar}..." if option.is_many else option.metavar
        return (shown if default in (MISSING, ()) else f"[{shown}]"), text
    if option.kind is bool:
        return f"--no-{option.flag[2:]}" if default else option.flag, text
    if default not in (MISSING, None, ()) and "efault" not in text:
        text += f" Default: {f'{default:g}' if isinstance(default, float) else default}."
    return f"{option.flag} {option.metavar}", text


@functools.cache
def _texts_below_fields(kind: type[Any]) -> dict[str, str]:
    """Return the string below each field, also of the classes that the dataclass extends."""
    found: dict[str, str] = {}
    for owner in filter(dataclasses.is_dataclass, reversed(kind.__mro__)):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(node, ast.ClassDef)
        for field, below in zip(node.body, node.body[1:], strict=False):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                found[field.target.id] = str(below.value.value)  # type: ignore[attr-defined]
    return found
