"""Tokens that travel to experts in fewer dimensions or as means of clusters, and the conversion to the former."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.every_case import over
from tests.sequence_ranks import ThreadPeers, on_ranks
from thinwire import ActivationCode, experts
from thinwire.errors import NonFiniteError
from thinwire.experts.convert import to_low_rank
from thinwire.site.expert_costs import TOKENS, ExpertShape, ladder

WIDTH = 8


def layer_of(dispatch: Any = None, *, hidden: int = 12) -> experts.ExpertLayer:
    torch.manual_seed(3)
    return experts.ExpertLayer(WIDTH, hidden, 8, 2, dispatch=dispatch).double()


def numbers(layer: Any, tokens: Tensor) -> dict[str, Tensor]:
    rows = tokens.clone().requires_grad_()
    made = layer(rows)
    made.sin().sum().backward()
    assert rows.grad is not None
    found = {"output": made.detach(), "inputs": rows.grad}
    return found | {name: parameter.grad for name, parameter in layer.named_parameters()}


def shared(layer: Any, parts: list[Tensor]) -> tuple[list[dict[str, Tensor]], int]:
    """Return the numbers of each rank, and the bytes that all sent in its passes."""

    def work(peers: ThreadPeers) -> tuple[dict[str, Tensor], int]:
        own = copy.deepcopy(layer)
        experts.parallelize(own, peers)
        ways = [(peers.rank, other) for other in range(peers.size) if other != peers.rank]
        before = sum(peers.ways.sent[way] for way in ways)
        return numbers(own, parts[peers.rank]), sum(peers.ways.sent[way] for way in ways) - before

    ranks, _ = on_ranks(len(parts), work)
    return [one for one, _ in ranks], sum(sent for _, sent in ranks)


def test_a_quarter_of_the_width_sends_a_quarter_of_the_bytes_and_has_the_gradients_of_one_process() -> None:
    parts = [torch.rand(size, WIDTH, dtype=torch.float64) for size in (7, 0, 5, 2)]
    layer = layer_of(experts.low_rank(ratio=0.25), hidden=48)
    wanted = numbers(copy.deepcopy(layer), torch.cat(parts))
    ranks, sent = shared(layer, parts)
    _, of_whole = shared(layer_of(), parts)
    counts = 4 * 3 * (8 // 4 + 1) * 8  # of rows, which are sent in both
    assert (sent - counts) / (of_whole - counts) == 0.25
    for name, whole in wanted.items():
        found = [one[name] for one in ranks]
        together = torch.cat(found) if name in ("output", "inputs", "up", "down") else torch.stack(found).sum(0)
        scale = 4 if name in ("up", "down") else 1  # of the mean over ranks
        torch.testing.assert_close(together * scale, whole, rtol=1e-9, atol=1e-12)


def test_the_layer_has_the_sizes_of_bigmac_s_table_four() -> None:
    # arXiv 2502.16927, table 4, for 24 layers of width 2048: 64 experts of 512, 8 a token, on 32 ranks, 2**19 tokens
    layers, dim, vocabulary, seq_len, tokens = 24, 2048, 50257, 2048, 2**19
    with torch.device("meta"):
        whole = experts.ExpertLayer(dim, 512, 64, 8)
        narrow = experts.ExpertLayer(dim, 512 * 4, 64, 8, dispatch=experts.low_rank(ratio=0.25))

    def parameters(layer: experts.ExpertLayer) -> int:
        own = sum(weight.numel() for name, weight in layer.named_parameters() if not name.startswith("router"))
        return layers * (own + 4 * dim**2) + vocabulary * dim

    def multiplications(layer: experts.ExpertLayer) -> float:
        """Of a token in a layer: its experts, attention and its scores, the layer's share of the head, projections."""
        weights = 8 / 64 * (layer.up.numel() + layer.down.numel())
        around = sum(one.weight.numel() for one in (layer.narrow, layer.widen) if one is not None)
        return weights + 4 * dim**2 + 2 * seq_len * dim + vocabulary * dim / layers + around

    assert f"{parameters(narrow) / parameters(whole) - 1:.2%}" == "1.35%"
    assert f"{multiplications(narrow) / multiplications(whole) - 1:.2%}" == "4.54%"

    def gibibytes(layer: experts.ExpertLayer) -> float:
        width = layer.up.shape[2]
        shape = ExpertShape(count=64, per_token=8, parameters=0, width=width, layers=layers)
        return layers * ladder(shape, tokens=tokens, sites=32)[TOKENS - 1].num_bytes / 2**30

    assert (gibibytes(whole), gibibytes(narrow)) == (1488.0, 372.0)


