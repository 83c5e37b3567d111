"""Runner of notebooks, and MkDocs hook that shows an executed notebook on a page.

Cells run in one namespace, in order, as in Jupyter, without a kernel and without IPython. Only printed text is stored.
`python scripts/run_notebook.py NOTEBOOK` runs a notebook and writes it back with its output.

A page of the docs that holds `<!-- notebook: FILE -->` shows the cells of FILE and what they print. The build runs
them in an empty folder; an error in a cell fails the build.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MARKER = re.compile(r"<!-- notebook: (\S+) -->")
_TIMEOUT_S = 900


def check_format(notebook: Mapping[str, Any]) -> None:
    """Check that a notebook has the form of nbformat 4.5.

    Raises:
        ValueError: It has not; names the cell and the field.
    """
    if (notebook.get("nbformat"), notebook.get("nbformat_minor")) != (4, 5) or "metadata" not in notebook:
        raise ValueError("nbformat must be 4 with minor version 5, and metadata must be there")
    seen: set[str] = set()
    for number, cell in enumerate(notebook["cells"]):
        needed = {"cell_type", "id", "metadata", "source"}
        if cell.get("cell_type") == "code":
            needed |= {"outputs", "execution_count"}
        elif cell.get("cell_type") != "markdown":
            raise ValueError(f"cell {number}: cell_type must be code or markdown, got {cell.get('cell_type')!r}")
        if set(cell) != needed:
            raise ValueError(f"cell {number} must have {sorted(needed)}, got {sorted(cell)}")
        if cell["id"] in seen or not cell["source"]:
            raise ValueError(f"cell {number} must have an id of its own and a source, got {cell['id']!r}")
        seen.add(cell["id"])


def run(notebook: dict[str, Any], *, replace: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run the code cells; return the notebook with what they printed.

    Args:
        notebook: The content of the file; it is changed.
        replace: Texts to replace in the sources that run, and by what.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, start=1):
        source = "".join(cell["source"])
        for old, new in (replace or {}).items():
            source = source.replace(old, new)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, f"cell {number}", "exec"), namespace)
        lines = printed.getvalue().splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    return notebook


@functools.cache  # `mkdocs serve` builds at every change of a page
def run_elsewhere(source: str) -> str:
    """Run the source of a notebook in a process and a folder of its own; return it with what it printed.

    Raises:
        RuntimeError: A cell raised; the text holds the end of the traceback.
    """
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        copy = Path(folder) / "notebook.ipynb"
        copy.write_text(source, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), copy.name], cwd=folder, capture_output=True, text=True,
            timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError("\n".join(done.stderr.splitlines()[-20:]) or f"exit code {done.returncode}")
        return copy.read_text(encoding="utf-8")


def to_markdown(notebook: Mapping[str, Any]) -> str:
    """Return the cells of an executed notebook as a page: texts, code, and what the code printed."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"]).rstrip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"````python\n{source}\n````")
        if printed := "".join(line for out in cell["outputs"] for line in out["text"]).rstrip():
            parts.append(f"````text\n{printed}\n````")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put an executed notebook into the page that names it (called by MkDocs).

    Raises:
        PluginError: A cell of the notebook raised.
    """
    from mkdocs.exceptions import PluginError

    def shown(found: re.Match[str]) -> str:
        source = (Path(__file__).resolve().parents[1] / found[1]).read_text(encoding="utf-8")
        try:
            return to_markdown(json.loads(run_elsewhere(source)))
        except RuntimeError as error:
            raise PluginError(f"{page.file.src_path}: {found[1]} failed:\n{error}") from error

    return _MARKER.sub(shown, markdown)


def main(path: Path) -> None:
    """Run a notebook and write it back."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    check_format(notebook)
    path.write_text(json.dumps(run(notebook), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
