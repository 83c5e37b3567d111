from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
COMMAND = "thinwire.cli.main"


def _help(*words: str) -> str:
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    code = f"import sys; from {COMMAND} import main; sys.exit(main())"
    asked = [sys.executable, "-c", code, *words, "--help"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 0, f"thinwire {' '.join(words)} --help: {done.stderr}"
    return done.stdout


def _is_there() -> bool:
    return importlib.util.find_spec("thinwire.cli") is not None and importlib.util.find_spec(COMMAND) is not None


def _commands() -> list[str]:
    found = re.search(r"\{([a-z][a-z-]*(?:,[a-z][a-z-]*)*)\}", _help())
    assert found, "the help of thinwire lists no commands as {train,compare,...}"
    return found.group(1).split(",")


def test_every_command_and_every_option_is_in_the_reference_of_the_command_line() -> None:
    """Binds from the day the command line exists: docs/cli.md has to come with it."""
    missing = []
    for command in _commands() if _is_there() else []:
        page = (DOCS / "cli.md").read_text()
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", _help(command))) - {"--help"}
        missing += [f"thinwire {command}"] if f"thinwire {command}" not in page else []
        missing += [f"{command} {option}" for option in sorted(options) if not re.search(rf"{option}(?![\w-])", page)]
    assert not missing, "docs/cli.md does not tell of " + ", ".join(missing)
