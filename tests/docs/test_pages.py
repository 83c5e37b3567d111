from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import markdown
import pytest
import torch
import yaml
from markdown_pages import DOCS, ROOT, pages, program
from torch import nn

import thinwire

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


def test_the_navigation_holds_every_page_but_the_records_which_pages_link() -> None:
    records = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["not_in_nav"].split()
    assert records == ["/benchmarks.md", "/benchmarks/", "/experiments/", "/decisions/", "/diagnosis/accuracy.md"]
    every = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert _pages_of_the_navigation() == {name for name in every if not f"/{name}".startswith(tuple(records))}
    linked = "".join((DOCS / name).read_text() for name in _pages_of_the_navigation())
    for index in ("benchmarks.md", "experiments/index.md", "decisions/index.md", "accuracy.md"):
        assert f"{index})" in linked, index


def test_the_page_of_public_names_holds_each_with_the_meaning_of_its_arguments() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "api_page.py"))
    assert sorted(page["ORDER"]) == sorted(thinwire.__all__)
    text = page["text"]()
    assert [line[4:-1] for line in text.splitlines() if line.startswith("## `")] == list(page["ORDER"])
    assert "| `secret` | The job's secret" in text and "|  |" not in text
    assert "scripts/api_page.py" in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["hooks"]


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


@pytest.mark.parametrize(("script", "picture"), [("fragment_drawing", "fragments"), ("expert_ladder", "expert-ladder")])
def test_drawings_are_those_of_the_schedule_and_of_the_ladder(script: str, picture: str) -> None:
    drawing = runpy.run_path(str(ROOT / "scripts" / f"{script}.py"))["drawing"]
    message = f"python scripts/{script}.py docs/assets/{picture}.svg"
    assert (DOCS / "assets" / f"{picture}.svg").read_text() == drawing(), message


def test_a_block_that_is_left_out_says_why() -> None:
    silent = [f"{name}:{line}" for name, found in PROGRAMS.items() for line in found.without_reason]
    assert not silent, "write <!-- not run: REASON --> at " + ", ".join(silent)


def test_the_table_of_extras_holds_each_and_the_package_says_where_it_lives() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = (DOCS / "get-started.md").read_text().partition("## Extras")[2]
    named = [name for row in re.findall(r"^\| (`[^|]*) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(project["optional-dependencies"])
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["site_url"]
    assert project["urls"]["Documentation"] == site and project["urls"].keys() >= {"Source", "Issues", "Changelog"}


def test_what_the_page_of_problems_shows_is_what_the_program_says() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    source = " ".join(re.sub(r'"\s*\n\s*f?"', "", source).split())
    page = (DOCS / "troubleshooting.md").read_text()
    shown = [found for row in re.findall(r"^\| ([^|]*) \|", page, re.M) for found in re.findall(r"`([^`]+)`", row)]
    others = {  # of pip and torchrun, and what the row names
        "requires a different Python", "timed out", "thinwire doctor", "Error waiting on exit barrier",
    }  # fmt: skip
    assert len(shown) > 10 and [text for text in shown if text not in others and text not in source] == []


# Imports torch once, and runs each script whose path it reads in a process and folder of its own.
RUNNER = """
import os, runpy, sys, traceback
import torch._dynamo  # the first step of an optimizer of torch's imports it, too
for path in map(str.strip, sys.stdin):
    child = os.fork()
    if child == 0:
        folder, name = os.path.split(path)
        os.chdir(folder)
        os.dup2(os.open("printed", os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(os.open("errors", os.O_WRONLY | os.O_CREAT), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv, code = [name], 1
        try:
            runpy.run_path(name, run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def runner() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", RUNNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.parametrize("name", WITH_PYTHON)
def test_python_in_the_pages_runs(name: str, tmp_path: Path, runner: subprocess.Popen[str]) -> None:
    """One process a page, its blocks in order: what a reader types, from top to bottom."""
    script = tmp_path / Path(name).name
    script.write_text(PROGRAMS[name].source)
    assert runner.stdin is not None and runner.stdout is not None
    print(script, file=runner.stdin, flush=True)
    assert runner.stdout.readline() == "0\n", (tmp_path / "errors").read_text()


def _python_of(text: str) -> list[str]:
    return re.findall(r"^ *```python[^\n]*\n(.*?)^ *```", text, re.M | re.S)


def _loops() -> Iterator[tuple[str, str]]:
    """Give every piece of code that readers may copy a training loop from, with where it stands."""
    for path in pages():
        yield from ((path.name, block) for block in _python_of(path.read_text()))
    for path in (ROOT / "examples").glob("*.py"):
        yield path.name, path.read_text()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield str(path.relative_to(ROOT)), ast.get_docstring(node) or ""


def test_every_loop_ends_with_the_final_exchange() -> None:
    steps, plain = r"optimizer\.step\(\)\s|\.step\(optimizer\)", r"optimizer = torch\.optim\."
    found = [(where, code) for where, code in _loops() if re.search(steps, code) and not re.search(plain, code)]
    assert len(found) >= 9
    ends = r"close\(final_|(with|as) optimizer:"
    open_ended = [f"{where}:\n{code}" for where, code in found if not re.search(ends, code)]
    assert not open_ended, "\n".join(open_ended)


def test_the_loop_of_the_readme_evaluates_what_was_trained_also_where_no_interval_is_over() -> None:
    torch.manual_seed(0)
    [loop] = [block for block in _python_of((ROOT / "README.md").read_text()) if "DistributedOptimizer(" in block]
    model = nn.Linear(4, 1)
    losses: list[float] = []

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) - batch.sum(dim=1, keepdim=True)).square().mean()

    def evaluate(model: nn.Module) -> None:
        losses.append(loss_of(model, torch.eye(4)).item())

    evaluate(model)
    assert "sync_interval=100" in loop
    names = {
        "model": model,
        "batches": [torch.randn(8, 4) for _ in range(60)],
        "loss_of": loss_of,
        "evaluate": evaluate,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(loop.replace("lr=3e-4", "lr=3e-2"), "README.md", "exec"), {"torch": torch, **names})
    assert losses[1] < losses[0] / 4


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
