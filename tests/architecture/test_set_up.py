from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from live_processes import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a folder with what the set-up reads, and no .venv yet."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def _make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # The outer make of a test run must not reach the inner one.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment = {name: value for name, value in inherited.items() if name not in ("TORCH", "PYTHON", "ARGS")}
    return subprocess.run(
        ["make", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def _planned(folder: Path, *words: str) -> str:
    done = _make(folder, "--dry-run", f"PYTHON={sys.executable}", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_one_command_makes_the_environment_and_trains(clone: Path) -> None:
    planned = _planned(clone, "train", "ARGS=--steps 5")
    assert planned.index("-m venv .venv") < planned.index("-e '.'") < planned.index("thinwire train")
    assert "--steps 300" in planned and planned.rstrip().endswith("--steps 5")


def test_the_tests_bring_every_extra_that_they_need(clone: Path) -> None:
    assert "-e '.[dev,docs,hf,parquet,lightning,trl]'" in _planned(clone, "setup")


def test_another_torch_takes_the_place_of_the_pinned_one(clone: Path) -> None:
    planned = _planned(clone, "TORCH=torch==2.9.1 --index-url https://example.invalid/cpu", "train")
    torch = re.search(r"install torch==2\.9\.1 --index-url https://example\.invalid/cpu$", planned, re.MULTILINE)
    assert torch and torch.start() < planned.index("-e '.'")
    pattern = re.search(r"grep -vE '(.*)' constraints.txt", planned)
    assert pattern
    dropped = {line for line in (ROOT / "constraints.txt").read_text().splitlines() if re.search(pattern[1], line)}
    assert f"torch=={_pins()['torch']}" in dropped
    assert not [line for line in dropped if re.match(r"torchft|numpy|tokenizers", line)]


def test_without_another_torch_every_pin_holds(clone: Path) -> None:
    planned = _planned(clone, "train")
    assert "install torch" not in planned
    assert "grep -vE '^#' constraints.txt" in planned


def test_the_choice_of_torch_is_remembered_until_it_is_taken_back(clone: Path) -> None:
    (clone / ".venv").mkdir()
    (clone / ".venv" / "torch-requirement").write_text("torch==2.9.1")
    assert "install torch==2.9.1" in _planned(clone, "train")
    assert "install torch==2.9.1" not in _planned(clone, "TORCH=", "train")


def test_what_is_installed_is_not_installed_again_until_the_pins_change(clone: Path) -> None:
    interpreter = clone / ".venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.touch()
    stamp = re.search(r"touch (\.venv/stamp-run-\d+)", _planned(clone, "train"))
    assert stamp
    (clone / stamp[1]).touch()
    assert "pip" not in _planned(clone, "train")
    later = (clone / stamp[1]).stat().st_mtime + 10
    os.utime(clone / "constraints.txt", (later, later))
    assert "pip" in _planned(clone, "train")


def test_a_python_that_is_not_there_is_named_with_the_remedy(clone: Path) -> None:
    done = _make(clone, "PYTHON=no-such-python", "train")
    assert done.returncode != 0
    assert "3.11 or newer, and 'no-such-python' is none" in done.stderr
    assert "make PYTHON=/path/to/python3.12 train" in done.stderr
    assert not (clone / ".venv").exists()


def test_a_python_that_is_too_old_is_named_with_the_remedy(clone: Path) -> None:
    old = clone / "python3.10"
    # As an old interpreter answers the question that the Makefile asks it.
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = _make(clone, f"PYTHON={old}", "train")
    assert done.returncode != 0
    assert "3.11 or newer" in done.stderr and str(old) in done.stderr
    assert not (clone / ".venv").exists()


def test_every_requirement_has_a_pin_that_it_accepts() -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    left_out = runpy.run_path(str(ROOT / "scripts" / "pin.py"))["LEFT_OUT"]
    kept = [wanted for extra, wanted in project["optional-dependencies"].items() if extra not in left_out]
    extras = [requirement for extra in kept for requirement in extra]
    for requirement in map(Requirement, [*project["dependencies"], *extras]):
        pin = _pins().get(requirement.name)
        assert pin is not None, f"{requirement.name} has no pin: make constraints"
        assert requirement.specifier.contains(pin, prereleases=True), f"{requirement} refuses {pin}"


def test_torch_is_pinned_by_number_alone() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", _pins()["torch"])
    assert "://" not in (ROOT / "constraints.txt").read_text()


def test_the_tests_can_be_run_without_workers() -> None:
    words = ["-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "--collect-only", "-q"]
    files = ["tests/architecture/test_set_up.py", "tests/docs/test_examples.py"]  # one by one and whole, with workers
    # whoever runs this test may have asked for more words than these
    plain = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        [sys.executable, *words, *files],
        cwd=ROOT,
        env=plain,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{file}::test_" in done.stdout for file in files)


def test_ci_runs_what_a_person_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "\nmake test || status=$?\n" in script.read_text()
    assert subprocess.run(["bash", "-n", str(script)], timeout=DEADLINE_S, check=False).returncode == 0
