"""The pages of the docs, and the Python in them that is meant to run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

FENCE = re.compile(r"^\s*```")
PYTHON = re.compile(r"^```python\b")
NOT_RUN = re.compile(r"^<!--\s*not run\b:?\s*(.*?)\s*-->$")
RUN_FIRST = "<!-- run first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The Python of one page.

    Attributes:
        source: All blocks that run, on the lines where they stand in the page, so that a traceback names those.
        num_blocks: How many blocks the reader sees that run.
        without_reason: Lines of markers that leave a block out and do not say why.
    """

    source: str
    num_blocks: int
    without_reason: tuple[int, ...]


def pages() -> list[Path]:
    """Return the README, the guide for contributors and every page of the docs."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def program(text: str) -> Program:
    """Return the Python of a page.

    A block that starts with three backticks and `python` runs, unless the line before it that is not blank is
    `<!-- not run: REASON -->`. Lines between `<!-- run first` and `-->` run too; the reader does not see them.
    """
    out: list[str] = []
    without_reason: list[int] = []
    num_blocks, inside, before = 0, "", ""
    for number, line in enumerate(text.splitlines(), start=1):
        kept = ""
        if inside:
            if (inside == "comment" and line.strip() == "-->") or (inside != "comment" and FENCE.match(line)):
                inside = ""
            elif inside in ("run", "comment"):
                kept = line
        elif line.strip() == RUN_FIRST:
            inside = "comment"
        elif FENCE.match(line):
            left_out = NOT_RUN.match(before)
            inside = "run" if PYTHON.match(line) and not left_out else "text"
            num_blocks += inside == "run"
            if left_out and not left_out.group(1):
                without_reason.append(number)
        out.append(kept)
        before = line.strip() or before
    return Program(source="\n".join(out) + "\n", num_blocks=num_blocks, without_reason=tuple(without_reason))
