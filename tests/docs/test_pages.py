from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import markdown
import pytest
import yaml
from markdown_pages import DOCS, ROOT, pages, program

PROGRAMS = {path.relative_to(ROOT).as_posix(): program(path.read_text()) for path in pages()}
WITH_PYTHON = sorted(name for name, found in PROGRAMS.items() if found.num_blocks)


def _navigation(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for below in entry.values() if isinstance(entry, dict) else entry:
            yield from _navigation(below)


def _pages_of_the_navigation() -> set[str]:
    return set(_navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))


def test_every_page_of_the_navigation_exists_and_every_page_is_in_the_navigation() -> None:
    assert _pages_of_the_navigation() == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


def test_the_docs_fetch_nothing_from_elsewhere() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert settings["theme"]["font"] is False
    assert "extra_javascript" not in settings and "extra_css" not in settings


def test_no_page_shows_an_include_marker_instead_of_the_included_file() -> None:
    literal_markers = runpy.run_path(str(ROOT / "scripts" / "include_markers.py"))["literal_markers"]
    with_includes = [path for path in DOCS.rglob("*.md") if literal_markers(path.read_text())]
    assert with_includes
    for path in with_includes:
        page = markdown.markdown(
            path.read_text(),
            extensions=["pymdownx.superfences", "pymdownx.highlight", "pymdownx.snippets"],
            extension_configs={"pymdownx.snippets": {"base_path": [str(ROOT)], "check_paths": True}},
        )
        assert literal_markers(page) == [], path


@pytest.mark.parametrize("code", ['--8<-- "a.py"', '--8 < --"a.py:outer"', "x\n--8<--\na.py\n"])
def test_the_build_of_the_docs_fails_on_an_include_marker_in_a_page(code: str) -> None:
    assert "scripts/include_markers.py" in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["hooks"]
    literal_markers = runpy.run_path(str(ROOT / "scripts" / "include_markers.py"))["literal_markers"]
    page = markdown.markdown(f"```python\n{code}\n```\n", extensions=["pymdownx.superfences", "pymdownx.highlight"])
    assert len(literal_markers(page)) >= 1
    assert literal_markers("<p>8 &lt; 9 and a - 8</p>") == []


def test_the_drawing_of_fragments_is_that_of_the_schedule() -> None:
    drawing = runpy.run_path(str(ROOT / "scripts" / "fragment_drawing.py"))["drawing"]
    message = "python scripts/fragment_drawing.py docs/assets/fragments.svg"
    assert (DOCS / "assets" / "fragments.svg").read_text() == drawing(), message


def test_a_block_that_is_left_out_says_why() -> None:
    silent = [f"{name}:{line}" for name, found in PROGRAMS.items() for line in found.without_reason]
    assert not silent, "write <!-- not run: REASON --> at " + ", ".join(silent)


def test_python_in_the_pages_runs(tmp_path: Path) -> None:
    """One process a page, its blocks in order: what a reader types, from top to bottom."""
    failed = []
    for name in WITH_PYTHON:
        folder = tmp_path / name.replace("/", "-")
        folder.mkdir()
        script = folder / Path(name).name
        script.write_text(PROGRAMS[name].source)
        done = subprocess.run(
            [sys.executable, script.name],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            failed.append(f"{name}\n{done.stderr}")
    assert not failed, "\n".join(failed)


def test_blocks_share_names_and_keep_their_lines() -> None:
    found = program(
        "# Title\n<!-- run first\na = 1\n-->\n\n```python\nb = a + 1\n```\ntext\n```python\nassert b == 2\n```\n"
    )
    assert found.num_blocks == 2
    assert found.source.splitlines()[6] == "b = a + 1"
    exec(compile(found.source, "page", "exec"), {})


@pytest.mark.parametrize(
    ("text", "source", "without_reason"),
    [
        ("<!-- not run: needs two hosts -->\n```python\n1 / 0\n```\n", "", ()),
        ("<!-- not run: -->\n\n```python\n1 / 0\n```\n", "", (3,)),
        ("```sh\nrm nothing\n```\n", "", ()),
        ("```text\n<!-- run first\n```\n", "", ()),
        ("```python title='a'\nx = 1\n```\n", "x = 1", ()),
    ],
)
def test_what_runs_is_what_is_marked(text: str, source: str, without_reason: tuple[int, ...]) -> None:
    found = program(text)
    assert found.source.strip() == source
    assert found.without_reason == without_reason
