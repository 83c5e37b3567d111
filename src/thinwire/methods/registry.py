"""Registry of methods: each paper's module registers its function, its card, and what it needs of a training run."""

from __future__ import annotations

import difflib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from thinwire.codecs import Codec, by_name
from thinwire.sync.method import RECIPES, Method, method_key, recipe

Recipe = TypeVar("Recipe", bound=Callable[..., Method])

_CARDS: dict[str, About] = {}
_BOOLS = {"true": True, "yes": True, "false": False, "no": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """A method's card. M is the number of replicas, H the sync interval.

    Attributes:
        paper: Where it comes from, such as `"arXiv 2311.08105"`.
        exchanged: What is sent, and when.
        bits: Payload bits that a replica sends a parameter and inner step.
        memory: Copies of the parameters that it keeps beside the model and the inner optimizer's state.
        restrictions: What it does not go with.
        plan_codecs: Codecs that `thinwire plan` chooses from; none for the method's own.
        inner_optimizer: The default of `thinwire train --inner-optimizer`.
        lr: The default of `thinwire train --lr`; None for that of the model and the inner optimizer.
    """

    paper: str
    exchanged: str
    bits: str
    memory: str
    restrictions: str = "none"
    plan_codecs: tuple[str, ...] = ()
    inner_optimizer: str = "adamw"
    lr: float | None = None


def register(card: About) -> Callable[[Recipe], Recipe]:
    """Make a function that returns a method known to `recipe` and to `thinwire train --method`.

    Its keyword arguments are the method's options, with their defaults and types.

    Raises:
        ValueError: A method of that name is registered already.
    """

    def add(recipe: Recipe) -> Recipe:
        name = method_key(recipe.__name__)
        if name in RECIPES:
            raise ValueError(f"the method {name!r} is registered already; give the function another name")
        RECIPES[name], _CARDS[name] = recipe, card
        return recipe

    return add


def about(name: str) -> About:
    """Return the card of a method, by its name.

    Raises:
        ValueError: No method has this name; names the nearest ones.

    Example:
        >>> about("diloco").paper
        'arXiv 2311.08105'
    """
    return _CARDS[method_key(recipe(name).__name__)]


def story(name: str) -> str:
    """Return the docstring of a method's module: the paper, its equations, what we changed.

    Raises:
        ValueError: No method has this name; names the nearest ones.
    """
    return inspect.cleandoc(sys.modules[recipe(name).__module__].__doc__ or "")


def parse_options(recipe: Callable[..., Method], texts: Sequence[str]) -> dict[str, Any]:
    """Turn `name=value` texts into a recipe's arguments, by its signature.

    Args:
        recipe: A function of `thinwire.methods`.
        texts: Such as `"density=0.01"`, `"codec=e3m0"`, `"nesterov=yes"`; `_` and `-` are the same in names.

    Raises:
        ValueError: A text is no `name=value`, the recipe has no such argument, or the value is not of its type.

    Example:
        >>> from thinwire.methods import diloco
        >>> parse_options(diloco, ["outer-lr=0.7", "sync_interval=50"])
        {'outer_lr': 0.7, 'sync_interval': 50}
    """
    hints = typing.get_type_hints(recipe)
    names = [name for name in inspect.signature(recipe).parameters if _kinds(hints[name])]
    found: dict[str, Any] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not sign or not value:
            raise ValueError(f"an option of a method is written NAME=VALUE, got {text!r}")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{recipe.__name__} has no option {name!r}{hint} It has: {', '.join(names)}")
        if name in found:
            raise ValueError(f"the option {name} is given twice")
        found[name] = _read(value.strip(), hints[name], name=name)
    return found


def options_of(recipe: Callable[..., Method]) -> dict[str, str]:
    """Return the options of a recipe that text can set, with type and default of each.

    Example:
        >>> from thinwire.methods import local_sgd
        >>> options_of(local_sgd)
        {'sync_interval': 'int, 100', 'codec': 'codec, its own'}
    """
    hints = typing.get_type_hints(recipe)
    found = {}
    for name, parameter in inspect.signature(recipe).parameters.items():
        if _kinds(hints[name]):
            default = "its own" if parameter.default is None else str(parameter.default)
            found[name] = f"{' or '.join(_kinds(hints[name]))}, {default}"
    return found


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _kinds(hint: Any) -> list[str]:
    words = []
    for member in _members(hint):
        if member is Codec:
            words.append("codec")
        elif typing.get_origin(member) is Literal:
            words.append("/".join(str(value) for value in typing.get_args(member)))
        elif _is_numbers(member):
            words.append("numbers joined by commas")
        elif member in (int, float, bool, str):
            words.append(member.__name__)
    return words


def _is_numbers(member: Any) -> bool:
    return typing.get_origin(member) in (tuple, Sequence) and typing.get_args(member)[0] in (int, float)


def _read(text: str, hint: Any, *, name: str) -> Any:
    reasons = []
    for member in _members(hint):
        try:
            return _read_as(text, member)
        except ValueError as error:
            reasons.append(str(error))
    problem = next((reason for reason in reasons if "codec" in reason), "")
    raise ValueError(problem or f"the option {name} must be {' or '.join(_kinds(hint))}, got {text!r}")


def _read_as(text: str, member: Any) -> Any:
    if member is Codec:
        return by_name(text)
    if _is_numbers(member):
        return tuple(typing.get_args(member)[0](part) for part in text.split(","))
    if member in (int, float, str):
        return member(text)
    words: dict[str, Any] = {}
    if member is bool:
        words = _BOOLS
    elif member is type(None):
        words = {"none": None}
    elif typing.get_origin(member) is Literal:
        words = {str(value): value for value in typing.get_args(member)}
    if text not in words:
        raise ValueError(text)
    return words[text]
