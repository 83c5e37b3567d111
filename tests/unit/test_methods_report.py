"""Tables and figures of the benchmark of all methods: what is compared with what, and labels that do not overlap."""

from __future__ import annotations

import importlib
import itertools
import random
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.methods.scatter import Box, Mark, place_labels, width_of
from thinwire.methods import RECIPES

FOLDER = Path(__file__).parents[2] / "benchmarks" / "methods"
SVG = "{http://www.w3.org/2000/svg}"
AREA = Box(left=40, top=30, right=680, bottom=470)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))  # the scripts there import each other by their bare names
    monkeypatch.delitem(sys.modules, "report", raising=False)  # another benchmark has one too
    return importlib.import_module("report")


def line(name: str, seed: int, **changed: Any) -> dict[str, Any]:
    reached = {"bits": 4.8, "accuracy": 0.98, "val_loss": 0.1}
    return {"task": "digits", "name": name, "seed": seed, "steps": 300, **reached, **changed}


def test_every_method_is_run_on_the_language_and_all_but_muloco_on_the_digits(report: Any) -> None:
    named = {task: {entry["method"] for entry in report.entries(task).values()} for task in report.TASKS}
    assert named["language"] == set(RECIPES)
    assert named["digits"] == set(RECIPES) - {"muloco"}  # whose Muon is for a transformer's matrices


def test_a_difference_is_to_the_reference_of_the_same_seed(report: Any) -> None:
    lines = [
        line("diloco", 1, accuracy=0.97), line("diloco", 0, accuracy=0.99), line("diloco", 2),
        line("diloco", 0, steps=20, accuracy=0.5), line("diloco", 0, task="language", steps=200),
        line(report.REFERENCE, 0, bits=48.0), line(report.REFERENCE, 1, accuracy=0.96),
    ]  # fmt: skip
    first, second = report.rows("digits", lines, [])
    assert (first.name, first.differences, first.times_fewer) == (report.REFERENCE, (), pytest.approx(48 / 26.4))
    assert second.accuracies == (99.0, 97.0, 98.0)
    assert second.differences == (pytest.approx(1.0), pytest.approx(1.0))
    assert (second.bits, second.times_fewer, second.step_s) == (4.8, pytest.approx(10.0), None)


def test_a_table_has_the_columns_that_are_filled_and_the_times_of_the_lab(report: Any) -> None:
    times = [
        {"name": "dgc", "rate": "20mbit", "wall_s": 10.0, "steps": 40, "compute_utilisation": 0.954},
        {"name": "dgc", "rate": "5mbit", "wall_s": 99.0, "steps": 40, "compute_utilisation": 0.1},
    ]
    lines = [
        {"task": "language", "name": name, "seed": 0, "steps": 200, "bits": bits, "val_loss": loss}
        for name, bits, loss in ((report.REFERENCE, 32.0, 5.0), ("dgc", 0.0213, 5.5))
    ]
    head, _, _, row = report.table(report.rows("language", lines, times)).splitlines()
    assert "s a step at 20 Mbit/s" in head and "accuracy" not in head
    assert row == "| dgc | 1 | 5.500 | +10.0 % | 0.0213 | 1,502 | 0.25 | 95 % | 2 |"
    assert "s a step" not in report.table(report.rows("language", lines, []))


def test_a_spread_writes_the_median_the_ends_and_no_minus_zero(report: Any) -> None:
    assert report.spread([3.0, 1.0, 2.0], "{:.0f}", " %") == "2 % (1 to 3)"
    assert report.spread([-0.001], "{:+.1f}") == "+0.0"
    assert report.spread([], "{}") == ""


def test_the_figure_names_every_method_once_in_the_colour_of_what_it_exchanges(report: Any) -> None:
    names = [*report.entries("digits")]
    generator = random.Random(0)
    lines = [
        line(name, seed, bits=generator.choice([0.1, 1.0, 4.8, 4.8, 5.0, 48.0]), val_loss=generator.uniform(0.02, 0.06))
        for name, seed in itertools.product(names, range(2))
    ]
    svg = ElementTree.fromstring(report.figure("digits", report.rows("digits", lines, [])))
    written = ["".join(node.itertext()) for node in svg.iter(f"{SVG}text") if node.get("class") == "label"]
    assert sorted(written) == sorted(names)
    titles = {node.findtext(f"{SVG}title"): node.get("class") for node in svg.iter(f"{SVG}circle") if len(node)}
    colours = {str(words).rpartition(":")[0]: colour for words, colour in titles.items()}
    assert (colours["dgc"], colours["diloco"], colours["masha2"]) == ("f0", "f1", "f0")


@pytest.mark.parametrize("seed", range(4))
def test_labels_stand_apart_from_each_other_and_from_all_points_and_inside(seed: int) -> None:
    generator = random.Random(seed)
    centres = [(generator.uniform(60, 660), generator.uniform(60, 440)) for _ in range(5)]
    marks = []
    for _ in range(24):
        x, y = (place + generator.gauss(0, 15) for place in generator.choice(centres))
        at = min(max(x, 45), 670), min(max(y, 40), 460)
        marks.append(Mark(at=at, top=at[1] - 10, bottom=at[1] + 5))
    names = ["name-" * generator.randint(1, 4) for _ in marks]
    boxes = place_labels(marks, names, area=AREA)
    assert not any(one.meets(other) for one, other in itertools.combinations(boxes, 2))
    for box, name in zip(boxes, names, strict=True):
        assert box.right - box.left == pytest.approx(width_of(name))
        assert AREA.left <= box.left and box.right <= AREA.right
        assert AREA.top <= box.top and box.bottom <= AREA.bottom
        assert not any(box.nearest(mark.at) == mark.at for mark in marks)


def test_a_label_without_room_is_named() -> None:
    small = Box(left=0, top=0, right=30, bottom=30)
    with pytest.raises(ValueError, match="no room for the label 'much too long'"):
        place_labels([Mark(at=(15, 15), top=15, bottom=15)], ["much too long"], area=small)
