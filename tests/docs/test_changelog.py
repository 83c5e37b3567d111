"""CHANGELOG.md, the version and LOG.md: the forms that they promise to keep."""

from __future__ import annotations

import re
from pathlib import Path

from thinwire.version import __version__

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
RELEASE = re.compile(r"(\d+\.\d+\.\d+) - (\d{4}-\d{2}-\d{2})")
MOST_WORDS, MOST_LINES = 20, 25
LOGS = (ROOT / "LOG.md", *sorted((ROOT / "docs" / "experiments").glob("*.md")))


def sections(text: str) -> dict[str, str]:
    """Return the text below each heading of the second level, by heading."""
    return {head: body for head, _, body in (part.partition("\n") for part in text.split("\n## ")[1:])}


def test_the_version_is_that_of_the_newest_release() -> None:
    headings = list(sections((ROOT / "CHANGELOG.md").read_text()))
    assert headings[0] == "Unreleased"
    releases = [RELEASE.fullmatch(heading) for heading in headings[1:]]
    assert all(releases), headings
    found = [(match[1], match[2]) for match in releases if match]
    assert found[0][0] == __version__
    dates = [date for _, date in found]
    assert dates == sorted(dates, reverse=True)


def test_the_readme_names_no_other_version() -> None:
    named = re.findall(r"thinwire[- ]v?(\d+\.\d+\.\d+)", (ROOT / "README.md").read_text())
    assert set(named) <= {__version__}


def test_an_item_of_the_changelog_is_one_line_of_few_words_under_a_known_kind() -> None:
    kind = ""
    for line in (ROOT / "CHANGELOG.md").read_text().splitlines():
        if line.startswith("### "):
            kind = line.removeprefix("### ")
            assert kind in KINDS, line
        elif line.startswith("- "):
            assert kind, f"an item before any kind: {line}"
            assert len(line.removeprefix("- ").split()) <= MOST_WORDS, line
        else:
            assert not line.startswith(" "), f"an item of more than one line: {line}"


def test_an_entry_of_the_log_is_a_dated_question_with_setup_and_conclusion() -> None:
    for path in LOGS:
        for title, body in sections("\n" + path.read_text()).items():
            where = f"{path.name}: {title}"
            if not re.match(r"\d{4}-\d{2}-\d{2}: ", title):
                assert path.parent.name == "experiments", where  # tables of several entries have pages there too
                continue
            assert "*Setup*: " in body and "*Conclusion*: " in body, where
            assert len(body.strip().splitlines()) < MOST_LINES, where
