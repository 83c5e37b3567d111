"""For the build of the docs: an `Example:` in a docstring is shown as the code that it is.

The parser knows `Examples:` alone, and would show our one example as a quotation.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

HEADING = re.compile(r"^Example:$", re.MULTILINE)


class ExampleSections(griffe.Extension):
    """Rename the section of every docstring as the parser knows it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename it in one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = HEADING.sub("Examples:", obj.docstring.value)
