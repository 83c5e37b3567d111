"""`thinwire watch RUN`: how a run goes and what is wrong with it, in the terminal."""

from __future__ import annotations

import json as json_format
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from thinwire.cli.words import read_words

if TYPE_CHECKING:
    from rich.console import Console

    from thinwire.monitor.dashboard.snapshot import RunFollower

FOUND = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """Show how a run of `thinwire train` goes: its replicas, and the newest findings of what is slow, stuck or gone.

    It only reads the run's folder, also from another terminal or host, and ends with the run or with Ctrl-C. On a
    terminal a table that stays in place, elsewhere a line for each change. With --once the exit code is 3 where
    something is wrong.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run's folder."""
    once: bool = False
    """Look once, and end."""
    json: bool = False
    """Look once, and print all that the folder tells as one JSON object on stdout."""
    period_s: float = 0.5
    """Time between two looks, in seconds."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; see `thinwire watch --help`.

    Returns:
        0, 3 where --once finds something wrong, 1 for a folder that cannot be read, 2 for wrong options.
    """
    from rich.console import Console

    from thinwire.errors import DataError
    from thinwire.monitor.dashboard.snapshot import RunFollower, snapshot

    try:
        options = read_words(WatchOptions, arguments, prog="thinwire watch")
        if not 0.05 <= options.period_s <= 60:
            raise ValueError(f"--period-s must be from 0.05 to 60, got {options.period_s:g}")
        if options.json or options.once:
            found = snapshot(options.run, diagnoses_all=True)
            if options.json:
                print(json_format.dumps(found))
            else:
                _show(Console(highlight=False), found)
            return FOUND if found["headline"]["level"] == "trouble" else 0
        follower, console = RunFollower(options.run), Console(highlight=False)
    except ValueError as error:
        return _fail(2, error)
    except DataError as error:
        return _fail(1, error)
    except SystemExit:  # after --help
        return 0
    try:
        if console.is_terminal:
            _watch_table(follower, console, period_s=options.period_s)
        else:
            _watch_lines(follower, console, period_s=options.period_s)
    except KeyboardInterrupt:
        pass
    return 0


def _watch_table(follower: RunFollower, console: Console, *, period_s: float) -> None:
    from rich.live import Live

    from thinwire.cli.watch_table import run_table

    with Live(console=console, auto_refresh=False) as live:
        while True:
            is_behind = follower.poll()
            sections = follower.sections()
            live.update(run_table(sections, width=console.width), refresh=True)
            if not is_behind and sections["run"]["state"] == "finished":
                return
            time.sleep(0 if is_behind else period_s)


def _watch_lines(follower: RunFollower, console: Console, *, period_s: float) -> None:
    """Print a line where the run's headline or a finding is new, and at each step that replica 0 tells of."""
    from thinwire.cli.tables import plain
    from thinwire.cli.watch_table import news

    told: list[str] = []
    while True:
        is_behind = follower.poll()
        sections = follower.sections()
        said = news(sections)
        for words in [words for words in said if words not in told]:
            console.print(plain(words), soft_wrap=True)
        told = said
        if not is_behind and sections["run"]["state"] == "finished":
            return
        time.sleep(0 if is_behind else period_s)


def _show(console: Console, sections: dict[str, object]) -> None:
    from thinwire.cli.watch_table import run_table

    console.print(run_table(sections, width=console.width))


def _fail(code: int, error: object) -> int:
    print(f"thinwire watch: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return code
