"""`thinwire recipes`: complete, commented configurations for common networks, read by `thinwire train --config`."""

from __future__ import annotations

import importlib.util
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
from thinwire.workloads.cards import DIGITS

FOLDER = Path(str(files("thinwire.training") / "recipes"))
# Columns of the list, by their key in the table `recipe` of each file.
COLUMNS = ("machines", "time", "memory", "sent")
_ACTIONS = ("ls", "show", "cp")
# Recipes that are programs: their files lie beside this one, and their names are actions that run them.
_PROGRAMS = {
    "flower-digits": {"machines": "10 clients of Flower on this machine", "sent": "0.13 MB"},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipesOptions:
    """List, show and copy complete configurations for common networks.

    `ls` lists them, `show NAME` prints one, `cp NAME [FILE]` copies one to a file. Run a copy with
    `thinwire train --config FILE`; options on the command line override it. Expected numbers in a recipe are planned
    by the command beside them, not measured. `flower-digits` runs ten clients of Flower on this machine, and prints
    accuracy and bytes.
    """

    action: str = argument("ls|show|cp|flower-digits")
    """What to do: ls, show or cp; or the recipe that is a program, to run it."""
    name: str | None = argument("NAME", None)
    """The recipe to show or copy."""
    file: Path | None = argument("FILE", None)
    """The copy. Default: NAME.toml in this folder, or NAME.py of a program."""


@command("recipes", RecipesOptions, remedy="give another file")
def main(options: RecipesOptions) -> int:
    """Run `thinwire recipes`."""
    if options.action in _PROGRAMS:
        _run_program(options.action)
        return 0
    if options.action not in _ACTIONS:
        raise unknown_name("action", options.action, _ACTIONS)
    if options.action == "ls":
        if options.name is not None:
            raise refusal("ls takes no name", got=repr(options.name), allowed="no further argument",
                          remedy=f"thinwire recipes show {options.name}")  # fmt: skip
        every = {name: facts_of(name) for name in names()}
        every |= _PROGRAMS
        rows = ((name, *(facts.get(key, "-") for key in COLUMNS)) for name, facts in every.items())
        print_table(("recipe", *COLUMNS), rows, left=("recipe", *COLUMNS))
        print(
            "\nthinwire recipes show NAME prints one. Memory and bytes are those of a replica.\n"
            "Numbers are planned, not measured, except those of cpu-demo and flower-digits."
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
    copy = Path(path_of(options.name).name) if options.file is None else options.file
    if copy.exists():
        raise refusal("the copy exists already", got=copy, allowed="a new file",
                      remedy=f"thinwire recipes cp {options.name} FILE")  # fmt: skip
    write_whole(copy, text)
    command_line = "python" if options.name in _PROGRAMS else "thinwire train --config"
    log(f"written to {copy}; {command_line} {copy}", command="recipes")
    return 0


def _run_program(name: str) -> None:
    program = importlib.import_module(f"thinwire.cli.{name.replace('-', '_')}")
    DIGITS.check_installed()
    if importlib.util.find_spec("ray") is None:  # Flower's own extra brings the one version that its simulation takes
        raise refusal("Flower's simulation needs ray", got="no ray", allowed="the version that Flower pins",
                      remedy="pip install 'flwr[simulation]'")  # fmt: skip
    program.run()


def names() -> list[str]:
    """Return the names of all recipes, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def path_of(name: str) -> Path:
    """Return the file of a recipe."""
    if name in _PROGRAMS:
        return Path(__file__).with_name(f"{name.replace('-', '_')}.py")
    if name not in names():
        raise unknown_name("recipe", name, [*names(), *_PROGRAMS])
    return FOLDER / f"{name}.toml"


def facts_of(name: str) -> dict[str, Any]:
    """Return the table `recipe` of a recipe: its title, its machines, and the planned numbers."""
    facts: dict[str, Any] = tomllib.loads(path_of(name).read_text(encoding="utf-8"))[RECIPE]
    return facts
