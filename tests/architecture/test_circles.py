"""No circle of imports, those inside functions and for types alone among them."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import pytest
from source_tree import imported, module_of, parse, sources


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules of a circle, the first again at the end; empty if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_modules_import_each_other_in_one_direction() -> None:
    modules = {module_of(path): path for path in sources()}

    def home(name: str) -> str:
        while name not in modules:
            name = name.rpartition(".")[0]
        return name

    imports = {}
    for module, path in modules.items():
        own = (name for name, _ in imported(parse(path.read_text())) if name.split(".")[0] == "thinwire")
        imports[module] = {home(name) for name in own} - {module}
    found = circle(imports)
    assert not found, f"move what both need into a module below them: {' -> '.join(found)}"


@pytest.mark.parametrize("imports", [{"a": {"b"}, "b": {"a"}}, {"a": {"b"}, "b": {"c"}, "c": {"a"}}])
def test_a_circle_is_seen(imports: dict[str, set[str]]) -> None:
    assert len(circle(imports)) == len(imports) + 1
