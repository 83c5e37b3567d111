"""Rules of the quality ladder: what runs next, what counts as tuned, how a token lag is read."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "quality"


@pytest.fixture
def quality(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))  # the scripts there import each other by their bare names
    names = ("rungs", "ladder", "report", "train")
    for name in names:  # another benchmark has a module of such a name too
        monkeypatch.delitem(sys.modules, name, raising=False)
    return {name: importlib.import_module(name) for name in names}


def side_of(quality, name="iso-loco", replicas=2, rung="A"):
    return next(quality["ladder"].sides(quality["rungs"].RUNGS[rung], only=[name], replicas=[replicas]))


def line_of(quality, settings, loss):
    return {**settings, "loss": loss, "tokens": settings["steps"] * 1024, "num_parameters": 115_200, "machine": "test",
            "sent_bytes": 1000, "cpu_s": 70.0, "curve": [[settings["steps"], loss]]}  # fmt: skip


def climb(quality, side, loss_of):
    """Run a side with given losses, as the ladder would; return the lines."""
    lines = {}
    for _ in range(20):
        losses = {key: line["loss"] for key, line in lines.items()}
        waiting = side.next_settings(losses)
        if not waiting:
            return lines
        for settings in waiting:
            lines[quality["ladder"].key_of(settings)] = line_of(quality, settings, loss_of(settings))
    raise AssertionError("the side never ends")


@pytest.mark.parametrize("best", [0.003, 0.0007, 0.02])
def test_a_grid_is_widened_until_its_best_rate_lies_inside(quality, best):
    side = side_of(quality)
    lines = climb(quality, side, lambda one: 2 + abs(one["lr"] / best - 1) / 100 + one["seed"] / 1000)
    losses = {key: line["loss"] for key, line in lines.items()}
    grid, chosen = side.grid(losses), side.best_lr(losses)
    assert grid[0] < chosen < grid[-1]
    assert sorted(line["seed"] for line in lines.values() if line["lr"] == chosen) == [0, 1, 2]


def test_losses_are_compared_seed_by_seed_at_the_best_rate_of_each(quality):
    sides = [side_of(quality, name) for name in ("iso-loco", "iso-loco, float32")]
    lines = {}
    for side, best, base in zip(sides, (3e-3, 6e-3), (2.02, 2.0), strict=True):
        lines |= climb(quality, side, lambda one, best=best, base=base: base * (1 + abs(one["lr"] / best - 1)))
    more = sides[0].next_settings({key: line["loss"] for key, line in lines.items()}, num_seeds=5)
    assert [(one["lr"], one["seed"]) for one in more] == [(3e-3, 3), (3e-3, 4)]
    for one in more:  # a seed that only one of both has is left out
        lines[quality["ladder"].key_of(one)] = line_of(quality, one, 9.0)
    rung, names = quality["rungs"].RUNGS["A"], [side.entry.name for side in sides]
    found = quality["report"].paired_differences(rung, lines, *names, replicas=2)
    assert found == pytest.approx({0: 1.0, 1: 1.0, 2: 1.0})


def test_a_run_that_is_stored_is_not_run_again(quality):
    side = side_of(quality)
    lines = climb(quality, side, lambda one: 2 + abs(one["lr"] / 3e-3 - 1))
    assert len(lines) == 3 + 2
    assert side.next_settings({key: line["loss"] for key, line in lines.items()}) == []


@pytest.mark.parametrize(
    ("change", "words"), [({"steps": 600}, "tokens a parameter"), ({"windows": 64, "steps": 2370}, "79 rounds")]
)
def test_a_rung_that_breaks_the_rules_is_refused(quality, change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(quality["rungs"].RUNGS["A"], **change)


def test_every_entry_names_a_method_and_arguments_that_exist(quality):
    from thinwire.codecs import by_name
    from thinwire.methods import recipe

    for entry in quality["rungs"].ENTRIES:
        options = {k: by_name(v) if k == "codec" else v for k, v in entry.options.items()}
        assert recipe(entry.method)(**options).name == entry.method
        assert set(entry.rungs.split()) <= set(quality["rungs"].RUNGS)


def test_the_report_holds_both_sides_at_their_best_rates(quality):
    rung = quality["rungs"].RUNGS["A"]
    base = climb(quality, side_of(quality, "data-parallel", 1),
                 lambda one: 2 * (one["steps"] / 2600) ** -0.1 + abs(one["lr"] / 6e-3 - 1))  # fmt: skip
    mine = climb(quality, side_of(quality), lambda one: 2.02 + abs(one["lr"] / 3e-3 - 1))
    (_, row) = quality["report"].rows(rung, base | mine)
    assert (row.method, row.replicas, row.lr, row.seeds, row.is_tuned) == ("iso-loco", 2, 3e-3, 3, True)
    assert row.gap_percent == pytest.approx(1.0)
    # a loss 1 % higher takes 1.01 ** -10 of the tokens
    assert row.token_lag_percent == pytest.approx(100 * (1 - 1.01**-10), rel=1e-6)


def test_a_loss_outside_of_the_budgets_has_no_token_lag(quality):
    lag = quality["report"].token_lag_percent
    assert lag(0.5, [(50, 4.0), (100, 1.0)], tokens=100) is None
    assert lag(1.0, [(50, 4.0), (100, 1.0)], tokens=100) == pytest.approx(0)


def test_a_run_in_pieces_is_the_run_in_one(quality, tmp_path, monkeypatch):
    """With rounds in flight at the pause, counted bytes, and the mean of global values on both sides of a pause."""
    rungs, train = quality["rungs"], quality["train"]
    text = tmp_path / "text"
    text.mkdir()
    for number in range(8):
        (text / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    small = dataclasses.replace(rungs.RUNGS["A"], name="A", data=str(text), eval_windows=64)
    for name, value in {"dim": 16, "steps": 12, "save_every": 4, "seq_len": 16, "num_parameters": 10_368}.items():
        object.__setattr__(small, name, value)
    monkeypatch.setattr(train, "RUNGS", {"A": small})
    monkeypatch.setattr(train, "SYNC_INTERVAL", 3)
    settings = {"rung": "A", "name": "x", "method": "streaming-diloco", "inner": "adamw", "replicas": 2, "windows": 4,
                "options": {"sync_interval": 3, "overlap_steps": 2, "codec": "e3m0"}, "lr": 0.01, "seed": 0,
                "steps": 12, "mean_of": 3}  # fmt: skip
    whole = train.train(settings, minutes=None, cache=tmp_path / "cache")
    pieces = [train.train(settings, minutes=1e-9, cache=tmp_path / "cache") for _ in range(3)]
    assert pieces[:2] == [None, None]
    for field in ("loss", "sent_bytes", "curve"):
        assert pieces[2][field] == whole[field]
    assert whole["loss"] != whole["curve"][-1][1]
    assert json.dumps(pieces[2])
