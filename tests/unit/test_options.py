"""Rules at the fields of options: what they refuse, and remedies that they accept."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from thinwire.options import flag, option, problems, rule_of, rules_of
from thinwire.training.config import SECTIONS


def outside(rule: Any) -> list[Any]:
    """Return values that a rule refuses, at each of its ends."""
    found: list[Any] = ["no such choice"] if rule.choices else []
    found += [rule.least - 1, math.nan] if rule.least is not None else []
    found += [rule.above, -math.inf, math.nan] if rule.above is not None else []
    found += [rule.most * 2] if rule.most is not None else []
    return found + ([rule.below] if rule.below is not None else [])


def test_every_training_option_refuses_what_is_outside_and_accepts_its_own_remedy() -> None:
    num_checked = 0
    for name, (_, field, rule) in rules_of(SECTIONS).items():
        assert rule.problem(flag(name), field.default, default=field.default) is None
        for value in outside(rule):
            text = str(rule.problem(flag(name), value, default=field.default))
            assert text.startswith((f"{flag(name)} is ", f"unknown {flag(name)}")) and f"got {value!r}" in text, text
            remedy = text.rpartition("try ")[2].removeprefix(flag(name)).split(" or ")[0].strip()
            given = remedy if rule.choices else float(remedy)
            assert rule.problem(flag(name), given, default=field.default) is None, text
            num_checked += 1
    assert num_checked > 80


def test_a_field_without_rules_allows_everything_and_both_open_ends_are_named() -> None:
    @dataclasses.dataclass(frozen=True)
    class Options:
        free: int = 3
        share: float = option(0.5, above=0, below=1, name="part")

    assert rule_of(dataclasses.fields(Options)[0]) == rule_of(dataclasses.fields(Options)[0])
    assert not list(problems(Options(free=-7)))
    with pytest.raises(
        ValueError, match=r"--part is out of its range; got 1; allowed above 0, below 1; try --part 0.5"
    ):
        raise next(problems(Options(share=1)))
