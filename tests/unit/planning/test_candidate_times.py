from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from thinwire.planning.candidates import Candidate, CandidateTimes, candidates
from thinwire.planning.cluster import Cluster, Machine
from thinwire.planning.training_task import TrainingTask

WIDTH, NAMES = 128, "abc"


def workload() -> TrainingTask:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))
    return TrainingTask(name="six", model=model, tokens=1e7, seq_len=64, batch_size=8)


def cluster(seed: int) -> Cluster:
    draw = random.Random(seed)
    rates = {name: 10 ** draw.uniform(4, 7) for name in NAMES}
    return Cluster(
        machines=tuple(
            Machine(
                name=name, flops_per_s=draw.uniform(2e9, 3e9), encode_bytes_per_s=1e8, up_bits_per_s=rates[name],
                down_bits_per_s=rates[name], latency_s=0.01,
            )
            for name in NAMES
        )
    )  # fmt: skip


def some(count: int, *, seed: int) -> list[Candidate]:
    found = candidates(workload(), [NAMES[:2], NAMES], intervals=(10, 50), overlaps=(1, 5), layers=(1, 3))
    return random.Random(seed).sample(list(found), count)


@pytest.mark.parametrize("seed", range(3))
def test_no_simulated_run_computes_more_than_its_busiest_link_allows(seed: int) -> None:
    times = CandidateTimes(workload(), cluster(seed))
    bounds = []
    for candidate in some(8, seed=seed):
        bounds.append(1 / times.wire_share(candidate))
        assert times.simulated(candidate).compute_utilisation <= min(1.0, bounds[-1]) + 1e-6, candidate
    assert min(bounds) < 1  # some of them are bound by their wires


def test_what_candidates_share_does_not_change_what_is_said_of_each() -> None:
    together = CandidateTimes(workload(), cluster(1))
    for candidate in some(8, seed=1):
        alone = CandidateTimes(workload(), cluster(1))
        assert together.guess_s(candidate) == alone.guess_s(candidate)
        assert together.simulated(candidate) == alone.simulated(candidate)
        assert together.simulated(candidate, rate_factor=2.0) == alone.simulated(candidate, rate_factor=2.0)


def test_a_refused_setting_is_refused_every_time() -> None:
    times = CandidateTimes(workload(), cluster(0))
    wrong = Candidate(
        method="streaming-diloco", replicas=("a", "b"), batch_size=4, sync_interval=5, overlap_steps=9, codec="e3m0"
    )  # fmt: skip
    for _ in range(2):
        with pytest.raises(ValueError, match="overlap_steps"):
            times.guess_s(wrong)


@pytest.mark.parametrize(
    ("rates", "latency_s", "fastest"), [((1e5, 1e6, 1e7), 0.001, "two-phase"), ((1e7,) * 3, 2.0, "all-gather")]
)
@pytest.mark.parametrize("codec", ["float32", "bfloat16", "e3m0"])
def test_three_machines_exchange_in_two_phases_where_that_is_faster(
    rates: tuple[float, ...], latency_s: float, fastest: str, codec: str
) -> None:
    machines = (
        Machine(name=name, flops_per_s=1e12, encode_bytes_per_s=1e8, up_bits_per_s=rate, latency_s=latency_s)
        for name, rate in zip(NAMES, rates, strict=True)
    )
    times = CandidateTimes(workload(), Cluster(machines=tuple(machines)))
    found = list(candidates(workload(), [NAMES], names=["diloco"], intervals=(10,), codec_names=[codec]))
    assert {one.exchange for one in found} == {"all-gather", "two-phase"}
    assert min(found, key=lambda one: times.simulated(one).total_s).exchange == fastest
