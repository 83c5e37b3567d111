"""`thinwire watch`: the run's state and its newest findings in the terminal."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rehearsed_run import finding_line
from tests.sample_runs import append, step_line, write_run
from thinwire.cli.watch import FOUND, WatchOptions, main


def test_the_options_are_those_that_were_agreed_on() -> None:
    names = [field.name for field in dataclasses.fields(WatchOptions) if field.name != "run"]
    options = sorted("--" + name.replace("_", "-") for name in names)
    frozen = Path(__file__).with_name("options_of_watch.txt").read_text().splitlines()
    assert options == frozen, "an option is a promise: change tests/cli/options_of_watch.txt and CHANGELOG.md too"


def test_the_newest_findings_stand_below_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    path = tmp_path / "findings.jsonl"
    path.write_text(finding_line(where="rank 1\u001b[2J", kind="non-communication slow", at=5) + finding_line(at=9))
    assert main([str(tmp_path), "--once"]) == FOUND
    told = capsys.readouterr().out
    rows = told.splitlines()
    assert rows[0] == f"{tmp_path.name}: finished, step 300 of 300"
    assert "communication slow: link 0 -> 2, and 1 more" in told and "remedy: look at the cable" in told
    newest, older = (told.index(words) for words in ("link 0 -> 2 (", "rank 1"))
    assert told.index("tokens/s") < newest < older
    assert "\x1b" not in told and "rank 1\ufffd[2J" in told
    with path.open("a") as file:
        file.write(finding_line(state="over", at=10) + finding_line(
            where="rank 1\u001b[2J", kind="non-communication slow", state="over", at=10))  # fmt: skip
    assert main([str(tmp_path), "--once"]) == 0
    assert "resolved: communication slow: link 0 -> 2" in capsys.readouterr().out


def test_a_run_without_findings_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, is_finished=False)
    assert main([str(tmp_path), "--once"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "? No diagnosis of this run yet" in told and "No findings.jsonl" in told


def test_without_a_terminal_each_change_is_a_line_and_the_end_of_the_run_is_the_end(tmp_path: Path) -> None:
    append(tmp_path / "metrics-replica-0.jsonl", step_line(10))
    rows: list[str] = []
    words = [sys.executable, "-m", "thinwire.cli.main", "watch", str(tmp_path), "--period-s", "0.05"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:  # each change is made when the one before has been shown
                rows.append(line.rstrip("\n"))
                if rows[-1].endswith("training, step 10"):
                    (tmp_path / "findings.jsonl").write_text(finding_line())
                elif rows[-1].startswith("communication slow: link 0 -> 2 ("):
                    write_run(tmp_path)
            assert process.wait(timeout=120) == 0
        finally:
            process.kill()
    assert rows[0].endswith("training, step 10")
    assert any(row.startswith("communication slow: link 0 -> 2 (") for row in rows)
    assert any(row.endswith("finished, step 300 of 300") for row in rows)
    assert len(rows) == len(set(rows))


def test_all_that_is_known_is_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write_run(tmp_path)), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["version"] == 1 and told["run"]["state"] == "finished"


def test_wrong_words_are_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--period-s", "0"]) == 2
    assert "--period-s must be from 0.05 to 60" in capsys.readouterr().err
    assert main([str(tmp_path / "none")]) == 1
    assert "there is no folder" in capsys.readouterr().err
