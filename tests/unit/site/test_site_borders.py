"""Plans over the border between sites: what crosses, in which code, and how long it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from thinwire.codec_specs import activation_bytes
from thinwire.errors import DataError
from thinwire.site.cost_model import Layout, ModelShape, StepCost, decoder_shape
from thinwire.site.device_grid import Degrees, SitePlacement
from thinwire.site.pipeline import StageLink
from thinwire.site.search import NothingFits, least_eager, plan_site
from thinwire.site.site_file import NodeLink, Site, SiteNode, join_sites, site_from_json
from thinwire.site.site_plan import read_site_plan

CODE = ("block-int8", "block-int4")
RATE, LATENCY_S = 5e6, 0.02
SHAPE = decoder_shape(layers=8, width=192, heads=4, vocab_size=2048, seq_len=128)


def site_of(*names: str, devices: int = 1, memory: float = 20e6) -> Site:
    return Site(
        nodes=tuple(
            SiteNode(name=name, devices=devices, memory_bytes=memory, flops_per_s=5e10, bandwidth_bits_per_s=1e10)
            for name in names
        ),
        between_nodes=NodeLink(bandwidth_bits_per_s=1e9, latency_s=1e-4),
    )  # fmt: skip


def joined(*sites: Site) -> Site:
    border = NodeLink(bandwidth_bits_per_s=RATE, latency_s=LATENCY_S)
    return join_sites({f"site-{n}": site for n, site in enumerate(sites)}, lambda one, other: border)


def test_joined_sites_keep_their_links_and_their_names_where_these_differ() -> None:
    site = joined(site_of("a", "b"), site_of("a", "c"))
    assert [node.name for node in site.nodes] == ["site-0.a", "b", "site-1.a", "c"]
    assert site.site_of == (0, 0, 1, 1) and site.has_border and not site_of("a", "b").has_border
    for one in range(4):
        for other in set(range(4)) - {one}:
            is_far = site.site_of[one] != site.site_of[other]
            link = site.link(one, other)
            assert (link.bandwidth_bits_per_s, link.latency_s) == ((RATE, LATENCY_S) if is_far else (1e9, 1e-4))


def step_of(slots: tuple[int, ...], *, shape: ModelShape = SHAPE, code: tuple[str, str] | None = CODE,
            **cut: Any) -> StepCost:  # fmt: skip
    degrees = Degrees(pp=len(slots), **{name: cut.pop(name) for name in ("dp_shard", "tp") if name in cut})
    placement = SitePlacement(site=joined(site_of("a", "b"), site_of("c", "d")), degrees=degrees, slots=slots)
    return StepCost(
        model=shape, layout=Layout(degrees=degrees, global_batch=8, **cut), placement=placement, code=code
    )  # fmt: skip


def test_only_the_boundary_on_the_border_is_coded_and_takes_the_time_of_its_payload() -> None:
    numel = 128 * 192
    one, back = (8 * activation_bytes(name, numel) / RATE for name in CODE)
    ((near, border, also_near, _),) = step_of((0, 1, 2, 3)).stage_links
    assert border.message_s == pytest.approx(one) and border.back.message_s == pytest.approx(back)
    assert border.latency_s == LATENCY_S
    assert near == also_near == StageLink(message_s=16 * numel / 1e9, latency_s=1e-4)
    ((_, plain, _, _),) = step_of((0, 1, 2, 3), code=None).stage_links
    assert plain == StageLink(message_s=16 * numel / RATE, latency_s=LATENCY_S)
    assert step_of((0, 1, 2, 3)).step_s < step_of((0, 1, 2, 3), code=None).step_s / 1.7


def test_boundaries_that_cross_twice_share_the_line_between_the_sites() -> None:
    once, twice = step_of((0, 1, 2, 3)), step_of((0, 2, 3, 1))
    assert twice.stage_links[0][0].message_s == pytest.approx(2 * once.stage_links[0][1].message_s)
    assert (once.placement.stage_sites, twice.placement.stage_sites) == ((0, 0, 1, 1), (0, 1, 1, 0))


@pytest.mark.parametrize(("is_tied", "interleave", "crossings"), [(False, 1, 1), (False, 2, 3), (True, 1, 1)])
def test_bytes_on_the_border_are_payloads_times_messages(is_tied: bool, interleave: int, crossings: int) -> None:
    shape = replace(SHAPE, is_head_tied=is_tied)
    step = step_of((0, 1, 2, 3), shape=shape, interleave=interleave, micro_batch=2)
    copies = [activation_bytes(name, 2048 * 192) * is_tied for name in CODE]
    expected = [4 * crossings * activation_bytes(name, 2 * 128 * 192) + copy
                for name, copy in zip(CODE, copies, strict=True)]  # fmt: skip
    assert step.border_bytes == tuple(expected)
    # the copy of a tied head comes before everything
    plain = step_of((0, 1, 2, 3), interleave=interleave, micro_batch=2)
    copies_s = 8 * sum(copies) / RATE
    assert step.step_s - plain.step_s == pytest.approx(copies_s, rel=0.25, abs=1e-9)
    assert sum(step.parts_s.values()) == pytest.approx(step.step_s)


def test_a_model_too_large_for_either_site_becomes_a_pipeline_over_the_border() -> None:
    sites = [site_of("a", devices=2, memory=28e6), site_of("b", devices=2, memory=28e6)]
    for site in sites:
        with pytest.raises(NothingFits, match="the model does not fit"):
            plan_site(site, SHAPE, global_batch=16)
    both = joined(*sites)
    plan = plan_site(both, SHAPE, global_batch=16, code=CODE)
    degrees = plan.best.layout.degrees
    assert degrees.pp > 1 and sum(plan.best.placement.num_borders[:-1]) == degrees.num_devices // degrees.pp
    # GPipe would hide the latency best; less is taken where it costs at most 1 %
    eager = plan.best.layout.eagerness
    gpipe = replace(plan.best, layout=replace(plan.best.layout, eagerness=plan.best.layout.num_micro_batches))
    assert eager > 1 and plan.best.step_s <= 1.01 * gpipe.step_s
    assert least_eager(both, gpipe).layout.eagerness <= eager
    read = read_site_plan({**plan.to_json(), "model": "nano"}).settings
    assert read["activation_code"] == "block-int8/block-int4" and read["eagerness"] == eager
    assert read["stage_sites"] == ",".join(map(str, plan.best.placement.stage_sites))
    for change, text in (
        ({"activation_code": "e3m0"}, "activation_code: e3m0 carries no forward activations"),
        ({"activation_code": 3}, "activation_code: unknown codec"),
        ({"stage_sites": [0]}, "stage_sites must number the site of"),
        ({"stage_sites": ["a"] * degrees.pp}, "stage_sites must be a whole number"),
        ({"eagerness": 0}, "eagerness must be a whole number"),
    ):
        with pytest.raises(DataError, match=text):
            read_site_plan({**plan.to_json(), "model": "nano", **change})


def test_a_file_may_state_the_sites_of_its_nodes() -> None:
    node = {"devices": 1, "memory_bytes": "1 GB", "flops_per_s": 1e12}
    content = {
        "format": "thinwire-site", "version": 1, "between_nodes": {"bandwidth_bits_per_s": "5mbit", "latency_s": 0},
        "nodes": [{"name": "a", "site": "north", **node}, {"name": "b", "site": "south", **node}],
    }  # fmt: skip
    assert site_from_json(content).site_of == (0, 1)
    content["nodes"][0]["site"] = ""  # type: ignore[index]
    with pytest.raises(DataError, match=r"nodes\[0\].site must be a text"):
        site_from_json(content)
