"""Models whose sequences ranks share, against the same model in one process."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from tests.sequence_ranks import ThreadPeers, on_ranks
from thinwire import sequences
from thinwire.transport.group_peers import check_agreement
from thinwire.workloads.language.presets import TransformerConfig
from thinwire.workloads.language.transformer import build_transformer, next_token_loss

SITES = (0, 0, 1, 1)


def batch(vocab_size: int, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(vocab_size, (2, seq_len + 1), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1], tokens[:, 1:]


def gradients_of_ranks(alone: Any, loss_of: Any, **how: Any) -> list[torch.Tensor]:
    """Return the gradients of a model whose loss is the mean over all ranks' positions."""

    def work(peers: ThreadPeers) -> list[torch.Tensor]:
        model = copy.deepcopy(alone)
        model.zero_grad()
        attend = sequences.attention(peers, sites=SITES, **how)
        sequences.share(model, attend)
        loss_of(model, attend).backward()
        return [parameter.grad for parameter in model.parameters()]

    ranks, _ = on_ranks(len(SITES), work)
    return [torch.stack(of_ranks).mean(0) for of_ranks in zip(*ranks, strict=True)]


@pytest.mark.parametrize(("policy", "chunks"), [("auto", 0), ("helper", 0), ("ring", 4), ("heads+sites", 3)])
def test_a_decoder_whose_sequences_are_shared_has_the_gradients_of_one_process(policy: str, chunks: int) -> None:
    config = TransformerConfig(vocab_size=16, dim=16, layers=2, heads=4, max_seq_len=28)
    tokens, targets = batch(16, 28)
    widths: set[int] = set()

    def see(_: nn.Module, given: tuple[torch.Tensor], __: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            widths.add(given[0].shape[1])

    def loss_of(model: Any, attend: sequences.SequenceAttention) -> torch.Tensor:
        own = sequences.own_tokens(tokens, attend)
        if chunks:
            model.recomputed_blocks = 0
            thinwire.streamed(model, chunks=chunks)
        for block in model.blocks:
            block.up.register_forward_hook(see)
        return model.loss(own, sequences.own_tokens(targets, attend))[0]

    alone: Any = build_transformer(config, seed=3).double()
    alone.recomputed_blocks = 1
    alone.loss(tokens, targets)[0].backward()
    found = gradients_of_ranks(alone, loss_of, heads=4, policy=policy)
    for parameter, gradient in zip(alone.parameters(), found, strict=True):
        assert (parameter.grad - gradient).abs().max() < 1e-10
    assert max(widths) == -(-7 // max(1, chunks)), "with gradients, the MLP runs chunk by chunk"


@pytest.mark.parametrize(("dim", "seq_len"), [(16, 28), (48, 20)])
def test_a_linear_decoder_over_ranks_has_the_gradients_of_one_process_and_sends_states_alone(
    dim: int, seq_len: int
) -> None:
    config = TransformerConfig(vocab_size=16, dim=dim, layers=2, heads=4, max_seq_len=seq_len, is_linear=True)
    tokens, targets = batch(16, seq_len)
    alone: Any = build_transformer(config, seed=3).double()
    alone.recomputed_blocks = 1
    alone.loss(tokens, targets)[0].backward()

    def work(peers: ThreadPeers) -> list[torch.Tensor]:
        model = copy.deepcopy(alone)
        model.zero_grad()
        attend = sequences.attention(peers, heads=4, policy="ring")
        sequences.share(model, attend)
        for way in peers.ways.sent:
            peers.ways.sent[way] *= way[0] != peers.rank  # what the ranks agreed on before
        model.loss(attend.own_tokens(tokens), attend.own_tokens(targets))[0].backward()
        attend.set_documents(torch.zeros(2, seq_len))
        with pytest.raises(ValueError, match=r"documents in one row.*try a document a row"):
            model(attend.own_tokens(tokens))
        return [parameter.grad for parameter in model.parameters()]

    ranks, sent = on_ranks(5 if seq_len == 20 else 4, work)
    for parameter, *gradients in zip(alone.parameters(), *ranks, strict=True):
        assert (parameter.grad - torch.stack(gradients).mean(0)).abs().max() < 1e-10
    state = 2 * dim * dim // 4  # of a layer and a batch of 2, whatever the length
    plan = sequences.scan_plan(ranks=len(ranks), width=dim // 4, state_bytes=8 * state)
    for rank in range(len(ranks)):
        how: Any = {"rank": rank, "ranks": len(ranks), "state": state, "decay": 2 * dim}
        # one of the two layers runs twice forward
        numbers = 3 * plan.sent_numbers(**how) + 2 * plan.sent_numbers(**how, reverse=True)
        assert sum(count for way, count in sent.items() if way[0] == rank) == 8 * numbers


def test_a_linear_decoder_refuses_parts_that_a_state_does_not_pass() -> None:
    config = TransformerConfig(vocab_size=16, dim=16, layers=1, heads=4, max_seq_len=8, is_linear=True)

    def work(peers: ThreadPeers) -> None:
        attend = sequences.attention(peers, heads=4, policy="zigzag")
        with pytest.raises(ValueError, match=r'the policy zigzag.*try policy="ring"'):
            sequences.share(build_transformer(config, seed=1), attend)

    on_ranks(2, work)


def llama(**more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, **more,
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config).double().train()


def test_a_transformers_model_has_the_gradients_of_one_process() -> None:
    tokens, targets = batch(16, 16)
    documents = torch.arange(16).expand(2, -1) // 7

    def loss_of(model: Any, attend: sequences.SequenceAttention) -> torch.Tensor:
        attend.set_documents(documents)
        logits = model(input_ids=attend.own_tokens(tokens)).logits
        return next_token_loss(logits, attend.own_tokens(targets), z_loss=0.0)[0]

    alone = llama()
    met = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
    logits = alone(
        input_ids=tokens, attention_mask=torch.zeros(met.shape).double().masked_fill(~met, -torch.inf)
    ).logits
    next_token_loss(logits, targets, z_loss=0.0)[0].backward()
    found = gradients_of_ranks(alone, loss_of, heads=4, kv_heads=2)
    for parameter, gradient in zip(alone.parameters(), found, strict=True):
        assert (parameter.grad - gradient).abs().max() < 1e-10


def test_models_whose_attention_is_another_one_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    mistral = transformers.MistralConfig(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=4,
    )  # fmt: skip
    bloom = transformers.BloomConfig(vocab_size=16, hidden_size=16, n_layer=1, n_head=2)
    decoder = build_transformer(TransformerConfig(vocab_size=16, dim=16, layers=1, heads=4), seed=1)

    def work(peers: ThreadPeers) -> None:
        attend = sequences.attention(peers, heads=2, kv_heads=1)
        with pytest.raises(ValueError, match="sliding_window 4 does not go with shared sequences"):
            sequences.share(transformers.MistralForCausalLM(mistral), attend)
        with pytest.raises(ValueError, match=r"registry; got BloomForCausalLM"):  # its ALiBi is in its own attention
            sequences.share(transformers.BloomForCausalLM(bloom), attend)
        with pytest.raises(ValueError, match=r"shared by thinwire's decoders and transformers models; got Linear"):
            sequences.share(nn.Linear(2, 2), attend)
        with pytest.raises(ValueError, match=r"another model; got 2 heads; allowed 4; try heads=4"):
            sequences.share(decoder, attend)

    on_ranks(1, work)


def test_calls_that_would_be_wrong_in_silence_are_refused() -> None:
    tokens, _ = batch(16, 8)
    padded = torch.ones(2, 8)
    padded[0, :2] = 0

    def work(peers: ThreadPeers) -> None:
        model = llama(attention_dropout=0.5)
        attend = sequences.attention(peers, heads=4, kv_heads=2)
        sequences.share(model, attend)
        with pytest.raises(ValueError, match=r"attention dropout 0.5 .*try attention_dropout=0.0"):
            model(input_ids=tokens)
        with pytest.raises(ValueError, match=r"labels alone .*shift_labels=attend"):
            model(input_ids=tokens, labels=tokens)
        with pytest.raises(ValueError, match="attention_mask does not go with shared sequences"):
            model(input_ids=tokens, attention_mask=padded)
        assert model.eval()(input_ids=tokens, labels=tokens, shift_labels=attend.own_tokens(tokens)).loss > 0
        assert model.eval()(input_ids=tokens, attention_mask=torch.ones(2, 8)).logits.shape == (2, 8, 16)

    on_ranks(1, work)


def test_ranks_that_differ_beyond_what_an_error_shows_are_refused() -> None:
    sites = "0," * 300
    check = partial(check_agreement, what="sequences", remedy="the same on all hosts")
    with pytest.raises(ValueError, match="do not share sequences alike"):
        on_ranks(2, lambda peers: check(peers, f"ring at sites {sites} {4 + peers.rank} heads"))
    on_ranks(2, lambda peers: check(peers, f"ring at sites {sites} 4 heads"))
