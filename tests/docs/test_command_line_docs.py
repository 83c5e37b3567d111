from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def _writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("command_line_page", ROOT / "scripts" / "command_line_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_the_command_line_tells_of_every_command_and_option_and_of_no_other() -> None:
    writer, page = _writer(), (ROOT / "docs" / "cli.md").read_text()
    commands = writer.commands()
    assert commands, "the help of thinwire lists no commands"
    told = {part.split("\n", 1)[0]: set(OPTION.findall(part)) for part in page.split("\n## thinwire ")[1:]}
    real = {command: set(OPTION.findall(writer.help_of(command))) for command in commands}
    assert told == real, "make command-line-page"
