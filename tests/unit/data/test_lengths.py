"""Sequences of unlike lengths on devices: against all assignments, an integer programme, and plain shares."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import DataError
from thinwire.site.cost_model import decoder_shape
from thinwire.site.search import plan_site
from thinwire.site.site_file import Site, SiteNode
from thinwire.workloads.language.lengths import (
    SequenceCost,
    assign_sequences,
    cost_of,
    load_lengths,
    pack,
    padded_groups,
)

PLAIN = SequenceCost(seconds_per_token=1.0)
CURVED = SequenceCost(seconds_per_token=1e-3, seconds_per_pair=1e-6)


def best_of_all(lengths: list[int], *, num_devices: int, cost: SequenceCost) -> float:
    """Return the shortest step of all assignments without shared sequences."""
    least = float("inf")
    for chosen in itertools.product(range(num_devices), repeat=len(lengths)):
        loads = [0.0] * num_devices
        for length, device in zip(lengths, chosen, strict=True):
            loads[device] += cost.alone_s(length)
        least = min(least, max(loads))
    return least


@given(lengths=st.lists(st.integers(1, 20), max_size=30), max_tokens=st.integers(1, 60))
def test_groups_of_like_lengths_hold_each_sequence_once_and_little_padding(lengths: list[int], max_tokens: int) -> None:
    groups = padded_groups(lengths, max_tokens=max_tokens)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) * lengths[group[0]] <= max_tokens or len(group) == 1
        assert lengths[group[0]] == max(lengths[place] for place in group)
    longest = [lengths[group[0]] for group in groups]
    assert longest == sorted(longest, reverse=True)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=7), st.integers(1, 3))
def test_the_step_is_at_most_a_third_longer_than_the_best(lengths: list[int], num_devices: int) -> None:
    found = assign_sequences(lengths, num_devices=num_devices, cost=CURVED, max_tokens=5000, may_share=False)
    best = best_of_all(lengths, num_devices=num_devices, cost=CURVED)
    assert best * (1 - 1e-9) <= found.step_s <= (4 / 3 - 1 / (3 * num_devices)) * best * (1 + 1e-9)
    assert sorted(one.index for one in found.sequences) == list(range(len(lengths)))
    for device in range(num_devices):
        loads = sum(CURVED.alone_s(lengths[index]) for index in found.of_device(device))
        assert loads == pytest.approx(found.device_s[device])


def test_an_integer_programme_finds_next_to_nothing_better() -> None:
    draw = random.Random(3)
    lengths = [min(30_000, int(draw.lognormvariate(7, 1.0))) + 1 for _ in range(24)]
    found = assign_sequences(lengths, num_devices=4, cost=CURVED, max_tokens=30_000, may_share=False)
    costs, count = np.array([CURVED.alone_s(length) for length in lengths]), len(lengths)
    # x[i, d] and the makespan
    objective = np.r_[np.zeros(4 * count), 1.0]
    once = np.hstack([np.kron(np.eye(count), np.ones((1, 4))), np.zeros((count, 1))])
    loads = np.hstack([np.kron(costs, np.eye(4)), -np.ones((4, 1))])
    from scipy.optimize import Bounds, LinearConstraint, milp  # takes a second, also where nothing is run

    solved = milp(
        objective, integrality=np.r_[np.ones(4 * count), 0.0], options={"time_limit": 10.0, "mip_rel_gap": 0.005},
        constraints=[LinearConstraint(once, 1, 1), LinearConstraint(loads, -np.inf, 0)],
        bounds=Bounds(0, np.r_[np.ones(4 * count), np.inf]),
    )  # fmt: skip
    assert found.step_s <= 1.03 * solved.mip_dual_bound


def test_equal_lengths_give_every_device_equally_many() -> None:
    found = assign_sequences([512] * 24, num_devices=8, cost=CURVED, max_tokens=512)
    assert {len(found.of_device(device)) for device in range(8)} == {3}
    assert found.balance == pytest.approx(1.0)


def test_one_device_takes_everything() -> None:
    found = assign_sequences([5, 2, 9], num_devices=1, cost=PLAIN, max_tokens=9)
    assert found.of_device(0) == [2, 0, 1] and found.step_s == 16.0 and found.num_tokens == 16


def test_a_sequence_too_long_for_a_device_is_shared_by_as_few_as_hold_it() -> None:
    found = assign_sequences([3000, *[900] * 9], num_devices=4, cost=PLAIN, max_tokens=1000)
    assert found.sequences[0].devices == (0, 1, 2)
    assert all(len(one.devices) == 1 for one in found.sequences[1:])


def test_a_sequence_that_would_hold_up_all_is_shared_unless_its_keys_take_longer() -> None:
    lengths = [8000, *[100] * 10]
    quick = assign_sequences(lengths, num_devices=4, cost=CURVED, max_tokens=8000)
    alone = assign_sequences(lengths, num_devices=4, cost=CURVED, max_tokens=8000, may_share=False)
    assert len(quick.sequences[0].devices) > 1 and quick.step_s < 0.5 * alone.step_s
    thin = SequenceCost(seconds_per_token=1e-3, seconds_per_pair=1e-6, exchange_seconds_per_token=1.0)
    assert len(assign_sequences(lengths, num_devices=4, cost=thin, max_tokens=8000).sequences[0].devices) == 1


def test_a_sequence_takes_as_long_as_the_plan_of_a_device_computes_for_it() -> None:
    model = decoder_shape(layers=2, width=64, heads=4, vocab_size=500, seq_len=4096, is_head_tied=True)
    node = SiteNode(name="a", devices=1, memory_bytes=1e12, flops_per_s=1e12, attention_flops_per_s=3e11)
    best = plan_site(Site(nodes=(node,)), model, global_batch=1).best
    cost = cost_of(
        layers=2, width=64, num_parameters=model.num_parameters, flops_per_s=1e12, attention_flops_per_s=3e11
    )
    assert cost.alone_s(4096) == pytest.approx(best.parts_s["compute"])


def test_uneven_lengths_on_64_devices_keep_them_busy() -> None:
    draw = random.Random(0)
    cost = cost_of(
        layers=32, width=4096, num_parameters=6.7e9, flops_per_s=1.4e14, bandwidth_bits_per_s=2.4e12, latency_s=5e-6
    )
    lengths = [min(131_072, int(draw.lognormvariate(8, 1.2)) + 1) for _ in range(1024)]
    found = assign_sequences(lengths, num_devices=64, cost=cost, max_tokens=32_768)
    in_turn = [0.0] * 64
    for number, length in enumerate(lengths):
        in_turn[number % 64] += cost.alone_s(length)
    assert found.balance > 0.98 and found.step_s < max(in_turn) / 1.3


@given(st.lists(st.integers(1, 100), max_size=30))
def test_passes_hold_every_sequence_once_and_no_more_than_allowed(lengths: list[int]) -> None:
    passes = pack(lengths, max_tokens=100)
    assert sorted(place for one in passes for place in one) == list(range(len(lengths)))
    assert all(sum(lengths[place] for place in one) <= 100 for one in passes)
    # of two passes not both are at most half full
    assert sum(sum(lengths[place] for place in one) <= 50 for one in passes) <= 1


@pytest.mark.parametrize(
    ("lengths", "words"), [([], "at least one token"), ([3, 0], "at least one token"), ([41], "got 41 tokens; allowed")]
)
def test_what_cannot_be_assigned_is_refused(lengths: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        assign_sequences(lengths, num_devices=4, cost=PLAIN, max_tokens=10)


def test_a_histogram_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hist.json"
    path.write_text(json.dumps({"format": "thinwire-lengths", "version": 1, "counts": {"8192": 3, "512": 40}}))
    assert list(load_lengths(path).items()) == [(512, 40), (8192, 3)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "no histogram"),
        ({"format": "thinwire-plan"}, "no histogram"),
        ({"version": 2}, "version 2"),
        ({"counts": {}}, "1 to 100,000 lengths"),
        ({"counts": {"0": 1}}, "not from 1 to"),
        ({"counts": {"-5": 1}}, "not from 1 to"),
        ({"counts": {"00000000000000000000009": 1}}, "not from 1 to"),
        ({"counts": {"5": 0}}, r"counts\.5 must be"),
        ({"counts": {"5": True}}, r"counts\.5 must be"),
        ({"counts": {"5": 1.5}}, r"counts\.5 must be"),
    ],
)
def test_a_file_that_is_no_histogram_is_refused(tmp_path: Path, content: object, words: str) -> None:
    path = tmp_path / "hist.json"
    whole = {"format": "thinwire-lengths", "version": 1, "counts": {"1": 1}}
    path.write_text(json.dumps({**whole, **content} if isinstance(content, dict) else content))
    with pytest.raises(DataError, match=words):
        load_lengths(path)
