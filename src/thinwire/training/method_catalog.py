"""Catalogue of the methods: names, options and cards, read from the source of `thinwire.methods` without torch.

A command line is checked against it before torch is imported, which takes seconds. Each method is a function below
`@register(ABOUT)`, and `ABOUT = About(...)` stands in the same file. A program that has registered methods of its own
has loaded `thinwire.methods`; these are then in the catalogue too.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from thinwire.codec_specs import CODEC_SPECS, codec_key
from thinwire.errors import refusal, unknown_method, unknown_name

_PACKAGE = Path(__file__).parents[1] / "methods"
_BOOLS = ("true", "yes", "false", "no")
_NUMBERS = "numbers joined by commas"


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodEntry:
    """A method's entry in the catalogue.

    Attributes:
        takes: All arguments of the method's function.
        kinds: Options that text can set, with the kinds of value that each takes, as `options_of` writes them.
        inner_optimizer: The default of `thinwire train --inner-optimizer`.
        lr: The default of `thinwire train --lr`; None for that of the model and the inner optimizer.
    """

    takes: frozenset[str]
    kinds: Mapping[str, tuple[str, ...]]
    inner_optimizer: str
    lr: float | None


def catalog() -> Mapping[str, MethodEntry]:
    """Return all methods by name, those that this program has registered itself among them.

    Example:
        >>> catalog()["dgc"].inner_optimizer, catalog()["dgc"].kinds["density"]
        ('plain-sgd', ('float',))
    """
    methods: Any = sys.modules.get("thinwire.methods")
    known = dict(_read_package())
    for name, recipe in getattr(methods, "RECIPES", {}).items():
        if name not in known:  # the program's own
            kinds = {
                option: tuple(text.rpartition(", ")[0].split(" or "))
                for option, text in methods.options_of(recipe).items()
            }
            card = methods.about(name)
            known[name] = MethodEntry(
                takes=frozenset(inspect.signature(recipe).parameters), kinds=kinds,
                inner_optimizer=card.inner_optimizer, lr=card.lr,
            )  # fmt: skip
    return known


def method_entry(name: str) -> MethodEntry:
    """Return a method's entry; `_` and `-` are the same.

    Raises:
        ValueError: No method has this name; names the nearest ones.
    """
    key = name.replace("_", "-").lower()
    known = catalog()
    if key not in known:
        raise unknown_method(name, known)
    return known[key]


def check_method_option(text: str, *, method: str) -> str:
    """Refuse a NAME=VALUE that a method does not take, and return the name.

    Raises:
        ValueError: It has another form, the method has no such option, or the value is of another kind.
    """
    kinds = method_entry(method).kinds
    name, sign, value = text.partition("=")
    name, value = name.strip().replace("-", "_"), value.strip()
    if not sign or not value:
        raise refusal("--method-option has no value", got=repr(text), allowed="NAME=VALUE",
                      remedy=f"thinwire methods {method}")  # fmt: skip
    if name not in kinds:
        raise unknown_name(f"option of --method {method}", name, kinds)
    if not any(_fits(value, kind) for kind in kinds[name]):
        if kinds[name] == ("codec",):
            codec_key(value)
        raise refusal(f"--method-option {name} is of another kind", got=repr(value), allowed=" or ".join(kinds[name]),
                      remedy=f"thinwire methods {method}")  # fmt: skip
    return name


def _fits(value: str, kind: str) -> bool:
    if value == "none":
        return True  # whether it may be none is known once the method is loaded
    if kind == "codec":
        return value.lower().replace("_", "-") in CODEC_SPECS
    if kind in ("int", "float", _NUMBERS):
        try:
            for part in value.split(",") if kind == _NUMBERS else (value,):
                int(part) if kind == "int" else float(part)
        except ValueError:
            return False
        return True
    return kind == "str" or value in (_BOOLS if kind == "bool" else kind.split("/"))


@cache
def _read_package() -> Mapping[str, MethodEntry]:
    found: dict[str, MethodEntry] = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "\n@register(" in text:
            found |= _read_module(ast.parse(text))
    return MappingProxyType(found)


def _read_module(tree: ast.Module) -> dict[str, MethodEntry]:
    values = _assigned(tree)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("thinwire.methods."):
            path = _PACKAGE.joinpath(*str(node.module).split(".")[2:]).with_suffix(".py")
            if path.exists() and path.name != "registry.py" and any(one.name[0].isupper() for one in node.names):
                values = _assigned(ast.parse(path.read_text(encoding="utf-8"))) | values
    found = {}
    for node in tree.body:
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "register":
                assert isinstance(node, ast.FunctionDef)
                arguments, card = [*node.args.args, *node.args.kwonlyargs], decorator.args[0]
                card = values.get(card.id, card) if isinstance(card, ast.Name) else card
                facts = {
                    word.arg: word.value.value
                    for word in (card.keywords if isinstance(card, ast.Call) else [])
                    if isinstance(word.value, ast.Constant)
                }
                found[node.name.replace("_", "-")] = MethodEntry(
                    takes=frozenset(one.arg for one in arguments),
                    kinds={
                        one.arg: kinds for one in arguments
                        if one.annotation and (kinds := _kinds(one.annotation, values))
                    },
                    inner_optimizer=str(facts.get("inner_optimizer", "adamw")),
                    lr=lr if isinstance(lr := facts.get("lr"), float) else None,
                )  # fmt: skip
    return found


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """Return what a module assigns to names, such as the aliases of its annotations."""
    return {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def _kinds(annotation: ast.expr, values: Mapping[str, ast.expr]) -> tuple[str, ...]:
    """Return the kinds of value that text can give for an annotation; none where it can give none."""
    if isinstance(annotation, ast.BinOp):
        return (*_kinds(annotation.left, values), *_kinds(annotation.right, values))
    if isinstance(annotation, ast.Name):
        if annotation.id in ("int", "float", "bool", "str"):
            return (annotation.id,)
        if annotation.id == "Codec":
            return ("codec",)
        alias = values.get(annotation.id)
        return _kinds(alias, values) if isinstance(alias, ast.Subscript) else ()
    if isinstance(annotation, ast.Subscript):
        of = ast.unparse(annotation.value)
        members = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        if of == "Literal":
            return ("/".join(str(ast.literal_eval(one)) for one in members),)
        if of in ("tuple", "Sequence") and ast.unparse(members[0]) in ("int", "float"):
            return (_NUMBERS,)
    return ()
