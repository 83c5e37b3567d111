"""Streamed backward: gradients, memory and refusals, against the same model's usual backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import thinwire
from thinwire.workloads.language.hf import HuggingFaceModel
from thinwire.workloads.language.presets import TransformerConfig
from thinwire.workloads.language.transformer import Transformer, build_transformer

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
IDS = torch.randint(3, 97, (2, 17), generator=torch.Generator().manual_seed(1))
LABELS = IDS.masked_fill(torch.arange(17) < torch.tensor([[5], [0]]), -100)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators have returned and that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self._live = {key: one for key, one in self._live.items() if not one[0].expired()}
        for tensor in (one for one in tree_iter(found) if isinstance(one, Tensor)):
            storage = tensor.untyped_storage()
            self._live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return found


def decoder(*, seed: int = 1, dtype: torch.dtype = torch.float64, **shape: Any) -> Transformer:
    sizes = {"vocab_size": 61, "dim": 24, "layers": 2, "heads": 3, "max_seq_len": 64, **shape}
    return build_transformer(TransformerConfig(**sizes), seed=seed).to(dtype)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest difference as a share of the largest gradient."""
    assert found.keys() == wanted.keys()
    scale = max(one.abs().max() for one in wanted.values())
    return max(float((found[name] - one).abs().max()) for name, one in wanted.items()) / float(scale)


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**{**SIZES, **more}))


def both_errors(plain: nn.Module, model: nn.Module, **given: Any) -> tuple[float, float]:
    """Return the differences of loss and gradients between two models."""
    losses = []
    for one in (plain, model):
        one.zero_grad()
        losses.append(one(input_ids=IDS, labels=LABELS, **given).loss)
        losses[-1].backward()
    return abs(float((losses[1] - losses[0]).detach())), error(gradients(model), gradients(plain))


@pytest.mark.parametrize("is_tied", [True, False])
def test_gradients_are_those_of_the_whole_sequence(is_tied: bool) -> None:
    plain, model = decoder(tied_head=is_tied), decoder(tied_head=is_tied)
    for length, chunks in ((1, 3), (5, 8), (7, 3), (33, 4)):
        thinwire.streamed(model, chunks=chunks)
        tokens = torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(length))
        targets = tokens.masked_fill(torch.arange(length) < torch.tensor([[length // 2], [length]]), -1)
        for wanted, is_padded in ((tokens, False), (targets, True), (torch.full_like(tokens, -1), True)):
            for one in (plain, model):
                one.zero_grad()
                for _ in range(2):  # gradients add up
                    one.loss(tokens, wanted, is_padded=is_padded)[0].backward()
            torch.testing.assert_close(
                model.loss(tokens, wanted, is_padded=is_padded), plain.loss(tokens, wanted, is_padded=is_padded)
            )
            if bool((wanted >= 0).any()):
                assert error(gradients(model), gradients(plain)) < 1e-12
            else:
                assert all(float(one.abs().max()) == 0 for one in gradients(plain).values())
                assert all(float(one.abs().max()) == 0 for one in gradients(model).values())
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), plain(tokens))


def test_peak_is_a_third_of_checkpointing() -> None:
    shape = {"vocab_size": 4096, "dim": 96, "layers": 3, "heads": 4, "max_seq_len": 1024, "dtype": torch.float32}
    again, model, exact = decoder(**shape), thinwire.streamed(decoder(**shape), chunks=8), decoder(**shape).double()
    again.recompute = True
    tokens = torch.randint(0, 4096, (1, 1024), generator=torch.Generator().manual_seed(1))
    peaks = []
    for one in (again, model):
        with LiveBytes() as live:
            one.loss(tokens, tokens)[0].backward()  # type: ignore[operator]
        peaks.append(live.peak)
    exact.loss(tokens, tokens)[0].backward()
    assert peaks[1] < 0.35 * peaks[0]
    wanted = gradients(exact)
    # rounding alone: as near to float64 as the usual backward pass is
    assert error(gradients(model), wanted) < 1.5 * error(gradients(again), wanted) < 2e-6


FAMILIES: dict[str, Callable[[], Any]] = {
    "grouped heads": lambda: transformers.LlamaConfig(**SIZES),
    "biases": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "norms of heads": lambda: transformers.Qwen3Config(**SIZES, head_dim=8),
    "sliding window": lambda: transformers.MistralConfig(**SIZES, sliding_window=4),
    "two kinds of layers": lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=4),
    "learned positions": lambda: transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_transformers_run_as_they_are(family: str) -> None:
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).double().eval()
    model = thinwire.streamed(copy.deepcopy(plain), chunks=3)
    mask = (torch.arange(17) < torch.tensor([[17], [12]])).long()
    for given in ({}, {"attention_mask": mask}, {"num_items_in_batch": torch.tensor(11)}):
        loss, grads = both_errors(plain, model, **given)
        assert loss < 2e-6 and grads < 3e-7, given  # transformers computes losses in float32
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, plain(input_ids=IDS).logits)


