"""Rules for names and docstrings: unique class names, noun phrases, and none of the metaphors that were replaced."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from source_tree import name_of, parse, sources

QUESTION = re.compile(r"(What|Who|Whose|Whom|How|Where|When|Which|Whether)\b")
# Words that stood for terms which readers already know: coordinator, session, connection, header, deadline, report.
METAPHORS = {
    "people", "desk", "council", "bid", "bids", "seat", "seats", "hub", "hop", "hops", "twin", "twins", "company",
    "ends", "told", "standing", "quiet", "patience", "notes", "board", "door", "keeping", "bear", "bears",
    "word", "words", "tell", "tells", "say", "says", "judge", "judges", "judged", "judgement", "look", "looks",
}  # fmt: skip
# As a module or a class, "line" stood for a connection; a function may handle lines of text.
METAPHORS_OF_TYPES = METAPHORS | {"line"}
# Methods that override another library's.
OF_OTHERS = {"push_to_hub"}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def words_of(name: str) -> list[str]:
    """Return the words of a name in snake or camel case.

    Example:
        >>> words_of("_round_trip"), words_of("TCPLine")
        (['round', 'trip'], ['tcp', 'line'])
    """
    return [word.lower() for word in _WORD.findall(name)]


@dataclass(frozen=True, order=True)
class Offender:
    """A name or docstring that breaks a rule; its places may move without it becoming another one."""

    kind: str
    name: str
    places: tuple[str, ...] = field(compare=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.name} in {', '.join(self.places)}"


def offenders() -> list[Offender]:
    """Return every offender in the package, sorted."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    homes: dict[str, set[str]] = defaultdict(set)
    for path in sources():
        place, tree = name_of(path), parse(path.read_text())
        for cls in public_classes(tree):
            homes[cls].add(place)
        for kind, name in in_module(place, tree):
            found[kind, name].add(place)
    found |= {("duplicate", cls): places for cls, places in homes.items() if len(places) > 1}
    return sorted(Offender(kind, name, tuple(sorted(places))) for (kind, name), places in found.items())


def public_classes(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the public classes of a module, nested ones among them."""
    yield from (
        node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


def in_module(place: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the offenders of one module: their kind and name."""
    if QUESTION.match(ast.get_docstring(tree) or ""):
        yield "question", place
    stem = Path(place).parent.name if place.endswith("__init__.py") else Path(place).stem
    if METAPHORS_OF_TYPES & set(words_of(stem)):
        yield "module", stem
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and METAPHORS_OF_TYPES & set(words_of(node.name)):
            yield "class", node.name
        is_own = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in OF_OTHERS
        if is_own and METAPHORS & set(words_of(node.name)):
            yield "function", node.name
