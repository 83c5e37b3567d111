"""Experiment trackers behind a transformers Trainer, without a network: each gets thinwire's numbers."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from thinwire.transport.loopback import LoopbackWorld

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'thinwire[hf]'")

STEPS, SOON_S = 4, 60.0
ROUNDS = "thinwire/rounds_applied"


def wandb_has(folder: Path, rounds: float) -> bool:
    importlib.import_module("wandb").finish()
    [log] = folder.rglob("*.wandb")
    until_s = time.monotonic() + SOON_S
    while ROUNDS.encode() not in log.read_bytes() and time.monotonic() < until_s:
        time.sleep(0.1)  # its service writes the file after `finish` has returned
    return ROUNDS.encode() in log.read_bytes()


def mlflow_has(folder: Path, rounds: float) -> bool:
    importlib.import_module("mlflow").flush_async_logging()
    [found] = folder.glob(f"mlruns/*/*/metrics/{ROUNDS}")
    values = {int(step): float(value) for _, value, step, *_ in map(str.split, found.read_text().splitlines())}
    return values.get(STEPS) == rounds > 0


def trackio_has(folder: Path, rounds: float) -> bool:
    with contextlib.suppress(RuntimeError):  # newer ones have finished when the trainer ends
        importlib.import_module("trackio").finish()
    return any(ROUNDS.encode() in path.read_bytes() for path in folder.rglob("*.db*"))


TRACKERS: dict[str, tuple[Callable[[Path, float], bool], dict[str, str]]] = {
    "wandb": (wandb_has, {"WANDB_MODE": "offline", "WANDB_DIR": "{folder}", "WANDB_SILENT": "true"}),
    "mlflow": (mlflow_has, {"MLFLOW_TRACKING_URI": "file://{folder}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}),
    "trackio": (trackio_has, {"TRACKIO_DIR": "{folder}", "HF_HUB_OFFLINE": "1"}),
}


def need(tracker: str) -> None:
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed: pip install {tracker}")
    if tracker == "trackio" and version(tracker).startswith("0.0."):
        pytest.skip(f"trackio {version(tracker)} is older than the callback of transformers: pip install -U trackio")


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_trainer_sends_thinwire_numbers_to_its_tracker(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(tracker)
    import datasets

    from thinwire.integrations.hf import DiLoCoTrainerMixin

    class Trainer(DiLoCoTrainerMixin, transformers.Trainer):  # type: ignore[misc]
        pass

    has_numbers, environment = TRACKERS[tracker]
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(folder=tmp_path))
    monkeypatch.chdir(tmp_path)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    tokens = torch.randint(0, 64, (16, 8)).tolist()
    args: Any = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=STEPS, per_device_train_batch_size=2, logging_steps=2,
        save_strategy="no", report_to=tracker, use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(
        model=transformers.LlamaForCausalLM(config), args=args, method=thinwire.methods.diloco(sync_interval=3),
        transport=LoopbackWorld(1).transports[0],
        train_dataset=datasets.Dataset.from_dict({"input_ids": tokens, "labels": tokens}),
    )  # fmt: skip
    trainer.train()
    last = [line for line in trainer.state.log_history if "loss" in line][-1]
    assert has_numbers(tmp_path, last[ROUNDS])