def test_eager_attention_adapters_copies_and_autocast_stay_exact() -> None:
    adapters = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    for is_wrapped in (True, False):
        plain = llama(attn_implementation="eager", tie_word_embeddings=True)
        model = copy.deepcopy(plain) if is_wrapped else thinwire.streamed(copy.deepcopy(plain), chunks=3)
        torch.manual_seed(1)
        plain = peft.get_peft_model(plain, adapters).double()
        torch.manual_seed(1)
        model = peft.get_peft_model(model, adapters).double()
        model = thinwire.streamed(model, chunks=3) if is_wrapped else model
        assert max(both_errors(plain, model)) < 2e-6 and all("lora" in name for name in gradients(model))
    copied = copy.deepcopy(model)
    copied.zero_grad()
    copied(input_ids=IDS, labels=LABELS).loss.backward()
    assert error(gradients(copied), gradients(model)) < 1e-12  # of its own weights
    plain = llama()
    model = thinwire.streamed(copy.deepcopy(plain), chunks=3)
    with torch.autocast("cpu", torch.bfloat16):
        loss, grads = both_errors(plain, model)
    assert 0 < grads < 0.02 and loss < 0.02


def test_a_model_is_streamed_under_inference_mode_and_trains_afterwards() -> None:
    model, tokens = llama(), torch.arange(12)[None]
    with torch.inference_mode():
        thinwire.streamed(model, chunks=3)
        value = float(model(input_ids=tokens, labels=tokens).loss)
    found = model(input_ids=tokens, labels=tokens).loss
    found.backward()
    assert found.item() == pytest.approx(value) and all(one.grad is not None for one in model.parameters())


def test_a_scaled_loss_gives_scaled_gradients() -> None:
    model, plain = thinwire.streamed(llama().double(), chunks=4), llama().double()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(input_ids=IDS, labels=LABELS).loss).backward()
    scaler.unscale_(optimizer)
    plain(input_ids=IDS, labels=LABELS).loss.backward()
    assert error(gradients(model), gradients(plain)) < 3e-7
    scaler.step(optimizer)


def test_the_backward_pass_drops_what_the_forward_pass_dropped() -> None:
    torch.manual_seed(0)
    drops = {"resid_pdrop": 0.3, "attn_pdrop": 0.3, "embd_pdrop": 0.3}
    config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, **drops)
    model = HuggingFaceModel(transformers.AutoModelForCausalLM.from_config(config).double().train())
    thinwire.streamed(model, chunks=3)

    def loss_at(seed: int) -> Tensor:
        torch.manual_seed(seed)
        found: Tensor = model.loss(IDS, IDS)[0]
        return found

    loss_at(5).backward()
    assert float(loss_at(6).detach()) != float(loss_at(5).detach())
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    slope = sum(float((grad * direction[name]).sum()) for name, grad in gradients(model).items())
    ends = []
    for step in (-1e-3, 1e-3):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(direction[name], alpha=step)
        ends.append(float(loss_at(5).detach()))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.sub_(direction[name], alpha=step)
    assert (ends[1] - ends[0]) / 2e-3 == pytest.approx(slope, rel=2e-2)


