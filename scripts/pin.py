"""Write constraints.txt: one version of each package that thinwire or an extra of it brings, for every Python.

    python scripts/pin.py constraints.txt

pip resolves the oldest Python first (3.11 means 3.11.0 here), and each later one within what was found so far; a
package that cannot be the same for all is an error now, not a surprise later.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
TORCH = "torch==2.13.0"
# torchtitan 0.3 needs an older datasets than all others take, and Flower's simulation pins another ray: these two are
# installed without constraints.txt
LEFT_OUT = ("titan", "flower")
BUILD = ("hatchling", "editables")  # the back end, and what it needs for an editable install
HEADER = """\
# Every version that an installation of thinwire can bring, with all extras, on Python {pythons}.
# Written by scripts/pin.py (`make constraints`). torch is pinned by number only: a CPU wheel that pip is offered fits.
# The cuda-*, nvidia-* and triton lines come with torch's CUDA build alone.
"""


def requirements() -> list[str]:
    """Return what pyproject.toml asks for, with all extras but those left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    kept = [wanted for extra, wanted in project["optional-dependencies"].items() if extra not in LEFT_OUT]
    extras = [requirement for extra in kept for requirement in extra]
    return sorted({*project["dependencies"], *extras, *BUILD, TORCH})


def resolve(python: str, *, pins: dict[str, str]) -> dict[str, str]:
    """Return `pins` and the version of each package that pip would install on top of them for one Python."""
    with tempfile.TemporaryDirectory() as folder:
        report, constraints = Path(folder) / "report.json", Path(folder) / "constraints.txt"
        constraints.write_text(as_lines(pins))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        target = ["--python-version", python, "--only-binary", ":all:", "--target", folder]
        files = ["--constraint", str(constraints), "--report", str(report)]
        subprocess.run([*pip, *target, *files, *requirements()], check=True)
        found = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    # A local label such as +cpu names a build, and the build is left to whoever installs.
    return pins | {entry["name"].lower().replace("_", "-"): entry["version"].split("+")[0] for entry in found}


def as_lines(pins: dict[str, str]) -> str:
    """Return pins in the form that pip reads."""
    return "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))


def main(path: str) -> None:
    """Resolve for every Python and write the file."""
    pins: dict[str, str] = {}
    for python in PYTHONS:
        pins = resolve(python, pins=pins)
    Path(path).write_text(HEADER.format(pythons=", ".join(PYTHONS)) + as_lines(pins))


if __name__ == "__main__":
    main(*sys.argv[1:])
