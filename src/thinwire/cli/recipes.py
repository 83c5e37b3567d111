"""`thinwire recipes`: complete, commented configurations for common networks, read by `thinwire train --config`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from thinwire.cli.argument_parsing import argument, command
from thinwire.cli.output import log
from thinwire.cli.tables import print_table
from thinwire.cli.train_options import RECIPE
from thinwire.errors import refusal, unknown_name
from thinwire.files import write_whole

FOLDER = Path(str(files("thinwire.training") / "recipes"))
# Columns of the list, by their key in the table `recipe` of each file.
COLUMNS = ("machines", "time", "memory", "sent")
_ACTIONS = ("ls", "show", "cp")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipesOptions:
    """List, show and copy complete configurations for common networks.

    `ls` lists them, `show NAME` prints one, `cp NAME [FILE]` copies one to a file. Run a copy with
    `thinwire train --config FILE`; options on the command line override it. Expected numbers in a recipe are planned
    by the command beside them, not measured.
    """

    action: str = argument("ls|show|cp")
    """What to do: ls, show or cp."""
    name: str | None = argument("NAME", None)
    """The recipe to show or copy."""
    file: Path | None = argument("FILE", None)
    """The copy. Default: NAME.toml in this folder."""


@command("recipes", RecipesOptions, remedy="give another file")
def main(options: RecipesOptions) -> int:
    """Run `thinwire recipes`."""
    if options.action not in _ACTIONS:
        raise unknown_name("action", options.action, _ACTIONS)
    if options.action == "ls":
        if options.name is not None:
            raise refusal("ls takes no name", got=repr(options.name), allowed="no further argument",
                          remedy=f"thinwire recipes show {options.name}")  # fmt: skip
        every = {name: facts_of(name) for name in names()}
        rows = ((name, *(facts.get(key, "-") for key in COLUMNS)) for name, facts in every.items())
        print_table(("recipe", *COLUMNS), rows, left=("recipe", *COLUMNS))
        print(
            "\nthinwire recipes show NAME prints one. Memory and bytes are those of a replica.\n"
            "Numbers are planned, not measured, except those of cpu-demo."
        )
        return 0
    if options.name is None:
        known = names()
        raise refusal(f"{options.action} needs a name", got="nothing", allowed=", ".join(known),
                      remedy=f"thinwire recipes {options.action} {known[0]}")  # fmt: skip
    text = path_of(options.name).read_text(encoding="utf-8")
    if options.action == "show":
        print(text, end="")
        return 0
    copy = Path(f"{options.name}.toml") if options.file is None else options.file
    if copy.exists():
        raise refusal("the copy exists already", got=copy, allowed="a new file",
                      remedy=f"thinwire recipes cp {options.name} FILE")  # fmt: skip
    write_whole(copy, text)
    log(f"written to {copy}; thinwire train --config {copy}", command="recipes")
    return 0


def names() -> list[str]:
    """Return the names of all recipes, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def path_of(name: str) -> Path:
    """Return the file of a recipe."""
    if name not in names():
        raise unknown_name("recipe", name, names())
    return FOLDER / f"{name}.toml"


def facts_of(name: str) -> dict[str, Any]:
    """Return the table `recipe` of a recipe: its title, its machines, and the planned numbers."""
    facts: dict[str, Any] = tomllib.loads(path_of(name).read_text(encoding="utf-8"))[RECIPE]
    return facts
