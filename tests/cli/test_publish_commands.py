"""`thinwire publish`, `follow` and `fetch` through a folder: files, hashes, commands, and addresses that are wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from thinwire.cli.main import main

SIZE = 120_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a folder as transformers writes it, with a file that is no part of the weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "model.safetensors.index.json").write_text("{}")
    write(folder, torch.randn(SIZE, generator=torch.Generator().manual_seed(0)))
    return folder


def write(folder: Path, weights: torch.Tensor) -> None:
    safetensors.torch.save_file({"w": weights, "n": torch.arange(3)}, folder / "model.safetensors")


def weights_of(folder: Path) -> torch.Tensor:
    return safetensors.torch.load_file(folder / "model.safetensors")["w"]


def test_a_folder_follows_what_is_published(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """Whole models first, then patches; a command after each; by hash from two places, of which one is damaged."""
    assert main(["publish", str(model), "--to", f"file://{tmp_path}/store", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    address, out = first["address"], tmp_path / "followed"
    follow = ["follow", address, "--out", str(out), "--versions", "1"]
    assert main([*follow, "--exec", f"echo v$THINWIRE_VERSION s$THINWIRE_STEP >> {tmp_path}/ran; false"]) == 0
    done = capsys.readouterr()
    assert "version 0, step 0:" in done.out
    assert "--exec ended with 1 after version 0; going on" in done.err
    assert (tmp_path / "ran").read_text() == "v0 s0\n"
    weights = weights_of(model)
    assert torch.equal(weights_of(out), weights.to(torch.bfloat16))
    assert sorted(path.name for path in out.iterdir()) == ["model.safetensors", "tokenizer.json", "version.json"]

    weights[:100] += 0.5
    write(model, weights)
    assert main(["publish", str(model), "--to", address, "--step", "7", "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["version"] == 1 and second["step"] == 7 and "address" not in second
    assert main(follow) == 0
    assert torch.equal(weights_of(out), weights.to(torch.bfloat16))
    assert json.loads((out / "version.json").read_text())["manifest_sha256"] == second["manifest_sha256"]

    secret = address.partition("#")[2]
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    largest = max((path for path in (tmp_path / "copy").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1] + b"\0")
    fetch = ["fetch", second["manifest_sha256"], "--source", f"file://{tmp_path}/copy#{secret}", "--source", address]
    assert main([*fetch, "--out", str(tmp_path / "fetched")]) == 0
    assert torch.equal(weights_of(tmp_path / "fetched"), weights.to(torch.bfloat16))
    assert main([*fetch, "--out", str(out)]) == 2
    assert "the folder is not empty" in capsys.readouterr().err


def test_wrong_addresses_and_models_are_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """In one line with a remedy: no run there, another secret, no weights, no hash, another model."""
    assert main(["publish", str(model), "--to", f"file://{tmp_path}/store", "--json"]) == 0
    address = json.loads(capsys.readouterr().out)["address"]
    (tmp_path / "empty").mkdir()
    other = tmp_path / "other"
    other.mkdir()
    safetensors.torch.save_file({"w": torch.zeros(3)}, other / "model.safetensors")
    out = ["--out", str(tmp_path / "out")]
    for arguments, code, text in (
        (["follow", address.replace("/store", "/nothing"), *out], 1, "start the publisher first, or check the address"),
        (["follow", address[:-52] + "a" * 52, *out], 1, "secret"),
        (["follow", address[:-3], *out], 2, "the secret behind # is cut or changed"),
        (["publish", str(tmp_path / "empty"), "--to", address], 2, "there are no weights"),
        (["publish", str(tmp_path / "none"), "--to", address], 2, "there is no such model"),
        (["publish", str(other), "--to", address], 2, "holds the weights of another model; got 'w' bfloat16 of shape"),
        (["fetch", "abc", "--source", address, *out], 2, "64 hexadecimal digits"),
        (["fetch", "a" * 64, *out], 2, "there is no source"),
        (["fetch", "a" * 64, "--source", address, *out], 1, "there is no blob"),
    ):
        assert main(arguments) == code, arguments
        error = capsys.readouterr().err
        assert text in error, error
        assert address[-52:] not in error


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--publish file:///shared/stream#abc", "--publish holds a secret"),
        ("--publish file:///shared/stream --elastic", "--publish does not go with --elastic"),
        ("--publish file:///shared/stream --tp 2", "--publish does not go with replicas of several ranks"),
    ],
)
def test_runs_that_cannot_publish_are_refused(options: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is started."""
    assert main(["train", *options.split()]) == 2
    assert text in capsys.readouterr().err
