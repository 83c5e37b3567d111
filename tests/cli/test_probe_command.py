"""`thinwire probe`: its options, and what it says to wrong ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from live_processes import DEADLINE_S

from thinwire.cli.main import main

THINWIRE = [sys.executable, "-m", "thinwire.cli.main"]
OPTIONS_FILE = Path(__file__).with_name("options_of_probe.txt")


def probe(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*THINWIRE, "probe", *words],
        capture_output=True, text=True, timeout=DEADLINE_S, cwd=cwd, env={**os.environ, **environment},
    )  # fmt: skip


def test_the_options_of_probe_are_those_that_were_agreed_on(tmp_path: Path) -> None:
    told = probe("--help", cwd=tmp_path, COLUMNS="100").stdout
    options = sorted(set(re.findall(r"^  (?:-h, )?(--[a-z][a-z-]*)", told, re.MULTILINE)))
    assert options == OPTIONS_FILE.read_text().splitlines(), (
        "an option is a promise: change tests/cli/options_of_probe.txt and CHANGELOG.md with it"
    )


UNDER_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        ([], {}, "a probe measures the wires between hosts; got one host; allowed torchrun"),
        (["--budgt", "3s"], {}, "try --budget"),
        (["--budget", "soon"], UNDER_TORCHRUN, "the duration cannot be read; got 'soon'"),
        (["--most", "9 GBit"], UNDER_TORCHRUN, "the size cannot be read; got '9 GBit'"),
        (["--most", "9"], UNDER_TORCHRUN, "the largest transfer must have at least 65536 bytes, got 9"),
        (["--step-time", "0s"], UNDER_TORCHRUN, "the time for steps must be above 0 s"),
        (["--model", "big"], UNDER_TORCHRUN, "big"),
        (["--device", "tpu"], UNDER_TORCHRUN, "unknown --device; got 'tpu'; allowed cpu, cuda"),
        (["--batch-size", "0"], UNDER_TORCHRUN, "--batch-size is too small; got 0"),
        (["--threads", "-1"], UNDER_TORCHRUN, "--threads is too small; got -1"),
        (["--secret", "nowhere"], UNDER_TORCHRUN, "nowhere"),
        (["--interface", "a", "--address", "b"], UNDER_TORCHRUN, "--interface does not go with --address"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    words: list[str], environment: dict[str, str], said: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["probe", *words]) == 2
    told = capsys.readouterr()
    assert told.out == "" and said in told.err and told.err.count("\n") == 1, told.err
    assert not list(tmp_path.iterdir())
