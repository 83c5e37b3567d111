"""The page as one document: its style and scripts stand in it, and the browser is told to take no others."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_SCRIPTS = ("measures.js", "elements.js", "sections.js", "live.js")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The page.

    Attributes:
        before: What stands before the run's state.
        after: What stands after it.
        policy: The Content-Security-Policy that it is sent with.
    """

    before: str
    after: str
    policy: str

    def holding(self, state: str) -> bytes:
        """Return the page as UTF-8 with a run's state in it, so that it is there at once and a saved copy shows it.

        Args:
            state: One JSON object, or nothing.
        """
        # within a script of data nothing but < can end it or begin another
        return f"{self.before}{state.replace('<', chr(92) + 'u003c') or 'null'}{self.after}".encode()


@cache
def document() -> Document:
    """Put the parts of the page together; nothing in it depends on a run."""
    folder = files("thinwire.monitor.dashboard") / "page"
    style = (folder / "page.css").read_text(encoding="utf-8")
    script = "\n".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    page = (folder / "page.html").read_text(encoding="utf-8")
    before, after = page.replace("/* style */", style).replace("/* script */", script).split("/* state */")
    policy = "; ".join([
        "default-src 'none'", f"style-src '{_hash(style)}'", f"script-src '{_hash(script)}'", "connect-src 'self'",
        "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'",
    ])  # fmt: skip
    return Document(before=before, after=after, policy=policy)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
