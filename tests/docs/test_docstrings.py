from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import griffe
import pytest

from thinwire.errors import MissingExtra

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "thinwire"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
TOLD_ELSEWHERE = ("cli", "inference", "training", "workloads")  # told by how-to pages, not name by name


def _modules() -> list[str]:
    paths = (path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py"))
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in paths if path.name != "__main__")


def _load(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except MissingExtra as missing:  # an integration with a library that the tests do not need
        pytest.skip(str(missing))


@pytest.mark.parametrize("name", _modules())
def test_the_examples_in_the_docstrings_hold(name: str) -> None:
    result = doctest.testmod(_load(name), optionflags=FLAGS)
    assert not result.failed, f"{result.failed} of {result.attempted} examples in {name} fail, see above"


@pytest.mark.parametrize("name", _modules())
def test_every_name_that_a_module_exports_exists_and_has_a_docstring(name: str) -> None:
    module = _load(name)
    try:
        exported = {public: getattr(module, public) for public in getattr(module, "__all__", ())}
    except MissingExtra as missing:  # names that are loaded when they are used
        pytest.skip(str(missing))
    bare = [public for public, value in exported.items() if _is_documentable(value) and not _has_docstring(value)]
    assert not bare, f"{name} exports without a docstring: {bare}"
    assert inspect.getdoc(module), f"{name} does not say what it is about"


def _is_documentable(value: object) -> bool:
    return inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)


def _has_docstring(value: object) -> bool:
    own = getattr(value, "__doc__", None)
    # A dataclass without a docstring gets its signature for one.
    signature = inspect.isclass(value) and own is not None and own.startswith(f"{value.__name__}(")
    return bool(own) and not signature


def test_the_reference_has_every_part_of_the_package() -> None:
    parts = {".".join(name.split(".")[:2]) for name in _modules()} - {"thinwire", "thinwire.version"}
    wanted = parts - {f"thinwire.{name}" for name in TOLD_ELSEWHERE}
    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    listed = set(re.findall(r"^::: (thinwire\.\w+)$", pages, re.MULTILINE))
    assert wanted == listed, f"missing in docs/reference: {wanted - listed}; gone from src: {listed - wanted}"


def test_the_reference_shows_the_comments_at_the_fields_of_a_class() -> None:
    extensions = griffe.load_extensions(ROOT / "scripts" / "field_comments.py")
    plan = griffe.load("thinwire.planning.plan", search_paths=[PACKAGE.parent], extensions=extensions)
    shown = plan["Needs"].docstring.parse("google")[-1]
    assert shown.kind.value == "attributes"
    assert shown.value[1].description.startswith("What the machines reach on wires without a limit: below 1")
    assert shown.value[3].description == (
        "The least H with which the chosen method reaches it on these wires; None where none does."
    )
