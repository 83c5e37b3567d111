"""`thinwire watch`: the run's state and its newest findings in the terminal."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from live_processes import DEADLINE_S

from tests.rehearsed_run import finding_line, write_records
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
    assert rows[0] == f"▲ {tmp_path.name}: communication slow: link 0 -> 2, and 1 more"
    assert rows[1].startswith("step 300 of 300, loss 4.") and "remedy: look at the cable" in told
    newest, older = (told.index(words) for words in ("link 0 -> 2 (", "rank 1"))
    assert told.index("tokens/s") < newest < older
    assert "\x1b" not in told and "rank 1\ufffd[2J" in told
    with path.open("a") as file:
        file.write(finding_line(state="over", at=10) + finding_line(
            where="rank 1\u001b[2J", kind="non-communication slow", state="over", at=10))  # fmt: skip
    assert main([str(tmp_path), "--once"]) == 0
    assert "resolved: communication slow: link 0 -> 2" in capsys.readouterr().out


def test_the_first_line_of_a_healthy_run_says_so_with_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, is_finished=False)
    for path in tmp_path.glob("metrics-*"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:12]))
    write_records(tmp_path, hosts=("a", "b"))
    assert main([str(tmp_path), "--once"]) == 0
    told = " ".join(capsys.readouterr().out.split())  # a narrow terminal breaks the line
    first = rf"✓ {tmp_path.name}: healthy, step 120 of 300, loss \d\.\d+, (.* tokens/s, )?1:20 min left"
    assert re.match(rf"{first} No fault found on 2 links or in any replica's work\. replica ", told), told


def test_the_first_line_of_a_starting_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--once"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[:2] == [
        f"… {tmp_path.name}: starting", "This folder holds no run yet. It is shown here as soon as it begins to write.",
    ]  # fmt: skip
    (tmp_path / "config.json").write_text('{"run": {"replicas": 2, "steps": 300}, "output": {"log_every": 10}}')
    assert main([str(tmp_path), "--once"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[:2] == [f"… {tmp_path.name}: starting", "Waiting for 2 replicas. Numbers appear after step 10."]


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
                if "healthy, step 10," in rows[-1]:
                    (tmp_path / "findings.jsonl").write_text(finding_line())
                elif rows[-1].startswith("communication slow: link 0 -> 2 ("):
                    write_run(tmp_path)
            assert process.wait(timeout=DEADLINE_S) == 0
        finally:
            process.kill()
    assert rows[0].startswith("✓ ") and "healthy, step 10, loss 5.000" in rows[0]
    assert any(row.startswith("communication slow: link 0 -> 2 (") for row in rows)
    assert any(row.startswith("step 300 of 300, ") for row in rows)
    assert len(rows) == len(set(rows))


def test_all_that_is_known_is_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write_run(tmp_path)), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["version"] == 1 and told["run"]["state"] == "finished"


def test_wrong_words_are_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--period-s", "0"]) == 2
    assert "--period-s is out of its range" in capsys.readouterr().err
    assert main([str(tmp_path / "none")]) == 1
    assert "there is no folder" in capsys.readouterr().err
