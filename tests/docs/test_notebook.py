"""The notebook of the examples runs from its first cell to its last, in a folder of its own."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

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
    ran = _runner().run(json.loads(NOTEBOOK.read_text()), replace={"steps = 300": "steps = 6"})
    printed = [
        "".join(line for out in cell["outputs"] for line in out["text"]) for cell in ran["cells"] if "outputs" in cell
    ]
    _, train, look, diagnose, generate = printed
    assert "validation loss of the global parameters" in train
    assert "step    6: validation loss" in look and "each replica sent" in look
    assert "records, 0 lines refused" in diagnose  # on a busy machine it may also find something
    assert generate.startswith("def __init__(self")
