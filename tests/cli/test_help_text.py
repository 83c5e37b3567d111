"""`--help` of every command: basic options first, no noise of the parser, one line of text for each option."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from thinwire.cli.main import COMMANDS, main

NUM_OPTIONS_WITHOUT_GROUPS = 7
HELPS = [
    *COMMANDS, "diagnose test", "bench wire", "bench profile", "traffic plan", "traffic compare", "traffic probe",
    "experts add", "experts branch", "experts convert", "experts eval", "experts merge",
]  # fmt: skip


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", "90")
    return 90


@pytest.mark.parametrize("command", HELPS)
def test_the_basic_options_come_first_and_the_text_fits(
    command: str, columns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    assert "{None}" not in text and "(default:" not in text and "None" not in text
    headings = re.findall(r"^(\w[\w ]+):$", text, re.MULTILINE)
    options = re.findall(r"^  (?:-h, )?(--[a-z][a-z-]*)", text, re.MULTILINE)
    assert len(options) == len(set(options))
    first, *others = [heading for heading in headings if heading != "Arguments"]
    assert first in ("Options", "Basic options")
    assert others or len(options) <= NUM_OPTIONS_WITHOUT_GROUPS + 1
    basic = text.split(f"{first}:")[1].split("\n\n")[0]
    assert "--help" in basic


def test_the_help_of_train_groups_the_other_options_by_subject(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    basic, rest = text.split("Run options:")
    for option in ("--replicas", "--steps", "--model", "--data", "--method", "--out"):
        assert f"\n  {option} " in basic and f"\n  {option} " not in rest
    for heading in ("Model", "Data", "Exchange", "Optimizer", "Output", "Elastic run"):
        assert f"\n{heading} options:\n" in rest


def test_a_default_is_shown_as_a_person_writes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "such as 25e9. Default: 1e+09." in text
    assert "Default: 24GB. --model" in text, "a default that the text names is not repeated"


def test_the_list_of_commands_shows_before_anything_is_imported_that_takes_long() -> None:
    code = "import sys; from thinwire.cli.main import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    shown = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True,
                           env={"PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert "train one model on several replicas" in shown.stdout
    slow = {"torch", "numpy", "tyro", "rich", "msgspec", "json", "difflib", "pathlib", "dataclasses", "inspect"}
    assert not slow & set(shown.stderr.split())
