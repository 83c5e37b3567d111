"""A run that publishes its global parameters, and a folder that follows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from training_runs import OPTIONS, Started, finish, result

from thinwire.cli.main import main

pytestmark = pytest.mark.multiprocess


def test_a_run_publishes_what_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A version each sync interval and one of the result, whose bits are those of the run's model as bfloat16."""
    run, out = tmp_path / "run", tmp_path / "followed"
    words = [*OPTIONS, "--replicas", "2", "--steps", "14", "--no-samples", "--publish", f"file://{tmp_path}/store"]
    done = result(finish(Started([*words, "--out", str(run)])))
    address = run / "follow-address.txt"
    assert address.stat().st_mode & 0o077 == 0
    secret = address.read_text().strip().partition("#")[2]
    assert secret not in (run / "config.json").read_text()
    assert main(["follow", address.read_text().strip(), "--out", str(out), "--versions", "1"]) == 0
    assert "version 2, step 14" in capsys.readouterr().out
    published = safetensors.torch.load_file(out / "model.safetensors")
    trained = safetensors.torch.load_file(run / "model" / "model.safetensors")
    assert done["steps"] == 14
    assert published.keys() == trained.keys()
    assert all(torch.equal(published[name], tensor.to(torch.bfloat16)) for name, tensor in trained.items())
    assert "thinwire_version" in json.loads((out / "run.json").read_text())
