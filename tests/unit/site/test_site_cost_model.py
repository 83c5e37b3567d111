"""Memory and step time of layouts inside a site, and the site's file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.reference import site_closed_forms as closed_forms
from thinwire.errors import DataError
from thinwire.planning.cluster import Cluster, Machine, Wire, save_cluster
from thinwire.site.cost_model import (
    Degrees,
    Layout,
    SitePlacement,
    StepCost,
    decoder_shape,
    device_memory,
    peak_bytes,
)
from thinwire.site.memory import FRAGMENTATION, layer_activation_bytes, state_bytes
from thinwire.site.site_file import NodeLink, Site, SiteNode, load_links, load_site, site_from_json

DAY_S = 86_400
MODEL = decoder_shape(layers=8, width=512, heads=8, vocab_size=1000, seq_len=256)


def box(devices: int, *, name: str = "box", bandwidth: float = 1e12) -> SiteNode:
    return SiteNode(
        name=name, devices=devices, memory_bytes=80e9, flops_per_s=1e13, bandwidth_bits_per_s=bandwidth, latency_s=1e-6
    )


def step(degrees: Degrees, site: Site, *, slots: tuple[int, ...] | None = None, **layout: int) -> StepCost:
    slots = tuple(range(degrees.num_blocks)) if slots is None else slots
    found = Layout(degrees=degrees, **{"global_batch": 16, **layout})
    return StepCost(model=MODEL, layout=found, placement=SitePlacement(site=site, degrees=degrees, slots=slots))


def test_zero_takes_what_its_paper_states() -> None:
    found = [state_bytes(7.5e9, zero_stage=stage, shards=64) / 1e9 for stage in range(4)]
    assert [round(each, 1) for each in found] == [120.0, 31.4, 16.6, 1.9]
    assert [closed_forms.zero_volume(stage) for stage in range(4)] == [2, 2, 2, 3]
    with pytest.raises(ValueError, match="no such ZeRO stage; got 4; allowed 0 to 3"):
        state_bytes(1, zero_stage=4, shards=1)


def test_zero_plus_plus_sends_a_quarter_of_zero_3() -> None:
    off = {"quantised_weights": False, "secondary_partition": False, "quantised_gradients": False}
    volumes = [closed_forms.zero_plus_plus_volume(**off)]
    for feature in ("quantised_weights", "secondary_partition", "quantised_gradients"):
        off[feature] = True
        volumes.append(closed_forms.zero_plus_plus_volume(**off))
    # qwZ halves the first gather, hpZ removes the second one from the slow links, qgZ quarters the gradients
    assert volumes == [3, 2.5, 1.5, 0.75]


def test_megatron_trains_in_the_published_time() -> None:
    gpt3 = {"tokens": 300e9, "num_parameters": 175e9, "num_devices": 1024, "flops_per_s": 140e12}
    assert closed_forms.training_time_s(**gpt3) / DAY_S == pytest.approx(33.9, abs=0.05)
    trillion = {"tokens": 450e9, "num_parameters": 1.008e12, "num_devices": 3072, "flops_per_s": 163e12}
    assert closed_forms.training_time_s(**trillion) / DAY_S == pytest.approx(83.9, abs=0.05)


def test_memo_counts_its_skeletal_activations() -> None:
    assert closed_forms.skeletal_bytes(tokens=2**20, width=4096, num_layers=32) == 4096 * 2**30


@pytest.mark.parametrize(
    ("layer_s", "layers", "host_bytes", "share"),
    [(0.5, 32, 1e12, 0.5), (10.0, 32, 1e12, 1.0), (0.1, 32, 1e12, 0.0), (10.0, 32, 270e9, 0.5), (10.0, 2, 1.0, 1.0)],
)
def test_memo_moves_what_a_layer_hides_and_the_host_holds(
    layer_s: float, layers: int, host_bytes: float, share: float
) -> None:
    found = closed_forms.memo_swapped_share(
        always_bytes=2e9, other_bytes=14e9, layer_s=layer_s, link_bytes_per_s=18e9, layers=layers, host_bytes=host_bytes
    )
    assert found == pytest.approx(share)


def test_activations_follow_the_formula() -> None:
    about = {"tokens": 2 * 2048, "seq_len": 2048, "width": 4096, "heads": 32}
    s, b, h, a = 2048, 2, 4096, 32
    assert layer_activation_bytes(**about, flash_attention=False) == 34 * s * b * h + 5 * a * s * s * b
    assert layer_activation_bytes(**about, tensor_parallel=4) == (10 + 24 / 4) * s * b * h
    assert layer_activation_bytes(**about, tensor_parallel=4, is_recomputed=True) == 2 * s * b * h
    assert layer_activation_bytes(**about, tensor_parallel=4, sequence_parallel=True) == 34 * s * b * h / 4
    own_part = layer_activation_bytes(**about, tensor_parallel=4, sequence_parallel=True, is_recomputed=True)
    assert own_part == 2 * s * b * h / 4
    assert layer_activation_bytes(**about, context_parallel=2) == 17 * s * b * h


def test_the_first_stage_holds_most_micro_batches() -> None:
    layout = Layout(degrees=Degrees(pp=4), global_batch=16)
    found = [device_memory(MODEL, layout, stage=stage) for stage in range(4)]
    one = 2 * layer_activation_bytes(tokens=256, seq_len=256, width=512, heads=8)
    assert [each.activations_bytes for each in found] == [4 * one, 3 * one, 2 * one, one]
    assert [each.logits_bytes > 0 for each in found] == [False, False, False, True]
    tensors = sum(getattr(found[0], kind) for kind in ("states_bytes", "gathered_bytes", "activations_bytes"))
    assert found[0].peak_bytes == tensors * (1 + FRAGMENTATION)
    # of two layers one is recomputed: it keeps its input in each micro-batch, and its values once
    recomputed = device_memory(MODEL, replace(layout, recomputed_layers=1), stage=0)
    assert recomputed.activations_bytes == pytest.approx(4 * (one / 2 + one / 34) + one / 2)


def test_all_ranks_hold_the_states_of_the_model_once() -> None:
    tied = decoder_shape(layers=8, width=512, heads=8, vocab_size=1000, seq_len=256, is_head_tied=True)
    for model, degrees in ((MODEL, Degrees(pp=2, dp_shard=2, tp=2)), (tied, Degrees(dp_shard=4, cp=2))):
        layout = Layout(degrees=degrees, global_batch=16, zero_stage=3)
        ranks = degrees.num_devices // degrees.pp
        total = ranks * sum(device_memory(model, layout, stage=stage).states_bytes for stage in range(degrees.pp))
        assert total == 16 * model.num_parameters
    # tied ends on different ranks hold the matrix twice
    parts = [device_memory(tied, Layout(degrees=Degrees(pp=2), global_batch=4), stage=stage) for stage in range(2)]
    assert sum(part.states_bytes for part in parts) == 16 * (tied.num_parameters + 1000 * 512)


def test_one_device_computes_without_messages() -> None:
    found = step(Degrees(), Site(nodes=(box(1),)), micro_batch=4)
    tokens = 16 * 256
    products, attention, head = 8 * 2 * 12 * 512**2, 8 * 2 * 256 * 512, 2 * 1000 * 512
    # attention has two products forward and five back
    assert found.step_s == pytest.approx(tokens * (3 * (products + head) + 3.5 * attention) / 1e13)
    assert found.parts_s["waiting"] == found.parts_s["data"] == 0
    again = step(Degrees(), Site(nodes=(box(1),)), micro_batch=4, recomputed_layers=8)
    assert again.step_s - found.step_s == pytest.approx(tokens * (products + attention) / 1e13)
    node = {**FILE["nodes"][0], "devices": 1, "flops_per_s": 1e13, "attention_flops_per_s": 4e12}
    site = site_from_json({**FILE, "nodes": [node], "links": []})
    slow = step(Degrees(), site, micro_batch=4)
    assert slow.step_s == pytest.approx(tokens * (3 * (products + head) / 1e13 + 3.5 * attention / 4e12))
    assert slow.parts_s["compute"] == pytest.approx(slow.step_s)
    assert step(Degrees(), site.with_speed(2e13), micro_batch=4).step_s == pytest.approx(slow.step_s / 2)


def test_tensor_parallel_sends_four_all_reduces_a_layer() -> None:
    site = Site(nodes=(replace(box(4), latency_s=0.0),))
    found = step(Degrees(tp=4), site).parts_s
    volume = 4 * 2 * 3 / 4 * 256 * 512 * 16  # 4 * 2 (t - 1) / t * b s h values of 16 bits
    assert found["tensor"] == pytest.approx(16 * 8 * volume / 1e12)
    assert found["data"] == found["waiting"] == pytest.approx(0, abs=1e-12)


def test_context_parallel_sends_keys_and_values_round() -> None:
    site = Site(nodes=(replace(box(4), latency_s=0.0),))
    found = step(Degrees(cp=4), site, zero_stage=1).parts_s
    forward = 2 * 256 * 512 * 3 / 4 * 16  # 2 N h (P - 1) / P values
    # again in the backward pass, and their gradients, which take one more hop: home
    assert found["context"] == pytest.approx(16 * 8 * (2 + 4 / 3) * forward / 1e12)


@pytest.mark.parametrize(("zero_stage", "volume"), [(1, 2), (2, 2), (3, 3)])
def test_data_parallel_sends_the_volumes_of_zero(zero_stage: int, volume: int) -> None:
    # so slow a link that computing hides nothing: one micro-batch, so each volume is sent once
    site = Site(nodes=(SiteNode(name="a", devices=4, memory_bytes=8e10, flops_per_s=1e30, bandwidth_bits_per_s=1e9),))
    found = step(Degrees(dp_shard=4), site, zero_stage=zero_stage, micro_batch=4)
    assert found.step_s == pytest.approx(volume * MODEL.num_parameters * 16 * 3 / 4 / 1e9)
    more = step(Degrees(dp_shard=4), site, zero_stage=zero_stage, micro_batch=1)
    times = {1: 2, 2: 5, 3: 12}[zero_stage]  # four micro-batches: gradients four times, in stage 3 weights eight times
    assert more.step_s / found.step_s == pytest.approx(times / volume)


def test_an_all_reduce_of_copies_is_sent_once_a_step() -> None:
    site = Site(nodes=(SiteNode(name="a", devices=4, memory_bytes=8e10, flops_per_s=1e30, bandwidth_bits_per_s=1e9),))
    found = step(Degrees(dp_replicate=4), site, micro_batch=1)
    assert found.step_s == pytest.approx(2 * MODEL.num_parameters * 16 * 3 / 4 / 1e9)


def test_rings_share_the_network_card_of_their_node() -> None:
    two = Site(
        nodes=(box(4, name="a"), box(4, name="b")), between_nodes=NodeLink(bandwidth_bits_per_s=8e9, latency_s=1e-3)
    )
    whole = step(Degrees(dp_shard=8), two).placement.shard_links
    assert (whole.size, whole.bandwidth_bits_per_s, whole.latency_s) == (8, 8e9, 1e-3)
    # four tensor-parallel lanes reduce at once; four copies inside a node do not cross
    assert step(Degrees(dp_shard=2, tp=4), two).placement.shard_links.bandwidth_bits_per_s == 2e9
    mixed = step(Degrees(dp_replicate=2, dp_shard=4), two).placement
    assert mixed.shard_links.bandwidth_bits_per_s == 1e12
    assert mixed.replicate_links.bandwidth_bits_per_s == 2e9
    (stage_links,) = step(Degrees(pp=2, dp_shard=4), two).stage_links
    assert stage_links[0].message_s == pytest.approx(256 * 512 * 16 / 2e9)


def test_a_ring_visits_node_after_node_whatever_the_placement() -> None:
    two = Site(nodes=(box(2, name="a"), box(2, name="b")), between_nodes=NodeLink(bandwidth_bits_per_s=8e9))
    mixed = step(Degrees(dp_shard=4), two, slots=(0, 2, 1, 3)).placement
    assert mixed.shard_links.bandwidth_bits_per_s == 8e9
    assert mixed.rank_order == ("a/0", "b/0", "a/1", "b/1")


def test_parts_make_up_the_step() -> None:
    two = Site(nodes=(box(4, name="a"), box(4, name="b")), between_nodes=NodeLink(bandwidth_bits_per_s=8e9))
    for degrees in (Degrees(pp=2, dp_shard=2, tp=2), Degrees(pp=2, cp=2, dp_replicate=2), Degrees(dp_shard=8)):
        found = step(degrees, two, zero_stage=int(degrees.shards > 1), recomputed_layers=2)
        assert sum(found.parts_s.values()) == pytest.approx(found.step_s)
        assert found.lower_bound_s <= found.step_s


def test_peaks_are_given_for_each_stage() -> None:
    assert len(peak_bytes(MODEL, Layout(degrees=Degrees(pp=4), global_batch=8))) == 4


FILE = {
    "format": "thinwire-site", "version": 1,
    "nodes": [
        {"name": "a", "devices": 2, "memory_bytes": "80 GB", "flops_per_s": 1e14, "bandwidth_bits_per_s": "2400gbit"},
        {"name": "b", "devices": 2, "memory_bytes": 24e9, "flops_per_s": 1e14},
    ],
    "between_nodes": {"bandwidth_bits_per_s": "25gbit", "latency_s": "30us"},
    "links": [{"source": "a", "destination": "b", "bandwidth_bits_per_s": "10gbit"}],
}  # fmt: skip


def test_a_file_is_read_with_its_units(tmp_path: Path) -> None:
    path = tmp_path / "site.json"
    path.write_text(json.dumps(FILE))
    site = load_site(path)
    assert site.device_names == ("a/0", "a/1", "b/0", "b/1") and site.memory_bytes == 24e9
    assert site.link(0, 0).bandwidth_bits_per_s == 2.4e12
    assert site.link(1, 0).bandwidth_bits_per_s == 1e10  # the reverse of the link


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "thinwire-cluster"}, "this is no site"),
        ({"version": 2}, "version 2; this thinwire reads 1"),
        ({"nodes": []}, "at least one node"),
        ({"nodes": [{"name": "a"}]}, r"nodes\[0\] lacks 'devices'"),
        ({"nodes": [{**FILE["nodes"][0], "devices": 1.5}]}, "must be a whole number of 1 to 1048576, got 1.5"),
        ({"nodes": [{**FILE["nodes"][0], "memory_bytes": "much"}]}, "the size cannot be read"),
        ({"nodes": [{**FILE["nodes"][0], "flops_per_s": 0}]}, r"flops_per_s must be above 0, got 0"),
        ({"nodes": [FILE["nodes"][0]] * 2, "links": []}, "got 'a' twice"),
        ({"between_nodes": None, "links": []}, "nothing states how fast 'a' reaches 'b'"),
        ({"links": [{"source": "a", "destination": "c", "bandwidth_bits_per_s": 1}]}, "a link names 'c'"),
        ({"speed": 1}, "the site has 'speed', which means nothing here"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_its_place(change: dict[str, object], text: str) -> None:
    with pytest.raises(DataError, match=text):
        site_from_json({**FILE, **change})


def test_a_site_of_thousands_of_nodes_is_read() -> None:
    nodes = [{**FILE["nodes"][0], "name": f"n{number}", "devices": 8} for number in range(2048)]
    site = site_from_json({**FILE, "nodes": nodes, "links": []})
    assert site.num_devices == 16_384 and site.link(0, 2047).bandwidth_bits_per_s == 25e9


MPIGRAPH = """START mpiGraph v1.5
MsgSize\t16384
Times\t100
Window\t50
Procs\t3

