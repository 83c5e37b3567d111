"""The source files of thinwire and what they import, for the tests beside this file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
PACKAGE = SRC / "thinwire"


def sources() -> list[Path]:
    """Return every source file of the package."""
    found = sorted(PACKAGE.rglob("*.py"))
    assert found, f"no source below {PACKAGE}"
    return found


def name_of(path: Path) -> str:
    """Return a file's place in the package: `sync/schedule.py`."""
    return path.relative_to(PACKAGE).as_posix()


def module_of(path: Path) -> str:
    """Return the dotted name that a file is imported by."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def parse(source: str) -> ast.Module:
    """Return the tree of a source, which all rules look at and none changes."""
    return ast.parse(source)


def imported(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield every absolute name that is imported, `from a import b` as `a.b`, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` for a chain of attributes on a name, or an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Yield every call of a dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := dotted(node.func)):
            yield name, node


def is_within(name: str, prefixes: tuple[str, ...]) -> bool:
    """Return whether a dotted name is one of the prefixes or lies below one."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)
