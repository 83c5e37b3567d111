from __future__ import annotations

import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.sample_runs import append, step_line, write_run
from thinwire.cli.argument_parsing import parse_options
from thinwire.cli.compare import CompareOptions, compare, main
from thinwire.errors import DataError

Output = pytest.CaptureFixture[str]


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    first = write_run(
        tmp_path / "all-reduce", method="all-reduce", interval=3, payload_bytes=12_200_000, final_loss=4.0
    )
    return first, write_run(tmp_path / "streaming", final_loss=4.1)


def test_the_command_line_takes_runs_out_and_json(tmp_path: Path) -> None:
    assert parse_options(CompareOptions, ["a", "b"], prog="") == CompareOptions(runs=(Path("a"), Path("b")))
    options = parse_options(CompareOptions, ["a", "--json", "--out", "page.html"], prog="")
    assert (options.json, options.out) == (True, Path("page.html"))


def test_without_out_no_file_is_written(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    assert main([str(runs[0]), str(runs[1])]) == 0
    assert "streaming" in capsys.readouterr().out
    assert list(empty.iterdir()) == []


def test_a_row_a_run_with_the_gap_to_the_first(runs: tuple[Path, Path], tmp_path: Path, capsys: Output) -> None:
    page = tmp_path / "out" / "compare.html"
    assert main([*map(str, runs), "--out", str(page)]) == 0
    captured = capsys.readouterr()
    head, first, second = captured.out.splitlines()
    for name in (
        "method",
        "replicas",
        "steps",
        "tokens",
        "val loss",
        "gap",
        "wall",
        "sent",
        "times fewer",
        "peak rate",
    ):
        assert name in head
    assert first.split()[:2] == ["all-reduce", "all-reduce"]
    assert "+2.50 %" in second and "12.4 MB" in second and " 296 " in second
    assert str(page) in captured.err
    assert page.is_file()


def test_json_is_one_object_on_stdout(runs: tuple[Path, Path], capsys: Output) -> None:
    compare(runs, out=None, json=True)
    values = json.loads(capsys.readouterr().out)
    assert values["notes"] == [] and values["page"] is None
    assert [row["name"] for row in values["runs"]] == ["all-reduce", "streaming"]
    assert values["runs"][1]["gap_percent"] == pytest.approx(2.5)
    assert values["runs"][1]["tokens"] == 614_400


def test_a_loss_that_is_not_finite_is_null_in_json_and_shown_in_the_table(tmp_path: Path, capsys: Output) -> None:
    good = write_run(tmp_path / "good")
    bad = write_run(tmp_path / "bad", summary={"val_loss": math.nan})
    compare((good, bad), out=None, json=True)
    row = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))["runs"][1]
    assert row["val_loss"] is None and row["gap_percent"] is None
    compare((good, bad), out=tmp_path / "page.html", json=False)
    assert "nan" in capsys.readouterr().out


def test_runs_on_other_data_models_or_tokens_are_flagged(tmp_path: Path, capsys: Output) -> None:
    first = write_run(tmp_path / "first")
    same = write_run(tmp_path / "same", method="diloco")
    other = write_run(tmp_path / "other", steps=600, config={"data": {"source": "books"}}, summary={"model": "35m"})
    comparison = compare((first, same, other), out=None, json=False)
    assert len(comparison.notes) == 1
    for words in ("other", "data (books against stdlib)", "model (35m against nano)", "tokens (1.23 M against 614 k)"):
        assert words in comparison.notes[0]
    assert comparison.notes[0] in capsys.readouterr().out


def test_the_page_has_a_line_a_run_and_loads_nothing(runs: tuple[Path, Path], tmp_path: Path) -> None:
    hostile = write_run(tmp_path / "<b>&\x1b[2J", final_loss=4.3)
    compare((*runs, hostile), out=tmp_path / "compare.html", json=False)
    text = (tmp_path / "compare.html").read_text()
    page = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    assert not re.search(r"https?://|@import|url\(|<script|\x1b", text)
    by_tokens, by_bytes = page.iter("svg")
    for figure in (by_tokens, by_bytes):
        lines = [node for node in figure.iter("polyline") if "line" in node.get("class", "").split()]
        assert len(lines) == 3
    ends = [
        float(line.attrib["points"].split()[-1].split(",")[0])
        for line in by_bytes.iter("polyline")
        if "line" in line.attrib["class"].split()
    ]
    assert ends[0] > ends[1], "the all-reduce run sent more"


def test_hostile_names_cannot_steer_the_terminal(tmp_path: Path, capsys: Output) -> None:
    compare((write_run(tmp_path / "[red]\x1b[2J", method="\x1b]0;x\x07"),), out=None, json=False)
    shown = capsys.readouterr().out
    assert "[red]" in shown
    assert "\x1b" not in shown and "\x07" not in shown


def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "a" / "demo"), write_run(tmp_path / "b" / "demo")
    comparison = compare(paths, out=None, json=True)
    assert [row.name for row in comparison.rows] == [str(path) for path in paths]


def test_fifteen_runs_fit_into_one_page(tmp_path: Path) -> None:
    paths = tuple(write_run(tmp_path / f"run-{n}", steps=60) for n in range(15))
    compare(paths, out=tmp_path / "compare.html", json=True)
    ElementTree.fromstring((tmp_path / "compare.html").read_text().removeprefix("<!DOCTYPE html>"))


def test_no_run_and_the_same_run_twice_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got none"):
        compare((), out=None, json=False)
    path = write_run(tmp_path / "run")
    with pytest.raises(ValueError, match="2 times"):
        compare((path, tmp_path / "." / "run"), out=None, json=False)


def test_an_unfinished_run_is_refused_and_no_page_is_written(tmp_path: Path, capsys: Output) -> None:
    good = write_run(tmp_path / "good")
    half = write_run(tmp_path / "half", steps=50, is_finished=False)
    append(half / "metrics-replica-0.jsonl", step_line(60))
    with pytest.raises(DataError, match=r"half has not finished.*last step is 60"):
        compare((good, half), out=tmp_path / "compare.html", json=False)
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "compare.html").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "got none"),
        (["RUN", "RUN"], 2, "2 times"),
        (["RUN", "--jsno"], 2, "--jsno"),
        (["nowhere"], 1, "there is no folder nowhere"),
        (["RUN", "--out", "RUN"], 1, "cannot write"),
        (["RUN", "--json"], 0, ""),
        (["--help"], 0, ""),
    ],
)
def test_every_mistake_is_one_line_on_stderr_and_an_exit_code(
    tmp_path: Path, capsys: Output, arguments: list[str], code: int, words: str
) -> None:
    path = write_run(tmp_path / "run")
    assert main([argument.replace("RUN", str(path)) for argument in arguments]) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == (1 if code else 0)
    assert bool(captured.out) == (code == 0)
