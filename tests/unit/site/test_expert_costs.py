"""Costs of experts: the ladder of what crosses a border, and expert parallelism inside a site."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.every_case import over
from thinwire.codec_specs import activation_bytes
from thinwire.site import memory
from thinwire.site.cost_model import Layout, ModelShape, StepCost, device_memory, sent_numbers, with_experts
from thinwire.site.device_grid import Degrees, SitePlacement
from thinwire.site.expert_costs import (
    CODED_TOKENS,
    PSEUDO_GRADIENTS,
    TOKENS,
    WEIGHTS,
    ExpertShape,
    all_to_all_s,
    chosen_rung,
    ladder,
)
from thinwire.site.search import allowed_grids, plan_site
from thinwire.site.site_file import NodeLink, Site, SiteNode

# h 2048, f 1408, 64 experts, 6 a token, and 0.5 M tokens of a site in a step
EXAMPLE = ExpertShape(count=64, per_token=6, parameters=2 * 2048 * 1408, width=2048, layers=1)
TOKENS_OF_SITE = 2**19


def site_of(nodes: int = 2, devices: int = 4, *, memory_bytes: float = 80e9, places: bool = False) -> Site:
    return Site(
        nodes=tuple(
            SiteNode(name=f"box-{n}", devices=devices, memory_bytes=memory_bytes, flops_per_s=1e14,
                     bandwidth_bits_per_s=1e12, latency_s=1e-6, site=f"place-{n}" if places else "")
            for n in range(nodes)
        ),
        between_nodes=NodeLink(bandwidth_bits_per_s=1e10, latency_s=1e-3),
    )  # fmt: skip


def decoder_with(experts: ExpertShape, *, layers: int = 4, width: int = 256) -> ModelShape:
    shape = ModelShape(
        layers=layers, width=width, heads=4, vocab_size=1000, seq_len=128, embedding_parameters=1000 * width,
        head_parameters=1000 * width,
        layer_parameters=4 * width**2 + experts.layer_parameters * experts.layers / layers,
    )  # fmt: skip
    return with_experts(shape, experts)


SMALL = decoder_with(ExpertShape(count=8, per_token=2, parameters=2 * 256 * 512, width=256, layers=3))


@over([(2, 100), (3, 7), (5, 1)])
def test_the_ladder_has_the_bytes_of_its_formulas(sites: int, interval: int) -> None:
    numbers, weights = TOKENS_OF_SITE * 6 * 2048 * (1 - 1 / sites), 64 * 2 * 2048 * 1408 * (1 - 1 / sites)
    found = [rung.num_bytes for rung in ladder(EXAMPLE, tokens=TOKENS_OF_SITE, sites=sites, interval=interval)]
    wanted = [4 * numbers * 2, 4 * numbers * 34 / 64, 2 * weights * 2, 2 * weights * 33 / 64 / interval, 0]
    assert found == pytest.approx(wanted, rel=1e-6)


def test_weights_are_23_to_35_times_fewer_bytes_than_tokens_in_the_example() -> None:
    visits = EXAMPLE.visits(TOKENS_OF_SITE)
    assert visits == 49_152
    # f to 1.5 f of an expert of two products, half as many again of a gated one
    assert [EXAMPLE.break_even_tokens(crossings=crossings) for crossings in (2, 3)] == [1408, 2112]
    gated = replace(EXAMPLE, parameters=3 * 2048 * 1408)
    assert [gated.break_even_tokens(crossings=crossings) for crossings in (2, 3)] == [2112, 3168]
    rungs = ladder(EXAMPLE, tokens=TOKENS_OF_SITE)
    ratio = rungs[TOKENS - 1].num_bytes / rungs[WEIGHTS - 1].num_bytes
    # of two sites each holds half of the experts, and each expert has the tokens of one other site
    assert ratio == pytest.approx(visits / EXAMPLE.break_even_tokens()) and round(ratio) == 35
    assert round(visits / EXAMPLE.break_even_tokens(crossings=3)) == 23


@over([
    (TOKENS_OF_SITE, True, True, PSEUDO_GRADIENTS), (TOKENS_OF_SITE, True, False, WEIGHTS),
    (TOKENS_OF_SITE, False, False, CODED_TOKENS), (256, True, False, CODED_TOKENS),
])  # fmt: skip
def test_a_border_gets_the_fewest_bytes_that_train_the_same_model_in_its_memory(
    tokens: int, may_stream: bool, holds_all: bool, wanted: int
) -> None:
    rungs = ladder(EXAMPLE, tokens=tokens)
    assert chosen_rung(rungs, may_stream=may_stream, holds_all=holds_all).number == wanted


def test_tokens_in_a_quarter_of_the_width_halve_the_bytes_of_bigmac_s_table_four_twice() -> None:
    # arXiv 2502.16927, table 4: 24 layers, 8 experts a token, 32 ranks, 2**19 tokens a step
    def gibibytes(width: int) -> float:
        experts = ExpertShape(count=64, per_token=8, parameters=2 * 2048 * 512, width=width, layers=24)
        return ladder(experts, tokens=2**19, sites=32)[TOKENS - 1].num_bytes * experts.layers / 2**30

    assert (gibibytes(2048), gibibytes(512)) == (1488.0, 372.0)


def test_experts_are_held_once_in_the_ranks_that_share_them() -> None:
    held, shared = SMALL.experts.layer_parameters * 3, SMALL.num_parameters
    for ep, zero_stage in ((1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (8, 3)):
        layout = Layout(degrees=Degrees(dp_shard=8, ep=ep), global_batch=8, zero_stage=zero_stage)
        dense = memory.state_bytes(shared - held, zero_stage=zero_stage, shards=8)
        own = memory.state_bytes(held / ep, zero_stage=zero_stage, shards=8 // ep)
        assert device_memory(SMALL, layout, stage=0).states_bytes == pytest.approx(dense + own)


def test_ranks_send_tokens_to_experts_four_times_and_gradients_of_their_own_experts_alone() -> None:
    held, tokens = SMALL.experts.layer_parameters * 3, 2 * 128
    for ep in (1, 2, 8):
        layout = Layout(degrees=Degrees(dp_shard=8, ep=ep), global_batch=32, micro_batch=2, zero_stage=1)
        found = sent_numbers(SMALL, layout, stage=0)
        # two passes, and three of four layers have experts
        assert found["ep"] == pytest.approx(2 * 3 * 4 * tokens * 2 * 256 * (1 - 1 / ep))
        dense = 2 * (SMALL.num_parameters - held) * 7 / 8
        assert found["data"] == pytest.approx(dense + 2 * held / ep * (1 - ep / 8))


def test_an_all_to_all_takes_the_time_of_its_busiest_card_line_or_device() -> None:
    site, bits = site_of(), 8e9
    assert all_to_all_s(site, [[0, 0, 0, 0], [1, 1, 1, 1]], bits=bits) == (pytest.approx(3 / 4 * bits / 1e12), 1e-6)
    # each of four devices of a node sends a quarter of its tokens to each of two on the other node
    assert all_to_all_s(site, [[0, 0, 1, 1]] * 2, bits=bits) == (pytest.approx(2 * 4 * bits / 4 / 1e10), 1e-3)
    assert all_to_all_s(site, [[0, 0, 1, 1]], bits=bits, lanes=2)[0] == pytest.approx(2 * 4 * bits / 4 / 1e10)
    assert all_to_all_s(site, [[0], [1]], bits=bits) == (0.0, 0.0)
    # three nodes at three places: each line has one pair, each card has two
    three = site_of(3, 1, places=True)
    assert all_to_all_s(three, [[0, 1, 2]], bits=bits)[0] == pytest.approx(2 * bits / 3 / 1e10)


def test_messages_of_experts_take_their_time_in_both_passes_and_replace_what_dense_gradients_cost() -> None:
    site = site_of()

    def step_of(ep: int) -> StepCost:
        degrees = Degrees(dp_shard=8, ep=ep)
        layout = Layout(degrees=degrees, global_batch=64, micro_batch=8, zero_stage=1)
        placement = SitePlacement(site=site, degrees=degrees, slots=tuple(range(8)))
        return StepCost(model=SMALL, layout=layout, placement=placement)

    whole, inside, across = (step_of(ep).parts_s for ep in (1, 4, 8))
    assert whole["experts"] == 0 < inside["experts"] < across["experts"]
    bits = 8 * 128 * 2 * 256 * 16  # of a device, for one layer
    card_s = 4 * bits * 4 / 8 / 1e10
    # of four layers three have experts; counts go first
    assert across["experts"] == pytest.approx(3 * (4 * card_s + 5 * 1e-3))
    coded = replace(step_of(8), model=replace(SMALL, experts=replace(SMALL.experts, bits=4.25))).parts_s
    assert coded["experts"] == pytest.approx(3 * (4 * card_s * 4.25 / 16 + 5 * 1e-3))
    assert whole["data"] > inside["data"] > across["data"]
    assert sum(across.values()) == pytest.approx(step_of(8).step_s)
    # every token computes with two of eight experts
    assert whole["compute"] == pytest.approx(
        8 * 128 * (4 * (3 * 2 * SMALL.active_parameters + 3.5 * 2 * 128 * 256) + 3 * 2 * 1000 * 256) / 1e14
    )
    assert SMALL.active_parameters == 4 * 256**2 + 3 / 4 * 2 * 2 * 256 * 512


def test_ep_divides_the_ranks_that_share_states_and_the_experts() -> None:
    grids, _ = allowed_grids(site_of(), SMALL, global_batch=64)
    assert {grid.ep for grid in grids if grid.shards == 8} == {1, 2, 4, 8}
    odd = replace(SMALL, experts=replace(SMALL.experts, count=6))
    assert {grid.ep for grid in allowed_grids(site_of(), odd, global_batch=64)[0] if grid.shards == 8} == {1, 2}
    dense = replace(SMALL, experts=None)
    assert {grid.ep for grid in allowed_grids(site_of(), dense, global_batch=64)[0]} == {1}


def test_a_plan_shares_experts_where_their_gradients_cost_more_than_their_tokens() -> None:
    experts = ExpertShape(count=8, per_token=1, parameters=2 * 1024 * 4096, width=1024, layers=8)
    plan = plan_site(site_of(1, 8), decoder_with(experts, layers=8, width=1024), global_batch=64)
    degrees = plan.best.layout.degrees
    assert plan.to_json()["degrees"]["ep"] == degrees.ep > 1
    alone = replace(degrees, ep=1)
    placement = replace(plan.best.placement, degrees=alone)
    whole = replace(plan.best, layout=replace(plan.best.layout, degrees=alone), placement=placement)
    assert whole.step_s > plan.best.step_s and whole.parts_s["experts"] == 0 < plan.best.parts_s["experts"]


def test_codes_of_the_ladder_are_those_of_the_codec_itself() -> None:
    rungs = ladder(EXAMPLE, tokens=64, code=("block-int8", "block-int4"))
    numbers = 64 * 6 / 2 * 2048
    wanted = 2 * (activation_bytes("block-int8", numbers) + activation_bytes("block-int4", numbers))
    assert rungs[CODED_TOKENS - 1].num_bytes == wanted
