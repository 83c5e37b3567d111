"""From text to the arguments of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest

from thinwire import methods
from thinwire.codecs import Codec, e3m0
from thinwire.methods import RECIPES, about, options_of, parse_options, story
from thinwire.sync.method import Method


def recipe(
    *, density: float = 0.1, rounds: int = 3, nesterov: bool = False, codec: Codec | None = None,
    order: Literal["up", "down"] = "up", steps: int | Sequence[int] = 1, clip: float | None = None,
    other: object = None,
) -> Method:  # fmt: skip
    """Take every kind of option."""
    raise NotImplementedError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("density=1e-3", 1e-3),
        ("rounds=7", 7),
        ("nesterov=yes", True),
        ("nesterov=false", False),
        ("codec=e3m0", e3m0()),
        ("codec=none", None),
        ("order=down", "down"),
        ("steps=4", 4),
        ("steps=1,2,3", (1, 2, 3)),
        ("clip=none", None),
        ("clip=2", 2.0),
    ],
)
def test_a_text_becomes_a_value_of_the_argument_s_type(text: str, value: Any) -> None:
    (found,) = parse_options(recipe, [text]).values()
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["density"], "is written NAME=VALUE, got 'density'"),
        (["density="], "is written NAME=VALUE, got 'density='"),
        (["densty=1"], "has no option 'densty'; did you mean density"),
        (["other=1"], "has no option 'other'"),
        (["rounds=1.5"], "rounds must be int, got '1.5'"),
        (["order=sideways"], "order must be up/down, got 'sideways'"),
        (["steps=1,x"], "steps must be int or numbers joined by commas, got '1,x'"),
        (["nesterov=maybe"], "nesterov must be bool, got 'maybe'"),
        (["codec=e3m1"], "unknown codec; got 'e3m1'; .*try e3m0"),
        (["clip=1", "clip=2"], "the option clip is given twice"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_value(texts: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_options(recipe, texts)


@pytest.mark.parametrize("name", RECIPES)
def test_every_method_tells_of_itself(name: str) -> None:
    card = about(name)
    assert all([card.paper, card.exchanged, card.bits, card.memory, card.restrictions])
    assert len(story(name)) > 100 and len((methods.recipe(name).__doc__ or "").splitlines()) > 1
    for option in options_of(methods.recipe(name)):
        assert f"{option}:" in (methods.recipe(name).__doc__ or ""), "an option is explained"
