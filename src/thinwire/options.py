"""Options: rules that stand at the fields of dataclasses, and drive command line, checks, help and `config.json`.

The text below a field is its help. Imports no torch, so that wrong options are refused at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from thinwire.errors import refusal, unknown_name

_KEY = "option"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRule:
    """Values that an option may have, and its class.

    Attributes:
        least: The least value, `most` the largest; values must be larger than `above`, smaller than `below`.
        usual: The value of the remedy; by default the default, or the least value that trains.
        choices: All values that there are.
        name: The name on the command line, where it is not the field's.
        is_basic: Whether the help lists it first.
        is_free: Whether it does not change what is computed: a resumed run may change it, and hosts may differ in it.
        is_local: Whether each host of an elastic run has its own.
        is_place: Whether it names what a host reads or writes, which each host may have elsewhere.
        unused: Why a method that does not take the option has no use for it; empty for options of no method.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    usual: object = None
    choices: tuple[str, ...] = ()
    name: str = ""
    is_basic: bool = False
    is_free: bool = False
    is_local: bool = False
    is_place: bool = False
    unused: str = ""

    def problem(self, flag: str, value: Any, *, default: object) -> ValueError | None:
        """Return what is wrong with a value; none for a missing one."""
        if value is None:
            return None
        if self.choices and value not in self.choices:
            return unknown_name(flag, value, self.choices)
        usual = self.usual if self.usual is not None else default or max(1, self.least or 0)
        remedy = f"{flag} {usual}"
        is_range = (self.least is not None or self.above is not None) and (
            self.below is not None or self.most is not None
        )
        is_allowed = (
            (self.least is None or value >= self.least) and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most) and (self.below is None or value < self.below)
        )  # fmt: skip
        if is_range and not is_allowed:
            return refusal(f"{flag} is out of its range", got=value, allowed=self.allowed, remedy=remedy)
        if self.above is not None and not self.above < value < math.inf:
            return refusal(f"{flag} is not above {self.above:g}", got=value, allowed=self.allowed, remedy=remedy)
        if self.least is not None and not value >= self.least:
            return refusal(f"{flag} is too small", got=value, allowed=self.allowed, remedy=remedy)
        return None

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        low = f"above {self.above:g}" if self.above is not None else f"at least {self.least:g}"
        if self.most is not None:
            return f"{low}, at most {self.most:g}"
        if self.below is not None:
            return f"{low}, below {self.below:g}"
        return f"{self.least:g} or more" if self.above is None else f"{low} and finite"


def option(default: Any, **rule: Any) -> Any:
    """Return a dataclass field with the rules of an option; see `OptionRule`.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Sizes:
        ...     steps: int = option(300, least=1)
        >>> print(*problems(Sizes(steps=0)))
        --steps is too small; got 0; allowed 1 or more; try --steps 300
    """
    return dataclasses.field(default=default, metadata={_KEY: OptionRule(**rule)})


def rule_of(field: dataclasses.Field[Any]) -> OptionRule:
    """Return the rules at a field; one that has none allows every value of its type."""
    found = field.metadata.get(_KEY)
    return found if isinstance(found, OptionRule) else OptionRule()


def flag(name: str) -> str:
    """Return an option as the command line writes it."""
    return "--" + name.replace("_", "-")


def problems(options: Any) -> Iterator[ValueError]:
    """Yield what is wrong with the values of a dataclass of options."""
    for field in dataclasses.fields(options):
        rule = rule_of(field)
        found = rule.problem(flag(rule.name or field.name), getattr(options, field.name), default=field.default)
        if found is not None:
            yield found


def rules_of(sections: Mapping[str, type[Any]]) -> dict[str, tuple[str, dataclasses.Field[Any], OptionRule]]:
    """Return section, field and rules of each option of some dataclasses, by its name."""
    return {
        rule.name or field.name: (section, field, rule)
        for section, kind in sections.items()
        for field in dataclasses.fields(kind)
        for rule in [rule_of(field)]
    }
