"""Balance loss of routers on several ranks and in several passes, against one process."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.every_case import over
from tests.sequence_ranks import ThreadPeers, on_ranks
from thinwire import experts
from thinwire.workloads.language.presets import TransformerConfig
from thinwire.workloads.language.transformer import build_transformer

WIDTH = 6


def model_of() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(experts.ExpertLayer(WIDTH, 5, 8, 2), nn.Tanh(), experts.ExpertLayer(WIDTH, 5, 4, 1)).double()


def tokens_of(count: int) -> Tensor:
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def routers(model: nn.Module) -> list[Tensor]:
    return [p.grad for name, p in model.named_parameters() if "router" in name and p.grad is not None]


def test_a_single_layer_has_the_loss_of_the_formula() -> None:
    layer, tokens = model_of()[0], tokens_of(9)
    layer(tokens)
    probabilities, chosen = (tokens @ layer.router.weight.T).softmax(-1), layer.routed[1]
    shares = torch.stack([(chosen == expert).sum() / chosen.numel() for expert in range(8)])
    assert experts.balance_loss(layer).item() == pytest.approx((8 * (shares * probabilities.mean(0)).sum()).item())
    layer.router.weight.data.zero_()
    layer(tokens)
    assert experts.balance_loss(layer).item() == pytest.approx(1), "equal probabilities"


@over([("ranks", 0.0), ("global-batch", 0.0), ("micro-batch", 1e-4)])
def test_the_mean_over_ranks_is_the_loss_of_one_process_where_counts_are_of_all(over: Any, least: float) -> None:
    tokens, whole = tokens_of(24), model_of()
    untouched = copy.deepcopy(whole)  # threads share one generator
    whole(tokens)
    wanted = experts.balance_loss(whole)
    wanted.backward()

    def work(peers: ThreadPeers) -> tuple[float, list[Tensor], int]:
        model = copy.deepcopy(untouched)
        experts.parallelize(model, peers)
        with experts.step(model):
            model(tokens[peers.rank * 6 :][:6])
            before = sum(count for way, count in peers.ways.sent.items() if way[0] == peers.rank)
            loss = experts.balance_loss(model, over=over)
            after = sum(count for way, count in peers.ways.sent.items() if way[0] == peers.rank)
            loss.backward()
        return loss.item(), routers(model), after - before

    ranks, _ = on_ranks(4, work)
    difference = abs(sum(loss for loss, _, _ in ranks) / 4 - wanted.item())
    gradients = [torch.stack(of_layer).mean(0) for of_layer in zip(*(found for _, found, _ in ranks), strict=True)]
    error = max(float((one - other).abs().max()) for one, other in zip(gradients, routers(whole), strict=True))
    assert (difference < 1e-12 and error < 1e-12) if least == 0 else difference > least
    # one message to each other rank, of all layers' 8 + 4 counts
    assert {sent for *_, sent in ranks} == {0 if over == "micro-batch" else 3 * 12 * 8}


def test_a_step_counts_its_earlier_passes_and_begins_with_none() -> None:
    tokens, model = tokens_of(12), model_of()
    found = []
    for _ in range(2):
        with experts.step(model):
            for part in tokens.split(4):
                model(part)
                found.append(experts.balance_loss(model, over="global-batch").item())
    assert found[:3] == found[3:]
    layer = model[0]
    layer(tokens)
    probabilities, chosen = copy.copy(layer.routed)
    shares = chosen.flatten().bincount(minlength=8).double() / 24
    first = 8 * (shares * probabilities[8:].mean(0)).sum()  # the last pass of a step sees the counts of all three
    hidden = torch.tanh(layer(tokens)).detach()
    model[2](hidden)
    probabilities, chosen = model[2].routed
    second = 4 * (chosen.flatten().bincount(minlength=4).double() / 12 * probabilities[8:].mean(0)).sum()
    assert found[2] == pytest.approx((first + second).item() / 2, rel=1e-12)


def test_padding_counts_nothing_and_a_rank_without_tokens_takes_part() -> None:
    tokens, model = tokens_of(8), model_of()
    model(tokens[:5])
    wanted = experts.balance_loss(model).item()
    model(tokens)
    assert experts.balance_loss(model, counted=torch.arange(8) < 5).item() == pytest.approx(wanted)

    def work(peers: ThreadPeers) -> float:
        own = copy.deepcopy(model)
        experts.parallelize(own, peers)
        own(tokens[: 5 * (1 - peers.rank)])
        loss = experts.balance_loss(own)
        loss.backward()
        return loss.item()

    assert on_ranks(2, work)[0] == [pytest.approx(wanted), 0.0]


def test_what_cannot_be_balanced_is_refused() -> None:
    model = model_of()
    with pytest.raises(ValueError, match=r"no layer of experts has run; .* try to call the model first"):
        experts.balance_loss(model)
    model(tokens_of(3))
    with pytest.raises(ValueError, match=r"counts the choices of a step; got no step; .* with experts.step\(model\)"):
        experts.balance_loss(model, over="global-batch")
    with pytest.raises(ValueError, match=r"unknown balance; got 'rank'; .* try ranks"):
        experts.balance_loss(model, over="rank")  # type: ignore[arg-type]


def test_a_decoder_of_experts_trains_on_the_balance_loss_and_decodes_as_it_reads() -> None:
    config = TransformerConfig(vocab_size=16, dim=8, layers=2, heads=2, max_seq_len=8, mlp_dim=8, num_experts=4)
    model: Any = build_transformer(replace(config, balance=0.5), seed=1)
    tokens = torch.randint(16, (2, 7), generator=torch.Generator().manual_seed(3))
    loss, _ = model.loss(tokens[:, :-1], tokens[:, 1:])
    plain: Any = build_transformer(replace(config, balance=0.0), seed=1)
    assert (loss - plain.loss(tokens[:, :-1], tokens[:, 1:])[0]).item() == pytest.approx(
        0.5 * experts.balance_loss(model).item(), rel=1e-5
    )
    with torch.no_grad():
        logits, cache = model.decode(tokens[:, :3])
        for place in range(3, 7):
            assert torch.allclose(logits, model(tokens[:, :place])[:, -1], atol=1e-5)
            logits, cache = model.decode(tokens[:, place : place + 1], cache)
