"""The wheel, built from the sdist and installed into an empty environment without git, gcc and make, runs the demo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from live_processes import DEADLINE_S

from thinwire.cli import demo, train
from thinwire.cli.main import COMMANDS, main
from thinwire.version import __version__

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("git", "gcc", "cc", "g++", "make", "ninja")


def _environment(folder: Path) -> dict[str, str]:
    """Return an environment whose PATH holds the folder alone, and that knows no source of ours."""
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CC", "CXX")}
    return {**plain, "PATH": str(folder)}


def _run(*words: str | Path, cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env=_environment(path),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-d", folder, "-t"]
    _run(*build, "sdist", cwd=ROOT, path=folder)
    with tarfile.open(folder / f"thinwire-{__version__}.tar.gz") as packed:
        packed.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # from 3.11.4 on
    _run(*build, "wheel", cwd=folder / f"thinwire-{__version__}", path=folder)
    return folder / f"thinwire-{__version__}-py3-none-any.whl"


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    here = ROOT / "src"
    files = {str(path.relative_to(here)) for path in (here / "thinwire").rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as packed:
        held = {name for name in packed.namelist() if name.startswith("thinwire/")}
    assert held == {name for name in files if "__pycache__" not in name}


def test_the_demo_of_the_installed_wheel_trains_without_git_gcc_and_make(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    site = next(environment.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # without the .pth files in there
    binaries = environment / "bin"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        binaries / "python",
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
    ]
    _run(*pip, wheel, cwd=tmp_path, path=binaries)
    assert not [tool for tool in TOOLS if (binaries / tool).exists()]
    done = _run(binaries / "thinwire", "demo", "--steps", "5", cwd=tmp_path, path=binaries)
    summary = json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())
    assert (summary["replicas"], summary["steps"], summary["data"]) == (2, 5, "stdlib")
    assert "validation loss" in done.stdout and "all-reduce at every step" in done.stdout
    assert "sample after training" in done.stdout
    assert 'thinwire generate runs/demo --prompt "def "' in done.stdout
    where = _run(binaries / "python", "-c", "import thinwire; print(thinwire.__file__)", cwd=tmp_path, path=binaries)
    assert Path(where.stdout.strip()).is_relative_to(site)


def test_the_demo_names_commands_that_there_are() -> None:
    assert {words.split()[0] for words, _ in demo.NEXT} <= set(COMMANDS)


def test_the_demo_leaves_a_run_alone_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "config.json").write_text("{}")
    assert main(["demo", "--quiet", "--out", "runs/demo"]) == 2
    assert "runs/demo holds a run already" in capsys.readouterr().err
    assert main(["demo", "--seteps", "3"]) == 2
    assert "try --steps" in capsys.readouterr().err
    words: list[str] = []
    monkeypatch.setattr(train, "main", lambda given: words.extend(given) or 0)
    assert main(["demo", "--quiet"]) == 0
    assert words[words.index("--out") + 1] == "runs/demo-2" and "dashboard runs/demo-2" in capsys.readouterr().out
