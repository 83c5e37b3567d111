"""`--model hf:PATH` with pretrained weights: the model's own tokenizer, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.pretrained_models import write_llama_with_weights, write_tokenizer
from thinwire.errors import CheckpointError
from thinwire.training.build import check
from thinwire.training.config import TrainConfig, resolve
from thinwire.training.summary import save_model
from thinwire.workloads.language.tokenizers import PretrainedTokenizer
from thinwire.workloads.language.workload import make_model, make_sampler, open_data, own_tokenizer

# The end of a text that quotes special tokens must not be taken for one.
TEXT = "A thin wire carries little, so say little. Say </s> and <s> as they are. " * 60


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a folder with weights and a tokenizer; the text lies beside it."""
    (tmp_path / "text.txt").write_text(TEXT)
    return write_tokenizer(write_llama_with_weights(tmp_path / "model"), texts=[TEXT])


def config_of(model: Path, **options: object) -> TrainConfig:
    given = TrainConfig.of(
        model=f"hf:{model}", data=str(model.parent / "text.txt"), cache_dir=model.parent / "cache", seq_len=24,
        batch_size=3, replicas=1, steps=2, **options,
    )  # fmt: skip
    return resolve(given, world_size=None, cores=2, home=model.parent)


def test_the_first_loss_is_the_one_that_transformers_computes(model: Path) -> None:
    config = config_of(model)
    check(config)
    corpus = open_data(config)
    own = transformers.AutoTokenizer.from_pretrained(model)
    # one document is cut by characters, and what follows is held out
    quoted = own(TEXT[: round(len(TEXT) * 0.98)], add_special_tokens=False, split_special_tokens=True).input_ids
    assert corpus.train.tolist() == [*quoted, own.eos_token_id]
    tokens, targets = next(make_sampler(config, corpus, replica=0))
    loss, nll = make_model(config, vocab_size=corpus.tokenizer.vocab_size, device="cpu").loss(tokens, targets)  # type: ignore[operator]

    plain = transformers.AutoModelForCausalLM.from_pretrained(model)
    windows = torch.cat([tokens, targets[:, -1:]], dim=1)
    expected = plain(input_ids=windows, labels=windows).loss
    torch.testing.assert_close(nll, expected.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=0, atol=1e-5)


def test_two_tokenizers_do_not_share_tokens_in_the_cache(model: Path, tmp_path: Path) -> None:
    first = open_data(config_of(model))
    write_tokenizer(model, texts=["something else entirely"] * 9)
    second = open_data(config_of(model))
    assert first.folder != second.folder and first.sha256 != second.sha256
    assert second.tokenizer.decode(second.train[:200]).strip().startswith("A thin wire")


def test_the_saved_model_opens_with_its_tokenizer(model: Path, tmp_path: Path) -> None:
    config = config_of(model)
    tokenizer = own_tokenizer(config)
    assert isinstance(tokenizer, PretrainedTokenizer)
    save_model(tmp_path, make_model(config, vocab_size=None, device="cpu"), files=tokenizer.files())
    before, after = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (model, tmp_path / "model"))
    assert before("Say </s>, little wire").input_ids == after("Say </s>, little wire").input_ids
    assert (after.eos_token, after.bos_token) == ("</s>", "<s>")


def test_pretrained_weights_without_their_tokenizer_are_refused(tmp_path: Path) -> None:
    folder = write_llama_with_weights(tmp_path / "bare")
    with pytest.raises(
        ValueError, match=r"pretrained weights but no tokenizer.*; try tokenizer.save_pretrained\('.*bare'\)"
    ):
        check(config_of(folder))


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_pretrained_weights_with_another_tokenizer_are_refused(model: Path, kind: str) -> None:
    with pytest.raises(
        ValueError, match=rf"--tokenizer {kind} does not go with the pretrained weights.*; got both; .*leave"
    ):
        check(config_of(model, tokenizer=kind))
    with pytest.raises(ValueError, match=r"--vocab-size does not go with --model hf:.*its own tokenizer; got both"):
        check(config_of(model, vocab_size=300))


def test_a_configuration_alone_trains_with_either_tokenizer(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert open_data(config_of(model)).tokenizer.end_of_text == 2
    for kind, end in (("bpe", 0), ("bytes", 256)):
        check(config_of(model, tokenizer=kind))
        assert open_data(config_of(model, tokenizer=kind)).tokenizer.end_of_text == end


def test_a_tokenizer_that_cannot_be_used_is_named(model: Path) -> None:
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": None}))
    with pytest.raises(CheckpointError, match="names no eos_token"):
        check(config_of(model))
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot read the tokenizer of hf:"):
        check(config_of(model))


def test_a_tokenizer_with_more_tokens_than_the_model_knows_is_refused(model: Path) -> None:
    write_tokenizer(model, texts=[f"word{number} word{number}" for number in range(999)], vocab_size=400)
    with pytest.raises(ValueError, match="knows 320 tokens, the tokenizer has 400"):
        check(config_of(model))