def test_a_compiled_caller_gets_the_same_gradients() -> None:
    plain, model = decoder(), thinwire.streamed(decoder(), chunks=3)
    tokens = torch.arange(14).reshape(2, 7)
    torch.compile(model, backend="eager")(tokens, tokens)[0].backward()
    plain.loss(tokens, tokens)[0].backward()
    assert error(gradients(model), gradients(plain)) < 1e-12


def test_what_cannot_be_cut_is_refused_and_left_as_it_was() -> None:
    no_groups = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    refused = {
        "a difference of": transformers.GraniteConfig(**SIZES, logits_scaling=3.0),
        "alibi": transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4),
        "MambaForCausalLM": transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2),
    }
    for text, config in refused.items():
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with pytest.raises(ValueError, match=text + r".*try model.gradient_checkpointing_enable\(\)"):
            thinwire.streamed(model)
        if text != "MambaForCausalLM":
            model.gradient_checkpointing_enable()
        model(input_ids=IDS, labels=IDS).loss.backward()
        assert "forward" not in vars(model)
    for value in (0, -1, True, 2.0):
        with pytest.raises(ValueError, match=r"needs chunks; got .*; try chunks=8"):
            thinwire.streamed(llama(**no_groups), chunks=value)  # type: ignore[arg-type]
    model = llama(**no_groups)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"try model\.gradient_checkpointing_disable"):
        thinwire.streamed(model)
    model.gradient_checkpointing_disable()
    thinwire.streamed(model)
    with pytest.raises(ValueError, match="streamed already"):
        thinwire.streamed(model)
    flex = llama(**no_groups)
    flex.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match=r"try model.set_attn_implementation\('sdpa'\)"):
        thinwire.streamed(flex)


def test_logits_and_a_second_backward_are_refused_with_a_remedy() -> None:
    model = thinwire.streamed(llama(), chunks=2)
    output = model(input_ids=IDS, labels=IDS)
    with pytest.raises(ValueError, match="call it without labels"):
        _ = output.logits
    with torch.no_grad():
        assert model(input_ids=IDS).logits.shape == (2, 17, 97)
        assert float(model(input_ids=IDS, labels=IDS)[0]) == pytest.approx(float(output.loss.detach()), rel=1e-6)
    output.loss.backward(retain_graph=True)
    with pytest.raises(ValueError, match="compute the loss again"):
        output.loss.backward()
    with pytest.raises(ValueError, match="returns the loss alone"):
        model(input_ids=IDS, labels=IDS, output_hidden_states=True)


def test_a_batch_without_a_label_has_the_loss_of_torch_and_changes_nothing() -> None:
    for num_items in (None, torch.tensor(3)):
        losses = []
        for model in (llama(), thinwire.streamed(llama(), chunks=2)):
            loss = model(input_ids=IDS, labels=torch.full_like(IDS, -100), num_items_in_batch=num_items).loss
            loss.backward()
            losses.append(loss.detach())
            found = gradients(model)
            assert found and not any(gradient.any() for gradient in found.values())
        assert torch.equal(losses[0].isnan(), losses[1].isnan()) and losses[1].isnan() == (num_items is None)


def test_another_loss_is_refused() -> None:
    model = thinwire.streamed(llama(), chunks=2)
    with pytest.raises(ValueError, match=r"labels from -1[0-9]+; allowed .* from -100;"):
        model(input_ids=IDS, labels=IDS - 200)
    model.loss_function = nn.functional.cross_entropy  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"got the loss cross_entropy.*try to call it without labels"):
        model(input_ids=IDS, labels=IDS)
    logits = model(input_ids=IDS).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), IDS.flatten()).backward()
    assert gradients(model)
