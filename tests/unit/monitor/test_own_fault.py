"""Errors that end a process: a full disk is named although torch's message hides it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.full_disk import file_size_limit
from thinwire.monitor.detect.diagnose import diagnose
from thinwire.recording.own_fault import fault_text
from thinwire.runlog.reader import from_records
from thinwire.runlog.records import Beat


def saved(path: Path) -> BaseException:
    """Return the error of torch.save on a disk without room."""
    with file_size_limit(4096), pytest.raises((RuntimeError, OSError)) as caught:
        torch.save([torch.ones(100_000)], path)
    return caught.value


def test_a_full_disk_is_named_behind_the_message_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.pt"
    error = saved(path)
    assert "disk" not in str(error), "torch does not say it"
    assert "the disk is full" not in fault_text(error), "there is room now, and nothing else says so"
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=0))
    assert fault_text(error).startswith(f"the disk is full ({path}); RuntimeError: ")
    (finding,) = diagnose(from_records([
        *(Beat(rank=rank, at_s=at_s / 2) for rank in (0, 1) for at_s in range(9)),
        Beat(rank=1, at_s=5.0, is_last=True, error=fault_text(error)[:400]),
    ]))  # fmt: skip
    assert finding.where == "rank 1" and "the disk is full" in finding.text and "make room" in finding.remedy


def test_an_error_of_the_system_for_no_room_is_named_behind_others() -> None:
    try:
        try:
            raise OSError(28, os.strerror(28), "/data/x")
        except OSError as cause:
            raise RuntimeError("saving failed") from cause
    except RuntimeError as error:
        assert fault_text(error) == "the disk is full (/data/x); RuntimeError: saving failed"
    assert fault_text(ValueError("no")) == "ValueError: no"