@over((size, code) for size in (2, 4) for code in (None, ("block-int8", "block-int4"), ("block-int4", "block-int4")))
def test_ranks_send_the_bytes_of_the_ladder_where_tokens_are_spread_evenly(
    size: int, code: tuple[str, str] | None
) -> None:
    tokens, k, count, width = 256, 2, 8, 32
    policy = experts.tokens(code=None if code is None else ActivationCode(*code))

    def work(peers: ThreadPeers) -> int:
        ranks = experts.ExpertRanks(
            name="layer",
            num_experts=count,
            compute=lambda rows, counts: 2 * rows,
            device=torch.device("cpu"),
            peers=peers,
        )
        others = [(peers.rank, other) for other in range(size) if other != peers.rank]
        before = sum(peers.ways.sent[way] for way in others)
        rows = torch.randn(tokens * k, width).bfloat16().requires_grad_()
        policy(rows, [tokens * k // count] * count, ranks).float().sum().backward()
        of_counts = (size - 1) * (count // size + 1) * 8
        return sum(peers.ways.sent[way] for way in others) - before - of_counts

    shape = ExpertShape(count=count, per_token=k, parameters=0, width=width, layers=1)
    rungs = ladder(shape, tokens=tokens, sites=size, code=code or ("bfloat16", "bfloat16"))
    sent, _ = on_ranks(size, work)
    assert sent == [rungs[0 if code is None else 1].num_bytes] * size


@over([1, 3, 7])
def test_a_conversion_s_error_is_the_sum_of_the_dropped_squared_singular_values(rank: int) -> None:
    layer = layer_of()
    found, (into, out_of) = to_low_rank(layer, rank)
    assert found.narrow is not None and found.widen is not None
    rows, columns = layer.up.flatten(0, 1), layer.down.transpose(0, 1).flatten(1)
    for spectrum, whole, near in (
        (into, rows, (found.up @ found.narrow.weight).flatten(0, 1)),
        (out_of, columns, (found.widen.weight @ found.down).transpose(0, 1).flatten(1)),
    ):
        dropped = torch.linalg.svdvals(whole)[rank:].square().sum()
        torch.testing.assert_close((whole - near).square().sum(), dropped)
        assert spectrum.squared_error == pytest.approx(float(dropped.detach()))
        assert spectrum.energy == pytest.approx(1 - float((dropped / whole.square().sum()).detach()))
        assert spectrum.rank_of(spectrum.energy) == rank and spectrum.rank_of(1.0) == WIDTH
    assert torch.equal(found.router.weight, layer.router.weight)


@pytest.mark.parametrize("name", ["router.weight", "up", "down"])
def test_weights_that_are_not_finite_are_not_converted(name: str) -> None:
    layer = experts.ExpertLayer(8, 12, 4)
    with torch.no_grad():
        layer.get_parameter(name).view(-1)[3] = float("nan")
    with pytest.raises(NonFiniteError, match=f"{name} holds NaN or infinity; convert an earlier checkpoint"):
        to_low_rank(layer, 4)


def test_a_layer_of_low_rank_is_converted_exactly_and_again() -> None:
    layer = layer_of()
    with torch.no_grad():  # experts that see two dimensions alone, and write two
        layer.up.copy_(layer.up[:, :, :2] @ torch.rand(2, WIDTH, dtype=torch.float64))
        layer.down.copy_(torch.rand(WIDTH, 2, dtype=torch.float64) @ layer.down[:, :2])
    tokens = torch.rand(9, WIDTH, dtype=torch.float64)
    once, (into, _) = to_low_rank(layer, 4)
    twice, _ = to_low_rank(once, 2)
    assert into.energy == pytest.approx(1) and twice.up.shape[2] == 2
    torch.testing.assert_close(once(tokens), layer(tokens))
    torch.testing.assert_close(twice(tokens), layer(tokens))
    with pytest.raises(ValueError, match="got 2; allowed 1 to 1 of 2; try --rank 1"):
        to_low_rank(twice, 2)
    to_low_rank(twice, 1)


def test_equal_tokens_travel_once_and_get_what_they_get_alone() -> None:
    tokens = torch.rand(3, WIDTH, dtype=torch.float64)
    parts = [tokens.repeat(4, 1), tokens[:1].repeat(5, 1)]
    layer = layer_of()
    wanted, of_all = shared(layer, parts)
    for compensate in (False, True):
        layer.dispatch = experts.clusters(compensate=compensate)
        found, sent = shared(layer, parts)
        assert sent < of_all / 3
        for one, other in zip(wanted, found, strict=True):
            for name in one if not compensate else ("output",):
                torch.testing.assert_close(other[name], one[name], msg=name)


def test_more_hashes_make_more_clusters_and_a_compensated_mean_is_added_to() -> None:
    sizes: list[int] = []
    rows = torch.rand(400, WIDTH, dtype=torch.float64)

    def compute(means: Tensor, counts: Any) -> Tensor:
        assert sum(counts) == len(means)
        sizes.append(len(means))
        return 3 * means

    ranks = experts.ExpertRanks(name="layer", num_experts=2, compute=compute, device=rows.device)
    for hashes in (1, 2, 6):
        made = experts.clusters(hashes=hashes)(rows, [150, 250], ranks)
        torch.testing.assert_close(made.sum(0), 3 * rows.sum(0))
        compensated = experts.clusters(hashes=hashes, compensate=True)(rows, [150, 250], ranks)
        torch.testing.assert_close(compensated, made + rows - made / 3)
    assert sizes[0] < sizes[2] < sizes[4] <= 400
    assert not len(experts.clusters()(rows[:0], [0, 0], ranks))


def test_numbers_out_of_range_are_refused_with_a_remedy_that_works() -> None:
    with pytest.raises(ValueError, match=r"got 0; allowed above 0, up to 1; try ratio=0\.25"):
        experts.low_rank(ratio=0)
    experts.low_rank(ratio=0.25)
    with pytest.raises(ValueError, match="got 65; allowed 1 to 64; try hashes=6"):
        experts.clusters(hashes=65)
    with pytest.raises(ValueError, match=r"got Weights; .*try clusters\(dispatch=experts.tokens\(\)\)"):
        experts.clusters(dispatch=experts.weights(most_streamed=1))
    experts.clusters(dispatch=experts.tokens())
    experts.clusters(hashes=6)
    with pytest.raises(ValueError, match=r"low_rank is a part of a layer's weights; .* try ExpertLayer\(dispatch"):
        experts.parallelize(layer_of(), ThreadPeers(None, 0, 1), dispatch=experts.low_rank())  # type: ignore[arg-type]
