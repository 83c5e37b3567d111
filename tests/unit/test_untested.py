"""Paths that have never run on their hardware say so at their first use, once a process."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from live_processes import DEADLINE_S

from thinwire import errors
from thinwire.errors import UntestedWarning, warn_untested
from thinwire.runlog.nccl_inspector import read_inspector
from thinwire.runlog.nccl_ras import read_ras
from thinwire.runlog.reader import Records


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_warned", set())


def test_each_path_is_warned_of_once() -> None:
    with pytest.warns(UntestedWarning, match="several GPUs"):
        warn_untested("gpu ranks")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_untested("gpu ranks")


@pytest.mark.parametrize("read", [read_inspector, read_ras])
def test_files_of_nccl_are_read_with_one_warning(tmp_path: Path, read: object) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UntestedWarning, match="made from NCCL's source") as said:
        for _ in range(3):
            read(Records(), tmp_path / "file")  # type: ignore[operator]
    assert len(said) == 1 and said[0].filename.endswith("test_untested.py")


def test_the_command_says_it_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "host-pid1.log").write_text('{"header":{},"metadata":{"inspector_output_format_version":"v4.0"}}\n')
    line = [sys.executable, "-m", "thinwire.cli.main", "diagnose", str(tmp_path / "host-pid1.log")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    said = [text for text in done.stderr.splitlines() if "warning" in text.lower()]
    assert len(said) == 1 and said[0].startswith("thinwire diagnose: warning: the reader of NCCL Inspector files")
