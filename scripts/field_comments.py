"""For the build of the docs: comments at the fields of a class are shown as the class's attributes.

A field of a dataclass says what it is in a comment behind it, or in the lines above it.
"""

from __future__ import annotations

from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Add an `Attributes:` section with the comments to the docstring of each class that has none."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Add the section to one class."""
        if cls.docstring is None or "Attributes:" in cls.docstring.value or isinstance(cls.filepath, list):
            return
        lines = cls.filepath.read_text().splitlines()
        found = {name: comment(lines, one) for name, one in cls.members.items() if one.is_attribute}
        entries = [f"    {name}: {text[0].upper()}{text[1:]}." for name, text in found.items() if text]
        if entries:
            cls.docstring.value = "\n".join([cls.docstring.value.rstrip(), "", "Attributes:", *entries])


def comment(lines: list[str], field: griffe.Object | griffe.Alias) -> str:
    """Return the comment of a field: what stands behind it, or else in the lines above it."""
    if field.lineno is None:
        return ""
    behind = lines[(field.endlineno or field.lineno) - 1].partition("  # ")[2]
    if behind and not behind.startswith(("type:", "noqa", "fmt:")):
        return behind
    above: list[str] = []
    for line in reversed(lines[: field.lineno - 1]):
        if not line.lstrip().startswith("# "):
            break
        above.insert(0, line.lstrip()[2:])
    return " ".join(above)
