"""Run the code cells of a notebook and store what they print: python scripts/run_notebook.py examples/first_run.ipynb.

Cells run in one namespace, in order, as in Jupyter, without a kernel and without IPython. Only printed text is stored.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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


def main(path: Path) -> None:
    """Run a notebook and write it back."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    check_format(notebook)
    path.write_text(json.dumps(run(notebook), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
