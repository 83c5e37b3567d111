"""MkDocs hook: a page that shows an include marker instead of the included file fails the build.

The marker of pymdownx.snippets is two hyphens, 8, a less-than sign and two hyphens. A formatter may take it for Python
and put blanks into it; the extension then publishes it as text.
"""

from __future__ import annotations

import re
from html import unescape
from typing import Any

_TAG = re.compile(r"<[^>]*>")
_MARKER = re.compile(r"-\s*8\s*<\s*-")


def literal_markers(page: str) -> list[str]:
    """Return the include markers that a rendered page shows, each with the characters around it."""
    shown = unescape(_TAG.sub("", page))
    return [shown[max(0, found.start() - 2) : found.end() + 40].strip() for found in _MARKER.finditer(shown)]


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Check a page (called by MkDocs).

    Raises:
        PluginError: It shows an include marker.
    """
    from mkdocs.exceptions import PluginError

    if found := literal_markers(html):
        raise PluginError(f"{page.file.src_path} shows an include marker as text: {'; '.join(found)}")
    return html
