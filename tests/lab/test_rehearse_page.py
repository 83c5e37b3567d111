"""The page of the docs on labs: its Python runs here, and its commands are ones that a lab accepts."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from live_processes import DEADLINE_S

from thinwire.cli.argument_parsing import parse_options
from thinwire.cli.lab import LabOptions, settings_of

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rehearse.md").read_text()
COMMANDS = [line for line in PAGE.replace("\\\n", " ").splitlines() if line.startswith("thinwire lab --")]
OPTIONS = re.findall(r"`(--(?:hosts|host|rate|link|latency) [^`]*)`", PAGE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_one_that_the_lab_accepts(command: str) -> None:
    words = shlex.split(command)[2:]
    options = parse_options(LabOptions, words[: words.index("--")], prog="thinwire lab")
    assert settings_of(options).num_hosts == 2
    assert words[words.index("--") + 1 :]


@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_the_page_are_ones_that_the_lab_accepts(options: str) -> None:
    settings_of(parse_options(LabOptions, ["--hosts", "4", *shlex.split(options)], prog="thinwire lab"))


def test_the_page_has_commands_and_options() -> None:
    assert len(COMMANDS) >= 3
    assert len(OPTIONS) >= 7


def test_the_python_of_the_page_runs(tmp_path: Path) -> None:
    (source,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (text,) = re.findall(r"^```text\n(from .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text(source + "\n".join("    " + line for line in text.splitlines()))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
