"""What `report.html` says of what broke."""

from __future__ import annotations

import json
from pathlib import Path

from tests.rehearsed_run import finding_line
from tests.sample_runs import write_run
from thinwire.monitor.report.report import trouble, write_report


def test_a_run_that_nobody_judged_is_not_called_well(tmp_path: Path) -> None:
    assert "or the run had no live diagnosis" in "".join(trouble(tmp_path))


def test_what_broke_what_was_done_and_what_it_cost_stand_in_the_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "findings.jsonl").write_text(finding_line(at=1e9) + finding_line(at=1e9 + 9, state="over"))
    action = {"at": 1e9 + 1, "action": "exclude", "target": "replica 2", "dry_run": True, "finding": 0, "result": "-"}
    (run / "actions.jsonl").write_text(json.dumps(action) + "\n")
    (run / "downtime.json").write_text(json.dumps({"detection_s": 1.5, "total_s": 2.0, "run_s": 40.0}))
    page = write_report(run, command="thinwire train").read_text()
    told = (
        "communication slow: link 0 -&gt; 2",
        "Messages take longer.",
        "times longer: 4.7",
        "97 %",
        "look at the cable",
    )
    done = "exclude (dry run: not done)", "replica 2", "2.0 s of 40.0 s, 5.0 %"
    # with the date, and the same wherever it is read
    when = [f"{words}2001-09-09 01:46:{second} UTC" for words, second in (("told at ", 40), ("over at ", 49), ("", 41))]
    for words in (*told, *done, *when):
        assert words in page, words


def test_broken_files_are_told_and_markup_in_them_stays_text(tmp_path: Path) -> None:
    (tmp_path / "findings.jsonl").write_text("{broken\n" + finding_line(text="<script>", at=1e12))
    (tmp_path / "actions.jsonl").write_text('{"at": "soon", "action": "warn"}\n')
    (tmp_path / "downtime.json").write_text('{"total_s": -1}')
    told = "".join(trouble(tmp_path))
    assert "<script>" not in told and "&lt;script&gt;" in told
    assert all(f"Not read: {name}" in told for name in ("findings.jsonl", "actions.jsonl", "downtime.json"))
