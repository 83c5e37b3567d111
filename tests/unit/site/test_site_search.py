"""Search for layouts and placements inside a site, against exhaustive search."""

from __future__ import annotations

import random
import re
import time
from dataclasses import replace
from itertools import pairwise, permutations
from math import inf

import pytest

from thinwire.site.cost_model import Layout, ModelShape, StepCost, decoder_shape, peak_bytes
from thinwire.site.device_grid import Degrees, SitePlacement
from thinwire.site.placement import anneal, place
from thinwire.site.search import (
    NothingFits,
    all_grids,
    allowed_grids,
    broken_rule,
    fewest_recomputed,
    fitting_layouts,
    memory_front,
    memory_reason,
    plan_site,
    simplest,
    smallest_layout,
    starts,
)
from thinwire.site.site_file import NodeLink, Site, SiteNode
from thinwire.site.site_plan import TIE
from thinwire.units import parse_seconds

SMALL = decoder_shape(layers=4, width=256, heads=4, vocab_size=1000, seq_len=128)
SEVEN = decoder_shape(layers=32, width=4096, heads=32, vocab_size=32_000, seq_len=2048, is_head_tied=True)


def nodes(count: int, devices: int, *, memory: float = 80e9, bandwidth: float = 2.4e12, flops: float = 1.4e14) -> Site:
    """Return equal nodes, joined at 25 Gbit/s."""
    return Site(
        nodes=tuple(
            SiteNode(name=f"n{n}", devices=devices, memory_bytes=memory, flops_per_s=flops,
                     bandwidth_bits_per_s=bandwidth, latency_s=5e-6)
            for n in range(count)
        ),
        between_nodes=NodeLink(bandwidth_bits_per_s=25e9, latency_s=30e-6),
    )  # fmt: skip


def exhaustive(site: Site, model: ModelShape, *, global_batch: int) -> list[StepCost]:
    """Return every layout that fits on every placement to begin with."""
    grids, _ = allowed_grids(site, model, global_batch=global_batch)
    return [
        StepCost(model=model, layout=layout, placement=placement)
        for degrees in grids
        for layout in fitting_layouts(site, model, degrees, global_batch=global_batch)
        for placement in starts(site, degrees)
    ]


SITES = [(nodes(1, n), SMALL) for n in (1, 2, 3, 4, 6, 8)] + [
    (nodes(1, 5), replace(SMALL, layers=5)),
    (nodes(1, 7), replace(SMALL, layers=7)),
    (nodes(2, 2, flops=1e13, bandwidth=1e11), SMALL),
    (nodes(2, 4, memory=1.5e9, flops=1e15), replace(SMALL, layers=8, width=1024, layer_parameters=12 * 1024**2)),
    (nodes(4, 2, flops=1e12, bandwidth=5e9), SMALL),
]


@pytest.mark.slow
@pytest.mark.parametrize(("site", "model"), SITES)
def test_the_plan_is_that_of_an_exhaustive_search(site: Site, model: ModelShape) -> None:
    every = exhaustive(site, model, global_batch=24)
    plan = plan_site(site, model, global_batch=24, most_placed=0)
    assert plan.best.step_s == simplest(every).step_s
    assert plan.best.layout.degrees == simplest(every).layout.degrees
    assert plan.best.step_s <= min(step.step_s for step in every) * (1 + TIE)
    placed = plan_site(site, model, global_batch=24)
    assert placed.best.step_s <= plan.best.step_s * (1 + TIE)
    assert plan.num_simulated <= plan.num_layouts and plan.num_left == 0 and max(plan.peak_bytes) <= site.memory_bytes


def test_one_device_has_all_degrees_1() -> None:
    plan = plan_site(nodes(1, 1), SMALL, global_batch=8)
    assert plan.best.layout.degrees == Degrees() and plan.best.layout.schedule == "none"
    assert not plan.runners_up and not plan.refused


@pytest.mark.slow
def test_64_devices_are_planned_in_seconds() -> None:
    began = time.process_time()
    plan = plan_site(nodes(8, 8), SEVEN, global_batch=256)
    used_s = time.process_time() - began
    assert used_s < 20  # of CPU
    # 25 Gbit/s a node is too thin for 7 billion gradients: stages cross it
    assert plan.best.layout.degrees.pp >= 8
    assert plan.best.layout.degrees.tp <= 8


def test_grids_have_the_product_and_are_different() -> None:
    for devices in (1, 6, 8, 12):
        grids = list(all_grids(devices))
        assert len(set(grids)) == len(grids)
        assert all(grid.num_devices == devices for grid in grids)
        count = sum(devices % (a * b * c * d) == 0 for a in range(1, 13) for b in range(1, 13) for c in range(1, 13)
                    for d in range(1, 13))  # fmt: skip
        assert len(grids) == count


