"""Head, remote layers and tail compute what the whole model computes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from split_servers import LAYERS, VOCABULARY, WIDTH, connected, cut, llama, own, qwen, served
from torch import Tensor, nn

from thinwire.codecs.activation_code import ActivationCode
from thinwire.split import around, middle_layers

TOKENS = torch.randint(VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(5))
PADDED = torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [0] * 3 + [1] * 4])


def loss_of(model: Any, tokens: Tensor, mask: Tensor | None) -> Tensor:
    if hasattr(model, "blocks"):
        found: Tensor = model.loss(tokens[:, :-1], tokens[:, 1:])[0]
        return found
    loss: Tensor = model(input_ids=tokens, labels=tokens, attention_mask=mask).loss
    return loss


def place_in_whole(name: str, layers: range) -> str:
    """Return the name that a parameter of the cut model has in the whole one."""
    words = name.split(".")
    for place, word in enumerate(words):
        if word.isdigit():
            number = int(word)
            words[place] = str(number if number < layers.start else number - 1 + len(layers))
            break
    return ".".join(words)


@pytest.mark.parametrize("make", [llama, qwen, own])
def test_loss_and_gradients_are_those_of_the_whole_model(make: Callable[[], nn.Module]) -> None:
    whole = make()
    for layers in (range(1), range(1, 4), range(3, LAYERS), range(LAYERS)):
        with served(whole, layers) as server, connected(server) as body:
            model = cut(whole, body)
            for mask in (None, PADDED) if make is not own else (None,):
                whole.zero_grad()
                model.zero_grad()
                loss, expected = loss_of(model, TOKENS, mask), loss_of(whole, TOKENS, mask)
                loss.backward()
                expected.backward()
                assert torch.equal(loss, expected)
                own_names = [name for name, _ in model.named_parameters()]
                assert len(own_names) == len(list(whole.parameters())) - len(
                    [1 for name, _ in whole.named_parameters() if any(f"s.{number}." in name for number in layers)]
                )
                for name, parameter in model.named_parameters():
                    assert torch.equal(parameter.grad, whole.get_parameter(place_in_whole(name, layers)).grad), name


def test_payload_bytes_are_four_crossings_of_every_position() -> None:
    code = ActivationCode()
    with served(llama(), range(2, 4)) as server, connected(server, code=code) as body:
        loss_of(cut(llama(), body), TOKENS, None).backward()
        numel = TOKENS.numel() * WIDTH
        assert body.sent_bytes == {"forward": code.payload_bytes(numel),
                                   "gradient": code.payload_bytes(numel, is_forward=False)}  # fmt: skip
        assert list(body.received_bytes.values()) == list(body.sent_bytes.values())
        with torch.no_grad():
            loss_of(cut(llama(), body), TOKENS, PADDED)
        assert body.sent_bytes["forward"] == 2 * code.payload_bytes(numel) + -(-TOKENS.numel() // 8)
        assert body.sent_bytes["gradient"] == code.payload_bytes(numel, is_forward=False)


def test_several_passes_may_wait_for_their_gradients_and_evaluation_comes_between() -> None:
    whole = llama()
    with served(whole, range(1, 4)) as server, connected(server) as body:
        model = cut(whole, body)
        losses = [loss_of(model, TOKENS[row : row + 1], None) for row in range(3)]
        with torch.no_grad():
            loss_of(model, TOKENS, None)
        for loss in reversed(losses):
            loss.backward()
        for row in reversed(range(3)):
            loss_of(whole, TOKENS[row : row + 1], None).backward()
        assert torch.equal(model.lm_head.weight.grad, whole.lm_head.weight.grad)
        assert torch.equal(model.model.embed_tokens.weight.grad, whole.model.embed_tokens.weight.grad)


def test_a_prompt_before_a_frozen_head_gets_its_gradient_and_a_frozen_head_alone_sends_none() -> None:
    whole = llama()
    with served(whole, range(1, 4)) as server, connected(server) as body:
        model = cut(whole, body)
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        loss_of(model, TOKENS, None).backward()
        assert body.sent_bytes["gradient"] == 0
        embedded = model.model.embed_tokens(TOKENS).requires_grad_()
        model(inputs_embeds=embedded, labels=TOKENS).loss.backward()
        expected = whole.model.embed_tokens(TOKENS).detach().requires_grad_()
        whole(inputs_embeds=expected, labels=TOKENS).loss.backward()
        assert embedded.grad is not None and torch.equal(embedded.grad, expected.grad)


def test_other_dtypes_and_layouts_come_back_as_they_went() -> None:
    with served(llama(), range(1, 4)) as server, connected(server) as body:
        for dtype in (torch.bfloat16, torch.float64):
            hidden = torch.randn(5, 2, WIDTH, dtype=dtype).transpose(0, 1).requires_grad_()
            found = body(hidden)
            found.sum().backward()
            assert found.dtype is dtype and found.shape == (2, 5, WIDTH)
            assert hidden.grad is not None and hidden.grad.dtype is dtype


def test_generation_without_a_cache_is_that_of_the_whole_model() -> None:
    whole = llama()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(TOKENS)}
    with served(whole, range(1, 4)) as server, connected(server) as body:
        model = cut(whole, body)
        assert torch.equal(model.generate(TOKENS, **options), whole.generate(TOKENS, **options))
        with pytest.raises(ValueError, match=r"have no cache; got use_cache=True.*try use_cache=False"):
            model.generate(TOKENS, use_cache=True, **options)
        assert torch.equal(model.generate(TOKENS, use_cache=False, **options), whole.generate(TOKENS, **options))
        with pytest.raises(ValueError, match="have no cache"):
            cut(own(), body).decode(TOKENS)


def test_what_cannot_be_cut_right_is_refused() -> None:
    with pytest.raises(ValueError, match="no decoder that can be cut"):
        middle_layers(
            transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=9)),
            range(1, 2),
        )
    with pytest.raises(ValueError, match="there are no such layers; got 2:9; allowed 0:5; try 1:4"):
        middle_layers(llama(), range(2, 9))
    middle_layers(llama(), range(1, 4))
    odd = llama()
    odd.model.layers[1].register_forward_hook(lambda layer, given, output: output + layer.calls.pop())
    odd.model.layers[1].calls = [0.0, 1.0]  # not the same function twice
    with pytest.raises(ValueError, match="do not compute by themselves what they do in the model"):
        middle_layers(odd, range(1, 2))
    with served(llama(), range(1, 4)) as server, connected(server) as body:
        with pytest.raises(ValueError, match=r"do not meet the server's layers.*try head=1, tail=1"):
            around(llama(), head=2, tail=1, body=body)
        model = around(llama(), head=1, tail=1, body=body)
        with pytest.raises(ValueError, match="one mark a token"):
            model(input_ids=TOKENS, attention_mask=torch.ones(3, 1, 7, 7, dtype=torch.bool))
        with pytest.raises(ValueError, match="count positions from 0"):
            model(input_ids=TOKENS, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]]))
        with pytest.raises(ValueError, match=r"do not fit the server's layers; got \(3, 7, 8\)"):
            body(torch.zeros(3, 7, 8))
        loss = loss_of(model, TOKENS, None)
        loss.backward(retain_graph=True)
        with pytest.raises(ValueError, match="has one gradient"):
            loss.backward()


def test_a_compiled_model_leaves_the_remote_layers_as_they_are() -> None:
    hidden = torch.randn(1, 2, WIDTH)
    with served(llama(), range(1, 4)) as server, connected(server) as body:
        assert torch.equal(torch.compile(body, backend="eager")(hidden), body(hidden))
