"""Samples of a run's text: in time, from several places, and kept over a resume."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.scripted_model import Scripted
from tests.trained_runs import TEXT, train
from thinwire.training.summary import begin_samples, finish_samples
from thinwire.workloads.language import ByteTokenizer
from thinwire.workloads.language.generation import continue_briefly, find_prompts
from thinwire.workloads.language.workload import LANGUAGE_MODELLING


def test_samples_end_in_time_and_leave_the_model_as_it_was() -> None:
    times = iter(np.arange(0.0, 100.0, 0.1).tolist())
    model = Scripted([*b"a" * 100]).train()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    texts = continue_briefly(model, ByteTokenizer(), ["x", "y"], clock=lambda: next(times))
    assert [len(text) for text in texts] == [3, 3], "0.25 s at 0.1 s a token"
    assert model.training and torch.equal(torch.rand(1), expected)


def test_prompts_are_whole_lines_from_several_places() -> None:
    text = "a wire\n" + "".join(f"{number} replicas say little\n{'and more ' * 9}\n" for number in range(99))
    corpus: Any = SimpleNamespace(tokenizer=ByteTokenizer(), held_out=ByteTokenizer().encode([text])[0])
    assert find_prompts(corpus) == ["0 replicas say little", "50 replicas say little"]
    corpus.held_out = ByteTokenizer().encode([text.replace("little\n", "little ")])[0]
    assert find_prompts(corpus) == ["0 replicas say little and more and more", "50 replicas say little and more and"]
    corpus.held_out = ByteTokenizer().encode(["short"])[0]
    assert find_prompts(corpus) == ["short"]
    corpus.held_out = corpus.held_out[:0]
    assert find_prompts(corpus) == []


def test_a_run_keeps_what_its_model_wrote_before_and_after_training(tmp_path: Path) -> None:
    config = train(tmp_path)
    samples = json.loads((config.run_dir / "samples.json").read_text())
    assert 1 <= len(samples) <= 2
    for sample in samples:
        assert set(sample) == {"prompt", "before", "after"}
        assert sample["prompt"] in TEXT and sample["before"] and sample["after"] != sample["before"]


def test_a_run_without_samples_writes_none(tmp_path: Path) -> None:
    config = train(tmp_path, samples=False, steps=1)
    assert not (config.run_dir / "samples.json").exists()


def test_a_resumed_run_keeps_the_text_from_before_training(tmp_path: Path) -> None:
    corpus: Any = SimpleNamespace(tokenizer=ByteTokenizer(), held_out=ByteTokenizer().encode([TEXT])[0])
    warnings: list[str] = []
    begin_samples(tmp_path, LANGUAGE_MODELLING, Scripted([*b"ab" * 99]), corpus, warn=warnings.append)
    begin_samples(tmp_path, LANGUAGE_MODELLING, Scripted([*b"cd" * 99]), corpus, warn=warnings.append)
    finish_samples(tmp_path, LANGUAGE_MODELLING, Scripted([*b"ef" * 99]), ByteTokenizer(), warn=warnings.append)
    samples = json.loads((tmp_path / "samples.json").read_text())
    assert [(sample["before"][:2], sample["after"][:2]) for sample in samples] == [("ab", "ef")] * 2
    assert warnings == []


def test_a_model_that_cannot_write_ends_no_run(tmp_path: Path) -> None:
    corpus: Any = SimpleNamespace(tokenizer=ByteTokenizer(), held_out=ByteTokenizer().encode([TEXT])[0])
    warnings: list[str] = []
    begin_samples(tmp_path, LANGUAGE_MODELLING, nn.Linear(1, 1), corpus, warn=warnings.append)
    (warning,) = warnings
    assert warning.startswith("no samples of the model's text: ") and warning.endswith("--no-samples leaves them out")
    finish_samples(tmp_path, LANGUAGE_MODELLING, nn.Linear(1, 1), ByteTokenizer(), warn=warnings.append)
    assert warnings == [warning] and list(tmp_path.iterdir()) == []