@pytest.mark.parametrize(
    ("degrees", "text"),
    [
        (Degrees(tp=16), "tensor parallel stays inside a node; got 16, allowed divisors of 8 devices"),
        (Degrees(cp=16, tp=1), None),
        (Degrees(pp=16), "every stage has a layer; got 16, allowed 1 to 4 layers"),
        (Degrees(tp=8, dp_shard=2), "every device has whole heads; got 8, allowed divisors of 4 heads"),
        (Degrees(dp_shard=16), None),
        (Degrees(dp_shard=32), "every replica has a sequence; got 32, allowed 1 to 24 sequences"),
    ],
)
def test_rules_leave_grids_out_with_the_number_and_the_limit(degrees: Degrees, text: str | None) -> None:
    rule = broken_rule(nodes(2, 8), replace(SMALL, seq_len=128), degrees, global_batch=24)
    assert (rule and rule[1]) == text


def test_layouts_that_fit_recompute_as_little_as_they_can() -> None:
    site = nodes(1, 8, memory=40e9)
    for degrees in (Degrees(dp_shard=8), Degrees(pp=4, dp_shard=2), Degrees(pp=2, tp=4)):
        for layout in fitting_layouts(site, SEVEN, degrees, global_batch=64):
            assert max(peak_bytes(SEVEN, layout)) <= 40e9
            if layout.recomputed_layers:
                fewer = replace(layout, recomputed_layers=layout.recomputed_layers - 1)
                assert max(peak_bytes(SEVEN, fewer)) > 40e9
    assert fewest_recomputed(nodes(1, 1), SEVEN, Layout(degrees=Degrees(), global_batch=1)) is None


def test_a_refusal_names_the_number_the_limit_and_the_remedy() -> None:
    site = nodes(1, 8, memory=24e9)
    layout = smallest_layout(Degrees(dp_shard=8), global_batch=64)
    grids, _ = allowed_grids(site, SEVEN, global_batch=64)
    text = memory_reason(site, SEVEN, layout, grids=grids)
    needed = max(peak_bytes(SEVEN, layout)) / 1e9
    recomputed = fewest_recomputed(site, SEVEN, layout)
    assert text == f"needs {needed:.1f} GB a device, has 24.0 GB: recompute {recomputed} layers or tp 2"
    assert max(peak_bytes(SEVEN, replace(layout, recomputed_layers=recomputed))) <= 24e9
    assert max(peak_bytes(SEVEN, smallest_layout(Degrees(dp_shard=4, tp=2), global_batch=64))) <= 24e9


