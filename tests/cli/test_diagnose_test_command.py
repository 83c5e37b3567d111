"""`thinwire diagnose test`: its options, what it says to wrong ones, and one test between real processes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from live_processes import DEADLINE_S

from thinwire.cli.diagnose import main
from thinwire.cli.diagnose_test import FOUND, ActiveTestOptions

JOB = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_the_options_of_the_test_are_those_that_were_agreed_on() -> None:
    options = sorted("--" + field.name for field in dataclasses.fields(ActiveTestOptions))
    frozen = Path(__file__).with_name("options_of_diagnose_test.txt").read_text().splitlines()
    assert options == frozen, "an option is a promise: change options_of_diagnose_test.txt and CHANGELOG.md too"


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        ([], {}, "a test is between hosts; got one host; allowed torchrun on 2 or more"),
        ([], {**JOB, "WORLD_SIZE": "1"}, "a test is between hosts"),
        (["--replicas", "1"], {}, "--replicas is out of its range; got 1; allowed 2 to 64"),
        (["--replicas", "65"], {}, "--replicas is out of its range; got 65"),
        (["--replicas", "2"], JOB, "--replicas does not go with torchrun: it has started 2 ranks"),
        (["--expect", "fast"], JOB, "fast"),
        (["--budget", "0s"], JOB, "--budget is too short; got 0s; allowed above 0s"),
        (["--deadline", "soon"], JOB, "the duration cannot be read; got 'soon'"),
        (["--interface", "a", "--address", "b"], JOB, "give interface or address, not both"),
        (["--secret", "/no/such/file"], JOB, "there is no secret on this host; got /no/such/file"),
        (["--replicsa", "2"], {}, "--replicas"),
    ],
)
def test_wrong_options_of_the_test_are_refused_in_one_line(
    words: list[str], environment: dict[str, str], said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["test", *words]) == 2
    told = capsys.readouterr()
    assert told.out == "" and said in told.err and told.err.count("\n") == 1, told.err


def test_a_rehearsal_on_one_machine_measures_all_pairs_of_real_processes() -> None:
    command = [sys.executable, "-m", "thinwire.cli.main", "diagnose", "test", "--replicas", "2", "--json"]
    done = subprocess.run([*command, "--budget", "0.2s"], capture_output=True, text=True, timeout=DEADLINE_S)
    told = json.loads(done.stdout)
    assert done.returncode == (FOUND if told["findings"] else 0), done.stderr
    # other work on this machine may make a wire slow; bytes arrive all the same, and are the right ones
    assert {finding["kind"] for finding in told["findings"]} <= {"communication slow"}
    measured = told["measured"]
    assert [(pair["from"], pair["to"], pair["fault"]) for pair in measured["pairs"]] == [(0, 1, ""), (1, 0, "")]
    assert all(pair["rate_bits_per_s"] > 1e6 and 0 < pair["latency_s"] < 1 for pair in measured["pairs"])
    assert measured["all_reduce"]["wrong"] == [] and len(measured["neighbours"]) == 2 and not measured["absent"]
    assert "all-reduce: around the ring" in done.stderr and done.stderr.count("pairs: 2 ways") == 1
