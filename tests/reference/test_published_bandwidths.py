"""The bandwidth tables of two papers, on the simulator; their numbers and sources stand beside the benchmark."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest

from benchmarks.simulate import layered_step
from benchmarks.simulate.layered_step import (
    SCALING_METHODS,
    SCALING_MODELS,
    STREAMING_METHODS,
    STREAMING_MODELS,
    LayeredMethod,
    LayeredModel,
    StepOrder,
    bandwidth_grid,
    compute_utilisation,
    grid_label,
    layered_tasks,
    printed_deviations,
    reaching,
)
from thinwire.averaging.message_pattern import AllGatherMessages, StoreMessages
from thinwire.simulate.cluster import star
from thinwire.simulate.exchange_model import ExchangeModel
from thinwire.simulate.fluid_network import SimLink
from thinwire.simulate.task_graph import ComputeTask, TransferTask, run_tasks

PUBLISHED = json.loads((Path(__file__).parents[2] / "benchmarks" / "simulate" / "published.json").read_text())
STREAMING = PUBLISHED["utilisation"]["streaming"]["rows"]
SCALING = PUBLISHED["utilisation"]["scaling"]["rows"]
KNOWN_DEVIATIONS = {("10B", "streaming, overlap"): [-1, 0, 0, 0, 0], ("100B", "streaming, overlap"): [0, 0, 0, -1, 0]}


def test_the_examples_of_the_layered_step_hold() -> None:
    assert not doctest.testmod(layered_step).failed


# Hundreds of simulated runs each, through the same lines whatever the model: traced they take six times as long.
def untraced_but_for_the_smallest(models):
    return [pytest.param(model, marks=[] if model == "1B" else pytest.mark.no_cover) for model in models]


@pytest.mark.parametrize("model", untraced_but_for_the_smallest(STREAMING))
@pytest.mark.parametrize("method", STREAMING_METHODS)
def test_table_4_of_streaming_diloco_comes_out(model, method):
    places = reaching(STREAMING_MODELS[model], STREAMING_METHODS[method])
    expected = KNOWN_DEVIATIONS.get((model, method), [0] * 5)
    assert printed_deviations(places, STREAMING[model][method]) == expected


@pytest.mark.no_cover
@pytest.mark.parametrize(("model", "method"), [(model, method) for model, rows in SCALING.items() for method in rows])
def test_table_6_of_the_scaling_laws_comes_out(model, method):
    places = reaching(SCALING_MODELS[model], SCALING_METHODS[method])
    assert printed_deviations(places, SCALING[model][method]) == [0] * 5


def test_every_printed_bandwidth_is_on_the_grid():
    labels = {grid_label(rate) for rate in bandwidth_grid()}
    rows = [row for table in (STREAMING, SCALING) for methods in table.values() for row in methods.values()]
    assert {text.removesuffix("+") for row in rows for text in row} <= labels
    assert len(rows) == 15 + 11


@pytest.mark.parametrize("row", PUBLISHED["volume"]["rows"], ids=lambda row: f"{row['method']}, {row['tokens']:.0e}")
def test_hours_at_1_gbit_per_s_follow_from_the_hours_without_a_limit(row):
    """The hours are printed with two or three digits, so their quotient is known to a few per cent or better."""
    used = compute_utilisation(STREAMING_MODELS["1B"], STREAMING_METHODS[row["method"]], bandwidth_bits_per_s=1e9)
    without, at_1 = row["hours_without_limit"], row["hours_at_1_gbit_per_s"]
    assert without / used == pytest.approx(at_1, rel=0.02 if without < 1 else 0.006)


def test_volumes_are_in_the_ratio_of_the_steps_and_bits():
    by_method = {}
    for row in PUBLISHED["volume"]["rows"]:
        by_method.setdefault(row["method"], []).append(row["terabytes"])
    for dense, streamed in zip(*by_method.values(), strict=True):
        assert dense / streamed == pytest.approx(100 * 16 / 4, rel=0.005)


def test_a_step_has_four_nodes_a_layer_but_one_and_merging_them_changes_no_time():
    model = LayeredModel(num_layers=7, num_parameters=7e6, step_s=2.1)
    launches = {1: {0, 3, 6}, 3: {1, 4}, 4: set(range(7))}
    for order in (StepOrder(), StepOrder(weights_first=True), StepOrder(has_first_gradient=True)):
        for overlap_steps in (0, 1):
            found = []
            for is_merged in (True, False):
                tasks, ends = layered_tasks(
                    model, launches=launches, num_steps=6, bits_per_parameter=8, overlap_steps=overlap_steps,
                    order=order, is_merged=is_merged,
                )  # fmt: skip
                times = run_tasks(tasks, links=[SimLink(bandwidth_bits_per_s=2e7)])
                found.append([times.end_s[end] for end in ends])
            assert found[0] == pytest.approx(found[1])
    tasks, _ = layered_tasks(model, launches={1: range(7)}, num_steps=1, bits_per_parameter=8, is_merged=False)
    assert len(tasks) == 4 * 7 - 1
    assert sum(isinstance(task, TransferTask) for task in tasks) == 7
    assert sum(task.seconds for task in tasks if isinstance(task, ComputeTask)) == pytest.approx(model.compute_s)


def test_diloco_stalls_by_its_bits_less_what_the_backward_pass_hides():
    model, bandwidth = STREAMING_MODELS["10B"], 3e9
    used = compute_utilisation(model, LayeredMethod(sync_interval=100), bandwidth_bits_per_s=bandwidth)
    # all layers leave one after another, from the end of the last layer's backward pass on
    first_s = (model.num_layers + 2) * model.node_s
    stall_s = 16 * model.num_parameters / bandwidth + first_s - model.compute_s
    assert used == pytest.approx(100 * model.compute_s / (100 * model.compute_s + stall_s))


def test_on_a_wire_without_limit_nothing_is_lost_but_by_what_cannot_be_hidden():
    for method in STREAMING_METHODS.values():
        assert compute_utilisation(STREAMING_MODELS["1B"], method, bandwidth_bits_per_s=1e18) == pytest.approx(1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayeredModel(num_layers=0, num_parameters=1.0, step_s=1.0), "above 0"),
        (lambda: LayeredMethod(sync_interval=0), "sync_interval must be at least 1"),
        (lambda: LayeredMethod(sync_interval=1, layers_per_fragment=0), "None for all"),
        (lambda: printed_deviations([3], ["7.7"]), "bandwidths of the grid, got 7.7"),
    ],
)
def test_settings_out_of_range_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_upload_that_many_read_takes_the_senders_one_payload_and_the_readers_all() -> None:
    # Covenant-72B (2603.08163): 20 peers at 110 Mbit/s up and 500 down, bfloat16 over 146; 70 s of exchange reported.
    payload_bits = 72e9 * 16 / 146
    peers = star([SimLink(bandwidth_bits_per_s=110e6)] * 20, downs=[SimLink(bandwidth_bits_per_s=500e6)] * 20)
    seconds = {}
    for pattern in (AllGatherMessages(), StoreMessages(), StoreMessages(is_two_phase=True)):
        stages = ExchangeModel(pattern=pattern).stages(peers, senders=range(20), members=range(20))
        rates = [link.bandwidth_bits_per_s for link in peers.links]
        seconds[pattern] = [max(payload_bits * bits / rates[link] for link, bits in stage.loads) for stage in stages]
    assert sum(seconds[AllGatherMessages()]) / 70 == pytest.approx(19.5, abs=0.1)
    up_s, down_s = seconds[StoreMessages()]
    assert up_s == pytest.approx(71.7, abs=0.1) and down_s == pytest.approx(299.8, abs=0.1)
    assert sum(seconds[StoreMessages(is_two_phase=True)]) == pytest.approx(71.7 + 30.0, abs=0.1)
