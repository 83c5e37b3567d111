"""Text from models: reproducible, whole characters, and no more work than new tokens need."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.trained_runs import TEXT, train
from thinwire.errors import CheckpointError
from thinwire.training.corpora import BpeTokenizer, ByteTokenizer
from thinwire.training.generation import (
    Sampling,
    begin_samples,
    continue_briefly,
    find_prompts,
    finish_samples,
    generate,
)
from thinwire.training.models import TransformerConfig, build_transformer

TINY = TransformerConfig(vocab_size=257, dim=32, layers=2, heads=2, max_seq_len=16)


class Scripted(nn.Module):
    """A model that writes given tokens, and counts the positions that it has been given to read."""

    max_seq_len = 1000

    def __init__(self, tokens: Sequence[int], *, value: float = 1000.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.positions: list[int] = []
        self._tokens = iter(tokens)
        self._value = value

    def decode(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        self.positions.append(tokens.shape[1])
        logits = torch.zeros(1, 300)
        logits[0, next(self._tokens)] = self._value
        return logits, object()


def text_of(model: nn.Module, prompt: str = "a thin wire", **settings: Any) -> str:
    return "".join(generate(model, ByteTokenizer(), prompt, sampling=Sampling(**settings)))


def test_a_token_at_a_time_gives_the_logits_of_the_whole_text_at_once() -> None:
    model = build_transformer(TINY, seed=3).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("gain"):
            nn.init.uniform_(parameter, 0.5, 2.0)
    tokens = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(tokens)
        logits, cache = model.decode(tokens[:, :5])
        torch.testing.assert_close(logits, whole[:, 4], atol=1e-5, rtol=0)
        for place in range(5, 16):
            logits, cache = model.decode(tokens[:, place : place + 1], cache)
            torch.testing.assert_close(logits, whole[:, place], atol=1e-5, rtol=0)
        with pytest.raises(ValueError, match="at most 16 tokens"):
            model.decode(tokens[:, :1], cache)
        _, cache = model.decode(tokens[:, :5])
        with pytest.raises(ValueError, match="one at a time; got 2"):
            model.decode(tokens[:, :2], cache)


def test_a_seed_gives_the_same_text_and_another_seed_another() -> None:
    model = build_transformer(TINY, seed=1).eval()
    torch.manual_seed(0)
    first = text_of(model, seed=4, max_tokens=60)
    torch.manual_seed(1)
    assert text_of(model, seed=4, max_tokens=60) == first
    assert text_of(model, seed=5, max_tokens=60) != first


def test_the_most_likely_token_is_taken_at_temperature_0_and_among_one() -> None:
    model = build_transformer(TINY, seed=1).eval()
    greedy = text_of(model, temperature=0.0, max_tokens=40)
    assert text_of(model, temperature=0.9, top_k=1, seed=7, max_tokens=40) == greedy
    assert text_of(model, temperature=5.0, top_k=0, seed=7, max_tokens=40) != greedy


def test_top_k_draws_all_of_the_k_most_likely_tokens_and_no_other() -> None:
    class Ranked(Scripted):
        def decode(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
            return torch.linspace(3, 0, 257)[None], object()

    drawn = text_of(Ranked([]), top_k=3, temperature=1.0, max_tokens=200)
    assert set(drawn) == {"\0", "\1", "\2"}


@pytest.mark.parametrize("max_tokens", [1, 40])
def test_a_text_longer_than_the_models_sequence_goes_on(max_tokens: int) -> None:
    model = build_transformer(TINY, seed=1).eval()
    pieces = list(generate(model, ByteTokenizer(), "x" * 50, sampling=Sampling(max_tokens=max_tokens)))
    assert pieces


def test_a_new_token_costs_one_position() -> None:
    model = Scripted([*b"a" * 300])
    assert text_of(model, temperature=0.0, max_tokens=300) == "a" * 300
    assert model.positions == [11, *[1] * 299]


def test_beyond_the_models_sequence_a_token_costs_two_positions_on_average() -> None:
    model = Scripted([*b"a" * 300])
    model.max_seq_len = 40
    text_of(model, temperature=0.0, max_tokens=300)
    assert max(model.positions) == 20 and sum(model.positions) < 2 * 311


def test_a_model_without_a_cache_reads_the_text_again() -> None:
    class Forgetful(Scripted):
        def decode(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
            assert cache is None
            return super().decode(tokens)[0], None

    model = Forgetful([*b"abc"])
    assert text_of(model, temperature=0.0, max_tokens=3) == "abc"
    assert model.positions == [11, 12, 13]


def test_pieces_are_whole_characters_and_the_end_of_text_is_not_printed() -> None:
    said = "é🙂\n"
    model = Scripted([*said.encode(), 256, *b"never"])
    pieces = list(generate(model, ByteTokenizer(), "x", sampling=Sampling(temperature=0.0)))
    assert pieces == ["é", "🙂", "\n"]


def test_bytes_that_are_no_character_come_at_the_end() -> None:
    model = Scripted([*b"a", 0xF0])
    assert text_of(model, temperature=0.0, max_tokens=2) == "a\ufffd"


def test_a_bpe_text_is_what_its_tokens_decode_to() -> None:
    tokenizer = BpeTokenizer.train([TEXT], vocab_size=280)
    said = "replicas say  little"
    tokens = tokenizer.encode([said])[0].tolist()
    pieces = list(
        generate(Scripted(tokens), tokenizer, "12 ", sampling=Sampling(temperature=0.0, max_tokens=len(tokens)))
    )
    assert "".join(pieces) == said and len(pieces) > 5


def test_an_empty_prompt_and_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        text_of(Scripted([1]), "")
    with pytest.raises(CheckpointError, match="NaN or infinity: training diverged"):
        text_of(Scripted([1], value=float("nan")))


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
    begin_samples(tmp_path, Scripted([*b"ab" * 99]), corpus, warn=warnings.append)
    begin_samples(tmp_path, Scripted([*b"cd" * 99]), corpus, warn=warnings.append)
    finish_samples(tmp_path, Scripted([*b"ef" * 99]), ByteTokenizer(), warn=warnings.append)
    samples = json.loads((tmp_path / "samples.json").read_text())
    assert [(sample["before"][:2], sample["after"][:2]) for sample in samples] == [("ab", "ef")] * 2
    assert warnings == []


def test_a_model_that_cannot_write_ends_no_run(tmp_path: Path) -> None:
    corpus: Any = SimpleNamespace(tokenizer=ByteTokenizer(), held_out=ByteTokenizer().encode([TEXT])[0])
    warnings: list[str] = []
    begin_samples(tmp_path, nn.Linear(1, 1), corpus, warn=warnings.append)
    (warning,) = warnings
    assert warning.startswith("no samples of the model's text: ") and warning.endswith("--no-samples leaves them out")
    finish_samples(tmp_path, nn.Linear(1, 1), ByteTokenizer(), warn=warnings.append)
    assert warnings == [warning] and list(tmp_path.iterdir()) == []
