"""The notebook of the examples runs from its first cell to its last, in a folder of its own."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "first_run.ipynb"


def _runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_notebook", ROOT / "scripts" / "run_notebook.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_notebook_has_the_form_that_jupyter_reads() -> None:
    runner, notebook = _runner(), json.loads(NOTEBOOK.read_text())
    runner.check_format(notebook)
    notebook["cells"][1]["id"] = notebook["cells"][0]["id"]
    with pytest.raises(ValueError, match="cell 1 must have an id of its own"):
        runner.check_format(notebook)


def test_the_notebook_trains_looks_diagnoses_and_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = _runner().run(json.loads(NOTEBOOK.read_text()), replace={"steps = 100": "steps = 2"})
    printed = [
        "".join(line for out in cell["outputs"] for line in out["text"]) for cell in ran["cells"] if "outputs" in cell
    ]
    _, train, look, diagnose, generate = printed
    assert "validation loss of the global parameters" in train
    assert "step    2: validation loss" in look and "each replica sent" in look
    assert "records, 0 lines refused" in diagnose  # on a busy machine it may also find something
    assert generate.startswith("def __init__(self")


def _notebook(*cells: tuple[str, str]) -> str:
    common = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}}
    made = []
    for number, (kind, source) in enumerate(cells):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": [source]}
        made.append(cell if kind == "markdown" else {**cell, "outputs": [], "execution_count": None})
    return json.dumps({**common, "cells": made})


def test_the_build_of_the_docs_shows_what_the_cells_print(tmp_path: Path) -> None:
    assert "<!-- notebook: examples/first_run.ipynb -->" in (ROOT / "docs" / "first-run-notebook.md").read_text()
    hooks = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["hooks"]
    assert "scripts/run_notebook.py" in hooks
    runner = _runner()
    source = _notebook(("markdown", "# A title"), ("code", "import os\nfound = os.listdir()"), ("code", "print(found)"))
    page = runner.to_markdown(json.loads(runner.run_elsewhere(source)))
    assert page.startswith("# A title\n\n````python\nimport os")
    assert page.endswith("````python\nprint(found)\n````\n\n````text\n['notebook.ipynb']\n````")
    hidden = tmp_path / "page.ipynb"
    hidden.write_text(source)
    shown = runner.on_page_markdown(f"<!-- notebook: {hidden} -->\n\nThe end.", page=None)
    assert shown == page + "\n\nThe end."


def test_the_build_of_the_docs_fails_where_a_cell_raises(tmp_path: Path) -> None:
    broken = tmp_path / "broken.ipynb"
    broken.write_text(_notebook(("code", "print('before')"), ("code", "raise OSError('no such wire')")))
    page = SimpleNamespace(file=SimpleNamespace(src_path="page.md"))
    with pytest.raises(PluginError, match=r"page\.md: .*broken\.ipynb failed:(.|\n)*cell 2(.|\n)*no such wire"):
        _runner().on_page_markdown(f"<!-- notebook: {broken} -->", page=page)
