"""Text of `--help`: usage, the basic options first, and the others under headings of their own.

An option is a field of a dataclass; the string below the field is its help.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import shutil
import textwrap
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

_MAX_COLUMNS = 100
_NAME_COLUMNS = 24
_METAVARS: dict[Any, str] = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionHelp:
    """One option or positional argument.

    Attributes:
        name: As it is typed, with its metavar.
        text: Its help, with the default.
        is_positional: Whether it has no name on the command line.
    """

    name: str
    text: str
    is_positional: bool = False


def is_help_wanted(arguments: Sequence[str]) -> bool:
    """Return whether the arguments ask for the help of a command."""
    return "-h" in arguments or "--help" in arguments


def options_of_dataclass(kind: type[Any], *, names: dict[str, str] | None = None) -> dict[str, OptionHelp]:
    """Return the help of each field of a dataclass, by the option's name with underscores.

    Args:
        kind: The dataclass.
        names: Names of options that differ from their field's.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    texts = _texts_below_fields(kind)
    found = {}
    for field in dataclasses.fields(kind):
        name = (names or {}).get(field.name, field.name)
        found[name] = _option(name, hints[field.name], field.default, " ".join(texts.get(field.name, "").split()))
    return found


def help_of_dataclass(kind: type[Any], *, prog: str, basic: Iterable[str] = ()) -> str:
    """Return the help of a command whose options are one dataclass.

    Args:
        kind: The dataclass; its docstring describes the command.
        prog: The command, such as "thinwire plan".
        basic: Options that come first; all, where none is named.
    """
    options = options_of_dataclass(kind)
    named = {name: option for name, option in options.items() if not option.is_positional}
    first = list(basic) or list(named)
    groups = {"Options": [named[name] for name in first]}
    groups["More options"] = [option for name, option in named.items() if name not in first]
    positional = [option for option in options.values() if option.is_positional]
    return format_help(prog, inspect.getdoc(kind) or "", groups=groups, positional=positional)


def format_help(
    prog: str, about: str, *, groups: dict[str, list[OptionHelp]], positional: Sequence[OptionHelp] = ()
) -> str:
    """Return a help text.

    Args:
        prog: The command.
        about: Its description: paragraphs.
        groups: Options by heading; the first group also gets `--help`.
        positional: The arguments without a name.
    """
    width = min(_MAX_COLUMNS, shutil.get_terminal_size().columns)
    usage = " ".join([f"usage: {prog} [OPTIONS]", *(option.name for option in positional)])
    lines = [usage]
    for paragraph in about.split("\n\n"):
        lines += ["", *textwrap.wrap(" ".join(paragraph.split()), width, break_on_hyphens=False)]
    first = next(iter(groups))
    shown = {**groups, first: [*groups[first], OptionHelp(name="-h, --help", text="Show this help.")]}
    for heading, options in {"Arguments": list(positional), **shown}.items():
        if options:
            lines += ["", f"{heading}:", *(line for option in options for line in _lines(option, width))]
    return "\n".join(lines)


def _lines(option: OptionHelp, width: int) -> list[str]:
    indent = " " * (_NAME_COLUMNS + 4)
    text = textwrap.wrap(option.text, max(20, width - len(indent)), break_on_hyphens=False) or [""]
    if len(option.name) > _NAME_COLUMNS:
        return [f"  {option.name}", *(f"{indent}{line}" for line in text)]
    return [f"  {option.name.ljust(_NAME_COLUMNS)}  {text[0]}", *(f"{indent}{line}" for line in text[1:])]


def _option(name: str, hint: Any, default: Any, text: str) -> OptionHelp:
    marks, kind = _without_annotation(hint)
    own_metavar = next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), None)
    flag = "--" + name.replace("_", "-")
    if tyro.conf.Positional in marks:
        metavar = own_metavar or name.upper()
        is_many = typing.get_origin(kind) is tuple
        is_optional = default is not dataclasses.MISSING and default != ()
        shown = f"{metavar}..." if is_many else metavar
        return OptionHelp(name=f"[{shown}]" if is_optional else shown, text=text, is_positional=True)
    if kind is bool:
        return OptionHelp(name=f"--no-{flag[2:]}" if default else flag, text=text)
    is_known = default is None or default == () or default is dataclasses.MISSING or "efault" in text
    shown_default = f"{default:g}" if isinstance(default, float) else default
    told = "" if is_known else f" Default: {shown_default}."
    return OptionHelp(name=f"{flag} {own_metavar or _metavar(kind)}", text=text + told)


def _without_annotation(hint: Any) -> tuple[tuple[Any, ...], Any]:
    marks: tuple[Any, ...] = ()
    if typing.get_origin(hint) is typing.Annotated:
        marks, hint = hint.__metadata__, hint.__origin__
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    return marks, hint


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return _metavar(typing.get_args(kind)[0])
    return _METAVARS[kind]


def _texts_below_fields(kind: type[Any]) -> dict[str, str]:
    """Return the string below each field, also of the classes that the dataclass extends."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(node, ast.ClassDef)
        for field, below in zip(node.body, node.body[1:], strict=False):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                found[field.target.id] = str(below.value.value)  # type: ignore[attr-defined]
    return found
