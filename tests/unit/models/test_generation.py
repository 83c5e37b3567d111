"""Text from models: reproducible, whole characters, and no more work than new tokens need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.scripted_model import Scripted
from tests.trained_runs import TEXT
from thinwire.errors import CheckpointError
from thinwire.workloads.language import BpeTokenizer, ByteTokenizer, TransformerConfig, build_transformer
from thinwire.workloads.language.generation import Sampling, generate

TINY = TransformerConfig(vocab_size=257, dim=32, layers=2, heads=2, max_seq_len=16)


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