def test_a_model_that_fits_nowhere_is_refused_with_what_it_takes() -> None:
    with pytest.raises(
        ValueError, match=r"the model does not fit: .* needs \d+\.\d GB a device, has 80\.0 GB; got 1 devices"
    ) as caught:
        plan_site(nodes(1, 1), SEVEN, global_batch=8)
    [devices] = map(
        int, re.findall(r"try 1\. to take (\d+) devices .* then 2\. to change the model", str(caught.value))
    )
    assert plan_site(nodes(1, devices), SEVEN, global_batch=8).best
    long = decoder_shape(layers=12, width=1024, heads=15, vocab_size=32_000, seq_len=262_144)
    with pytest.raises(
        NothingFits,
        match=r"try 1\. to share each sequence inside a site .*; then 2\. .* across sites, .*; then 3\. to change the",
    ) as caught:
        plan_site(nodes(1, 2, memory=3e9), long, global_batch=2)
    [cp] = map(int, re.findall(r"--cp (\d+), about", str(caught.value)))
    assert plan_site(nodes(1, cp, memory=3e9), long, global_batch=2).best.layout.degrees.cp > 1
    with pytest.raises(NothingFits):
        plan_site(nodes(1, cp // 2, memory=3e9), long, global_batch=2)
    with pytest.raises(ValueError, match=r"no grid of 5 devices keeps the rules"):
        plan_site(nodes(1, 5), replace(SMALL, layers=4, heads=4, seq_len=128), global_batch=4)


def test_a_streamed_backward_pass_is_planned_where_it_spares_slower_layouts() -> None:
    model = decoder_shape(layers=12, width=1024, heads=16, vocab_size=32_000, seq_len=16_384)
    site = nodes(2, 1, memory=8e9)
    plan = plan_site(site, model, global_batch=16)
    others = plan_site(site, replace(model, can_stream=False), global_batch=16)
    best = plan.best
    assert best.layout.streamed_chunks == 8 and best.layout.degrees == Degrees(dp_shard=2)
    assert max(plan.peak_bytes) <= 8e9 and best.step_s < others.best.step_s and not others.best.layout.streamed_chunks
    assert "backward pass streamed in 8 chunks" in best.layout.describe()
    again = replace(best, layout=replace(best.layout, streamed_chunks=0, recomputed_layers=12))
    assert max(peak_bytes(model, again.layout)) > 8e9
    works = [sum(step.parts_s[name] for name in ("compute", "recompute")) for step in (best, again)]
    assert works[0] == pytest.approx(1.5 * works[1]) and sum(best.parts_s.values()) == pytest.approx(best.step_s)
    # what recomputing makes fit is not streamed
    larger = nodes(2, 1, memory=12e9)
    for layout in fitting_layouts(larger, model, Degrees(dp_shard=2), global_batch=16):
        assert (
            not layout.streamed_chunks or fewest_recomputed(larger, model, replace(layout, streamed_chunks=0)) is None
        )
    assert not plan_site(larger, model, global_batch=16).best.layout.streamed_chunks
    reason = memory_reason(nodes(2, 1, memory=8e9), model, again.layout, grids=[])
    assert reason.endswith("GB: stream the backward pass in 8 chunks")


def test_the_plan_names_why_the_others_lost() -> None:
    plan = plan_site(nodes(2, 2, flops=1e13), SMALL, global_batch=24)
    found = plan.to_json()
    assert {"degrees", "schedule", "micro_batch", "accumulation", "peak_bytes", "step_s", "refused"} <= set(found)
    assert found["runners_up"]
    for step, one in zip(plan.runners_up, found["runners_up"], strict=True):
        slower = re.fullmatch(r"(.*)% slower(?:, most by .*: (.*) a step instead of (.*))?", one["reason"])
        assert (slower is None) == (step.step_s <= plan.best.step_s * 1.005), one["reason"]
        if slower is not None and slower[2] is not None:  # a cause costs more in the slower layout
            assert parse_seconds(slower[2]) >= parse_seconds(slower[3])
    assert sorted(found["rank_order"]) == ["n0/0", "n0/1", "n1/0", "n1/1"]
    degrees = found["degrees"]
    assert degrees["pp"] * degrees["dp_replicate"] * degrees["dp_shard"] * degrees["cp"] * degrees["tp"] == 4


def unequal(count: int, *, seed: int, bandwidth: float | None = None) -> Site:
    """Return nodes of one device each, joined by links of random bandwidth."""
    draw = random.Random(seed)
    found = [SiteNode(name=f"n{n}", devices=1, memory_bytes=8e9, flops_per_s=1e13) for n in range(count)]
    links = [
        NodeLink(source=a.name, destination=b.name, bandwidth_bits_per_s=bandwidth or 10 ** draw.uniform(8, 11))
        for a in found for b in found if a.name < b.name
    ]  # fmt: skip
    return Site(nodes=tuple(found), links=tuple(links))


def first_step(site: Site, degrees: Degrees) -> StepCost:
    layout = Layout(degrees=degrees, global_batch=24, zero_stage=int(degrees.shards > 1))
    return StepCost(model=SMALL, layout=layout, placement=starts(site, degrees)[0])


@pytest.mark.parametrize(
    ("degrees", "seed"),
    [
        (Degrees(pp=4), 0),
        (Degrees(pp=2, dp_shard=2), 1),
        (Degrees(pp=2, dp_shard=3), 2),
        (Degrees(dp_shard=2, dp_replicate=3), 3),
    ],
)
def test_annealing_finds_the_best_of_all_placements(degrees: Degrees, seed: int) -> None:
    site = unequal(degrees.num_devices, seed=seed)
    begin = first_step(site, degrees)

    def cost(slots: tuple[int, ...]) -> float:
        return replace(begin, placement=SitePlacement(site=site, degrees=degrees, slots=slots)).pipette_s

    best = min(cost(slots) for slots in permutations(range(degrees.num_devices)))
    assert cost(place(begin).placement.slots) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(3))
def test_annealing_finds_the_shortest_path_through_eight_nodes(seed: int) -> None:
    draw = random.Random(seed)
    far = [[draw.uniform(1, 100) for _ in range(8)] for _ in range(8)]

    def cost(order: tuple[int, ...]) -> float:
        return sum(far[a][b] for a, b in pairwise(order))

    assert cost(anneal(range(8), cost)) == pytest.approx(min(map(cost, permutations(range(8)))))


def test_infinite_links_make_placement_irrelevant() -> None:
    site = unequal(6, seed=0, bandwidth=inf)
    begin = first_step(site, Degrees(pp=2, dp_shard=3))
    times = {replace(begin, placement=replace(begin.placement, slots=slots)).step_s for slots in permutations(range(6))}
    assert len(times) == 1
    assert place(begin) is begin


def test_placement_keeps_stages_that_talk_most_on_the_fast_link() -> None:
    # a-c and b-d are fast, all other pairs slow: pipelines of two must be a-c and b-d
    pairs = {("a", "c"): 1e11, ("b", "d"): 1e11}
    site = Site(
        nodes=tuple(SiteNode(name=name, devices=1, memory_bytes=8e9, flops_per_s=1e13) for name in "abcd"),
        between_nodes=NodeLink(bandwidth_bits_per_s=1e8),
        links=tuple(NodeLink(source=a, destination=b, bandwidth_bits_per_s=rate) for (a, b), rate in pairs.items()),
    )
    found = place(first_step(site, Degrees(pp=1, dp_shard=2, dp_replicate=2))).placement.rank_order
    assert {frozenset(found[:2]), frozenset(found[2:])} == {frozenset({"a/0", "c/0"}), frozenset({"b/0", "d/0"})}


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_front_of_memory_and_time_is_that_of_all_layouts(devices: int) -> None:
    site = nodes(1, devices)
    plan = plan_site(site, SMALL, global_batch=8, most_placed=0)
    layouts = [step.layout for step in exhaustive(site, SMALL, global_batch=8)]
    layouts += [replace(each, recomputed_layers=SMALL.layers // each.degrees.pp) for each in layouts]
    grid = {degrees: starts(site, degrees)[0] for degrees in {each.degrees for each in layouts}}
    found = {
        (max(peak_bytes(SMALL, each)), StepCost(model=SMALL, layout=each, placement=grid[each.degrees]).step_s)
        for each in layouts
    }
    best = sorted(
        (memory, step_s) for memory, step_s in found
        if not any(m <= memory and s <= step_s and (m, s) != (memory, step_s) for m, s in found)
    )  # fmt: skip
    front = [(max(peak_bytes(SMALL, step.layout)), step.step_s) for step in memory_front(plan)]
    assert [number for point in front for number in point] == pytest.approx([n for point in best for n in point])


# Table 1 of arXiv 2104.04473: parameters in 1e9, heads, width, layers, tensor and pipeline degree, GPUs, batch.
MEGATRON = [
    (1.7, 24, 2304, 24, 1, 1, 32, 512), (3.6, 32, 3072, 30, 2, 1, 64, 512), (7.5, 32, 4096, 36, 4, 1, 128, 512),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024), (39.1, 64, 8192, 48, 8, 2, 512, 1536),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792), (145.6, 96, 12288, 80, 8, 8, 1536, 2304),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160), (529.6, 128, 20480, 105, 8, 35, 2520, 2520),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072),
]  # fmt: skip


