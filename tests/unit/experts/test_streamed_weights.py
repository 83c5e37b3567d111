"""Weights of experts that are streamed for a step (FSSDP): exact, with the bytes of the formula, in one plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.every_case import over
from tests.sequence_ranks import ThreadPeers, on_ranks
from thinwire import ActivationCode, experts
from thinwire.experts.stream_plan import plan_streams
from thinwire.experts.streams import streams_of

WIDTH, HIDDEN, STEPS, PASSES, COUNTS = 6, 2, 3, 2, (9, 0, 7, 4)
WEIGHT_BYTES = 2 * WIDTH * HIDDEN * 8


def model_of() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(experts.ExpertLayer(WIDTH, HIDDEN, 8, 2), experts.ExpertLayer(WIDTH, HIDDEN, 4, 1)).double()


def batch(step: int, number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * number + rank)
    return torch.randn(COUNTS[rank], WIDTH, dtype=torch.float64, generator=generator)


def train(model: nn.Module, ranks: list[int], mean_over: int, seen: Any = None) -> list[list[Tensor]]:
    """Return the gradients of each step; the router's is that of these ranks' tokens."""
    found = []
    for step in range(STEPS):
        with experts.step(model):
            if seen is not None:
                seen(model)
            for number in range(PASSES):
                tokens = torch.cat([batch(step, number, rank) for rank in ranks])
                (model(tokens).sin().sum() / mean_over).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        for parameter in model.parameters():  # the whole step is followed: a gradient of an old copy would show
            if parameter.ndim == 3:
                parameter.data.sub_(0.05 * parameter.grad)
            parameter.grad = None
    return found


@over([(1 << 30, 8, "every"), (1, 0, "none"), (1 << 30, 1, "some")])
def test_streamed_experts_have_the_gradients_of_one_process(most_bytes: int, most: int, which: str) -> None:
    whole = model_of()
    # the mean over ranks is what the layer makes of gradients
    wanted = train(copy.deepcopy(whole), [0, 1, 2, 3], 4)
    policy = experts.weights(most_streamed=max(most, 1), most_bytes=1 << 30) if most else experts.tokens()

    def work(peers: ThreadPeers) -> tuple[list[list[Tensor]], list[int], int]:
        model = copy.deepcopy(whole)
        experts.parallelize(model, peers, dispatch=policy)
        held: list[int] = []
        found = train(model, [peers.rank], 1, lambda one: held.append(sum(len(layer.copies) for layer in one)))
        return found, held, sum(parameter.numel() for parameter in model.parameters())

    ranks, _ = on_ranks(4, work)
    held = [copies for _, copies, _ in ranks]
    assert all(copies[0] == 0 for copies in held), "nothing is known before the first step"
    later = [copies[1] + copies[2] for copies in held]
    assert {"every": max(later) > 4, "some": 0 < max(later) <= 4, "none": not any(later)}[which]
    for step in range(STEPS):
        for place, (name, _) in enumerate(whole.named_parameters()):
            parts = [found[step][place] for found, _, _ in ranks]
            of_ranks = torch.stack(parts).sum(0) / 4 if "router" in name else torch.cat(parts)
            assert (of_ranks - wanted[step][place]).abs().max() < 1e-9, (step, name)
    assert len({size for *_, size in ranks}) == 1, "copies are no parameters"


def test_bytes_of_a_copy_are_twice_its_weights_and_its_tokens_stay() -> None:
    whole = model_of()

    def work(peers: ThreadPeers) -> Any:
        model = copy.deepcopy(whole)
        experts.parallelize(model, peers, dispatch=experts.weights(most_streamed=8))
        for layer in model:  # as if each rank had sent many rows to expert 0 of each layer, and rank 0 some to 7
            layer.streams_from[:, 0] = 1000
        model[0].streams_from[0, 7] = 900
        plans = [streams_of(layer) for layer in model]
        sent = lambda: {w: c for w, c in peers.ways.sent.items() if w[0] == peers.rank}  # noqa: E731
        before = sent()
        with experts.step(model):
            middle = sent()
        return plans, [
            {way: later[way] - now[way] for way in now} for now, later in ((before, middle), (middle, sent()))
        ]

    ranks, _ = on_ranks(4, work)
    plans = [plan for plan, _ in ranks]
    assert plans == [[((0, 1), (0, 2), (0, 3), (7, 0)), ((0, 1), (0, 2), (0, 3))]] * 4
    there = {way: count for _, (first, _) in ranks for way, count in first.items() if count}
    back = {way: count for _, (_, last) in ranks for way, count in last.items() if way[0] != way[1]}
    assert there == {(0, 1): 2 * WEIGHT_BYTES, (0, 2): 2 * WEIGHT_BYTES, (0, 3): 2 * WEIGHT_BYTES, (3, 0): WEIGHT_BYTES}
    counts = (8 + 4) * 8  # every rank's choices, for the next step's plan
    assert back == {(one, other): there.get((other, one), 0) + counts for one, other in back}


def test_the_plan_of_the_specified_example_streams_all_and_is_far_below_tokens() -> None:
    # 64 experts of 2 x 2048 x 1408 weights, 6 a token, 2^19 tokens a site, 16 bits
    rows = 2**19 * 6 // 64
    counts, expert_bytes, row_bytes = [[rows] * 64] * 2, 2 * 2048 * 1408 * 2, 4 * 2048 * 2
    sizes = {"row_bytes": row_bytes, "expert_bytes": expert_bytes}
    plan = plan_streams(counts, **sizes, most_streamed=64)
    assert len(plan) == 64 and all(expert // 32 != rank for expert, rank in plan)
    tokens, weights = 64 * rows * row_bytes, 2 * expert_bytes * len(plan)
    assert tokens / weights == pytest.approx(rows / 1408) and tokens / weights > 34
    assert plan_streams([[1408] * 64] * 2, **sizes, most_streamed=64) == (), "at the break-even, tokens travel"
    assert len(plan_streams([[1409] * 64] * 2, **sizes, most_streamed=64)) == 64
    assert len(plan_streams(counts, **sizes, most_streamed=3)) == 6


def test_coded_tokens_move_the_break_even() -> None:
    uncoded, coded = (
        experts.weights(code=code).row_bytes(width=64, item_bytes=4)
        for code in (None, ActivationCode("block-int4", "block-int4"))
    )
    assert uncoded == 4 * 64 * 4 and coded == pytest.approx(4 * 64 * 17 / 32)


def test_streams_that_cannot_be_are_refused_with_a_remedy_that_works() -> None:
    def share(**how: Any) -> None:
        on_ranks(2, lambda peers: experts.parallelize(model_of(), peers, dispatch=experts.weights(**how)))

    copy_bytes = 2 * 2 * WEIGHT_BYTES
    with pytest.raises(ValueError, match=r"over the memory limit in 2 layers; .* try weights\(most_streamed=2, most_"):
        share(most_streamed=4, most_bytes=2 * copy_bytes + 5)
    share(most_streamed=2, most_bytes=2 * copy_bytes + 5)
    with pytest.raises(ValueError, match="most_streamed is too small; got 0"):
        experts.weights(most_streamed=0)


def test_frozen_experts_get_no_gradient_from_copies() -> None:
    whole = model_of()
    whole[0].up.requires_grad_(False)

    def work(peers: ThreadPeers) -> list[bool]:
        model = copy.deepcopy(whole)
        experts.parallelize(model, peers, dispatch=experts.weights(most_streamed=8))
        for layer in model:
            layer.streams_from.fill_(1000)
        with experts.step(model):
            assert model[0].copies
            model(batch(0, 0, peers.rank)).sum().backward()
        return [layer.up.grad is not None for layer in model]

    assert on_ranks(4, work)[0] == [[False, True]] * 4
