"""The catalogue that is read from source says the same as the methods themselves."""

from __future__ import annotations

import inspect

import pytest

from thinwire.methods import RECIPES, about, options_of, recipe
from thinwire.training.method_catalog import catalog, check_method_option, method_entry
from thinwire.workloads.language.presets import PRESETS, check_model


def test_every_method_is_in_the_catalogue_and_nothing_else() -> None:
    assert set(catalog()) == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_an_entry_says_what_the_method_says(name: str) -> None:
    entry, parameters = method_entry(name), inspect.signature(recipe(name)).parameters
    assert entry.takes == set(parameters)
    assert {option: " or ".join(kinds) for option, kinds in entry.kinds.items()} == {
        option: text.rpartition(", ")[0] for option, text in options_of(recipe(name)).items()
    }
    assert (entry.inner_optimizer, entry.lr) == (about(name).inner_optimizer, about(name).lr)


def test_every_preset_and_every_size_is_a_model() -> None:
    for name in (*PRESETS, "7b", "1.5B"):
        check_model(name)
    with pytest.raises(ValueError, match="unknown --model; got '7q'"):
        check_model("7q")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("density", "--method-option has no value; got 'density'; allowed NAME=VALUE"),
        ("densty=1", "unknown option of --method dgc; got 'densty'; .*try density"),
        ("density=some", "--method-option density is of another kind; got 'some'; allowed float"),
        ("masks=maybe", "allowed bool"),
        ("selection=best", "allowed sampled/exact"),
    ],
)
def test_an_option_that_a_method_does_not_take_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_method_option(text, method="dgc")


@pytest.mark.parametrize("text", ["density=1e-3", "masks=no", "clip_norm=none", "clip-norm=2", "selection=exact"])
def test_an_option_that_a_method_takes_is_accepted(text: str) -> None:
    check_method_option(text, method="dgc")
