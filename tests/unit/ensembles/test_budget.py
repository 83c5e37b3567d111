from __future__ import annotations

import re

import pytest

from thinwire.ensembles import divide_budget

DIFFICULTY = {"easy": 3.0, "medium": 4.0, "hard": 5.0}


def used(found: dict, tokens_per_step: int) -> float:
    return sum(6 * one.parameters * tokens_per_step * one.steps for one in found.values())


@pytest.mark.parametrize("flops", [7.2e12, 7.77e12, 1e13, 1.23456e15])
def test_steps_and_sizes_use_up_the_budget_to_one_percent(flops: float) -> None:
    sizes = [400_000, 700_000, 1_000_000, 1_500_000, 3_000_000]
    for options in ({"parameters": 1_000_000}, {"steps": 400}, {"steps": 400, "sizes": sizes}):
        found = divide_budget(flops, DIFFICULTY, tokens_per_step=1000, **options)
        assert used(found, 1000) == pytest.approx(flops, rel=0.01), options
        assert used(found, 1000) <= flops * (1 + 1e-6) or "sizes" not in options
    assert {one.parameters for one in found.values()} <= set(sizes)


def test_three_difficulties_give_the_steps_and_the_sizes_of_the_paper() -> None:
    steps = divide_budget(7.2e12, DIFFICULTY, tokens_per_step=1000, parameters=1_000_000)
    assert [one.steps for one in steps.values()] == [300, 400, 500]
    flops = 6 * 340e6 * 1000 * 400
    sizes = divide_budget(flops, {"easy": 90, "medium": 115, "hard": 135}, tokens_per_step=1000, steps=400)
    assert [one.parameters for one in sizes.values()] == [90_000_000, 115_000_000, 135_000_000]
    assert {one.steps for one in sizes.values()} <= {399, 400}


def test_what_whole_steps_cannot_use_up_is_refused_with_a_budget_that_works() -> None:
    options = {"tokens_per_step": 1000, "parameters": 1_000_000}
    with pytest.raises(ValueError, match=r"to 1 %; got 2e\+10, .* try flops=") as refused:
        divide_budget(2e10, DIFFICULTY, **options)
    flops = float(re.search(r"try flops=(\S+)", str(refused.value))[1])
    assert used(divide_budget(flops, DIFFICULTY, **options), 1000) == pytest.approx(flops, rel=0.01)
    for wrong in (0.0, -1.0, float("nan"), float("inf"), 1e-300, 10**400):
        with pytest.raises(ValueError, match="a budget is no amount"):
            divide_budget(wrong, DIFFICULTY, **options)
        with pytest.raises(ValueError, match="a budget is no amount"):
            divide_budget(1e12, {"easy": wrong}, **options)
    # shares whose product with the budget no float holds
    with pytest.raises(ValueError, match="a budget is no amount"):
        divide_budget(1e308, {"easy": 10.0, "hard": 1e-308}, **options)
    with pytest.raises(ValueError, match="parameters does not go with steps"):
        divide_budget(1e12, DIFFICULTY, tokens_per_step=1000)
