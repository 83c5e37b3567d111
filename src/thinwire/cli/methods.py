"""`thinwire methods`: a table of the methods, or the description of one."""

from __future__ import annotations

import dataclasses
import json as json_format
import sys
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from thinwire.cli.argument_parsing import argument, command
from thinwire.training.method_catalog import method_entry

_MAX_COLUMNS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodsOptions:
    """List the methods of `thinwire train --method`, or explain one: paper, equations, options."""

    name: str | None = argument("NAME", None)
    """Method to explain."""
    json: bool = False
    """Print one JSON object on stdout instead of text."""


@command("methods", MethodsOptions)
def main(options: MethodsOptions) -> int:
    """Run `thinwire methods`."""
    if options.name is not None:
        method_entry(options.name)  # refuses an unknown one before torch is imported
    from thinwire.methods import RECIPES

    names = tuple(RECIPES)
    if options.name is not None:
        names = (options.name.replace("_", "-").lower(),)
    found = {name: _facts(name) for name in names}
    if options.json:
        print(json_format.dumps(found))
    elif options.name is None:
        _print_table(found)
    else:
        _explain(names[0])
    return 0


def _facts(name: str) -> dict[str, str]:
    from thinwire.methods import about, recipe

    first = next(iter((recipe(name).__doc__ or "").strip().splitlines()), "")
    return {"does": first, **dataclasses.asdict(about(name))}


def _print_table(found: dict[str, dict[str, str]]) -> None:
    console = Console(highlight=False)
    console.width = min(_MAX_COLUMNS, console.width) if sys.stdout.isatty() else _MAX_COLUMNS
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("method", no_wrap=True)
    table.add_column("what it does", width=33)
    table.add_column("paper", no_wrap=True)
    table.add_column("bits per parameter and step", width=24)
    for name, facts in found.items():
        table.add_row(name, facts["does"].replace("`sync_interval`", "H"), facts["paper"], facts["bits"])
    console.print(table)
    console.print("\nM: replicas. H: --sync-interval. Equations, memory, options: thinwire methods NAME")


def _explain(name: str) -> None:
    from thinwire.methods import about, options_of, recipe, story
    from thinwire.options import flag
    from thinwire.training.config import OPTIONS

    card = about(name)
    print(f"{name} ({card.paper})\n\n{story(name)}\n")
    print(f"exchanged: {card.exchanged}\nbits a parameter and step: {card.bits}")
    print(f"extra copies of the parameters: {card.memory}\nrestrictions: {card.restrictions}\n")
    print("options of thinwire train:")
    for option, kind in options_of(recipe(name)).items():
        # a name that means something else to `thinwire train`, such as the warm-up of the learning rate
        is_taken = OPTIONS.get(option, ("sync", option))[0] != "sync"
        print(f"  --method-option {option}=VALUE: {kind}" if is_taken else f"  {flag(option)}: {kind}")
