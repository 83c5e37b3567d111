"""The prepared call on a GPU: its limits, records that outlive a cut, and its table in the docs."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))  # the scripts there import each other by bare names
    names = ("records", "report", "run")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return {name: importlib.import_module(name) for name in names}


def test_the_limits_of_all_parts_are_two_calls_together(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--list"])
    assert scripts["run"].main() == 0
    *parts, whole = capsys.readouterr().out.splitlines()
    seconds = {line.split()[0]: int(line.split()[1]) for line in parts}
    files = {path.stem for path in (ROOT / "benchmarks" / "gpu").glob("*.py")}
    assert set(seconds) == files - {"records", "report", "run"}
    assert int(whole.split()[1]) == sum(seconds.values()) <= 2 * 540


def test_results_that_are_there_are_not_measured_again_and_a_failure_is(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    def part(ends_s: float = float("inf")) -> object:
        return scripts["records"].Part(
            name="codec", device=torch.device("cpu"), is_tiny=True, folder=tmp_path, ends_s=ends_s
        )

    def fail() -> dict[str, object]:
        raise RuntimeError("no memory")

    first = part()
    first.measure("one", lambda: {"value": 1})
    first.measure("two", fail)
    assert first.num_failed == 1
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"part": "codec", "key": "th')  # a full disk
    second = part()
    assert second.measure("one", fail)["value"] == 1
    assert second.measure("two", lambda: {"value": 2})["value"] == 2
    assert part(ends_s=0.0).measure("three", fail) is None
    assert [(line["key"], line["state"]) for line in scripts["records"].read(tmp_path)] == [
        ("one", "done"), ("two", "failed"), ("two", "done"),
    ]  # fmt: skip


def test_the_table_of_the_docs_is_that_of_the_stored_results(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    report = scripts["report"]
    assert report.table(report.read(report.RESULTS)) in (ROOT / "docs" / "benchmarks.md").read_text()
    nothing = report.rows(report.read(tmp_path / "none"))
    assert nothing and all(value == report.MISSING for _, _, value in nothing)
    (tmp_path / "own").write_text(json.dumps({"part": "exact", "key": "kill and resume", "state": "failed"}) + "\n")
    assert "failed" in report.table(report.read(tmp_path / "own"))
