"""The page of the papers' claims: every method has one, and its words are those of the stored results."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
from markdown_pages import DOCS, ROOT

from thinwire.methods import RECIPES

SCRIPTS = ("claims", "claims_page", "compare", "images", "ladder", "rungs")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in ("methods", "quality"):  # the scripts there import each other by their bare names
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / folder))
    for name in SCRIPTS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("claims_page")


def test_the_page_is_that_of_the_stored_results_and_has_every_method(script: ModuleType) -> None:
    assert set(script.CLAIMS) == set(RECIPES) - {"all-reduce"}
    remedy = "run benchmarks/methods/claims_page.py docs/methods-claims.md"
    assert (DOCS / "methods-claims.md").read_text() == script.page(script.Stored.read()), remedy


def test_a_verdict_follows_from_its_measures(script: ModuleType) -> None:
    claim = script.Claim(claim="as good", baseline="SGD", evidence=[script.Text(entry="a"), script.Text(entry="b")])

    def verdict(*holds: bool, **more: Any) -> str:
        return str(claim.verdict([script.Finding(words="", holds=one, **more) for one in holds]))

    assert [verdict(True, True), verdict(True, False), verdict(False, False), verdict()] == [
        "shown", "shown in part", "not shown here", "not measured"]  # fmt: skip
    assert verdict(True) == "shown in part"  # the other measure was not run
    assert verdict(True, is_of_bytes=True) == "not measured"
    assert verdict(True, True, needs_seeds=True) == "shown, few seeds"


def test_a_side_is_tuned_before_its_seeds_run_and_its_best_rate_lies_inside(script: ModuleType) -> None:
    claims = script.claims
    side = claims.Side(
        settings={"method": "co2", "inner": "sgd"}, lrs=(0.1, 0.2, 0.4), variants=({}, {"outer_lr": 0.5})
    )

    def loss(run: dict[str, Any]) -> float:
        return abs(run["lr"] / 0.8 - 1) + len(run["arguments"]) + run["seed"] / 1000

    losses: dict[str, float] = {}
    while wanted := side.next_runs(losses):
        losses[claims.key_of(wanted[0])] = loss(wanted[0])
    assert side.grid(losses) == [0.1, 0.2, 0.4, 0.8, 1.6]
    assert [(run["lr"], run["arguments"], run["seed"]) for run in side.winners(losses)] == [
        (0.8, {}, seed) for seed in (0, 1, 2)]  # fmt: skip
    assert len(losses) == 5 * 2 + 2
