"""Any transformers model, from a configuration or with its weights."""

from __future__ import annotations

import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from tests.operator_counter import OperatorCounter
from thinwire.errors import CheckpointError, MissingExtra
from thinwire.workloads.language import (
    HuggingFaceModel,
    TransformerConfig,
    build_model,
    build_transformer,
)

TINY = TransformerConfig(vocab_size=31, dim=16, layers=3, heads=2, max_seq_len=12)


def random_tokens(*shape: int, vocab_size: int = 31, seed: int = 0) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def write_llama(folder: Path, **changes: int) -> Path:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 24,
        **changes,
    }
    transformers.LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return folder


def write_gpt2(folder: Path) -> Path:
    transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=24).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("write", [write_llama, write_gpt2])
def test_a_local_configuration_trains_as_a_model_of_ours(write: object, tmp_path: Path) -> None:
    assert callable(write)
    model = build_model(f"hf:{write(tmp_path)}", vocab_size=50, max_seq_len=24, seed=1)
    assert isinstance(model, HuggingFaceModel)
    assert (model.vocab_size, model.max_seq_len) == (64, 24)
    tokens, targets = random_tokens(2, 24), random_tokens(2, 24, seed=1)
    model.eval()  # GPT-2 drops values at random while it trains.
    total, nll = model.loss(tokens, targets)
    torch.testing.assert_close(total.detach(), nll)
    torch.testing.assert_close(nll, F.cross_entropy(model(tokens).detach().flatten(0, 1), targets.flatten()))
    total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_recomputed_activations_change_no_bit(tmp_path: Path) -> None:
    gradients, kept = {}, {}
    for recompute, keeps in ((False, False), (True, False), (True, True)):
        model = build_model(f"hf:{write_llama(tmp_path)}", max_seq_len=24, seed=1)
        model.keeps_attention, model.recompute = keeps, recompute
        assert model.recompute is recompute
        with OperatorCounter() as counter:
            model.train().loss(random_tokens(2, 24), random_tokens(2, 24, seed=1))[0].backward()
        kept[keeps, recompute] = counter.calls["_scaled_dot_product_flash_attention_for_cpu"]
        gradients[keeps, recompute] = [parameter.grad for parameter in model.parameters()]
    assert kept == {(False, False): 2, (False, True): 4, (True, True): 2}, "forward passes of attention in 2 layers"
    for again in gradients.values():
        assert all(torch.equal(one, other) for one, other in zip(gradients[False, False], again, strict=True))


def test_a_configuration_without_weights_starts_from_the_seed(tmp_path: Path) -> None:
    write_llama(tmp_path)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, same, other = (build_model(f"hf:{tmp_path}", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    name = "model.model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first.get_parameter(name), same.get_parameter(name))
    assert not torch.equal(first.get_parameter(name), other.get_parameter(name))


def test_weights_in_the_folder_are_loaded(tmp_path: Path) -> None:
    original = build_model(f"hf:{write_llama(tmp_path / 'config')}", seed=4)
    assert isinstance(original, HuggingFaceModel)
    original.model.save_pretrained(tmp_path / "weights")  # type: ignore[operator]
    loaded = build_model(f"hf:{tmp_path / 'weights'}", seed=99)
    for (name, a), b in zip(original.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_on_the_meta_device_no_weights_are_read(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    model = build_model(f"hf:{tmp_path}", device="meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    with pytest.raises(CheckpointError, match="cannot read hf:"):
        build_model(f"hf:{tmp_path}")


def test_only_matrices_have_two_axes_or_more() -> None:
    # Optimizers decay, or orthogonalise, by the number of axes.
    for name, parameter in build_transformer(TINY).named_parameters():
        assert parameter.ndim == (1 if name.endswith("gain") else 2), name


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin holds pickled weights.*safetensors"):
        build_model(f"hf:{tmp_path}")


def test_a_folder_without_a_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"cannot read hf:{tmp_path}.*config\.json"):
        build_model(f"hf:{tmp_path}")


def test_a_name_that_the_hub_cannot_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"cannot read hf:nobody/nothing: .*on the hub"):
        build_model("hf:nobody/nothing")


def test_a_configuration_file_is_as_good_as_its_folder(tmp_path: Path) -> None:
    folder = build_model(f"hf:{write_llama(tmp_path)}", seed=2)
    file = build_model(f"hf:{tmp_path / 'config.json'}", seed=2)
    for a, b in zip(folder.parameters(), file.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_transformers_model_with_too_few_tokens_or_positions_is_refused(tmp_path: Path) -> None:
    write_llama(tmp_path)
    with pytest.raises(ValueError, match="knows 64 tokens, the tokenizer has 257"):
        build_model(f"hf:{tmp_path}", vocab_size=257)
    with pytest.raises(ValueError, match="takes sequences of 24 tokens, 128 were asked for"):
        build_model(f"hf:{tmp_path}", max_seq_len=128)


def test_without_transformers_the_text_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'thinwire\[hf\]'"):
        build_model("hf:anything")
