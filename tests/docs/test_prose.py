"""The words and the width of the docs: sentences that are read once, and code that fits the page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_pages import DOCS, ROOT

MAX_WORDS = 30
# What the theme shows beside its navigation; output of a program may be scrolled a little.
MAX_COMMAND_COLUMNS, MAX_CODE_COLUMNS = 80, 100
SHORT_SECTIONS = ("Tutorials", "Parameters between replicas", "Parts of your own", "Before a run", "During a run")
# Generated, or records of the past.
EXEMPT = ("cli.md", "decisions/", "experiments/")
# Words without a fixed meaning in distributed systems, and metaphors; each has a term of the field.
BANNED = (
    r"nobody", r"whoever", r"anew", r"in the middle", r"told", r"tells?", r"judge[sd]?", r"let(?:s|ting)? go",
    r"come(?:s)? to rest", r"mend(?:s|ed)?", r"bears?", r"borne", r"how far", r"so long", r"is over", r"the words",
    r"councils?", r"twins?", r"patience", r"seats?", r"desk", r"bids?",
)  # fmt: skip
# Proper names that contain such a word.
ALLOWED = re.compile(r"Weights & Biases|EF21's twins")


def _below(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for one in entry.values() if isinstance(entry, dict) else entry:
            yield from _below(one)


def _short_pages() -> list[str]:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    return [page for entry in nav for title in SHORT_SECTIONS for page in _below(entry.get(title, []))]


def _pages() -> list[str]:
    names = [path.relative_to(DOCS).as_posix() for path in sorted(DOCS.rglob("*.md"))]
    return [name for name in names if not name.startswith(EXEMPT)]


def without_code(text: str) -> str:
    """Return a page without blocks of code, comments, inline code and the targets of links; lines stay."""

    def blank(found: re.Match[str]) -> str:
        return "\n" * found[0].count("\n")

    text = re.sub(r"^[ ]*```.*?^[ ]*```$|<!--.*?-->", blank, text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`", lambda found: "x" + blank(found), text)
    return re.sub(r"\]\([^)]*\)", lambda found: "]" + blank(found), text)


def long_sentences(text: str) -> list[str]:
    """Return the sentences of a page with more words than a reader takes in at once; tables and headings not."""
    lines = [line.strip() for line in without_code(text).splitlines()]
    text = "\n".join("" if line.startswith(("|", "#", "!")) else line for line in lines)
    parts = re.split(r"(?<=[.!?:;])\**\s+|\n\s*\n|\n(?=[-*] |\d+\. )", text)
    return [" ".join(part.split()) for part in parts if len(part.split()) > MAX_WORDS]


def banned_words(text: str) -> list[str]:
    """Return banned words of a page, each with its line."""
    pattern = re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.IGNORECASE)
    lines = ALLOWED.sub("", without_code(text)).splitlines()
    return [f"{number}: {word}" for number, line in enumerate(lines, 1) for word in pattern.findall(line)]


def wide_lines(text: str) -> list[str]:
    """Return lines of code that a reader would have to scroll for, each with its line."""
    found, language = [], None
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.match(r"\s*```(\w*)", line)
        if fence:
            language = fence[1] or "text" if language is None else None
        elif language is not None:
            most = MAX_COMMAND_COLUMNS if language in ("sh", "bash") else MAX_CODE_COLUMNS
            if len(line) > most:
                found.append(f"{number}: {len(line)} columns")
    return found


@pytest.mark.parametrize("name", _short_pages())
def test_a_sentence_of_a_tutorial_or_a_how_to_is_short(name: str) -> None:
    assert long_sentences((DOCS / name).read_text()) == []


@pytest.mark.parametrize("name", _pages())
def test_a_page_has_none_of_the_banned_words(name: str) -> None:
    assert banned_words((DOCS / name).read_text()) == []


@pytest.mark.parametrize("name", sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")))
def test_code_fits_the_page(name: str) -> None:
    assert wide_lines((DOCS / name).read_text()) == []


def test_there_are_tutorials_and_how_tos() -> None:
    assert len(_short_pages()) >= 10
    assert all(Path(DOCS / name).is_file() for name in _short_pages())


def test_the_checks_find_what_they_are_for() -> None:
    words = " ".join(["word"] * (MAX_WORDS + 1))
    assert long_sentences(f"Short one.\n\n{words}.\n") == [f"{words}."]
    assert long_sentences(f"| {words} |\n\n```sh\n{words}\n```\n`{words}` and `x`.\n") == []
    assert banned_words("It is done\nanew, and `anew`.\n```text\nanew\n```\n") == ["2: anew"]
    assert wide_lines(f"{'x' * 200}\n```sh\n{'x' * 81}\n```\n```text\n{'x' * 100}\n```\n") == ["3: 81 columns"]
