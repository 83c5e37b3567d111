"""The commands around elastic runs: their options, and what they refuse."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from live_processes import DEADLINE_S

from thinwire.cli.main import main

COMMANDS = ("join", "invite", "status", "pause", "resume", "leave")
WORDS = "thinwire://127.0.0.1:1/" + 52 * "a"

RANKS = ("--elastic", "--ranks-per-replica", "2")


def options_of(command: str) -> list[str]:
    told = subprocess.run(
        [sys.executable, "-m", "thinwire.cli.main", command, "--help"],
        capture_output=True, text=True, timeout=DEADLINE_S, env={**os.environ, "COLUMNS": "100"},
    ).stdout  # fmt: skip
    return sorted(set(re.findall(r"^  (?:-h, )?(--[a-z][a-z-]*)", told, re.MULTILINE)))


def test_the_options_of_elastic_commands_are_those_that_were_agreed_on() -> None:
    frozen = Path(__file__).with_name("options_of_elastic.txt").read_text().splitlines()
    found = [f"{command} {option}" for command in ("join", "status", "leave") for option in options_of(command)]
    assert found == frozen, "an option is a promise: change tests/cli/options_of_elastic.txt and CHANGELOG.md with it"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["join", "nowhere"],
            "the address cannot be read; got 'nowhere'; allowed HOST:PORT, thinwire://KEY@HOST:PORT/SECRET, "
            "or file:///FOLDER#SECRET and other stores",
        ),
        (["join", "host:0"], "the address has a wrong port; got 0"),
        (["join", "host:29400"], "the address holds no secret"),
        (["join", "thinwire://host:29400/abc"], "got 3 letters and digits; allowed 52"),
        (["join", WORDS, "--replicas", "0"], "--replicas is too small; got 0"),
        (["join", WORDS, "--batch-size", "0"], "--batch-size is too small; got 0"),
        (
            ["join", WORDS, "--interface", "eth0", "--own-address", "1.2.3.4"],
            "--interface does not go with --own-address",
        ),
        (["leave", WORDS], "the replica that shall leave is missing; got nothing; allowed --replica N or --host NAME"),
        (["pause", WORDS, "--replica", "1", "--host", "a"], "--replica does not go with --host"),
        (["status", "host:29400"], "the address holds no secret"),
        (["train", "--elastic", "--method", "noloco"], "exchanges with chosen replicas"),
        (["train", "--elastic", "--method", "sparse-loco"], "depends on who sent what before"),
        (["train", "--elastic", "--method", "all-reduce"], "for elastic runs take iso-loco, streaming-diloco, diloco"),
        (["train", "--invite-only"], "--invite-only is for elastic runs; got --invite-only without --elastic"),
        (["invite", "/nowhere"], "the folder is of no elastic run whose first host is this one; got /nowhere"),
        (["train", "--elastic", "--pace"], "--pace does not go with --elastic"),
        (
            ["train", "--elastic", "--overlap-steps", "1,2"],
            "--overlap-steps names replicas, which come and go with --elastic; got 1,2",
        ),
        (["status", WORDS, "--replica", "1"], "unknown option; got --replica"),
        (["join", WORDS, "--ranks-per-replica", "0"], "--ranks-per-replica is too small; got 0"),
        (["train", "--elastic", "--ranks-per-replica", "0"], "--ranks-per-replica is too small; got 0"),
        (
            ["train", "--ranks-per-replica", "2"],
            "--ranks-per-replica is for elastic runs; got --ranks-per-replica without --elastic",
        ),
        (["train", *RANKS, "--batch-size", "1"], "--ranks-per-replica 2 is more than the 1 sequences of a step"),
        (["train", *RANKS, "--inner-optimizer", "muon"], "--inner-optimizer muon needs whole matrices"),
        (["train", *RANKS, "--compile"], "--compile was not tried with --ranks-per-replica above 1"),
        (["train", "--port", "1234"], "--port is for elastic runs"),
        (["train", "--checkpoint-to", "s3://x/y"], "--checkpoint-to is for elastic runs"),
        (["train", "--begin-with", "4"], "--begin-with is for elastic runs"),
        (
            ["train", "--elastic", "--replicas", "3", "--begin-with", "2"],
            "--begin-with is less than this host starts; got 2; allowed 3 or more",
        ),
        (["train", "--elastic", "--keep-checkpoints", "0"], "--keep-checkpoints is too small; got 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    told = capsys.readouterr().err
    assert said in told and len(told.strip().splitlines()) == 1, told


def test_elastic_does_not_go_under_torchrun(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--elastic"]) == 2
    assert "--elastic does not go with torchrun" in capsys.readouterr().err


def test_a_folder_that_is_none_of_an_elastic_run_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "the folder is of no elastic run" in capsys.readouterr().err


def test_a_coordinator_that_is_not_there_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.cli.elastic_commands._DEADLINE_S", 0.3)
    assert main(["status", WORDS]) == 1
    assert "no coordinator answered at 127.0.0.1, port 1, within 0.3 s" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["stdin", "environment"])
def test_the_address_may_come_by_stdin_or_the_environment(how: str) -> None:
    place = "thinwire://127.0.0.1:0/" + 52 * "a"
    done = subprocess.run(
        [sys.executable, "-m", "thinwire.cli.main", "join", *(["-"] if how == "stdin" else [])],
        input=f"{place}\n" if how == "stdin" else "", capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        env={**os.environ, **({"THINWIRE_JOIN": place} if how == "environment" else {})},
    )  # fmt: skip
    assert done.returncode == 2 and "the address has a wrong port; got 0" in done.stderr, done.stderr


def test_without_an_address_a_command_says_where_it_may_come_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("THINWIRE_JOIN", raising=False)
    assert main(["join"]) == 2
    assert "the address is missing; got nothing; allowed an argument, - for stdin, or THINWIRE_JOIN" in (
        capsys.readouterr().err
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["status", "-"]) == 2
    assert "stdin holds no address" in capsys.readouterr().err


WITHOUT_TORCH = """
import sys
import thinwire.cli.processes
from thinwire.cli import elastic_run
from thinwire.cli.elastic_commands import join as main

def run_here(roles, *, host, part):
    settings = LocalSettings.load(host.run_dir)
    assert settings.threads == 1 and len(roles) == 2
    print("torch" in sys.modules)
    return 0

from thinwire.training.elastic.job import LocalSettings
elastic_run.run_here = run_here
sys.exit(main(sys.argv[1:]))
"""


def test_a_host_that_joins_imports_no_torch_before_its_replicas_do(tmp_path: Path) -> None:
    words = [WORDS, "--replicas", "2", "--threads", "1", "--own-address", "127.0.0.1", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), f"it would wait seconds for it\n{done.stderr}"
