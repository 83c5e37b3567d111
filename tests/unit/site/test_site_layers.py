"""Layer programme of a site: against enumeration."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from thinwire.site.cost_model import Layout, StepCost, decoder_shape, peak_bytes
from thinwire.site.device_grid import Degrees
from thinwire.site.layers import LayerOption, cheapest_options
from thinwire.site.search import mixed_layers, starts
from thinwire.site.site_file import Site, SiteNode
from thinwire.site.site_plan import TIE

MODEL = decoder_shape(layers=6, width=1024, heads=8, vocab_size=4000, seq_len=256)


@pytest.mark.parametrize("seed", range(60))
def test_the_programme_is_as_fast_as_the_best_of_all_choices(seed: int) -> None:
    draw = random.Random(seed)
    layers = draw.randrange(1, 7)
    if seed % 2:  # layers of one kind, where many choices cost the same
        alike = [LayerOption(draw.randrange(1, 20), draw.random()) for _ in range(4)]
        options = [alike] * layers
    else:
        options = [
            [LayerOption(draw.randrange(1, 20), draw.random()) for _ in range(draw.randrange(1, 5))]
            for _ in range(layers)
        ]
    most = draw.uniform(0.2, 1.1) * sum(max(one.num_bytes for one in own) for own in options)
    fit = [
        sum(one.seconds for one in chosen) for chosen in product(*options)
        if sum(one.num_bytes for one in chosen) <= most
    ]  # fmt: skip
    found = cheapest_options(options, most_bytes=most)
    if not fit:
        assert found is None
        return
    assert found is not None
    chosen = [own[number] for own, number in zip(options, found, strict=True)]
    assert sum(one.num_bytes for one in chosen) <= most
    assert sum(one.seconds for one in chosen) == pytest.approx(min(fit), rel=1e-9)


@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("share", [0.1, 0.4, 0.7, 0.95])
def test_no_mix_of_layers_that_fits_is_faster_than_the_one_found(share: float, micro_batch: int) -> None:
    layout = Layout(degrees=Degrees(dp_shard=4), global_batch=64, micro_batch=micro_batch, zero_stage=3)

    def cut(unsharded: int, recomputed: int) -> Layout:
        return replace(layout, unsharded_layers=unsharded, recomputed_layers=recomputed)

    least = peak_bytes(MODEL, cut(0, MODEL.layers))[0]
    limit = least + share * (peak_bytes(MODEL, cut(MODEL.layers, 0))[0] - least)
    node = SiteNode(
        name="box", devices=4, memory_bytes=limit, flops_per_s=1e13, bandwidth_bits_per_s=4e10, latency_s=1e-5
    )
    site = Site(nodes=(node,))
    placement = starts(site, layout.degrees)[0]

    def step_s(one: Layout) -> float:
        return StepCost(model=MODEL, layout=one, placement=placement).step_s

    mixes = [cut(u, r) for u in range(1, MODEL.layers) for r in range(MODEL.layers + 1)]
    best = min((step_s(one) for one in mixes if peak_bytes(MODEL, one)[0] <= limit), default=None)
    found = mixed_layers(site, MODEL, layout)
    if found is None:
        # all layers sharded, or none, is then as good
        ends = [cut(u, r) for u in (0, MODEL.layers) for r in range(MODEL.layers + 1)]
        assert best is None or min(step_s(one) for one in ends if peak_bytes(MODEL, one)[0] <= limit) <= best * (
            1 + TIE
        )
        return
    assert peak_bytes(MODEL, found)[0] <= limit
    assert best is not None and step_s(found) <= best * (1 + TIE)