1 of 3 (33.3%)
2 of 3 (66.7%)
Gathering results

Send max\t1024.000000
Send avg\t700.000000

Send\ta:0\tb:1\tc:2\t
a:0 to\t0.000\t1024.000\t512.000\t
b:1 to\t256.000\t0.000\t128.000\t
c:2 to\t512.000\t64.000\t0.000\t

Recv max\t1024.000000
Recv avg\t700.000000

Recv\ta:0\tb:1\tc:2\t
a:0 from\t0.000\t300.000\t512.000\t
b:1 from\t900.000\t0.000\t65.000\t
c:2 from\t512.000\t128.000\t0.000\t
END mpiGraph
"""


def test_measured_links_of_mpigraph_replace_those_of_the_file(tmp_path: Path) -> None:
    path, links = tmp_path / "site.json", tmp_path / "mpigraph.out"
    path.write_text(json.dumps(FILE))
    links.write_text(MPIGRAPH)
    site = load_site(path, links=links)
    # the lower of both sides' rates, in 2^20 bytes a second; mpiGraph measures no latency
    assert site.link(0, 1).bandwidth_bits_per_s == 900 * 2**20 * 8
    assert site.link(1, 0).bandwidth_bits_per_s == 256 * 2**20 * 8
    assert site.link(0, 0).bandwidth_bits_per_s == 2.4e12
    without = site_from_json({**FILE, "links": []}, measured=load_links(links))
    assert without.link(0, 1).latency_s == pytest.approx(3e-5)


def test_measured_links_of_a_probe_replace_those_of_the_file(tmp_path: Path) -> None:
    path, links = tmp_path / "site.json", tmp_path / "cluster.json"
    path.write_text(json.dumps({key: value for key, value in FILE.items() if key not in ("between_nodes", "links")}))
    machines = (Machine(name="a"), Machine(name="b"))
    wires = (
        Wire(source="a", destination="b", bandwidth_bits_per_s=5e9, latency_s=1e-4),
        Wire(source="b", destination="a", bandwidth_bits_per_s=4e9, latency_s=2e-4),
    )
    save_cluster(Cluster(machines=machines, wires=wires), links)
    site = load_site(path, links=links)
    assert (site.link(0, 1).bandwidth_bits_per_s, site.link(0, 1).latency_s) == (5e9, 1e-4)
    assert (site.link(1, 0).bandwidth_bits_per_s, site.link(1, 0).latency_s) == (4e9, 2e-4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ping statistics", "neither a cluster.json nor the output of mpiGraph"),
        (MPIGRAPH.replace("b:1", "a:1"), "'a' ran two tasks; run mpiGraph with one task on each node"),
        (MPIGRAPH.replace("512.000", "fast"), "from 'a' to 'c' must be a number, got 'fast'"),
        (MPIGRAPH.replace("256.000", "0.000"), "no rate from 'b' to 'a'; run mpiGraph to its end"),
        (MPIGRAPH.replace("b:1", "d:1"), "not measured from 'a' to 'b'; there are a, c, d, and nodes need the same"),
        ('{"format": "thinwire-site"}', "this is no cluster"),
        (None, "No such file"),
    ],
)
def test_links_that_do_not_fit_the_site_are_refused_with_the_place(
    tmp_path: Path, text: str | None, words: str
) -> None:
    path, links = tmp_path / "site.json", tmp_path / "links"
    path.write_text(json.dumps(FILE))
    if text is not None:
        links.write_text(text)
    with pytest.raises(DataError, match=words):
        load_site(path, links=links)
    path.unlink()
    with pytest.raises(DataError, match=r"No such file or directory; write one as docs/plan-inside\.md shows$"):
        load_site(path)
