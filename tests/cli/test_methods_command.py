"""`thinwire methods`: a table of all, or all that is to be said of one."""

from __future__ import annotations

import json

import pytest

from thinwire.cli.methods import main
from thinwire.methods import RECIPES


def test_all_methods_stand_in_the_table_with_paper_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    for name in RECIPES:
        assert f"\n{name} " in text
    assert "arXiv 2501.18512" in text and "4.13 (M - 1) / H" in text
    assert max(map(len, text.splitlines())) <= 100


def test_one_method_is_explained_with_its_equations_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["streaming_diloco"]) == 0
    text = capsys.readouterr().out
    assert "theta_mp(t) = alpha theta_mp(t) + (1 - alpha) theta_p(t)" in text
    assert "--overlap-steps: int or numbers joined by commas, 1" in text and "--outer-momentum: float, 0.9" in text


def test_an_option_whose_name_means_something_else_to_train_is_shown_as_one_of_the_method(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["dgc"]) == 0
    text = capsys.readouterr().out
    assert "  --density: float, 0.001" in text and "  --method-option warmup_steps=VALUE: int, 0" in text


def test_a_program_gets_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diloco", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["diloco"]["paper"] == "arXiv 2311.08105"


@pytest.mark.parametrize(("words", "named"), [(["dilco"], "try diloco"), (["--jsn"], "json")])
def test_wrong_words_are_answered_in_one_line(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    told = capsys.readouterr()
    assert told.out == "" and named in told.err and len(told.err.splitlines()) == 1