def megatron(row: tuple[float, ...]) -> tuple[ModelShape, Layout]:
    """Return the model of a row, and the layout published for it with every layer recomputed."""
    _, heads, width, layers, tp, pp, gpus, batch = row
    shape = decoder_shape(
        layers=int(layers), width=int(width), heads=int(heads), vocab_size=51_200, seq_len=2048, is_head_tied=True
    )
    return shape, Layout(
        degrees=Degrees(pp=int(pp), dp_replicate=int(gpus / (tp * pp)), tp=int(tp)), global_batch=int(batch),
        recomputed_layers=int(layers / pp),
    )  # fmt: skip


@pytest.mark.parametrize("row", MEGATRON, ids=lambda row: f"{row[0]}B")
def test_the_layouts_of_megatron_s_table_have_its_parameters_and_fit_its_devices(row: tuple[float, ...]) -> None:
    shape, layout = megatron(row)
    # with the biases, norms and learned positions of that model (its equation 2)
    beside = 13 * shape.layers * shape.width + 2048 * shape.width
    assert round((shape.num_parameters + beside) / 1e9, 1) == row[0]
    assert layout.num_micro_batches * layout.degrees.dp_replicate == row[-1]
    assert max(peak_bytes(shape, layout)) < 80e9


@pytest.mark.slow
@pytest.mark.parametrize("row", MEGATRON[:3], ids=lambda row: f"{row[0]}B")
def test_the_plan_is_no_slower_than_megatron_s_layout(row: tuple[float, ...]) -> None:
    shape, layout = megatron(row)
    site = nodes(layout.degrees.num_devices // 8, 8)
    published = StepCost(model=shape, layout=layout, placement=starts(site, layout.degrees)[0])
    plan = plan_site(site, shape, global_batch=layout.global_batch, most_simulated=10, most_placed=1)
    assert plan.best.step_s <= published.step_s
