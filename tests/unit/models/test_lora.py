"""`--lora`: adapters that are trained beside frozen weights, saved alone and merged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.pretrained_models import write_llama_with_weights, write_tokenizer
from thinwire.errors import MissingExtra
from thinwire.training.build import check, make_inner_optimizer
from thinwire.training.config import TrainConfig, resolve
from thinwire.training.summary import save_model
from thinwire.workloads.language import HuggingFaceModel
from thinwire.workloads.language.workload import make_model, own_tokenizer

RANK = 4
TOKENS = torch.arange(24).reshape(2, 12)
# Of each block: four projections of the attention and three of the MLP, in and out.
ADAPTERS = 2 * RANK * (4 * (16 + 16) + 3 * (16 + 32))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(write_llama_with_weights(tmp_path / "model"), texts=["a thin wire carries little. " * 9])


def config_of(folder: Path, **options: object) -> TrainConfig:
    given = TrainConfig.of(**{"model": f"hf:{folder}", "seq_len": 12, "replicas": 2, "lora": RANK, **options})
    return resolve(given, world_size=None, cores=2, home=folder)


def build(config: TrainConfig) -> Any:
    return make_model(config, vocab_size=None, device="cpu")


def test_only_adapters_are_trained_and_they_change_nothing_at_first(folder: Path) -> None:
    model, plain = build(config_of(folder)), build(config_of(folder, lora=None))
    assert isinstance(model, HuggingFaceModel)
    torch.testing.assert_close(model(TOKENS), plain(TOKENS), rtol=0, atol=1e-6)
    assert (model.vocab_size, model.max_seq_len) == (plain.vocab_size, plain.max_seq_len)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trained) and sum(p.numel() for p in trained.values()) == ADAPTERS
    assert not any("lm_head" in name for name in trained)
    groups = make_inner_optimizer(config_of(folder), model).param_groups
    assert sum(p.numel() for group in groups for p in group["params"]) == ADAPTERS


def test_adapters_follow_from_the_seed_alone(folder: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, same, other = (dict(build(config_of(folder, seed=seed)).named_parameters()) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    name = next(name for name in first if "lora_A" in name)
    assert torch.equal(first[name], same[name]) and not torch.equal(first[name], other[name])


def test_shapes_alone_are_checked_before_weights_are_read(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no weights")
    check(config_of(folder))


def test_adapters_and_the_merged_model_are_saved(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder)
    model, tokenizer = build(config), own_tokenizer(config)
    assert tokenizer is not None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    model.eval()
    expected = model(TOKENS).detach()
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert (base(TOKENS).logits - expected).abs().max() > 0.1
    run = tmp_path / "run"
    run.mkdir()
    save_model(run, model, files=tokenizer.files())
    merged = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    torch.testing.assert_close(merged(TOKENS).logits, expected, rtol=0, atol=1e-5)
    import peft  # takes seconds, which each worker that collects would spend

    adapted = peft.PeftModel.from_pretrained(base, run / "adapters")
    torch.testing.assert_close(adapted(TOKENS).logits, expected, rtol=0, atol=1e-5)
    size = (run / "adapters" / "adapter_model.safetensors").stat().st_size
    assert 4 * ADAPTERS <= size < 4 * ADAPTERS + 16_384
    assert transformers.AutoTokenizer.from_pretrained(run / "model")("thin wire").input_ids


def test_without_peft_the_text_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtra, match=r"pip install 'thinwire\[peft\]'"):
        check(config_of(folder))


def test_adapters_of_nothing_pretrained_are_refused(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"pretrained weights, and --model nano has none; got --lora .*; try --model hf:"
    ):
        check(config_of(folder, model="nano"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"--lora trains adapters of pretrained weights, and --model hf:.* has none"):
        check(config_of(folder))
    with pytest.raises(ValueError, match="--lora does not go with --elastic"):
        check(config_of(folder, elastic=True))
