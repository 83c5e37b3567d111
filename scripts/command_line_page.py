"""Write docs/cli.md from the help of the commands: `make command-line-page`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HEADER = """\
# Command line

Output of `thinwire COMMAND --help`, written by `make command-line-page`.

Results go to stdout, logs to stderr. The exit code is 0, 1 for an error while running, or 2 for wrong options.
"""


# Commands below another one, listed by the help of that one.
NESTED = {
    "diagnose": ("diagnose test",),
    "experts": tuple(f"experts {name}" for name in ("add", "branch", "convert", "eval", "merge")),
    "bench": ("bench profile",),
    "traffic": ("traffic plan", "traffic compare", "traffic probe"),
}  # fmt: skip


def help_of(command: str = "") -> str:
    """Return the help of a command, as it looks in a terminal of 80 columns."""
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    thinwire = [sys.executable, "-c", "import sys; from thinwire.cli.main import main; sys.exit(main())"]
    done = subprocess.run(
        [*thinwire, *command.split(), "--help"], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def commands() -> list[str]:
    """Return the commands that the help of thinwire lists, and the commands nested below them."""
    listed = re.findall(r"^  ([a-z][a-z-]*)  +\S", help_of(), re.MULTILINE)
    return [name for command in listed for name in (command, *NESTED.get(command, ()))]


def page() -> str:
    """Return the page."""
    sections = [f"## thinwire {command}\n\n```text\n{help_of(command)}\n```\n" for command in commands()]
    return "\n".join([HEADER, *sections])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
