"""Where a plain job's steps begin, and what a rank did of its own in each."""

from __future__ import annotations

import random

import pytest

from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.detect.slow_compute import between_operations
from thinwire.monitor.detect.timeline import build
from thinwire.runlog.reader import Records, from_records
from thinwire.runlog.records import Communicator, Operation, Record

BUCKETS = 3
STEP_S = 0.1


def job(
    *, steps: int, num_ranks: int, slow_from: int | None = None, times: tuple[float, ...] = (1.0, 3.0),
    hosts: tuple[str, ...] = (), seed: int = 0, sigma: float = 0.1,
) -> Records:  # fmt: skip
    """Return the records of DDP with buckets of one size: two close together, and the rest of the step after them.

    From some step on, the first ranks take so many times as long; rank 1 three times, where nothing is said.
    """
    chance = random.Random(seed)
    ranks = tuple(range(num_ranks))
    made: list[Record] = [Communicator(communicator="0", ranks=ranks, hosts=hosts or ("host",) * num_ranks)]
    ready = [0.0] * num_ranks
    for step in range(steps):
        for bucket in range(BUCKETS):
            for rank in ranks:
                own_s = STEP_S if bucket == 0 else 0.001
                if slow_from is not None and rank < len(times) and step >= slow_from and bucket == 0:
                    own_s *= times[rank]
                ready[rank] += own_s * chance.lognormvariate(0.0, sigma)
            done_s = max(ready) + 0.002
            for rank in ranks:
                made.append(Operation(
                    communicator="0", rank=rank, sequence=step * BUCKETS + bucket, kind="all_reduce", dtype="float32",
                    count=64, posted_s=ready[rank], done_s=done_s,
                ))  # fmt: skip
                ready[rank] = done_s
    return from_records(made)


def test_a_step_is_told_by_its_long_gap_though_all_calls_are_alike() -> None:
    works = between_operations(build(job(steps=40, num_ranks=2)))
    assert sorted(works) == [0, 1]
    for own in works.values():
        assert [work.step for work in own] == list(range(39))
        assert all(0.06 < work.time_s < 0.17 for work in own)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_slow_rank_of_a_plain_job_is_named_within_a_few_steps(num_ranks: int) -> None:
    records = job(steps=40, num_ranks=num_ranks, slow_from=30)
    (found,) = diagnose(records)
    assert (found.kind, found.where) == ("non-communication slow", "rank 1")
    assert 29 <= found.seen_round <= 35
    assert diagnose(job(steps=40, num_ranks=num_ranks)) == []


@pytest.mark.parametrize(
    ("times", "shared", "apart"),
    [
        ((1.5, 1.5), [], ["rank 0", "rank 1"]),
        ((1.0, 1.6), [], ["rank 1"]),
        ((1.7, 2.6), [], ["rank 0", "rank 1"]),
        ((2.4, 2.4), ["host host"], ["rank 0", "rank 1"]),
        ((1.0, 2.6), ["rank 1"], ["rank 1"]),
    ],
)
def test_two_ranks_that_share_cores_are_slow_only_beyond_what_other_load_explains(
    times: tuple[float, float], shared: list[str], apart: list[str]
) -> None:
    def places(hosts: tuple[str, str]) -> list[str]:
        return [found.where for found in diagnose(job(steps=60, num_ranks=2, slow_from=30, times=times, hosts=hosts))]

    assert places(("host", "host")) == shared
    assert places(("host", "other")) == apart


def test_a_job_without_calls_has_no_steps() -> None:
    assert between_operations(build(Records())) == {}


@pytest.mark.parametrize("num_ranks", [4, 16])
def test_a_rank_that_is_slow_from_its_first_step_is_named_beside_like_ranks_only(num_ranks: int) -> None:
    apart = tuple(f"host-{rank}" for rank in range(num_ranks))

    def found(times: tuple[float, ...], hosts: tuple[str, ...] = apart) -> list[str]:
        records = job(steps=60, num_ranks=num_ranks, slow_from=0, times=times, hosts=hosts)
        return [finding.where for finding in diagnose(records)]

    assert found((1.0, 1.0, 1.6)) == ["rank 2"]
    assert found((1.0, 1.0, 1.2)) == [], "above three quarters of the fastest"
    assert found((0.6,)) == [], "one fast rank makes the others no slow ones"
    assert found((1.0, 1.0, 1.6), ("host",) * num_ranks) == [], "ranks that share cores"


@pytest.mark.parametrize("seed", range(4))
def test_ranks_whose_steps_scatter_widely_are_not_slow_from_the_start(seed: int) -> None:
    hosts = tuple(f"host-{rank}" for rank in range(32))
    records = job(steps=60, num_ranks=32, hosts=hosts, seed=seed, sigma=0.4)
    assert diagnose(records) == []
