"""Tests that need Flower, in an environment of their own: its simulation pins another ray than thinwire's pins do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from live_processes import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(sys.prefix) / "flower" / "bin" / "python"
FILES = sorted(path.name for path in (ROOT / "tests" / "flower").glob("test_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_the_tests_pass_where_flower_is_installed(name: str, tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip(f"there is no Flower in {PYTHON.parents[1]}: make test installs it where pip finds flwr")
    words = [
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-q",
        "--show-capture=no",
        f"tests/flower/{name}",
    ]
    plain = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        [str(PYTHON), *words, f"--basetemp={tmp_path / 'inner'}"], cwd=ROOT, capture_output=True, text=True,
        timeout=2 * DEADLINE_S, check=False,
        env={**plain, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(tmp_path / "flwr"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-8000:] + done.stderr[-2000:]
