"""Published layouts of large models: each is planned as it was run, fits its devices, and takes the published time.

A device's speed is that of another published run on the same kind of device, never of the layout that is predicted: the
cost model has to explain what the layout changes. Whatever the model does not count is named beside the layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from thinwire.site.cost_model import Layout, ModelShape, StepCost, decoder_shape, peak_bytes, rank_chunks
from thinwire.site.device_grid import Degrees
from thinwire.site.search import starts
from thinwire.site.site_file import NodeLink, Site, SiteNode

GIB = 2**30
# NVLink of one device in each direction, and the network cards of a node, by the papers.
A100_NVLINK, H100_NVLINK = 2.4e12, 3.6e12
WITHIN = 0.25


def site(nodes: int, *, memory_gib: float, flops: float, nvlink: float, network: float) -> Site:
    """Return equal nodes of eight devices."""
    return Site(
        nodes=tuple(
            SiteNode(name=f"n{n}", devices=8, memory_bytes=memory_gib * GIB, flops_per_s=flops,
                     bandwidth_bits_per_s=nvlink, latency_s=5e-6)
            for n in range(nodes)
        ),
        between_nodes=NodeLink(bandwidth_bits_per_s=network, latency_s=1e-5),
    )  # fmt: skip


def llama(*, layers: int, width: int, mlp_width: int, heads: int) -> ModelShape:
    """Return a Llama 3 with 8 heads of keys and values (arXiv 2407.21783, table 3).

    A block keeps, in 16 bits a token and unit of width: both norms' inputs and outputs, queries, keys and values,
    attention, gate, up and their product; no dropout.
    """
    grouped, wide = 8 / heads, mlp_width / width
    return ModelShape(
        layers=layers, width=width, heads=heads, vocab_size=128_256, seq_len=8192,
        layer_parameters=width**2 * (2 + 2 * grouped + 3 * wide), embedding_parameters=128_256 * width,
        head_parameters=128_256 * width, unit_bytes=2 * (4 + 1 + 2 * grouped + 1 + 3 * wide), is_sequence_parallel=True,
    )  # fmt: skip


def megatron_s(tera_flops: float, *, devices: int, model: ModelShape, batch: int) -> float:
    """Return the time of a step from TFLOP/s a device as Megatron counts them (arXiv 2104.04473, equation 3)."""
    s, h, n = model.seq_len, model.width, model.layers
    work = 96 * batch * s * n * h**2 * (1 + s / (6 * h) + model.vocab_size / (16 * n * h))
    return work / (devices * tera_flops * 1e12)


@dataclass(frozen=True, kw_only=True)
class Published:
    """A layout, its devices and its published time."""

    model: ModelShape
    layout: Layout
    site: Site
    step_s: float

    @property
    def planned_s(self) -> float:
        """Time of a step on the better placement to begin with."""
        layout = self.layout
        placements = starts(self.site, layout.degrees)
        return min(StepCost(model=self.model, layout=layout, placement=one).step_s for one in placements)


def gpt(layers: int, width: int, heads: int, vocab_size: int) -> ModelShape:
    return decoder_shape(
        layers=layers, width=width, heads=heads, vocab_size=vocab_size, seq_len=2048, is_head_tied=True
    )


def a100(nodes: int, *, memory_gib: float = 80, network: float) -> Site:
    # the speed with which Megatron's 145.6B takes its published time
    return site(nodes, memory_gib=memory_gib, flops=1.76e14, nvlink=A100_NVLINK, network=network)


LLAMA_8B = llama(layers=32, width=4096, mlp_width=14_336, heads=32)
LLAMA_70B = llama(layers=80, width=8192, mlp_width=28_672, heads=64)
LLAMA_405B = llama(layers=126, width=16_384, mlp_width=53_248, heads=128)
TITAN_S = 8192 / 512  # sequences of 8192 tokens on 512 devices, over tokens a second of a device


def titan(nodes: int) -> Site:
    """Return H100 with 96 GB at 500 W.

    Products are in float8, as fast as the published time of the 70B needs. Attention is in 16 bits, as fast as that of
    the 8B on 32,768 tokens needs.
    """
    found = site(nodes, memory_gib=96, flops=7.05e14, nvlink=H100_NVLINK, network=3.2e12)
    return replace(found, nodes=tuple(replace(node, attention_flops_per_s=2.22e14) for node in found.nodes))


def titan_8b(cp: int, *, tokens_per_s: float) -> Published:
    """Return torchtitan's 8B on eight devices (table 2 of the same page), 32,768 tokens a device."""
    layout = Layout(degrees=Degrees(dp_shard=8 // cp, cp=cp), global_batch=8 // cp, zero_stage=3, recomputed_layers=32)
    return Published(
        model=replace(LLAMA_8B, seq_len=32_768 * cp), layout=layout, site=titan(1), step_s=32_768 / tokens_per_s
    )


def titan_405b(cp: int, *, tokens_per_s: float) -> Published:
    """Return torchtitan's 405B on long sequences (table 6), by 1F1B with eight micro-batches of a sequence."""
    degrees = Degrees(pp=8, dp_shard=8 // cp, cp=cp, tp=8)
    layout = Layout(degrees=degrees, global_batch=64 // cp, zero_stage=1, recomputed_layers=16)
    return Published(
        model=replace(LLAMA_405B, seq_len=32_768 * cp), layout=layout, site=titan(64),
        step_s=64 * 32_768 / 512 / tokens_per_s,
    )  # fmt: skip


def llama_3(devices: int, *, tera_flops: float) -> Published:
    """Return a row of arXiv 2407.21783, table 4: 6 operations a parameter and token, 16 M tokens a step.

    The first chunk of the first stage has the embedding alone, the last one of the last stage the head (section 3.3.2),
    so chunks have one layer; optimizer states and gradients are sharded, and nothing is recomputed.
    """
    layout = Layout(
        degrees=Degrees(pp=16, dp_shard=devices // 128, tp=8), global_batch=2048, zero_stage=2, interleave=8,
    )  # fmt: skip
    # the speed with which 8,192 devices take their published time
    return Published(
        model=LLAMA_405B, layout=layout,
        site=site(devices // 8, memory_gib=80, flops=5.45e14, nvlink=H100_NVLINK, network=3.2e12),
        step_s=6 * LLAMA_405B.num_parameters * 2048 * 8192 / (devices * tera_flops * 1e12),
    )  # fmt: skip


def published_405b(*, interleave: int, tokens_per_s: float) -> Published:
    """Return torchtitan's 405B (benchmarks/llama3_h100_202412_torchtitan.md, table 5); 126 layers, 8 ranks.

    A replica has 32 sequences, in as many micro-batches as stages (torchtitan/parallelisms/pipelining_utils.py).
    """
    layout = Layout(
        degrees=Degrees(pp=8, dp_shard=8, tp=8), global_batch=256, zero_stage=1, interleave=interleave,
        recomputed_layers=16, micro_batch=4 // interleave,
    )  # fmt: skip
    return Published(model=LLAMA_405B, layout=layout, site=titan(64), step_s=256 * TITAN_S / tokens_per_s)


MEGATRON, BLOOM, OPT = gpt(80, 12_288, 96, 51_200), gpt(70, 14_336, 112, 250_880), gpt(96, 12_288, 96, 50_272)
# Where the speeds of the devices come from.
CALIBRATED = {
    "Megatron 145.6B": Published(  # arXiv 2104.04473, table 1: 148 TFLOP/s a device
        model=MEGATRON, site=a100(192, network=1.6e12),
        layout=Layout(degrees=Degrees(pp=8, dp_replicate=24, tp=8), global_batch=2304, recomputed_layers=10),
        step_s=megatron_s(148, devices=1536, model=MEGATRON, batch=2304),
    ),
    "torchtitan 70B": Published(  # table 4 of torchtitan's page: 829 tokens a second and device
        model=LLAMA_70B, site=titan(32), step_s=512 * 8192 / 256 / 829,
        layout=Layout(degrees=Degrees(dp_shard=32, tp=8), global_batch=512, micro_batch=16, zero_stage=3,
                      recomputed_layers=80),
    ),
    "torchtitan 8B on 32,768 tokens": titan_8b(1, tokens_per_s=3890),
    "Llama 3 405B on 8,192": llama_3(8192, tera_flops=430),
}  # fmt: skip
PREDICTED = {
    # arXiv 2211.05100 and the run's script: 384 devices of Jean Zay with four cards of 100 Gbit/s a node; the model's
    # page states "about 150 TFLOPs". Attention was whole, and is counted as causal.
    "BLOOM-176B": Published(
        model=BLOOM, site=a100(48, network=4e11),
        layout=Layout(degrees=Degrees(pp=12, dp_shard=8, tp=4), global_batch=2048, micro_batch=2, zero_stage=1,
                      recomputed_layers=6),
        step_s=megatron_s(150, devices=384, model=BLOOM, batch=2048),
    ),
    # arXiv 2210.02414 and the run's log (logs/main-log.md): 96 nodes, "134TFLOPS, 88.5s/iter". Attention is
    # bidirectional and its softmax in float32; neither is counted.
    "GLM-130B": Published(
        model=gpt(70, 12_288, 96, 150_528), site=a100(96, memory_gib=40, network=8e11), step_s=88.5,
        layout=Layout(degrees=Degrees(pp=8, dp_shard=24, tp=4), global_batch=4224, zero_stage=1, recomputed_layers=9),
    ),
    # arXiv 2205.01068: 2 M tokens a step, of which 124 replicas get 8.26 sequences each; "up to 147 TFLOP/s".
    "OPT-175B": Published(
        model=OPT, site=a100(124, network=1.6e12), step_s=megatron_s(147, devices=992, model=OPT, batch=1024),
        layout=Layout(degrees=Degrees(dp_shard=124, tp=8), global_batch=1024, micro_batch=9, zero_stage=3,
                      recomputed_layers=96),
    ),
    "torchtitan 405B, 1F1B": published_405b(interleave=1, tokens_per_s=100),
    "torchtitan 405B, interleaved": published_405b(interleave=2, tokens_per_s=128),
    "torchtitan 8B on 65,536 tokens": titan_8b(2, tokens_per_s=2540),
    "torchtitan 8B on 131,072 tokens": titan_8b(4, tokens_per_s=1071),
    "torchtitan 8B on 262,144 tokens": titan_8b(8, tokens_per_s=548),
    "torchtitan 405B on 32,768 tokens": titan_405b(1, tokens_per_s=76),
    "torchtitan 405B on 65,536 tokens": titan_405b(2, tokens_per_s=47),
    "torchtitan 405B on 131,072 tokens": titan_405b(4, tokens_per_s=31),
    "torchtitan 405B on 262,144 tokens": titan_405b(8, tokens_per_s=16),
    "Llama 3 405B on 16,384": llama_3(16_384, tera_flops=400),
}  # fmt: skip


@pytest.mark.parametrize("name", [*CALIBRATED, *PREDICTED])
def test_published_layouts_fit_and_take_the_published_time(name: str) -> None:
    one = CALIBRATED.get(name) or PREDICTED[name]
    assert one.layout.degrees.num_devices == one.site.num_devices
    # the cards have 80 and 96 GB in powers of two; on 8,192 devices the schedule held micro-batches back, unlike 1F1B
    if name != "Llama 3 405B on 8,192":
        assert max(peak_bytes(one.model, one.layout)) <= one.site.memory_bytes
    assert one.planned_s == pytest.approx(one.step_s, rel=0.01 if name in CALIBRATED else WITHIN)


def test_stages_are_cut_as_published() -> None:
    layout = Layout(degrees=Degrees(pp=12), global_batch=1)
    assert [sum(rank_chunks(BLOOM, layout, rank)) for rank in range(12)] == [5, *[6] * 10, 5]
    layout = replace(layout, degrees=Degrees(pp=8))
    assert [sum(rank_chunks(BLOOM, layout, rank)) for rank in range(8)] == [8, *[9] * 6, 8]
    layout = llama_3(16_384, tera_flops=400).layout
    assert rank_chunks(LLAMA_405B, layout, 0) == (0, *[1] * 7) and rank_chunks(LLAMA_405B, layout, 15) == (*[1] * 7, 0)
    assert LLAMA_405B.num_parameters == pytest.approx(405.8e9, rel=1e-3)


def test_sequence_parallel_stages_send_one_part_each() -> None:
    one = PREDICTED["torchtitan 405B, 1F1B"]
    placement = starts(one.site, one.layout.degrees)[0]
    whole, part = (
        StepCost(model=replace(one.model, is_sequence_parallel=shared), layout=one.layout, placement=placement)
        for shared in (False, True)
    )
    assert whole.stage_links[0][0].message_s == pytest.approx(8 * part.stage_links[0][0].message_s)
