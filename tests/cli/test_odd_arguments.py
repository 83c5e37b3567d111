"""Arguments that nobody should give: every command reads them, or refuses them in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import io
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

from thinwire import cli
from thinwire.cli.argument_parsing import parse_options
from thinwire.errors import MissingExtra

ODD = ("", "--", "-", "-1", "9" * 400, "1e400", "nan", "\udcff", "\x00", "--x", "---", "--=", "x", "--help=", "--no-x")


def kinds() -> Iterator[type[Any]]:
    for module in pkgutil.iter_modules(cli.__path__):
        try:
            held = importlib.import_module(f"thinwire.cli.{module.name}")
        except MissingExtra:  # an app of Flower, which has an environment of its own
            continue
        for name, kind in vars(held).items():
            is_own = inspect.isclass(kind) and kind.__module__ == held.__name__
            if is_own and dataclasses.is_dataclass(kind) and name.endswith("Options"):
                yield kind


KINDS = list(kinds())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_odd_argument_is_read_or_refused_in_one_line(kind: type[Any]) -> None:
    flags = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(kind)]
    lines = [[word] for word in (*ODD, *flags)] + [[flag, word] for flag in flags for word in ODD]
    lines += [[f"{flag}={word}"] for flag in flags for word in ODD] + [[flag, "1", flag, "2"] for flag in flags]
    for words in lines:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                parse_options(kind, words, prog="thinwire x")
        except SystemExit as stop:
            assert not stop.code, words
        except ValueError as error:
            assert type(error) is ValueError and "\n" not in str(error), (words, error)
    assert len(KINDS) > 20
